"""What a JSON schema costs a server (OpenAI API): output tokens a second with a form for every request, and without.

    python scripts/research/compare_forms.py URL                # of a server of any engine that runs already

Greedy answers of up to 128 tokens, all requests at once; a first round, which is not counted, compiles the grammar.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI

ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 40},
        "city": {"type": "string", "maxLength": 30},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["street", "city", "zip"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 3, "maxItems": 8},
        "address": ADDRESS,
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "customer", "schema": SCHEMA, "strict": True}}


def main() -> None:
    """Prints a line for each number of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--batches", default="1,16,64", help="requests at once")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.url, api_key="none", timeout=600)
    model = next(iter(client.models.list())).id

    def rate(batch: int, form: dict[str, Any]) -> float:
        def ask(number: int) -> int:
            prompt = f"Describe customer number {number} as JSON with name, age, email, tags and address."
            answer = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=128, **form
            )
            assert answer.usage is not None
            return answer.usage.completion_tokens

        start = time.perf_counter()
        with ThreadPoolExecutor(batch) as pool:
            tokens = sum(pool.map(ask, range(batch)))
        return tokens / (time.perf_counter() - start)

    rate(2, {})
    rate(2, {"response_format": FORM})
    for batch in map(int, arguments.batches.split(",")):
        free, bound = rate(batch, {}), rate(batch, {"response_format": FORM})
        print(f"{batch:3} at once: {free:7.1f} tokens/s, with the schema {bound:7.1f} ({bound / free:.2f})", flush=True)


if __name__ == "__main__":
    main()
