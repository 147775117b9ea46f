"""Offline inference: prompts in, outputs back in the same order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, cast

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.config_sources import resolve_config
from octavo.core.errors import InvalidRequestError, OctavoError
from octavo.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.engine.input_processor import Prompt
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.tokenizer import Tokenizer

#: One chat message: {"role": ..., "content": ...}.
Message = dict[str, Any]
Params = SamplingParams | BeamSearchParams | Sequence[SamplingParams | BeamSearchParams] | None


class LLM:
    """A model ready to generate.

    >>> llm = LLM(model="smollm2-135m")
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].outputs[0].text

    A single prompt that cannot be served raises ``InvalidRequestError``. In a list of prompts it fails alone:
    its output has ``finish_reason`` "error" and the reason in ``error``; the others finish.
    """

    def __init__(self, model: str, *, tokenizer: str | None = None, **options: Any) -> None:
        """Loads a model by name, folder, .gguf file or hub id; options are the fields of ``EngineConfig``.

        Raises:
            OctavoError: an option is wrong, or the model is unknown, unreadable, unsupported or too large.
        """
        if tokenizer is not None:
            options["tokenizer"] = str(tokenizer)
        self.llm_engine = LLMEngine.from_config(resolve_config({"model": str(model), **options}))
        self._ids = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm_engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Completes prompts (text, token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``), one or many.

        ``sampling_params`` and ``priority``: one for all prompts, or one for each.

        Raises:
            InvalidRequestError: a single prompt cannot be served, or there are not as many parameters as prompts.
        """
        single = _is_single(prompts)
        many = [cast(Prompt, prompts)] if single else list(cast("Sequence[Prompt]", prompts))
        return self._run([(p, None) for p in many], sampling_params, use_tqdm, priority, single)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """The ``beam_width`` likeliest continuations of each prompt, best first, each with its ``score``.

        >>> llm.beam_search("The capital of France is", BeamSearchParams(beam_width=4, max_tokens=8))

        ``generate`` takes ``BeamSearchParams`` too, also mixed with ``SamplingParams``.

        Raises:
            InvalidRequestError: as for ``generate``.
        """
        return self.generate(prompts, params, use_tqdm=use_tqdm, priority=priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, through the model's chat template.

        Raises:
            InvalidRequestError: a single conversation cannot be served.
            TokenizerError: the model has no chat template and none was given.
        """
        single = bool(messages) and isinstance(messages[0], dict)
        conversations = [messages] if single else list(messages)
        rendered: list[tuple[Prompt, OctavoError | None]] = []
        for conversation in conversations:
            try:
                ids = self.get_tokenizer().encode_chat(
                    list(cast("Sequence[Message]", conversation)),
                    add_generation_prompt=add_generation_prompt,
                    tools=tools,
                    chat_template=chat_template,
                )
                rendered.append((ids, None))
            except InvalidRequestError as e:
                rendered.append(([], e))
        return self._run(rendered, sampling_params, use_tqdm, priority, single)

    def sleep(self, level: int = 1) -> None:
        """Frees memory until ``wake_up``, for other programs. Meanwhile requests raise ``EngineStateError``.

        Level 1 drops the KV cache with its prefixes; on a GPU the weights move to host memory, on a CPU they stay,
        packed as they are. Level 2 drops the weights too: ``wake_up`` reads them again from the checkpoint.

        Raises:
            ConfigError: there is no such level.
            EngineStateError: requests are unfinished.
        """
        self.llm_engine.sleep(level)

    @property
    def is_sleeping(self) -> bool:
        """Whether requests are refused until ``wake_up``."""
        return self.llm_engine.is_sleeping

    def wake_up(self) -> None:
        """Restores weights and KV cache; nothing happens if it is not sleeping."""
        self.llm_engine.wake_up()

    def _run(
        self,
        prompts: list[tuple[Prompt, OctavoError | None]],
        sampling_params: Params,
        use_tqdm: bool,
        priority: int | Sequence[int],
        single: bool,
    ) -> list[RequestOutput]:
        params = _one_each(
            "sampling_params", sampling_params or SamplingParams(), (SamplingParams, BeamSearchParams), len(prompts)
        )
        priorities = _one_each("priority", priority, int, len(prompts))
        outputs: dict[str, RequestOutput] = {}
        order = []
        try:
            for (prompt, error), param, rank in zip(prompts, params, priorities, strict=True):
                request_id = str(next(self._ids))
                order.append(request_id)
                try:
                    if error is not None:
                        raise error
                    self.llm_engine.add_request(request_id, prompt, param, priority=rank, streaming=False)
                except InvalidRequestError as e:
                    if single:
                        raise
                    outputs[request_id] = _refused(request_id, prompt, e)
            self._finish_all(outputs, len(order), use_tqdm)
        finally:  # an interrupt leaves nothing behind
            for request_id in order:
                self.llm_engine.abort_request(request_id)
        return [outputs[request_id] for request_id in order]

    def _finish_all(self, outputs: dict[str, RequestOutput], total: int, use_tqdm: bool) -> None:
        """Steps until every request has ended, showing prompts done and tokens a second."""
        from tqdm import tqdm

        start = time.perf_counter()
        tokens_in = tokens_out = 0
        with tqdm(total=total, initial=len(outputs), desc="Prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    outputs[output.request_id] = output
                    tokens_in += len(output.prompt_token_ids)
                    tokens_out += sum(len(o.token_ids) for o in output.outputs)
                    seconds = time.perf_counter() - start
                    bar.set_postfix_str(
                        f"in {tokens_in / seconds:.0f} tok/s, out {tokens_out / seconds:.0f} tok/s", refresh=False
                    )
                    bar.update()


def _is_single(prompts: object) -> bool:
    """Whether this is one prompt and not a list of them: a list of integers is one prompt's token ids."""
    if isinstance(prompts, (str, dict)):
        return True
    if isinstance(prompts, (list, tuple)):
        return bool(prompts) and isinstance(prompts[0], int)
    raise InvalidRequestError(f"prompts must be text, token ids, a dictionary or a list of these, not {prompts!r}")


def _one_each(name: str, value: Any, kind: type | tuple[type, ...], count: int) -> list[Any]:
    if isinstance(value, kind):
        return [value] * count
    if isinstance(value, Sequence) and len(value) == count:
        return list(value)
    given = f"{len(value)} of them" if isinstance(value, Sequence) else repr(value)
    raise InvalidRequestError(f"{name} must be one for all prompts or one for each of the {count}, not {given}")


def _refused(request_id: str, prompt: Any, error: OctavoError) -> RequestOutput:
    """The output of a request that never ran."""
    now = time.monotonic()
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt if isinstance(prompt, str) else None
    return RequestOutput(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=list(prompt) if isinstance(prompt, (list, tuple)) else [],
        outputs=[CompletionOutput(0, finish_reason="error", error=str(error))],
        finished=True,
        metrics=RequestMetrics(arrival_time=now, finished_time=now),
    )
