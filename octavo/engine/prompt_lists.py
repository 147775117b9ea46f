"""Lists of prompts: whether something is one, and the output of a prompt that is refused."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from octavo.core.errors import InvalidRequestError, OctavoError
from octavo.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.core.pooling_outputs import Pooled, PoolingOutput, PoolingRequestOutput
from octavo.core.pooling_params import PoolingParams


def is_single(name: str, value: object, first: type, forms: str) -> bool:
    """Whether this is one prompt or conversation, and not a list of them; ``first``: the type of what one begins with.

    Raises:
        InvalidRequestError: it is neither; ``forms`` are what it may be.
    """
    if isinstance(value, (str, dict)):
        return True
    if isinstance(value, (list, tuple)):
        return bool(value) and isinstance(value[0], first)
    raise InvalidRequestError(f"{name} must be {forms}, not {value!r}")


def refused(request_id: str, prompt: Any, params: object, error: OctavoError) -> RequestOutput | Pooled:
    """The output of a request with these parameters that was refused."""
    now = time.monotonic()
    metrics = RequestMetrics(arrival_time=now, finished_time=now)
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt if isinstance(prompt, str) else None
    ids = list(prompt) if isinstance(prompt, (list, tuple)) else []
    if isinstance(params, PoolingParams):
        return PoolingRequestOutput(request_id, PoolingOutput(np.zeros(0, np.float32), str(error)), text, ids, metrics)
    return RequestOutput(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=ids,
        outputs=[CompletionOutput(0, finish_reason="error", error=str(error))],
        finished=True,
        metrics=metrics,
    )
