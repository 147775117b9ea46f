"""What drafts bring on any server of the OpenAI API, and whether its answers stay the same.

    octavo serve smollm2-135m --port 8001 &                                         # without drafts
    python scripts/research/compare_drafts.py http://localhost:8001/v1 --save plain.json
    octavo serve smollm2-135m --port 8002 --speculative-config '{"method": "ngram"}' &
    python scripts/research/compare_drafts.py http://localhost:8002/v1 --with plain.json

The work is that of ``octavo bench offline --speculative``: texts to write out again with a change, greedily. Each line
is for one number of requests at a time: output tokens a second, the median of the rounds, and with ``--with`` how
many times those of the file, and how many answers differ from its answers. From the second round on prompts may be
cached, on every server.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import OpenAI

from octavo.lab.bench.speculation import example_prompts


def main() -> None:
    """Measures one server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--with", dest="others", type=Path)
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.url, api_key="none")
    model = next(iter(client.models.list())).id
    prompts = example_prompts(arguments.prompts, random.Random(0))[arguments.prompts :]

    def ask(prompt: str) -> tuple[str, int]:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=arguments.tokens,
        )
        assert answer.usage is not None
        return answer.choices[0].message.content or "", answer.usage.completion_tokens

    ask(prompts[0])
    found: dict[str, dict[str, Any]] = {}
    others = json.loads(arguments.others.read_text()) if arguments.others else {}
    for batch in map(int, arguments.batches.split(",")):
        rates = []
        for _ in range(arguments.rounds):
            start = time.perf_counter()
            with ThreadPoolExecutor(batch) as pool:
                answers = list(pool.map(ask, prompts))
            rates.append(sum(tokens for _, tokens in answers) / (time.perf_counter() - start))
        found[str(batch)] = {"tokens_per_s": statistics.median(rates), "answers": [text for text, _ in answers]}
        line = f"{batch:3} at a time: {statistics.median(rates):7.1f} tokens/s"
        if other := others.get(str(batch)):
            changed = sum(a != b for a, b in zip(found[str(batch)]["answers"], other["answers"], strict=True))
            ratio = statistics.median(rates) / other["tokens_per_s"]
            line += f", {ratio:.2f} times; {changed} of {len(answers)} answers differ"
        print(line, flush=True)
    if arguments.save:
        arguments.save.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
