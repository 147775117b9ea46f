"""From prompts and parameters to requests of the engine core: tokenize, check, resolve."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from octavo.config.options import MAX_LOGPROBS
from octavo.core.errors import InvalidRequestError
from octavo.core.model_config import ReasoningMarks, ThinkingBudget
from octavo.core.plugins import LogitsPlugins
from octavo.core.request import (
    DEFAULT_OPTIONS,
    FOREIGN_KEYS,
    PROMPT_KEYS,
    AdapterRef,
    AnyTask,
    Beam,
    EncoderInput,
    EngineCoreRequest,
    Generate,
    Prompt,
    RequestOptions,
    SplitPrompt,
)
from octavo.core.sampling_params import (
    BeamSearchParams,
    DefaultMaxTokens,
    SamplingParams,
    excluding_fields,
    no_token_message,
    sampling_in_effect,
)
from octavo.engine.chat_template import REASONING_MARKS, find_reasoning_marks
from octavo.engine.encoder_prompts import NO_FEATURES, EncoderPrompts, PromptFeatures, take_images, takes_images
from octavo.engine.model_files import ModelFiles
from octavo.engine.output_processor import RequestState
from octavo.engine.tokenizer import NoTokenizer
from octavo.grammar.compiler import GrammarCompiler
from octavo.process.sandbox import Sandbox
from octavo.scheduler.policies import POLICIES, policy_class

if TYPE_CHECKING:
    from octavo.engine.image_prompts import ImagePrompts

_MASK64 = (1 << 64) - 1
#: 2**64 / golden ratio: spreads consecutive numbers over all 64 bits (Knuth, TAOCP vol. 3, section 6.4).
_SPREAD = 0x9E3779B97F4A7C15
#: Tokens at the end of a prompt among which is the mark that opens its reasoning, with spaces after it.
_MARK_TOKENS = 16
#: Options that the front end makes other fields of a core's request of, or needs itself: none of them is sent.
_RESOLVED: dict[str, Any] = {
    "arrival_time": None, "lora_request": None, "prediction": None, "visible_tokens": frozenset(), "client": "",
    "reasoning": None, "timestamps": None, "alignment_heads": (),
}  # fmt: skip


class InputProcessor:
    """Checks requests against one model. Owns the numbering of groups."""

    def __init__(self, files: ModelFiles, max_model_len: int | None = None) -> None:
        """``max_model_len`` in tokens, prompt and output together; by default that of the options, or of the model."""
        options, config, self.tokenizer = files.options, files.model_config, files.tokenizer
        #: That of the network, which may have more embeddings than the tokenizer has tokens.
        self.vocab_size = vocab_size = config.vocab_size
        self.eos_token_ids = config.eos_token_ids
        self.max_model_len = max_model_len or options.max_model_len or config.default_length
        #: The model's own values for fields of ``SamplingParams`` that a caller leaves out.
        self.default_sampling = dict(files.default_sampling)
        #: Runs what requests bring as programs; for all of this frontend.
        self.sandbox = Sandbox()
        self.grammars = GrammarCompiler(
            self.sandbox,
            files.tokenizer.special_texts,
            vocab_size,
            options.structured_outputs_compile_seconds,
            options.structured_outputs_config,
        )
        #: Checked in C: a loop in Python takes 5 ms for 100,000 tokens, during which a server does nothing else.
        self._token_ids: Any = list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]
        self._seed = options.seed
        limit = MAX_LOGPROBS if options.max_logprobs is None else options.max_logprobs
        self._max_logprobs = vocab_size if limit == -1 else limit
        self._logits_plugins = LogitsPlugins(options.logits_processors or ())
        self._policy = options.scheduling_policy
        self._policy_class = policy_class(options.scheduling_policy)
        #: Of an encoder-decoder model.
        self.encoder_prompts: EncoderPrompts | None = None
        if config.encoder_facts is not None:
            self.encoder_prompts = EncoderPrompts(config, self.max_model_len, self)
        #: Of a model that sees images.
        self.image_prompts: ImagePrompts | None = None
        if takes_images(config, options):
            from octavo.engine.image_prompts import ImagePrompts  # with numpy, of which other models need nothing

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
        """Tokenizes and checks one request, for ``OutputProcessor.open``; nothing is changed if it is refused.

        ``adapter``: what its ``lora_request`` names (``AdapterRegistry``).

        Raises:
            InvalidRequestError: the prompt or a parameter cannot be served by this model.
        """
        if not isinstance(params, (SamplingParams, BeamSearchParams)):
            raise InvalidRequestError(f"sampling_params must be SamplingParams or BeamSearchParams, not {params!r}")
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
        if isinstance(params, SamplingParams) and (most := params.truncate_prompt_tokens) is not None:
            if split is not None:
                raise InvalidRequestError(
                    f"truncate_prompt_tokens must be left out with encoder-decoder models, not {most}"
                )
            if images:
                raise InvalidRequestError(f"truncate_prompt_tokens must be left out with images, not {most}")
            room = self.max_model_len - virtual - (1 if params.max_tokens is None else params.max_tokens)
            token_ids = token_ids[-(max(1, room) if most == -1 else most) :]
        found = NO_FEATURES
        if isinstance(images, PromptFeatures):
            found = images
        elif self.image_prompts is not None:
            token_ids, found = self.image_prompts.expand(self.prompt_ids(token_ids), images)
        token_ids = self._check_prompt(token_ids, virtual, samples=params.max_tokens != 0)
        predicted = self._read_prediction(options.prediction)
        limit = self._max_tokens(params.max_tokens, len(token_ids), virtual)
        fitted = params if limit is params.max_tokens else msgspec.structs.replace(params, max_tokens=limit)
        thinking = self._thinking_budget(params, options.reasoning, text, token_ids)
        num_forced = 0 if split is None else split["num_forced"]
        task = self._task(fitted, thinking, options, num_forced=num_forced)
        encoder_input = None if split is None else split.get("encoder_input")
        group = self.core_request(token_ids, task, arrival, options, adapter, predicted, encoder_input)
        if found.images:
            group.images, group.features = found.images, found.moved(virtual)
        if isinstance(params, BeamSearchParams):  # its hypotheses are shown as completions
            params = SamplingParams(n=params.beam_width, skip_special_tokens=params.skip_special_tokens)
        encoder_prompt = None if split is None else split.get("encoder_prompt")
        return RequestState(request_id, text, token_ids, params, group, options.visible_tokens, encoder_prompt)

    def begin(self, prompt: Prompt, options: RequestOptions) -> tuple[float, RequestOptions]:
        """When a request has arrived, and its options with the salt that its prompt names.

        Raises:
            InvalidRequestError: the scheduling policy does not look at what they say, or the salt is no text.
        """
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
        """What a core takes of a request that was checked; ``arrival`` and ``options`` are those of ``begin``."""
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
        """New parameters for a request that brings none: the model's own defaults, and for the rest those here."""
        return SamplingParams(**self.default_sampling)

    @property
    def sampling_in_effect(self) -> dict[str, Any]:
        """What those parameters are, by name; see ``core.sampling_params.sampling_in_effect``."""
        return sampling_in_effect(self.default_sampling)

    def _thinking_budget(
        self, params: SamplingParams | BeamSearchParams, marks: ReasoningMarks | None, text: str | None, ids: list[int]
    ) -> ThinkingBudget | None:
        """The budget of the output's reasoning; None: it has no limit, or the model marks no reasoning.

        ``marks``: those that are known; else they are found by the chat template.
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
                f"thinking_token_budget must be left out: what ends the model's reasoning ({marks.end!r}) is no "
                "token, so that it cannot be set"
            )
        start = self.tokenizer.encode(marks.start, add_special_tokens=False)
        before = self.tokenizer.decode(ids[-_MARK_TOKENS:], skip_special_tokens=False) if text is None else text
        # One that is several tokens does not end what is counted, but for the text.
        interrupts = [i for text in marks.interrupts if (i := self.tokenizer.convert_tokens_to_ids(text)) is not None]
        return ThinkingBudget(most, start, end, marks.opened_by(before), interrupts)

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
        self._check_params(params)
        bad_words = [ids for word in params.bad_words or () for ids in self.tokenizer.bad_word_ids(word)]
        stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(self.eos_token_ids))
        seed = self._request_seed(params)
        if params.logprobs is None and params.num_sequences > params.n:
            params = msgspec.structs.replace(params, logprobs=0)  # the best are chosen by them
        ignored = list(self.eos_token_ids) if params.ignore_eos else []
        self._check_choices_left(params, bad_words, stops.union(ignored))
        grammar = None
        if params.structured_outputs is not None:
            if isinstance(self.tokenizer, NoTokenizer):
                raise InvalidRequestError("structured_outputs needs a tokenizer, and none is loaded")
            grammar = self.grammars.compile(params.structured_outputs)
            params = msgspec.structs.replace(params, structured_outputs=None)  # the core takes the grammar alone
            if not grammar.begin_after:
                thinking = None  # the form is all there is
        heads = list(options.alignment_heads)
        rules = options.timestamps
        return Generate(params, seed, sorted(stops), bad_words, ignored, grammar, thinking, rules, heads)

    def read_prompt(self, prompt: Prompt | Any) -> tuple[str | None, list[int]]:
        """The text (if there is one) and the token ids of a prompt in any of its forms, as an encoder reads it."""
        if isinstance(prompt, Mapping):
            return self._read_dictionary(prompt)
        if isinstance(prompt, str):
            return prompt, self.tokenizer.source.encode(prompt)
        if isinstance(prompt, (list, tuple)):
            return None, list(prompt)
        raise InvalidRequestError(f"a prompt must be text, a list of token ids or a dictionary, not {prompt!r}")

    def _read_dictionary(self, prompt: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        for key, value in prompt.items():
            if key in FOREIGN_KEYS and value is not None:
                raise InvalidRequestError(f"{key!r} of a prompt must be None: {FOREIGN_KEYS[key]}")
            if key not in FOREIGN_KEYS and key not in PROMPT_KEYS:
                raise InvalidRequestError(
                    f"a prompt has the unknown key {key!r}; known: {', '.join(map(repr, PROMPT_KEYS))}"
                )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if not isinstance(text, str | None):
            raise InvalidRequestError(f"'prompt' must not be {type(text).__name__}")
        if not isinstance(ids, list | tuple | None):
            raise InvalidRequestError(f"'prompt_token_ids' must not be {type(ids).__name__}")
        if ids is not None:
            return text, list(ids)
        if text is not None:
            return text, self.tokenizer.source.encode(text)
        raise InvalidRequestError("a prompt given as a dictionary needs 'prompt' (text) or 'prompt_token_ids'")

    def _check_prompt(self, token_ids: Sequence[int], virtual: int, *, samples: bool) -> list[int]:
        """The token ids, as plain integers, if they can be served: behind so many virtual tokens, and with a token
        after them if it ``samples``.
        """
        checked = self.prompt_ids(token_ids)
        if virtual + len(token_ids) + samples > self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {_counted(len(token_ids), virtual)}, but prompt and output together may have at most "
                f"{self.max_model_len}: the model's max_model_len, or what the KV cache blocks hold if that is less"
            )
        return checked

    def _read_prediction(self, prediction: str | Sequence[int] | None) -> list[int]:
        """The token ids of a predicted output, up to the longest that there can be."""
        if prediction is None:
            return []
        if isinstance(prediction, str):
            prediction = self.tokenizer.encode(prediction, add_special_tokens=False)
        return self._checked_ids("prediction", prediction[: self.max_model_len])

    def prompt_ids(self, token_ids: Sequence[int], what: str = "prompt") -> list[int]:
        """The token ids of a prompt as plain integers; ``what`` it is called in errors.

        Raises:
            InvalidRequestError: there is none, or one is no integer, or not in the vocabulary.
        """
        if not token_ids:
            raise InvalidRequestError(f"the {what} is empty; it must have at least one token")
        return self._checked_ids(what, token_ids)

    def _checked_ids(self, name: str, token_ids: Sequence[int]) -> list[int]:
        try:
            checked: list[int] = msgspec.convert(token_ids, self._token_ids)
        except (msgspec.ValidationError, ValueError):  # the latter of text that is no Unicode
            wrong = next(t for t in token_ids if type(t) is not int or not 0 <= t < self.vocab_size)
            raise InvalidRequestError(
                f"{name} token ids must be integers from 0 to {self.vocab_size - 1}, not {wrong!r}"
            ) from None
        return checked

    def _check_policy(self, options: RequestOptions) -> None:
        """Refuses what the scheduling policy does not look at."""
        if options.priority and not self._policy_class.uses_priority:
            names = ", ".join(name for name, policy in POLICIES.items() if policy.uses_priority)
            raise InvalidRequestError(
                f"priority must be 0 under scheduling_policy {self._policy!r}, which does not look at it, not "
                f"{options.priority}; policies that do: {names}, or a module:Class"
            )
        if self._policy_class.uses_targets:
            return
        for name in ("ttft_target", "tpot_target"):
            if getattr(options, name) is not None:
                names = ", ".join(name for name, policy in POLICIES.items() if policy.uses_targets)
                raise InvalidRequestError(
                    f"{name} must be left out under scheduling_policy {self._policy!r}, which does not look at it; "
                    f"policies that do: {names}, or a module:Class that says so"
                )

    def _max_tokens(self, limit: int | None, num_prompt_tokens: int, virtual: int) -> int | None:
        """``max_tokens`` if the context has room for it after the prompt; one that no caller named is cut to that."""
        room = self.max_model_len - virtual - num_prompt_tokens
        if isinstance(limit, DefaultMaxTokens):
            return min(int(limit), room)
        if limit is not None and limit > room:
            raise InvalidRequestError(
                f"max_tokens ({limit}) does not fit: the prompt has {_counted(num_prompt_tokens, virtual)}, and "
                f"prompt and output together may have at most {self.max_model_len}; {room} or None would fit"
            )
        return limit

    def _check_params(self, params: SamplingParams) -> None:
        if params.detokenize:
            self.tokenizer.check_can_decode(bool(params.stop))
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self._max_logprobs:
                raise InvalidRequestError(
                    f"{name} must be in [0, {self._max_logprobs}], not {getattr(params, name)}: the engine's option "
                    "max_logprobs is its limit"
                )
        if len(params.logprob_token_ids or ()) > self._max_logprobs:
            message = f"logprob_token_ids must hold at most {self._max_logprobs} (max_logprobs)"
            raise InvalidRequestError(f"{message}, not {len(params.logprob_token_ids or ())}")
        self._logits_plugins.processors(params)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= self.vocab_size:
                    raise InvalidRequestError(
                        f"{name} holds token id {token}, but the vocabulary ends at {self.vocab_size - 1}"
                    )

    def _check_choices_left(self, params: SamplingParams, bad_words: list[list[int]], stops: Set[int]) -> None:
        """Refuses what excludes every token from the start; what a grammar allows is known to the workers alone."""
        excluded = {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens:
            excluded |= stops
        allowed = params.allowed_token_ids
        if len(excluded) >= self.vocab_size if allowed is None else excluded.issuperset(allowed):
            names = [name for name in excluding_fields(params) if not name.startswith("structured_outputs")]
            raise InvalidRequestError(no_token_message(names, 0))

    def _request_seed(self, params: SamplingParams) -> int:
        """The request's own seed, or one drawn from the engine's seed and the number of such requests before."""
        if params.seed is not None:
            return params.seed & _MASK64
        self._unseeded += 1
        return ((self._seed << 32) ^ (self._unseeded * _SPREAD)) & _MASK64


def _counted(tokens: int, virtual: int) -> str:
    return f"{tokens} tokens and the adapter {virtual} virtual ones" if virtual else f"{tokens} tokens"
