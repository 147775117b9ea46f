"""Vectors and scores offline: the methods of ``LLM`` that do not generate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from octavo.core.errors import InvalidRequestError, OctavoError
from octavo.core.pooling_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    Pooled,
    PoolingRequestOutput,
    ScoringOutput,
)
from octavo.core.pooling_params import PoolingParams, PoolingTask
from octavo.core.prompts import Prompt
from octavo.core.request_options import RequestOptions, check_one_each, check_request_keywords, options_for_each
from octavo.engine.front_end import FrontEnd
from octavo.engine.progress import Bar
from octavo.engine.prompt_lists import is_single

#: One for all prompts, or one for each.
PoolingParamsOfEach = PoolingParams | Sequence[PoolingParams] | None
Rendered = list[tuple[Prompt, OctavoError | None]]


class PoolingCalls(ABC):
    """The methods; what runs requests is the engine's.

    A prompt that cannot be served raises ``InvalidRequestError`` if it is alone. In a list it fails alone: the
    ``error`` of its output says why. Vectors and scores are the same bits alone, in any list, in any order.
    """

    front_end: FrontEnd

    @abstractmethod
    def _run(
        self, prompts: Rendered, params: Any, use_tqdm: Bar, options: list[RequestOptions], single: bool
    ) -> list[Any]:
        """The outputs of prompts, some of which are errors already, in their order."""

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParamsOfEach = None,
        *,
        use_tqdm: Bar = True,
        pooling_task: PoolingTask | None = None,
        **keywords: Any,
    ) -> list[Pooled]:
        """What the model makes of prompts, as ``PoolingOutput``: ``data`` is float32.

        >>> llm.encode("Some text", pooling_task="token_embed")[0].outputs.data.shape

        Args:
            prompts: one, or a list of them; texts, token ids, or dictionaries of these.
            pooling_params: one for all prompts, or one for each.
            use_tqdm: shows a progress bar, or what makes one.
            pooling_task: what to compute, where the parameters do not name it; default: vectors or class scores.
            keywords: see ``LLM``.

        Raises:
            InvalidRequestError: a single prompt cannot be served, or the model lacks the task.
        """
        check_request_keywords("encode", keywords)
        return self._pool("encode", prompts, pooling_params, pooling_task, use_tqdm, keywords)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParamsOfEach = None,
        prompt_name: str | None = None,
        **keywords: Any,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """A vector of each prompt, as ``EmbeddingOutput``.

        >>> llm = LLM("all-minilm-l6-v2")
        >>> llm.embed("A sentence")[0].outputs.embedding

        ``prompt_name``: which of the texts that the model's files name is put before each prompt, such as "query".

        Raises:
            InvalidRequestError: see ``encode``.
        """
        check_request_keywords("embed", keywords)
        outputs = self._pool("embed", prompts, pooling_params, "embed", use_tqdm, keywords, prompt_name)
        return [o.with_result(EmbeddingOutput(o.outputs.data.tolist(), o.outputs.error)) for o in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParamsOfEach = None,
        **keywords: Any,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The class scores of each prompt, as ``ClassificationOutput``; the names are ``model_config.labels``.

        Raises:
            InvalidRequestError: see ``encode``.
        """
        check_request_keywords("classify", keywords)
        outputs = self._pool("classify", prompts, pooling_params, "classify", use_tqdm, keywords)
        return [o.with_result(ClassificationOutput(o.outputs.data.tolist(), o.outputs.error)) for o in outputs]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParamsOfEach = None,
        **keywords: Any,
    ) -> list[Pooled]:
        """The scores of each token of prompts, of a reward model: ``encode`` with ``token_classify``.

        Raises:
            InvalidRequestError: see ``encode``.
        """
        return self.encode(prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="token_classify", **keywords)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParams | None = None,
        **keywords: Any,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """How well texts fit, as ``ScoringOutput``: of one text with each of several, or of pairs.

        A cross-encoder or a language model as a judge (``task="score"``) reads both texts of a pair; vectors of other
        models are compared, that of a text in several pairs being computed once. ``prompt_token_ids`` of an output are
        those of both texts.

        Raises:
            InvalidRequestError: the numbers of texts differ, a text cannot be served, or the model cannot score.
        """
        check_request_keywords("score", keywords)
        single = isinstance(data_1, str) and isinstance(data_2, str)
        first = [data_1] if isinstance(data_1, str) else list(data_1)
        second = [data_2] if isinstance(data_2, str) else list(data_2)
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise InvalidRequestError(f"{len(first)} texts cannot be scored with {len(second)}: give one, or as many")
        self.front_end.pooling.require("score")
        params = self.front_end.pooling.score_params(pooling_params)
        prompts: Rendered = []
        options: list[RequestOptions] = []
        places: dict[object, int] = {}
        of_pair: list[list[int]] = []
        each = options_for_each("score", keywords, len(first))
        for query, document, pair_options in zip(first, second, each, strict=True):
            of_pair.append([])
            for prompt, error in self._pair(query, document, params):
                place = places.setdefault((_identity(prompt), id(pair_options)), len(prompts))
                if place == len(prompts):
                    prompts.append((prompt, error))
                    options.append(pair_options)
                of_pair[-1].append(place)
        outputs = self._run(prompts, [params] * len(prompts), use_tqdm, options, single=False)
        return [self._scored([outputs[place] for place in pair], single) for pair in of_pair]

    def _pair(self, query: str, document: str, params: PoolingParams) -> Rendered:
        """What is computed of a pair."""
        try:
            prompts = self.front_end.pooling.pair_prompts(query, document, params.truncate_prompt_tokens)
        except InvalidRequestError as e:
            return [([], e)]
        return [(prompt, None) for prompt in prompts]

    def _scored(self, outputs: list[Pooled], single: bool) -> PoolingRequestOutput[ScoringOutput]:
        """The output of a pair, made of those of its prompts."""
        last = outputs[-1]  # the one that is of this pair alone
        try:
            scored = ScoringOutput(self.front_end.pooling.score(outputs))
        except InvalidRequestError as e:
            if single:
                raise
            scored = ScoringOutput(float("nan"), str(e))
        ids = [token for output in outputs for token in output.prompt_token_ids]
        text = " ".join(output.prompt or "" for output in outputs)
        return PoolingRequestOutput(last.request_id, scored, text, ids, last.metrics)

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, use_tqdm: Bar = True, **keywords: Any
    ) -> list[tuple[int, float]]:
        """Index and score of each document, the best first; those of equal scores in their order.

        >>> llm.rerank("rivers of Europe", ["The Rhine", "A loaf of bread"], top_n=1)

        Raises:
            InvalidRequestError: a text cannot be served, or the model cannot score.
        """
        if not len(documents):
            return []
        outputs = self.score(query, documents, use_tqdm=use_tqdm, **keywords)
        scores = []
        for index, output in enumerate(outputs):
            if output.outputs.error is not None:
                raise InvalidRequestError(f"document {index}: {output.outputs.error}")
            scores.append((index, output.outputs.score))
        return sorted(scores, key=lambda pair: -pair[1])[:top_n]

    def _pool(
        self,
        method: str,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParamsOfEach,
        task: PoolingTask | None,
        use_tqdm: Bar,
        keywords: dict[str, Any],
        prompt_name: str | None = None,
    ) -> list[Pooled]:
        pooling = self.front_end.pooling
        if task is not None:
            pooling.require(task)
        single = is_single("prompts", prompts, int, "text, token ids, a dictionary or a list of these")
        many = [cast(Prompt, prompts)] if single else list(cast("Sequence[Prompt]", prompts))
        each = [params or PoolingParams()] * len(many) if isinstance(params, PoolingParams | None) else list(params)
        check_one_each("pooling_params", each, len(many))
        if task is not None:
            each = [_for_task(one, task) for one in each]
        rendered: Rendered = []
        for prompt in many:
            try:
                rendered.append((pooling.embedding_prompt(prompt, prompt_name) if method == "embed" else prompt, None))
            except InvalidRequestError as e:
                rendered.append((prompt, e))
        return self._run(rendered, each, use_tqdm, options_for_each(method, keywords, len(many)), single)


def _identity(prompt: Prompt) -> object:
    """What tells a text from others; token ids, which are of one pair alone, are told apart as they are."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Mapping) or "prompt_token_ids" in prompt:
        return id(prompt)
    return tuple(prompt.items())


def _for_task(params: PoolingParams, task: PoolingTask) -> PoolingParams:
    """The parameters for a task.

    Raises:
        InvalidRequestError: they name another one.
    """
    if params.task not in (None, task):
        raise InvalidRequestError(f"the parameters are for task {params.task!r}, not for {task!r}")
    return msgspec.structs.replace(params, task=task)
