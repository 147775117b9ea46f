"""Turns prompts and parameters into requests of the engine core: tokenizes, checks, resolves defaults.

``InputProcessor`` does so for generation, ``EncoderPrompts`` reads prompts of encoder-decoder models, and
``PoolingInputs`` makes requests for vectors and scores.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from octavo.config.options import MAX_LOGPROBS
from octavo.core.errors import CONTEXT_LENGTH, ConfigError, InvalidRequestError
from octavo.core.foreign import FOREIGN
from octavo.core.model_config import EncoderFacts, ModelConfig, ReasoningMarks, ThinkingBudget, model_tasks
from octavo.core.outputs import Pooled, PoolingParams, PoolingTask
from octavo.core.plugins import LogitsPlugins
from octavo.core.request import (
    DEFAULT_OPTIONS,
    PROMPT_KEYS,
    AdapterRef,
    AnyTask,
    Beam,
    EncoderInput,
    EngineCoreRequest,
    Generate,
    Pool,
    Prompt,
    RequestOptions,
    SplitPrompt,
)
from octavo.core.sampling_params import (
    BeamSearchParams,
    DefaultMaxTokens,
    SamplingParams,
    excluding_fields,
    no_token_error,
    sampling_in_effect,
)
from octavo.engine.chat_template import REASONING_MARKS, find_reasoning_marks
from octavo.engine.image_prompts import NO_FEATURES, ImagePrompts, PromptFeatures, take_images, takes_images
from octavo.engine.model_files import ModelFiles
from octavo.engine.output_processor import NO_SAMPLING, PoolingState, RequestState
from octavo.engine.tokenizer import NoTokenizer
from octavo.grammar.compiler import GrammarCompiler
from octavo.process.sandbox import Sandbox
from octavo.scheduler.policies import POLICIES, policy_class

if TYPE_CHECKING:
    import numpy as np

_MASK64 = (1 << 64) - 1
#: 2**64 / golden ratio: spreads consecutive numbers over all 64 bits (Knuth, TAOCP vol. 3, section 6.4).
_SPREAD = 0x9E3779B97F4A7C15
#: Tokens at the end of a prompt that may open its reasoning.
_MARK_TOKENS = 16
#: Options that are not sent to the core: they become other fields of its request, or only the front end needs them.
_RESOLVED: dict[str, Any] = {
    "arrival_time": None, "lora_request": None, "prediction": None, "visible_tokens": frozenset(), "client": "",
    "reasoning": None, "timestamps": None, "alignment_heads": (),
}  # fmt: skip


class InputProcessor:
    """Tokenizes and checks requests for one model, and numbers them."""

    def __init__(self, files: ModelFiles, max_model_len: int | None = None) -> None:
        """``max_model_len``: in tokens, prompt and output together; defaults to the option, or the model's."""
        options, config, self.tokenizer = files.options, files.model_config, files.tokenizer
        #: Of the network, which may have more embeddings than the tokenizer has tokens.
        self.vocab_size = vocab_size = config.vocab_size
        self.eos_token_ids = config.eos_token_ids
        self.max_model_len = max_model_len or options.max_model_len or config.default_length
        #: The model's own defaults of ``SamplingParams`` fields.
        self.default_sampling = dict(files.default_sampling)
        #: Runs programs of requests, such as templates and grammars.
        self.sandbox = Sandbox()
        self.grammars = GrammarCompiler(
            self.sandbox,
            files.tokenizer.special_texts,
            vocab_size,
            options.structured_outputs_compile_seconds,
            options.structured_outputs_config,
        )
        #: msgspec checks token ids in C: a Python loop would block the server for 5 ms per 100,000 tokens.
        self._token_ids: Any = list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]
        self._seed = options.seed
        limit = MAX_LOGPROBS if options.max_logprobs is None else options.max_logprobs
        #: Highest ``logprobs`` of a request.
        self.max_logprobs = vocab_size if limit == -1 else limit
        self._logits_plugins = LogitsPlugins(options.logits_processors or ())
        self._policy = options.scheduling_policy
        self._policy_class = policy_class(options.scheduling_policy)
        self.encoder_prompts: EncoderPrompts | None = None
        if config.encoder_facts is not None:
            self.encoder_prompts = EncoderPrompts(config, self.max_model_len, self)
        self.image_prompts: ImagePrompts | None = None
        if takes_images(config, options):
            self.image_prompts = ImagePrompts(files, self.sandbox)
        self._next_group_id = 0
        self._unseeded = 0

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        adapter: AdapterRef | None = None,
    ) -> RequestState:
        """Tokenizes and checks a request for ``OutputProcessor.open``.

        ``adapter``: the adapter of ``options.lora_request``.

        Raises:
            InvalidRequestError: the model cannot serve the prompt or a parameter; nothing has changed.
        """
        if not isinstance(params, (SamplingParams, BeamSearchParams)):
            raise InvalidRequestError("must be SamplingParams or BeamSearchParams", path="sampling_params", got=params)
        arrival, options = self.begin(prompt, options)
        split: SplitPrompt | None = None
        images: list[Any] | PromptFeatures = []
        if self.image_prompts is not None:
            prompt, images = take_images(prompt)
        if self.encoder_prompts is not None:
            split = self.encoder_prompts.split(prompt)
            text, token_ids = split.get("prompt"), split["prompt_token_ids"]
        else:
            text, token_ids = self.read_prompt(prompt)
        virtual = 0 if adapter is None else adapter.num_virtual_tokens
        params.validate()  # a field may have been assigned after construction
        num_answers = params.beam_width if isinstance(params, BeamSearchParams) else params.n
        if isinstance(params, SamplingParams) and params.use_beam_search:
            params = params.beam_search()
        if isinstance(params, SamplingParams) and (most := params.truncate_prompt_tokens) is not None:
            if split is not None:
                raise InvalidRequestError(
                    "must be left out with encoder-decoder models", path="truncate_prompt_tokens", got=most
                )
            if images:
                raise InvalidRequestError("must be left out with images", path="truncate_prompt_tokens", got=most)
            room = self.max_model_len - virtual - (1 if params.max_tokens is None else params.max_tokens)
            token_ids = token_ids[-(max(1, room) if most == -1 else most) :]
        prompt_features = NO_FEATURES
        if isinstance(images, PromptFeatures):
            prompt_features = images
        elif self.image_prompts is not None:
            token_ids, prompt_features = self.image_prompts.expand(self.prompt_ids(token_ids), images)
        token_ids = self.prompt_ids(token_ids)
        room = self.check_length(len(token_ids), params.max_tokens, virtual)
        predicted: str | Sequence[int] = options.prediction or ()
        if isinstance(predicted, str):
            predicted = self.tokenizer.encode(predicted, add_special_tokens=False)
        predicted = self._checked_ids("prediction", predicted[: self.max_model_len])
        fitted = params
        if isinstance(params.max_tokens, DefaultMaxTokens):
            fitted = msgspec.structs.replace(params, max_tokens=min(int(params.max_tokens), room))
        thinking = self._thinking_budget(params, options.reasoning, text, token_ids)
        num_forced = 0 if split is None else split["num_forced"]
        task = self._task(fitted, thinking, options, num_forced=num_forced)
        encoder_input = None if split is None else split.get("encoder_input")
        group = self.core_request(token_ids, task, arrival, options, adapter, predicted, encoder_input)
        if prompt_features.images:
            group.images, group.features = prompt_features.images, prompt_features.shifted(virtual)
        if isinstance(params, BeamSearchParams):  # describes its hypotheses as completions
            params = SamplingParams(
                n=num_answers, best_of=params.beam_width, skip_special_tokens=params.skip_special_tokens
            )
        encoder_prompt = None if split is None else split.get("encoder_prompt")
        return RequestState(request_id, text, token_ids, params, group, options.visible_tokens, encoder_prompt)

    def begin(self, prompt: Prompt, options: RequestOptions) -> tuple[float, RequestOptions]:
        """Returns the request's arrival time, and its options with the prompt's cache salt."""
        arrival = time.monotonic() if options.arrival_time is None else float(options.arrival_time)
        self._check_policy(options)
        if isinstance(prompt, Mapping) and (salt := prompt.get("cache_salt")) is not None:
            options = msgspec.structs.replace(options, cache_salt=salt)
        return arrival, options

    def core_request(
        self,
        token_ids: list[int],
        task: AnyTask,
        arrival: float,
        options: RequestOptions,
        adapter: AdapterRef | None,
        prediction: list[int] | None = None,
        encoder_input: EncoderInput | None = None,
    ) -> EngineCoreRequest:
        """Makes the core's request; ``arrival`` and ``options`` come from ``begin``."""
        self._next_group_id += 1
        virtual = 0 if adapter is None else adapter.num_virtual_tokens
        return EngineCoreRequest(
            group_id=self._next_group_id - 1,
            prompt_token_ids=[*range(self.vocab_size, self.vocab_size + virtual), *token_ids] if virtual else token_ids,
            task=task,
            arrival_time=arrival,
            options=msgspec.structs.replace(options, **_RESOLVED),
            adapter=adapter,
            encoder_input=encoder_input,
            prediction=prediction or [],
        )

    def default_params(self) -> SamplingParams:
        return SamplingParams(**self.default_sampling)

    @property
    def sampling_in_effect(self) -> dict[str, Any]:
        return sampling_in_effect(self.default_sampling)

    def _thinking_budget(
        self, params: SamplingParams | BeamSearchParams, marks: ReasoningMarks | None, text: str | None, ids: list[int]
    ) -> ThinkingBudget | None:
        """The budget of the output's reasoning; None: no limit, or the model marks no reasoning.

        ``marks``: if known; else those of the chat template.
        """
        most = params.thinking_token_budget if isinstance(params, SamplingParams) else None
        if most is None or most == -1:
            return None
        if marks is None:
            names = map(find_reasoning_marks, self.tokenizer.chat_templates.values())
            marks = next((REASONING_MARKS[name] for name in names if name is not None), None)
        if marks is None:
            return None
        end = self.tokenizer.convert_tokens_to_ids(marks.end)
        if end is None:
            raise InvalidRequestError(
                f"must be left out: what ends the model's reasoning ({marks.end!r}) is no token, so that it cannot "
                "be set",
                path="thinking_token_budget",
            )
        start = self.tokenizer.encode(marks.start, add_special_tokens=False)
        before = self.tokenizer.decode(ids[-_MARK_TOKENS:], skip_special_tokens=False) if text is None else text
        # Marks of several tokens are not detected.
        interrupts = [i for text in marks.interrupts if (i := self.tokenizer.convert_tokens_to_ids(text)) is not None]
        return ThinkingBudget(most, start, end, marks.opened_by(before), interrupts)

    def check_length(self, num_tokens: int, max_tokens: int | None, virtual: int = 0) -> int:
        """Checks that a prompt and its output fit the context; returns the tokens that the output may have.

        ``virtual``: tokens of a prompt adapter. ``DefaultMaxTokens`` may be more than fit.
        """
        tokens = f"{num_tokens} tokens" + (f" and the adapter {virtual} virtual ones" if virtual else "")
        room = self.max_model_len - virtual - num_tokens
        # Clients search for the words "maximum context length" of the OpenAI API.
        limit = (
            f"prompt and output together may have at most {self.max_model_len}: this model's maximum context length is "
            f"{self.max_model_len} tokens"
        )
        if room < int(max_tokens != 0):  # sampling needs a place for a token
            raise InvalidRequestError(f"has {tokens}, but {limit}", path="prompt", kind=CONTEXT_LENGTH)
        if max_tokens is not None and max_tokens > room and not isinstance(max_tokens, DefaultMaxTokens):
            problem = f"{max_tokens} does not fit: the prompt has {tokens}, and {limit}; {room} or None would fit"
            raise InvalidRequestError(problem, path="max_tokens", kind=CONTEXT_LENGTH)
        return room

    def _task(
        self,
        params: SamplingParams | BeamSearchParams,
        thinking: ThinkingBudget | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        num_forced: int = 0,
    ) -> Generate | Beam:
        if isinstance(params, BeamSearchParams):
            self.tokenizer.check_can_decode()
            self._unseeded += 1  # the seed of the next request does not depend on the task of this one
            return Beam(params, [] if params.ignore_eos else list(self.eos_token_ids), num_forced)
        if -1 in (params.logprobs, params.prompt_logprobs):
            named = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
            whole = {name: self.vocab_size for name, count in named.items() if count == -1}
            params = msgspec.structs.replace(params, **whole)
        self.check_params(params)
        bad_words = [ids for word in params.bad_words or () for ids in self.tokenizer.bad_word_ids(word)]
        stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(self.eos_token_ids))
        seed = params.seed
        if seed is None:
            self._unseeded += 1
            seed = (self._seed << 32) ^ (self._unseeded * _SPREAD)
        if params.logprobs is None and params.num_sequences > params.n:
            params = msgspec.structs.replace(params, logprobs=0)  # ``best_of`` needs them
        ignored = list(self.eos_token_ids) if params.ignore_eos else []
        self._check_choices_left(params, bad_words, stops.union(ignored))
        grammar = None
        if params.structured_outputs is not None:
            if isinstance(self.tokenizer, NoTokenizer):
                raise InvalidRequestError("needs a tokenizer, and none is loaded", path="structured_outputs")
            grammar = self.grammars.compile(params.structured_outputs)
            params = msgspec.structs.replace(params, structured_outputs=None)  # the core takes the grammar alone
            if not grammar.begin_after:
                thinking = None  # the grammar covers the whole output
        heads = list(options.alignment_heads)
        rules = options.timestamps
        return Generate(params, seed & _MASK64, sorted(stops), bad_words, ignored, grammar, thinking, rules, heads)

    def read_prompt(self, prompt: Prompt | Any) -> tuple[str | None, list[int]]:
        """Returns the text, if any, and the token ids of a prompt in any of its forms."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.source.encode(prompt)
        if isinstance(prompt, (list, tuple)):
            return None, list(prompt)
        if not isinstance(prompt, Mapping):
            raise InvalidRequestError("must be text, a list of token ids or a dictionary", path="prompt", got=prompt)
        for key, value in prompt.items():
            if key in FOREIGN["prompt"] and value is not None:
                raise InvalidRequestError(f"{key!r} must be None: {FOREIGN['prompt'][key].reason}", path="prompt")
            if key not in FOREIGN["prompt"] and key not in PROMPT_KEYS:
                raise InvalidRequestError(
                    f"has the unknown key {key!r}; known: {', '.join(map(repr, PROMPT_KEYS))}", path="prompt"
                )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if not isinstance(text, str | None):
            raise InvalidRequestError(f"must not be {type(text).__name__}", path="prompt")
        if not isinstance(ids, list | tuple | None):
            raise InvalidRequestError(f"must not be {type(ids).__name__}", path="prompt_token_ids")
        if ids is not None:
            return text, list(ids)
        if text is not None:
            return text, self.tokenizer.source.encode(text)
        raise InvalidRequestError("a dictionary needs 'prompt' (text) or 'prompt_token_ids'", path="prompt")

    def prompt_ids(self, token_ids: Sequence[int], path: str = "prompt") -> list[int]:
        """Checks that a prompt has tokens, all in the vocabulary; ``path``: its name in errors."""
        if not token_ids:
            raise InvalidRequestError("is empty; it must have at least one token", path=path)
        return self._checked_ids(path, token_ids)

    def _checked_ids(self, name: str, token_ids: Sequence[int]) -> list[int]:
        try:
            checked: list[int] = msgspec.convert(token_ids, self._token_ids)
        except (msgspec.ValidationError, ValueError):  # the latter of text that is no Unicode
            wrong = next(t for t in token_ids if type(t) is not int or not 0 <= t < self.vocab_size)
            raise InvalidRequestError(
                f"token ids must be integers from 0 to {self.vocab_size - 1}", path=name, got=wrong
            ) from None
        return checked

    def _check_policy(self, options: RequestOptions) -> None:
        if options.priority and not self._policy_class.uses_priority:
            names = ", ".join(name for name, policy in POLICIES.items() if policy.uses_priority)
            raise InvalidRequestError(
                f"must be 0 under scheduling_policy {self._policy!r}, which does not look at it, not "
                f"{options.priority}; policies that do: {names}, or a module:Class",
                path="priority",
            )
        if self._policy_class.uses_targets:
            return
        for name in ("ttft_target", "tpot_target"):
            if getattr(options, name) is not None:
                names = ", ".join(name for name, policy in POLICIES.items() if policy.uses_targets)
                raise InvalidRequestError(
                    f"must be left out under scheduling_policy {self._policy!r}, which does not look at it; policies "
                    f"that do: {names}, or a module:Class that says so",
                    path=name,
                )

    def check_params(self, params: SamplingParams) -> None:
        """Checks parameters whose limits are the model's or the engine's."""
        if params.detokenize:
            self.tokenizer.check_can_decode(bool(params.stop))
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.max_logprobs:
                raise InvalidRequestError(
                    f"must be in [0, {self.max_logprobs}], not {getattr(params, name)}: the engine's option "
                    "max_logprobs is its limit",
                    path=name,
                )
        if len(params.logprob_token_ids or ()) > self.max_logprobs:
            problem = f"must hold at most {self.max_logprobs} (max_logprobs), not {len(params.logprob_token_ids or ())}"
            raise InvalidRequestError(problem, path="logprob_token_ids")
        self._logits_plugins.processors(params)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= self.vocab_size:
                    raise InvalidRequestError(
                        f"holds token id {token}, but the vocabulary ends at {self.vocab_size - 1}", path=name
                    )

    def _check_choices_left(self, params: SamplingParams, bad_words: list[list[int]], stops: Set[int]) -> None:
        """Refuses parameters that exclude every token from the start; grammars are left to the workers."""
        excluded = {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens:
            excluded |= stops
        allowed = params.allowed_token_ids
        if len(excluded) >= self.vocab_size if allowed is None else excluded.issuperset(allowed):
            names = [name for name in excluding_fields(params) if not name.startswith("structured_outputs")]
            raise no_token_error(names, 0)


# Encoder-decoder models


class EncoderPrompts:
    """Splits the prompts of an encoder-decoder model, which are:

    - a text, token ids, or a dictionary with one of these: the encoder's prompt; the decoder begins with its start
      tokens. If the model takes audio, this is the decoder's prompt, and ``multi_modal_data`` has the audio;
    - ``{"encoder_prompt": ..., "decoder_prompt": ...}``, each as above; the second may be None.
    """

    def __init__(self, config: ModelConfig, max_model_len: int, inputs: InputProcessor) -> None:
        facts, longest = config.encoder_facts, config.longest_input(max_model_len)
        assert facts is not None and longest is not None
        self.longest = longest
        self.facts, self._inputs = facts, inputs

    def split(self, prompt: Prompt | Any) -> SplitPrompt:
        """Splits a prompt into the encoder's input and the decoder's token ids; a split prompt is returned as it is."""
        if isinstance(prompt, Mapping) and isinstance(prompt.get("encoder_input"), EncoderInput):
            return prompt  # type: ignore[return-value]
        salt = None
        if isinstance(prompt, Mapping):
            salt = prompt.get("cache_salt")
            prompt = {key: value for key, value in prompt.items() if key != "cache_salt" and value is not None}
        if isinstance(prompt, Mapping) and not prompt.keys().isdisjoint(("encoder_prompt", "decoder_prompt")):
            split = self._split_explicit(prompt)
        elif self.facts.takes_audio:
            data, rest = _take_data(prompt)
            split = self._split(None, data, rest)
        else:
            split = self._split(prompt, None, None)
        return split if salt is None else {**split, "cache_salt": salt}

    def _split_explicit(self, prompt: Mapping[str, Any]) -> SplitPrompt:
        if unknown := [key for key in prompt if key not in ("encoder_prompt", "decoder_prompt")]:
            raise InvalidRequestError(
                "has 'decoder_prompt' and 'cache_salt' beside it", path="encoder_prompt", got=unknown[0]
            )
        if "encoder_prompt" not in prompt:
            raise InvalidRequestError("needs 'encoder_prompt' beside it: what the encoder reads", path="decoder_prompt")
        encoder, data = prompt["encoder_prompt"], None
        if self.facts.takes_audio:
            data, rest = _take_data(encoder)
            if rest not in (None, "", []):
                raise InvalidRequestError(f"the encoder reads sound alone, not {rest!r} beside it", path="prompt")
        return self._split(encoder, data, prompt.get("decoder_prompt"))

    def _split(self, encoder: Any, data: Any, decoder: Any) -> SplitPrompt:
        text: str | None = None
        if self.facts.takes_audio:
            encoder_input = audio_input(data, self.facts)
        else:
            text, ids = self._inputs.read_prompt(encoder)
            checked = self._inputs.prompt_ids(ids, "encoder_prompt")
            if len(checked) > self.longest:
                raise InvalidRequestError(
                    f"has {len(checked)} tokens, but may have at most {self.longest}: the model's positions, or "
                    "max_model_len where it has no limit of its own",
                    path="encoder_prompt",
                    kind=CONTEXT_LENGTH,
                )
            encoder_input = EncoderInput.of_tokens(checked)
        split = self._decoder_prompt(decoder)
        split["encoder_input"], split["encoder_prompt"] = encoder_input, text
        return split

    def _decoder_prompt(self, prompt: Any) -> SplitPrompt:
        """Reads the decoder's prompt, without the tokenizer's special tokens, and puts the start token before it."""
        start, forced = self.facts.decoder_start_ids, self.facts.forced_ids
        if prompt is None or prompt in ("", [], ()):
            return SplitPrompt(prompt_token_ids=[*start, *forced], num_forced=len(forced))
        text: str | None = None
        if isinstance(prompt, str):
            text, ids = prompt, self._inputs.tokenizer.encode(prompt, add_special_tokens=False)
        elif isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None:
            text, _ = self._inputs.read_prompt({**prompt, "prompt_token_ids": [0]})
            if text is None:
                raise InvalidRequestError("needs 'prompt' (text) or 'prompt_token_ids'", path="decoder_prompt")
            ids = self._inputs.tokenizer.encode(text, add_special_tokens=False)
        else:
            text, ids = self._inputs.read_prompt(prompt)
        ids = self._inputs.prompt_ids(ids, "decoder_prompt")
        if ids[:1] != [*start[:1]]:
            ids = [*start[:1], *ids]
        split = SplitPrompt(prompt_token_ids=ids, num_forced=0)
        if text is not None:
            split["prompt"] = text
        return split


#: Path of the sound of a prompt.
_SOUND = "multi_modal_data.audio"


def audio_input(data: Any, facts: EncoderFacts) -> EncoderInput:
    """Converts sound, samples float32 [n] at the model's rate or (samples, rate), to the encoder's input."""
    samples, rate = data if isinstance(data, tuple) and len(data) == 2 else (data, facts.audio_rate)
    if data is None:
        raise InvalidRequestError(
            'the model reads sound: give it as {"multi_modal_data": {"audio": (samples, rate)}}', path="prompt"
        )
    if rate != facts.audio_rate:
        raise InvalidRequestError(f"must have {facts.audio_rate} samples a second", path=_SOUND, got=rate)
    import numpy as np

    values = np.asarray(samples)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.floating):
        raise InvalidRequestError(
            f"must be float32 [samples] of one channel, not {values.dtype} {values.shape}", path=_SOUND
        )
    if not 0 < len(values) <= facts.audio_samples:
        raise InvalidRequestError(f"must have 1 to {facts.audio_samples} samples, not {len(values)}", path=_SOUND)
    return EncoderInput.of_audio(values, facts.audio_tokens)


def _take_data(prompt: Any) -> tuple[Any, Any]:
    """Separates the sound of a prompt from the rest of it; each may be None."""
    if not isinstance(prompt, Mapping):
        return None, prompt
    data = prompt.get("multi_modal_data")
    if data is not None and (not isinstance(data, Mapping) or set(data) != {"audio"}):
        raise InvalidRequestError("must be a dictionary with 'audio' alone", path="multi_modal_data", got=data)
    rest = {key: value for key, value in prompt.items() if key != "multi_modal_data"}
    if set(rest) == {"prompt"}:
        return data and data["audio"], rest["prompt"]
    return (None if data is None else data["audio"]), rest or None


# Vectors and scores

#: As the Qwen3-Reranker models were trained (Zhang et al. 2025, "Qwen3 Embedding", section 2).
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
#: The answers if config.json has no ``classifier_from_token``.
_DEFAULT_ANSWERS = ("no", "yes")


class YesNoScorer:
    """Scores pairs with a language model: the score is the probability of the second of ``answer_ids`` ("yes").

    Without ``answer_ids`` a head of classes makes the score.
    """

    def __init__(self, files: ModelFiles) -> None:
        """The answers are those of the model's files or of ``hf_overrides`` (``classifier_from_token``), or "no" and
        "yes".
        """
        self._tokenizer, pooler = files.tokenizer, files.model_config.pooler
        self._format, self._system = pooler.pairs, pooler.prompts.get(pooler.default_prompt_name or "")
        if self._format is not None:
            self.answer_ids = list(self._format.answer_ids or ())
            vocab_size = files.model_config.vocab_size
            if max(self.answer_ids, default=0) >= vocab_size:
                raise ConfigError(f"LogitScore names the tokens {self.answer_ids}, but the vocabulary has {vocab_size}")
            return
        words = (files.options.hf_overrides or {}).get("classifier_from_token", _DEFAULT_ANSWERS)
        ids = [self._tokenizer.convert_tokens_to_ids(word) for word in words]
        if len(ids) != 2 or None in ids:
            raise ConfigError(
                f"task 'score' needs two tokens as answers, but {words!r} are not: name them in hf_overrides as "
                "classifier_from_token"
            )
        self.answer_ids = [index for index in ids if index is not None]

    def prompt(self, query: str, document: str, most: int | None) -> Prompt:
        """Makes the prompt of a pair; the document is cut so that the prompt has at most ``most`` tokens."""
        ids = self._encode(query, document)
        if most is not None and len(ids) > most:
            words = self._tokenizer.encode(document, add_special_tokens=False)
            kept = len(words)
            while len(ids) > most:
                kept -= len(ids) - most
                if kept < 0:
                    raise InvalidRequestError(f"the query alone is longer than {most} tokens", path="query")
                ids = self._encode(query, self._tokenizer.decode(words[:kept]))
        return {"prompt": f"{query} {document}", "prompt_token_ids": ids}

    def _encode(self, query: str, document: str) -> list[int]:
        pairs = self._format
        if pairs is not None and pairs.template is not None:
            before, _, after = pairs.template.partition("{document}")
            rendered = before.replace("{query}", query) + document + after.replace("{query}", query)
            return self._tokenizer.encode(rendered, add_special_tokens=False)
        if pairs is not None:
            pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            system = [] if self._system is None else [{"role": "system", "content": self._system}]
            return self._tokenizer.encode(
                self._tokenizer.apply_chat_template([*system, *pair], **pairs.options), add_special_tokens=False
            )
        text = f"<Instruct>: {_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        if not self._tokenizer.chat_templates:
            return self._tokenizer.encode(f"{_SYSTEM}\n\n{text}\n\nAnswer:")
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)
        return self._tokenizer.encode(rendered, add_special_tokens=False)


#: Further keys of a prompt's dictionary: the segment of each token; the first pooled position.
_TYPES, _FIRST = "token_type_ids", "first_pooled"


class PoolingInputs:
    """Tokenizes and checks requests for vectors and scores of one model."""

    def __init__(self, files: ModelFiles, inputs: InputProcessor) -> None:
        self._files, self._inputs, self.tokenizer = files, inputs, files.tokenizer
        self.max_model_len = inputs.max_model_len
        self.config, self.pooler = files.model_config, files.model_config.pooler
        #: "generate", and those of ``PoolingTask``.
        self.tasks = model_tasks(self.config, files.options.task)
        has_answers = self.pooler.pairs is not None or (self.config.head == "lm" and self.tasks == ("score",))
        self._yes_no = YesNoScorer(files) if has_answers else None

    def require(self, task: str) -> None:
        if task not in self.tasks:
            raise InvalidRequestError(
                f"{self.config.architecture} cannot {_VERBS[task]}; it can: "
                + ", ".join(_VERBS[name] for name in self.tasks),
                path="model",
                kind="unsupported_task",
            )

    def embedding_prompt(self, prompt: Prompt, prompt_name: str | None = None) -> Prompt:
        """Puts the model's text named ``prompt_name``, or its default one, before a prompt."""
        name = prompt_name if prompt_name is not None else self.pooler.default_prompt_name
        if name is None:
            return prompt
        before = self.pooler.prompts.get(name)
        if before is None:
            names = ", ".join(map(repr, self.pooler.prompts)) or "none"
            raise InvalidRequestError(f"must be one of the model's prompts ({names})", path="prompt_name", got=name)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if not isinstance(text, str) or (isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None):
            if prompt_name is None:
                return prompt  # the caller's token ids include the prompt text
            raise InvalidRequestError(f"{name!r} is put before texts, not before token ids", path="prompt_name")
        others = prompt if isinstance(prompt, Mapping) else {}
        fields: dict[str, Any] = {**others, "prompt": before + text}
        if not self.pooler.include_prompt:
            # As sentence-transformers counts the tokens of a prompt text: without a special token at its end.
            ids = self.tokenizer.encode_cut(before, self.max_model_len)
            fields[_FIRST] = len(ids) - (bool(ids) and ids[-1] in self.tokenizer.special_ids)
        return fields

    def pair_prompts(self, query: str, document: str, truncate: int | None = None) -> list[Prompt]:
        """Makes the prompts of a pair: one with both texts, or one for each text, whose vectors are compared."""
        self.require("score")
        for name, text in (("query", query), ("document", document)):
            if not isinstance(text, str):
                raise InvalidRequestError("must be text", path=name, got=text)
        if self._compares:
            prompts = self.pooler.prompts
            return [
                self.embedding_prompt(query, "query" if "query" in prompts else None),
                self.embedding_prompt(document, "document" if "document" in prompts else None),
            ]
        if self._yes_no is not None:
            return [self._yes_no.prompt(query, document, self._cut_length(truncate))]
        ids, second = self.tokenizer.encode_pair(query, document, self._cut_length(truncate))
        types = [0] * second + [1] * (len(ids) - second) if second else None
        return [{"prompt": f"{query} {document}", "prompt_token_ids": ids, _TYPES: types}]

    @property
    def _compares(self) -> bool:
        return self.config.head in ("none", "lm") and self._yes_no is None

    def score(self, outputs: Sequence[Pooled]) -> float:
        """Computes the score of a pair from the outputs of its prompts; ``InvalidRequestError`` if one failed."""
        for output in outputs:
            if output.outputs.error is not None:
                raise InvalidRequestError(output.outputs.error)
        rows = [output.outputs.data for output in outputs]
        return float(rows[0][0]) if len(rows) == 1 else similarity(self.pooler.similarity, *rows)

    def score_params(self, params: PoolingParams | None) -> PoolingParams:
        return msgspec.structs.replace(params or PoolingParams(), task="embed" if self._compares else "score")

    def tokenize(self, prompt: Prompt, params: PoolingParams) -> Prompt:
        """Adds token ids to a text prompt; for a thread, if the text is long."""
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        text = fields.get("prompt")
        if not isinstance(text, str) or fields.get("prompt_token_ids") is not None:
            return prompt
        most = self._cut_length(params.truncate_prompt_tokens)
        ids = self.tokenizer.encode(text) if most is None else self.tokenizer.encode_cut(text, most)
        return {**fields, "prompt_token_ids": ids}

    def _cut_length(self, truncate: int | None) -> int | None:
        return None if truncate is None else self.max_model_len if truncate == -1 else truncate

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        adapter: AdapterRef | None = None,
    ) -> PoolingState:
        """Tokenizes and checks a request for ``OutputProcessor.open``; nothing changes if it is refused."""
        arrival, options = self._inputs.begin(prompt, options)
        params.validate()  # a field may have been assigned after construction
        task_name = self._task(params)
        fields = dict(prompt) if isinstance(prompt, Mapping) else {}
        types, first = fields.pop(_TYPES, None), fields.pop(_FIRST, 0)
        text, token_ids = self._inputs.read_prompt(self.tokenize(fields or prompt, params))
        if (most := self._cut_length(params.truncate_prompt_tokens)) is not None:
            token_ids = token_ids[:most]
        virtual = 0 if adapter is None else adapter.num_virtual_tokens
        token_ids = self._inputs.prompt_ids(token_ids)
        if virtual + len(token_ids) > self.max_model_len:
            raise InvalidRequestError(
                f"has {len(token_ids) + virtual} tokens, but the model takes at most {self.max_model_len}; "
                "truncate_prompt_tokens=-1 cuts it there",
                path="prompt",
                kind=CONTEXT_LENGTH,
            )
        task = Pool(
            msgspec.structs.replace(params, task=task_name),
            "last" if self._yes_no is not None else self.pooler.kind,
            self._first_pooled(first, len(token_ids), task_name) + virtual,
            _second_text(types, token_ids),
            [] if self._yes_no is None else self._yes_no.answer_ids,
        )
        group = self._inputs.core_request(token_ids, task, arrival, options, adapter)
        return PoolingState(request_id, text, token_ids, NO_SAMPLING, group)

    def _first_pooled(self, first: int, num_tokens: int, task: PoolingTask) -> int:
        """The first pooled position of a prompt whose first ``first`` tokens are excluded.

        If no token is left (the text is empty, or was cut), vectors are those of sentence-transformers: zero, or of the
        first token. There is none for "max".
        """
        if first < num_tokens:
            return first
        kind = self.pooler.kind
        if kind == "max" and task == "embed":
            raise InvalidRequestError(
                "no token of the text is left beside those of its prompt, which is not pooled", path="prompt"
            )
        if kind == "cls" or task != "embed":
            return 0 if task == "embed" else num_tokens - 1
        return num_tokens

    def _task(self, params: PoolingParams) -> PoolingTask:
        task: Any = params.task
        if task is None:
            task = next((name for name in self.tasks if name not in ("generate", "score")), "score")
        if task == "score" and self._compares:
            raise InvalidRequestError(
                "this model scores pairs by comparing vectors: ask for both with task embed", path="task"
            )
        self.require(task)
        if (dimensions := params.dimensions) is not None:  # only sizes that the model was trained for
            if task not in ("embed", "token_embed"):
                raise InvalidRequestError(f"is for vectors, and must be left out of {task}", path="dimensions")
            size, sizes = self.vector_size, self.pooler.dimensions
            if dimensions > size or (sizes is not None and dimensions != size and dimensions not in sizes):
                supported = f"1 to {size}" if sizes is None else ", ".join(map(str, (*sizes, size)))
                raise InvalidRequestError(
                    f"must be one of the model's ({supported}), not {dimensions}", path="dimensions"
                )
        checked: PoolingTask = task
        return checked

    @property
    def vector_size(self) -> int:
        return self.pooler.dense[-1].outputs if self.pooler.dense else self.config.hidden_size


