"""The methods of vLLM's ``LLM`` that do not generate, with its keywords and with tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.compat.vllm.pooling import with_tensors
from octavo.core.errors import InvalidRequestError
from octavo.core.pooling_outputs import PoolingRequestOutput
from octavo.core.pooling_params import PoolingParams
from octavo.engine.pooling_calls import PoolingCalls

_PAIRS = "pairs have the form that the model's tokenizer gives them, or the prompt that Qwen3-Reranker is trained with"


class PoolingMethods(PoolingCalls):
    """Octavo's methods. Prompts are cut by ``truncate_prompt_tokens``, alone or among ``tokenization_kwargs``."""

    def encode(self, prompts: Any, pooling_params: Any = None, **keywords: Any) -> list[PoolingRequestOutput]:
        """As Octavo's; ``data`` is a tensor where torch is installed."""
        return with_tensors(super().encode(prompts, _cut(pooling_params, keywords), **keywords))

    def reward(self, prompts: Any, **keywords: Any) -> list[PoolingRequestOutput]:
        """As Octavo's; see ``encode``, which it calls."""
        return super().reward(prompts, **_with_cut(keywords))

    def embed(self, prompts: Any, **keywords: Any) -> list[PoolingRequestOutput]:
        """As Octavo's."""
        return super().embed(prompts, **_with_cut(keywords))

    def classify(self, prompts: Any, **keywords: Any) -> list[PoolingRequestOutput]:
        """As Octavo's."""
        return super().classify(prompts, **_with_cut(keywords))

    def score(
        self, data_1: Any, data_2: Any, *, chat_template: str | None = None, **keywords: Any
    ) -> list[PoolingRequestOutput]:
        """As Octavo's.

        Raises:
            InvalidRequestError: there is a ``chat_template``; or as Octavo's.
        """
        if chat_template is not None:
            raise InvalidRequestError(f"chat_template must be None in score: {_PAIRS}")
        return super().score(data_1, data_2, **_with_cut(keywords))


def _with_cut(keywords: dict[str, Any]) -> dict[str, Any]:
    params = _cut(keywords.pop("pooling_params", None), keywords)
    return {**keywords, "pooling_params": params}


def _cut(params: Any, keywords: dict[str, Any]) -> Any:
    """The parameters with the number of tokens that the keywords name, which are removed from these."""
    more = dict(keywords.pop("tokenization_kwargs", None) or {})
    most = keywords.pop("truncate_prompt_tokens", None)
    most = more.pop("truncate_prompt_tokens", None) if most is None else most
    if more:
        keywords["tokenization_kwargs"] = more  # refused by name
    if most is None:
        return params
    if isinstance(params, Sequence) and not isinstance(params, Mapping):
        return [msgspec.structs.replace(each, truncate_prompt_tokens=most) for each in params]
    return msgspec.structs.replace(params or PoolingParams(), truncate_prompt_tokens=most)
