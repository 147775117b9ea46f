"""Bytes that the front end holds of an open request, from which it could go on at another engine core."""

from __future__ import annotations

import argparse
import gc
import tracemalloc

from octavo import SamplingParams
from octavo.config.engine_config import EngineConfig
from octavo.core.plan import EngineCoreOutputs, PositionLogprobs, SequenceOutput, SequenceResult
from octavo.core.request import RequestOptions
from octavo.core.sampling_params import RequestOutputKind
from octavo.engine.front_end import FrontEnd
from octavo.engine.model_files import find_files
from octavo.engine.output_processor import RequestState


def held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def generate(front_end: FrontEnd, requests: list[RequestState], tokens: int, logprobs: bool) -> None:
    """Steps of a core that give each request so many tokens, which a client takes as they come."""
    for step in range(tokens):
        sequences = []
        for request in requests:
            token = 1000 + (request.group_id * 31 + step) % 20_000
            extra = SequenceResult([PositionLogprobs(token, -1.0, 1)]) if logprobs else None
            sequences.append(SequenceOutput(request.group_id, 0, [token], extra))
        for request in front_end.outputs.process(EngineCoreOutputs(sequences=sequences))[0]:
            request.take()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=500, help="tokens that each has so far")
    args = parser.parse_args()
    front_end = FrontEnd(find_files(EngineConfig(model=args.model)), 4096, crosses_process=True)
    for logprobs in (False, True):
        params = SamplingParams(temperature=0, max_tokens=args.tokens + 1, logprobs=0 if logprobs else None)
        tracemalloc.start()
        before = held()
        requests = []
        for i in range(args.requests):
            prompt = {"prompt_token_ids": [1000 + i, *range(2000, 1999 + args.prompt)]}
            kind = RequestOutputKind.DELTA
            requests.append(front_end.add(f"{logprobs}-{i}", prompt, params, RequestOptions(), None, kind))
        opened = held()
        generate(front_end, requests, args.tokens, logprobs)
        after = held()
        tracemalloc.stop()
        print(
            f"{'with' if logprobs else 'without'} logprobs: {(after - before) / args.requests:,.0f} bytes a streaming "
            f"request, of them {(opened - before) / args.requests:,.0f} at its start (prompt of {args.prompt} tokens) "
            f"and {(after - opened) / args.requests / args.tokens:.1f} for each of its {args.tokens} tokens"
        )


if __name__ == "__main__":
    main()