_VERBS = {
    "generate": "generate text",
    "transcribe": "transcribe recordings",
    "embed": "embed",
    "token_embed": "embed tokens",
    "classify": "classify",
    "token_classify": "classify tokens",
    "score": "score pairs",
}


def _second_text(types: Any, token_ids: Sequence[int]) -> int:
    """The position where the tokens of the second text begin; 0: there is none."""
    if types is None:
        return 0
    if not isinstance(types, list) or len(types) < len(token_ids):
        raise InvalidRequestError(f"must be a list of {len(token_ids)} numbers, one for each token", path=_TYPES)
    ones = types[: len(token_ids)].count(1)
    second = len(token_ids) - ones
    if types[: len(token_ids)] != [0] * second + [1] * ones or not second:
        raise InvalidRequestError("must be 0 for the tokens of the first text, then 1", path=_TYPES)
    return second if ones else 0


def similarity(kind: str, first: np.ndarray, second: np.ndarray) -> float:
    """The similarity of two vectors float32 [D], by the model's measure; larger is more similar."""
    import numpy as np  # a server that generates does without

    a, b = first.astype(np.float64), second.astype(np.float64)
    if kind == "euclidean":
        return -float(np.sqrt(np.sum((a - b) ** 2)))
    if kind == "manhattan":
        return -float(np.sum(np.abs(a - b)))
    product = float(np.sum(a * b))
    if kind == "dot":
        return product
    return product / max(float(np.sqrt(np.sum(a * a)) * np.sqrt(np.sum(b * b))), 1e-12)
