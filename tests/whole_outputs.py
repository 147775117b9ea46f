"""What of an answer must be the same, bit for bit, whatever goes on beside its request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo import RequestOutput


def everything(output: RequestOutput) -> Any:
    """All completions of a request, and the logprobs of its prompt."""
    completions = [
        (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.error, o.cumulative_logprob, o.score, o.logprobs)
        for o in output.outputs
    ]
    return completions, output.prompt_logprobs


def all_of(outputs: Sequence[RequestOutput]) -> list[Any]:
    """``everything`` of each request."""
    return [everything(output) for output in outputs]
