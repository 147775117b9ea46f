"""Offline inference: prompts in, outputs back in the same order."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

from octavo.core.adapters import LoRARequest, PromptAdapterRequest
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.config_sources import resolve_config
from octavo.core.errors import AdapterError, ConfigError, InvalidRequestError, OctavoError
from octavo.core.foreign_options import check_keywords
from octavo.core.interrupts import HeldInterrupts
from octavo.core.metrics import Metric, metrics_of
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.engine.input_processor import Prompt
from octavo.engine.llm_arguments import (
    Conversation,
    Prediction,
    as_messages,
    claims_of,
    is_conversation,
    is_single,
    one_each,
    refused,
    template_variables,
)
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.progress import Bar, Progress
from octavo.engine.shared_prefixes import SharedPrefix
from octavo.engine.stat_loggers import StatLogger
from octavo.engine.tokenizer import Tokenizer

#: Seconds between status lines with ``disable_log_stats=False``.
STATUS_INTERVAL = 10.0
Params = SamplingParams | BeamSearchParams | Sequence[SamplingParams | BeamSearchParams] | None


class LLM:
    """A model ready to generate.

    >>> llm = LLM(model="smollm2-135m")
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].outputs[0].text

    A single prompt that cannot be served raises ``InvalidRequestError``. In a list of prompts (also of one) it fails
    alone: its output has ``finish_reason`` "error" and the reason in ``error``; the others finish.

    Ctrl-C comes between two steps, ends the requests of the call, and leaves the engine as it was. A second one within
    two seconds, while the first waits for a step, ends the process (code 130).

    Further keywords of vLLM's methods (``tokenization_kwargs=None``, ...) are accepted at the values that mean what is
    done anyway, and otherwise refused with the reason; see docs/coming-from-vllm.md.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | None = None,
        stat_loggers: Sequence[StatLogger] = (),
        disable_log_stats: bool | None = None,
        **options: Any,
    ) -> None:
        """Loads a model by name, folder, .gguf file or hub id; options are the fields of ``EngineConfig``.

        ``None`` as the value of an option means its default. ``stat_loggers`` get the statistics of each step.
        ``disable_log_stats=False`` writes a status line every ``log_stats_interval`` seconds, 10 if that is not given;
        True writes none.

        Raises:
            OctavoError: an option is wrong, or the model is unknown, unreadable, unsupported or too large.
        """
        if tokenizer is not None:
            options["tokenizer"] = str(tokenizer)
        if disable_log_stats:
            if options.get("log_stats_interval") is not None:
                raise ConfigError("log_stats_interval writes status lines, which disable_log_stats=True turns off")
            options["log_stats_interval"] = None
        elif disable_log_stats is not None:
            options.setdefault("log_stats_interval", STATUS_INTERVAL)
        self.llm_engine = LLMEngine.from_config(resolve_config({"model": str(model), **options}), stat_loggers)
        self._ids = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """New parameters with the model's own defaults, which a call without ``sampling_params`` has.

        They are those of the model's generation_config.json (option ``generation_config``), and for fields that it does
        not set those of ``SamplingParams``.
        """
        return self.llm_engine.inputs.default_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        priority: float | Sequence[float] | None = 0,
        user: str | Sequence[str | None] | None = None,
        ttft_target: float | Sequence[float | None] | None = None,
        tpot_target: float | Sequence[float | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        prompt_adapter_request: PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None = None,
        prediction: Prediction = None,
        **keywords: Any,
    ) -> list[RequestOutput]:
        """Completes prompts (text, token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``), one or many.

        A bad prompt alone raises; in a list it is an output whose ``outputs[0].error`` says why, and the others finish.

        Args:
            prompts: one prompt, or a list of them.
            sampling_params: one for all prompts, or one for each, taken as they are; by default
                ``get_default_sampling_params()``.
            use_tqdm: shows a progress bar, or what makes one in place of ``tqdm.tqdm``.
            priority: one for all prompts, or one for each: integers or finite floats, of which the lower goes first,
                for policies that look at them (``scheduling_policy="static"``).
            user: whose requests they are, one for all or one for each, for policies that look at it.
            ttft_target: seconds from its arrival to the first token of a request, one for all or one for each, for
                policies that look at it (``scheduling_policy="deadline"``).
            tpot_target: seconds between its tokens after the first; as ``ttft_target``.
            lora_request: the adapter of all, or of each; None: the model itself. Needs ``enable_lora=True``, or
                ``enable_prompt_adapter=True`` if it is a prompt adapter.
            prompt_adapter_request: a prompt adapter, in place of ``lora_request``.
            prediction: what the output is likely to be, as text or token ids, one for all or one for each: tokens that
                it has indeed come sooner, and the output is the same.
            keywords: see the class.

        Raises:
            InvalidRequestError: a single prompt cannot be served, or there are not as many parameters as prompts.
            AdapterError: the adapter of a single prompt cannot be used.
        """
        check_keywords("generate", keywords)
        single = is_single(prompts)
        many = [cast(Prompt, prompts)] if single else list(cast("Sequence[Prompt]", prompts))
        adapters = lora_request, prompt_adapter_request
        claims = claims_of(priority, user, ttft_target, tpot_target, adapters, prediction, len(many))
        return self._run([(p, None) for p in many], sampling_params, use_tqdm, claims, single)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: Bar = True,
        priority: float | Sequence[float] | None = 0,
        user: str | Sequence[str | None] | None = None,
        ttft_target: float | Sequence[float | None] | None = None,
        tpot_target: float | Sequence[float | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        prompt_adapter_request: PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None = None,
        **keywords: Any,
    ) -> list[RequestOutput]:
        """The ``beam_width`` likeliest continuations of each prompt, best first, each with its ``score``.

        >>> llm.beam_search("The capital of France is", BeamSearchParams(beam_width=4, max_tokens=8))

        ``generate`` takes ``BeamSearchParams`` too, also mixed with ``SamplingParams``. ``sequences`` of an output has
        prompt and continuation together; for that, the text of a prompt given as token ids is filled in here.

        Raises:
            InvalidRequestError: as for ``generate``.
        """
        outputs = self.generate(
            prompts,
            params,
            use_tqdm=use_tqdm,
            priority=priority,
            user=user,
            ttft_target=ttft_target,
            tpot_target=tpot_target,
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
            **keywords,
        )
        for output in outputs:
            if output.prompt is None:
                output.prompt = self.get_tokenizer().decode(output.prompt_token_ids)
        return outputs

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        priority: float | Sequence[float] | None = 0,
        user: str | Sequence[str | None] | None = None,
        ttft_target: float | Sequence[float | None] | None = None,
        tpot_target: float | Sequence[float | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        prompt_adapter_request: PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None = None,
        prediction: Prediction = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, through the model's chat template.

        >>> llm.chat("Name three rivers.")
        >>> llm.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three rivers."}])

        A bad conversation alone raises; in a list it is an output whose ``outputs[0].error`` says why.

        Args:
            messages: a conversation: its messages, or one message, or a text, which is a user's message; or a list of
                conversations, in which a text is a conversation too.
            sampling_params: as for ``generate``; ``use_tqdm``, ``priority`` and ``keywords`` too.
            use_tqdm: see there.
            priority: see there; ``user`` and the targets too.
            user: see there.
            ttft_target: see there.
            tpot_target: see there.
            lora_request: see there.
            prompt_adapter_request: see there.
            prediction: see there; of what the assistant answers.
            add_generation_prompt: ends the prompt with what opens the assistant's answer.
            continue_final_message: the answer continues the last message; needs ``add_generation_prompt=False``.
            tools: JSON schemas of callable tools.
            chat_template: a name among the model's templates, or a template's text.
            chat_template_kwargs: further names that the template may use.
            keywords: see the class.

        Raises:
            InvalidRequestError: a single conversation cannot be served, or the model has no chat template and none was
                given.
            TokenizerError: the template is not valid.
        """
        check_keywords("chat", keywords)
        single = is_conversation(messages)
        conversations = [cast("Conversation", messages)] if single else list(cast("Sequence[Conversation]", messages))
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template": chat_template,
        }
        variables = template_variables(chat_template_kwargs, options)
        rendered: list[tuple[Prompt, OctavoError | None]] = []
        for conversation in conversations:
            try:
                ids = self.get_tokenizer().encode_chat(as_messages(conversation), **options, **variables)
                rendered.append((ids, None))
            except InvalidRequestError as e:
                rendered.append(([], e))
        adapters = lora_request, prompt_adapter_request
        claims = claims_of(priority, user, ttft_target, tpot_target, adapters, prediction, len(rendered))
        return self._run(rendered, sampling_params, use_tqdm, claims, single)

    def add_shared_prefix(self, prompt: Prompt, name: str | None = None) -> str:
        """Computes the beginning of prompts to come, and keeps its KV cache blocks until ``remove_shared_prefix``.

        >>> name = llm.add_shared_prefix(system_prompt)
        >>> llm.generate(system_prompt + question)[0].metrics.num_cached_tokens

        The text is tokenized as a prompt's beginning is. All of its tokens are shared, by requests without a
        ``cache_salt``. The answers are the same as without it.

        Returns:
            Its name: ``name``, or by default ``prefix-1`` and so on.

        Raises:
            ConfigError: the prefix cache is off, the name is in use, or too few blocks would be left for a request of
                ``max_model_len`` tokens.
            InvalidRequestError: it is no prompt, or too long.
            EngineStateError: the engine sleeps.
        """
        return self.llm_engine.add_shared_prefix(prompt, name)

    def remove_shared_prefix(self, name: str) -> None:
        """Releases a shared prefix; its blocks stay cached until they are needed.

        Raises:
            ConfigError: there is none of this name.
        """
        self.llm_engine.remove_shared_prefix(name)

    def shared_prefixes(self) -> list[SharedPrefix]:
        """The shared prefixes, each with ``name``, ``token_ids`` and ``num_blocks``."""
        return self.llm_engine.shared_prefixes()

    def encode(self, *_: object, **__: object) -> NoReturn:
        """Refuses, as the methods for vectors and scores of vLLM do here: there are no pooling models.

        Raises:
            InvalidRequestError: always.
        """
        raise InvalidRequestError(
            "encode, embed, classify, score and reward need a pooling model, but Octavo generates text"
        )

    embed = classify = score = reward = encode

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Calls a method of every worker, or a function with each worker as its first argument: answers by rank.

        Where workers run in other processes, arguments and answers are plain data, and a function is found there by
        its name, so it must be importable. ``timeout`` in seconds.

        Raises:
            ConfigError: there is no such method, or something cannot be sent.
            EngineDeadError: a worker is lost.
            TimeoutError: not all have answered in time; the workers are ended.
            Exception: the method failed on a worker.
        """
        return self.llm_engine.collective_rpc(method, args, kwargs, timeout)

    def reset_prefix_cache(self) -> bool:
        """Forgets the contents of all blocks that requests to come could share; true, as it always succeeds."""
        self.llm_engine.reset_prefix_cache()
        return True

    def get_metrics(self) -> list[Metric]:
        """Queues and blocks now (``Gauge``), and totals since the start (``Counter``), each with name and value."""
        return metrics_of(self.llm_engine.stats())

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
        use_tqdm: Bar,
        claims: list[dict[str, Any]],
        single: bool,
    ) -> list[RequestOutput]:
        given = sampling_params or self.get_default_sampling_params()
        params = one_each("sampling_params", given, (SamplingParams, BeamSearchParams), len(prompts))
        outputs: dict[str, RequestOutput] = {}
        order = []
        with HeldInterrupts() as interrupts:
            try:
                for (prompt, error), param, claim in zip(prompts, params, claims, strict=True):
                    interrupts.deliver()
                    request_id = str(next(self._ids))
                    order.append(request_id)
                    try:
                        if error is not None:
                            raise error
                        self.llm_engine.add_request(request_id, prompt, param, streaming=False, **claim)
                    except (InvalidRequestError, AdapterError) as e:
                        if single:
                            raise
                        outputs[request_id] = refused(request_id, prompt, e)
                self._finish_all(outputs, len(order), use_tqdm, interrupts)
            finally:  # an interrupt leaves nothing behind
                for request_id in order:
                    self.llm_engine.abort_request(request_id)
        return [outputs[request_id] for request_id in order]

    def _finish_all(
        self, outputs: dict[str, RequestOutput], total: int, use_tqdm: Bar, interrupts: HeldInterrupts
    ) -> None:
        """Steps until every request has ended, showing prompts done and tokens a second."""
        with Progress(use_tqdm, total, len(outputs)) as progress:
            while self.llm_engine.has_unfinished_requests():
                interrupts.deliver()
                for output in self.llm_engine.step():
                    outputs[output.request_id] = output
                    progress.add(output)
