"""Offline inference: prompts in, outputs back in the same order."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.config_sources import resolve_config
from octavo.core.errors import AdapterError, ConfigError, InvalidRequestError, OctavoError
from octavo.core.interrupts import HeldInterrupts
from octavo.core.metric_values import Metric, metrics_of
from octavo.core.outputs import RequestOutput
from octavo.core.prompts import Prompt
from octavo.core.request_options import RequestOptions, check_one_each, check_request_keywords, options_for_each
from octavo.core.sampling_params import SamplingParams
from octavo.engine.chat_images import chat_prompt
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.model_files import find_files
from octavo.engine.pooling_calls import PoolingCalls
from octavo.engine.progress import Bar, Progress
from octavo.engine.prompt_lists import is_single, refused
from octavo.engine.stat_loggers import StatLogger
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.transcription_calls import TranscriptionCalls

#: Seconds between status lines with ``disable_log_stats=False``.
STATUS_INTERVAL = 10.0
#: One chat message: {"role": ..., "content": ...}.
Message = dict[str, Any]
#: Its messages, or a text or message alone.
Conversation = Sequence[Message] | Message | str
Params = SamplingParams | BeamSearchParams | Sequence[SamplingParams | BeamSearchParams] | None


class LLM(LLMEngine, PoolingCalls, TranscriptionCalls):
    """A model ready to generate, to make vectors and scores (``PoolingCalls``), or texts (``TranscriptionCalls``).

    >>> llm = LLM(model="smollm2-135m")
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].outputs[0].text

    A single prompt that cannot be served raises ``InvalidRequestError``. In a list of prompts (also of one) it fails
    alone: its output has ``finish_reason`` "error" and the reason in ``error``; the others finish.

    Ctrl-C comes between two steps, ends the requests of the call, and leaves the engine as it was. A second one within
    two seconds, while the first waits for a step, ends the process (code 130).

    ``generate``, ``beam_search`` and ``chat`` take the fields of ``RequestOptions`` as keywords, such as ``priority``,
    ``user``, ``lora_request`` and ``prediction``: one value for all prompts, or a list with one for each.

    Further keywords of vLLM's methods (``tokenization_kwargs=None``, ...) are accepted at the values that mean what is
    done anyway, and otherwise refused with the reason; see docs/coming-from.md.
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
        super().__init__(find_files(resolve_config({"model": str(model), **options})), stat_loggers)
        self._ids = itertools.count()

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, which this is: for requests that are added and read one by one."""
        return self

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """New parameters with the model's own defaults, which a call without ``sampling_params`` has.

        They are those of the model's generation_config.json, GGUF file or, of a built-in model, its authors (option
        ``generation_config``), and for fields that it does not set those of ``SamplingParams``.
        """
        return self.inputs.default_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        **keywords: Any,
    ) -> list[RequestOutput]:
        """Completes prompts (text, token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``), one or many.

        A bad prompt alone raises; in a list it is an output whose ``outputs[0].error`` says why, and the others finish.

        Args:
            prompts: one prompt, or a list of them.
            sampling_params: one for all prompts, or one for each, taken as they are; by default
                ``get_default_sampling_params()``.
            use_tqdm: shows a progress bar, or what makes one in place of ``tqdm.tqdm``.
            keywords: see the class.

        Raises:
            InvalidRequestError: a single prompt cannot be served, a keyword is wrong, or there are not as many
                parameters as prompts.
            AdapterError: the adapter of a single prompt cannot be used.
        """
        check_request_keywords("generate", keywords)
        single = is_single("prompts", prompts, int, "text, token ids, a dictionary or a list of these")
        many = [cast(Prompt, prompts)] if single else list(cast("Sequence[Prompt]", prompts))
        options = options_for_each("generate", keywords, len(many))
        return self._run([(p, None) for p in many], sampling_params, use_tqdm, options, single)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: Bar = True, **keywords: Any
    ) -> list[RequestOutput]:
        """The ``beam_width`` likeliest continuations of each prompt, best first, each with its ``score``.

        >>> llm.beam_search("The capital of France is", BeamSearchParams(beam_width=4, max_tokens=8))

        ``generate`` takes ``BeamSearchParams`` too, also mixed with ``SamplingParams``. ``sequences`` of an output has
        prompt and continuation together; for that, the text of a prompt given as token ids is filled in here.

        Raises:
            InvalidRequestError: as for ``generate``.
        """
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm, **keywords)
        for output in outputs:
            if output.prompt is None:
                output.prompt = self.tokenizer.decode(output.prompt_token_ids)
        return outputs

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        use_tqdm: Bar = True,
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
                conversations, in which a text is a conversation too. For images in them see ``chat_prompt``.
            sampling_params: as for ``generate``; ``use_tqdm`` too.
            use_tqdm: see there.
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
        check_request_keywords("chat", keywords)
        single = is_single("messages", messages, dict, "a text, messages or a list of conversations")
        conversations = [cast("Conversation", messages)] if single else list(cast("Sequence[Conversation]", messages))
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template": chat_template,
        }
        variables = _template_variables(chat_template_kwargs, options)
        rendered: list[tuple[Prompt, OctavoError | None]] = []
        for conversation in conversations:
            try:
                rendered.append((chat_prompt(self.inputs, _as_messages(conversation), **options, **variables), None))
            except InvalidRequestError as e:
                rendered.append(([], e))
        each = options_for_each("chat", keywords, len(rendered))
        return self._run(rendered, sampling_params, use_tqdm, each, single)

    def get_metrics(self) -> list[Metric]:
        """Queues and blocks now (``Gauge``), and totals since the start (``Counter``), each with name and value."""
        return metrics_of(self.stats())

    def _run(
        self,
        prompts: list[tuple[Prompt, OctavoError | None]],
        params: Any,
        use_tqdm: Bar,
        options: list[RequestOptions],
        single: bool,
    ) -> list[Any]:
        params_of_each = params or self.get_default_sampling_params()
        if isinstance(params_of_each, (SamplingParams, BeamSearchParams)):
            params_of_each = [params_of_each] * len(prompts)
        check_one_each("sampling_params", params_of_each, len(prompts))
        outputs: dict[str, Any] = {}
        order = []
        with HeldInterrupts() as interrupts:
            try:
                for (prompt, error), params, request_options in zip(prompts, params_of_each, options, strict=True):
                    interrupts.deliver()
                    request_id = str(next(self._ids))
                    order.append(request_id)
                    try:
                        if error is not None:
                            raise error
                        self.add_request(request_id, prompt, params, request_options, streaming=False)
                    except (InvalidRequestError, AdapterError) as e:
                        if single:
                            raise
                        outputs[request_id] = refused(request_id, prompt, params, e)
                self._finish_all(outputs, len(order), use_tqdm, interrupts)
            finally:  # an interrupt leaves nothing behind
                for request_id in order:
                    self.abort_request(request_id)
        return [outputs[request_id] for request_id in order]

    def _finish_all(self, outputs: dict[str, Any], total: int, use_tqdm: Bar, interrupts: HeldInterrupts) -> None:
        """Steps until every request has ended, showing prompts done and tokens a second."""
        with Progress(use_tqdm, total, len(outputs)) as progress:
            while self.has_unfinished_requests():
                interrupts.deliver()
                for output in self.step():
                    outputs[output.request_id] = output
                    progress.add(output)


def _as_messages(conversation: Conversation) -> Sequence[Message]:
    """The messages of a conversation in any of its forms."""
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    return [conversation] if isinstance(conversation, dict) else conversation


def _template_variables(variables: Mapping[str, Any] | None, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """``chat_template_kwargs``, if no name among them is one of the arguments."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise InvalidRequestError(f"chat_template_kwargs must be a dictionary, not {variables!r}")
    for name in variables:
        if name in options or name in ("messages", "template", "tokenize"):
            raise InvalidRequestError(f"chat_template_kwargs must not hold {name!r}, which is an argument of its own")
    return variables
