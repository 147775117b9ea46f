"""Sampling parameters of a request: one validated, serialisable record."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from octavo.core.errors import InvalidRequestError, did_you_mean

# Structured output: what a request asks for, and the grammar that the workers hold its tokens to.

#: The fields of ``StructuredOutputsParams`` that say a form.
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
#: How messages of workers begin that are about the form which a request asks for: it exceeds the limits of the parser
#: with the model's vocabulary, or in the course of an output.
UNUSABLE = "the grammar cannot be used: "
TOO_COSTLY = "the grammar became too costly: "


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form that an output must have: exactly one of the first six fields. Names are those of vLLM.

    >>> StructuredOutputsParams(choice=["yes", "no"])

    Raises:
        InvalidRequestError: no form is given or several are, or a value is of the wrong type.
    """

    #: A JSON schema: a mapping, JSON text, or a class of pydantic. True: any JSON value.
    json: str | dict[str, Any] | bool | None = None
    #: True: any JSON object.
    json_object: bool | None = None
    #: A regular expression (of Rust's crate ``regex``, without look-around) that the whole output matches.
    regex: str | None = None
    #: The output is one of these texts.
    choice: list[str] | None = None
    #: A grammar in Lark's notation, as llguidance has it, or in llama.cpp's GBNF.
    grammar: str | None = None
    #: Free text in which certain tags begin a part of a certain schema: ``{"structures": [{"begin", "schema", "end"}],
    #: "triggers": [..]}``, or its JSON text.
    structural_tag: str | dict[str, Any] | None = None
    #: JSON without spaces and line breaks between its tokens. None: as the engine's ``structured_outputs_config`` says.
    disable_any_whitespace: bool | None = None
    #: A regular expression of what may stand between the tokens of JSON. None: a space, or a line break and an
    #: indentation of at most the schema's depth.
    whitespace_pattern: str | None = None
    #: Objects whose schema names properties and does not speak of further ones have none. None: as the engine's option.
    disable_additional_properties: bool | None = None
    #: Refuse a JSON schema with keywords that outputs cannot be held to, which are left out otherwise.
    strict: bool | None = None
    #: Of other engines, which may check by several libraries.
    disable_fallback: bool | None = None
    #: The form begins after the first occurrence of these tokens, such as the end of a model's reasoning.
    begin_after: list[int] = []

    def __post_init__(self) -> None:
        make_schema = getattr(self.json, "model_json_schema", None)
        if make_schema is not None:
            self.json = make_schema()
        self.validate()

    @property
    def form(self) -> str:
        """The name of the field that says the form."""
        return self._forms()[0]

    def validate(self) -> None:
        """Checks the types of the fields, and that they say one form.

        Raises:
            InvalidRequestError: naming the field, its value and what would be right.
        """
        forms = self._forms()
        if len(forms) != 1:
            what = " and ".join(forms) if forms else "none of them"
            raise InvalidRequestError(f"structured_outputs must have exactly one of {', '.join(FORMS)}, not {what}")
        _check("json", self.json, (str, dict, bool), "a JSON schema as a mapping or as text, or True")
        _check("json_object", self.json_object, bool, "True")
        _check("structural_tag", self.structural_tag, (str, dict), "a mapping or JSON text")
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check(name, getattr(self, name), str, "text")
        if self.choice is not None and not _choice_texts(self.choice):
            raise InvalidRequestError("structured_outputs.choice must be a list of texts, with at least one")
        for name in ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "strict"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidRequestError(f"structured_outputs.{name} must be True or False")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequestError(
                "structured_outputs.whitespace_pattern and disable_any_whitespace exclude each other"
            )

    def _forms(self) -> list[str]:
        return [name for name in FORMS if getattr(self, name) not in (None, False)]


def structured_outputs_of(value: StructuredOutputsParams | Mapping[str, Any]) -> StructuredOutputsParams:
    """The parameters, also of a mapping with their fields.

    Raises:
        InvalidRequestError: a field is unknown or wrong.
    """
    if isinstance(value, StructuredOutputsParams):
        value.validate()  # a field may have been assigned since
        return value
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"structured_outputs must be StructuredOutputsParams or a mapping with its fields, not {value!r}"
        )
    fields = [name for name in StructuredOutputsParams.__struct_fields__ if name != "begin_after"]  # is not of users
    for name in value:
        if name not in fields:
            hint = did_you_mean(str(name), fields, written=str)
            raise InvalidRequestError(f"structured_outputs has the unknown field {name!r:.100}; {hint}")
    return StructuredOutputsParams(**value)


def _check(name: str, value: object, kinds: type | tuple[type, ...], right: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise InvalidRequestError(f"structured_outputs.{name} must be {right}, not {value!r:.200}")


def _choice_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A checked grammar, as an engine core takes it."""

    #: Digest of the other fields.
    key: str
    #: In llguidance's own notation (Lark, or JSON).
    source: str
    #: The output is free up to the first occurrence of these tokens, which end a model's reasoning; empty: it is bound
    #: from its first token on.
    begin_after: list[int] = []


#: ``f(output_token_ids, logits)`` or ``f(prompt_token_ids, output_token_ids, logits)``; logits is float32
#: [vocab_size] of this request's next token: a tensor where torch is imported in the process, as it is by a module that
#: imports it, and else an array of numpy. The return value, of either kind, replaces it. One that takes two arguments
#: is called with two.
LogitsProcessor = Callable[..., Any]

#: Fields of other engines that have one value here, and why no other.
FOREIGN_FIELDS = {
    "guided_decoding": "its name is structured_outputs, and takes StructuredOutputsParams",
    "spaces_between_special_tokens": "texts are those of the tokenizer's decoder",
    "flat_logprobs": "logprobs are one dictionary a position",
}


class RequestOutputKind(enum.Enum):
    """What each output of a request that is read while it grows holds."""

    #: All of the output so far; the default of ``AsyncLLM.generate`` and ``LLMEngine.step``.
    CUMULATIVE = 0
    #: What is new since the output before; the default of ``AsyncLLM.submit``.
    DELTA = 1
    #: All of it, once it has ended; as ``LLM`` gives it.
    FINAL_ONLY = 2


class DefaultMaxTokens(int):
    """A ``max_tokens`` that no caller has named: cut to what the context leaves, where a named one is refused."""


DEFAULT_MAX_TOKENS = DefaultMaxTokens(16)

MAX_STOPS = 64
MAX_CANDIDATES = 256
#: A lower temperature is greedy.
MIN_TEMPERATURE = 1e-5
#: How a worker's message begins where every token of the vocabulary is masked.
NO_TOKEN_LEFT = "no token is left to choose"
#: Fields that a model may have defaults of (``default_sampling``).
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, dict=True):
    """Sampling parameters of one request; with the names of other engines and of the OpenAI API.

    >>> SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64)

    Order of application to the logits: custom processors, allowed tokens, bad words, minimum tokens, logit bias,
    penalties (repetition, then frequency and presence), temperature, min-p, top-k, top-p, choice. Logprobs are those of
    the model's own distribution, before any of these. Where tokens tie at a top-k or top-p threshold, the lower token
    ids stay.

    Raises:
        InvalidRequestError: a value is out of range or of the wrong type.
    """

    #: Number of completions of the prompt.
    n: int = 1
    #: Completions sampled; the ``n`` with the highest cumulative logprob are returned, best first. None: ``n``.
    best_of: int | None = None
    #: Subtracted from the logit of every token already generated (once each).
    presence_penalty: float = 0.0
    #: Subtracted for each time a token was generated.
    frequency_penalty: float = 0.0
    #: Logits of tokens in prompt or output are divided (positive) or multiplied (negative) by it. 1 is off.
    repetition_penalty: float = 1.0
    #: 0 (or below 1e-5) is greedy.
    temperature: float = 1.0
    #: Smallest set of most likely tokens whose probability reaches this. 1 is off.
    top_p: float = 1.0
    #: Number of most likely tokens kept. 0 or -1 is off.
    top_k: int = 0
    #: Tokens less likely than this share of the most likely one's probability are dropped. 0 is off.
    min_p: float = 0.0
    #: Fixes the random numbers of this request; completion ``i`` of ``n`` uses ``seed + i``.
    seed: int | None = None
    #: Texts that end the generation.
    stop: str | list[str] | None = None
    #: Token ids that end the generation.
    stop_token_ids: list[int] | None = None
    #: Words (texts) that are never generated.
    bad_words: list[str] | None = None
    #: Keep the stop string (or stop token's text) in the output.
    include_stop_str_in_output: bool = False
    #: Continue after the end-of-sequence token.
    ignore_eos: bool = False
    #: Most tokens to generate; refused if prompt and ``max_tokens`` are longer than the context. The default, if it was
    #: not given, is cut there instead. None: as many as the context length allows. 0: the prompt is computed, for its
    #: logprobs.
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    #: No end-of-sequence (also with ``ignore_eos``) and no stop token before this many generated tokens.
    min_tokens: int = 0
    #: Number of most likely tokens whose logprobs are returned at each position beside the chosen one's; at most the
    #: engine's ``max_logprobs``. -1: the whole vocabulary.
    logprobs: int | None = None
    #: Token ids whose logprobs are returned at each position, in place of the most likely ones'; at most the engine's
    #: ``max_logprobs``.
    logprob_token_ids: list[int] | None = None
    #: Number of most likely tokens whose logprobs are returned at each position of the prompt.
    prompt_logprobs: int | None = None
    #: False returns token ids only and skips detokenizing (stop strings cannot be used then).
    detokenize: bool = True
    skip_special_tokens: bool = True
    #: Added to the logits of these token ids, each within [-100, 100].
    logit_bias: dict[int, float] | None = None
    #: Only these token ids may be generated.
    allowed_token_ids: list[int] | None = None
    #: Called on this request's logits before all else; runs in the engine's process only.
    logits_processors: list[LogitsProcessor] | None = None
    #: Arguments of the logits processors that the engine was started with (option ``logits_processors``), by name.
    extra_args: dict[str, Any] | None = None
    #: Most tokens of reasoning, of models that mark it: then the mark that ends it is the only token allowed. 0: none;
    #: -1 or None: no limit.
    thinking_token_budget: int | None = None
    #: Keep only this many last tokens of the prompt. -1: as many as leave room for ``max_tokens`` in the context.
    truncate_prompt_tokens: int | None = None
    #: The form that the output must have; a mapping with its fields becomes one.
    structured_outputs: StructuredOutputsParams | None = None
    #: None: the default of the method that gives the outputs.
    output_kind: RequestOutputKind | None = None
    # Fields of other engines that have this one value here, see ``FOREIGN_FIELDS``:
    guided_decoding: None = None
    spaces_between_special_tokens: bool = True
    flat_logprobs: bool = False

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Checks every field; also called when a request arrives, as fields may have been assigned since.

        Raises:
            InvalidRequestError: naming the field, its value and what would be right.
        """
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self._check_numbers()
        self._check_lists()
        if self.structured_outputs is not None:
            self.structured_outputs = structured_outputs_of(self.structured_outputs)
        if self.output_kind is not None and not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequestError(f"output_kind must be a RequestOutputKind, not {self.output_kind!r}")
        for name, reason in FOREIGN_FIELDS.items():
            default, value = _FOREIGN_DEFAULTS[name], getattr(self, name)
            if value is not default:
                raise InvalidRequestError(f"{name} must be {default}, not {value!r}: {reason}")

    def clone(self) -> SamplingParams:
        """A copy whose lists and dictionaries are its own; logits processors are shared."""
        return copy.deepcopy(self, {id(f): f for f in self.logits_processors or ()})

    def _check_numbers(self) -> None:
        check_integer("n", self.n, 1, MAX_CANDIDATES)
        if self.best_of is not None:
            check_integer("best_of", self.best_of, self.n, MAX_CANDIDATES)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True)
        check_number("temperature", self.temperature, 0.0, math.inf)
        check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        check_integer("top_k", self.top_k, -1, None)
        check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 0, None)
        check_integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not be greater than max_tokens ({self.max_tokens})"
            )
        if self.thinking_token_budget is not None:
            check_integer("thinking_token_budget", self.thinking_token_budget, -1, None)
        if self.truncate_prompt_tokens is not None:
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, None)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequestError("truncate_prompt_tokens must be at least 1, or -1, not 0")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                check_integer(name, value, -1, None)  # at most max_logprobs, an option of the engine
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, not {getattr(self, name)!r}")

    def _check_lists(self) -> None:
        _texts("stop", self.stop)
        _texts("bad_words", self.bad_words)
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True")
        _token_ids("stop_token_ids", self.stop_token_ids)
        _token_ids("allowed_token_ids", self.allowed_token_ids)
        _token_ids("logprob_token_ids", self.logprob_token_ids)
        if self.logprob_token_ids is not None:
            if self.logprobs:
                raise InvalidRequestError("logprob_token_ids names the tokens; leave logprobs None, or 0")
            self.logprobs = 0
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must not be empty; leave it None to allow every token")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise InvalidRequestError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
            # JSON has no integer keys, so a client's {"50256": -100} arrives with text keys.
            try:
                self.logit_bias = {int(k) if isinstance(k, str) else k: v for k, v in self.logit_bias.items()}
            except ValueError:
                raise InvalidRequestError(
                    f"logit_bias must map token ids to numbers, not {self.logit_bias!r}"
                ) from None
            _token_ids("logit_bias", list(self.logit_bias))
            for token, bias in self.logit_bias.items():
                check_number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.logits_processors is not None and not isinstance(self.logits_processors, (list, tuple)):
            raise InvalidRequestError(f"logits_processors must be a list of callables, not {self.logits_processors!r}")
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise InvalidRequestError(f"extra_args must map names to values, not {self.extra_args!r}")
        for f in self.logits_processors or ():
            if not callable(f):
                raise InvalidRequestError(f"logits_processors must be callables, not {f!r}")

    @property
    def num_sequences(self) -> int:
        """Sequences that run for these parameters: ``best_of``, or ``n``."""
        return self.n if self.best_of is None else self.best_of

    @property
    def runs_custom_code(self) -> bool:
        """Whether logits processors that are not Octavo's own change its logits."""
        return bool(self.logits_processors or self.extra_args)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < MIN_TEMPERATURE


def defaults_beside(given: Collection[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The model's ``defaults`` of parameters that a request leaves out; ``given`` names those that it has.

    A model's min_p is meant for the model's temperature: beside another one it would undo what the request asks for.
    """
    apart = {*given, "min_p"} if "temperature" in given else {*given}
    return {name: value for name, value in defaults.items() if name not in apart}


def sampling_in_effect(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What a request without parameters is sampled with: the model's ``defaults``, else those of ``SamplingParams``.

    ``max_tokens`` is among them only if the model has one: without it each surface has a limit of its own.
    """
    params = SamplingParams(**defaults)
    values = {name: getattr(params, name) for name in MODEL_DEFAULTS if name != "max_tokens"}
    return values | {name: int(value) for name, value in defaults.items() if name == "max_tokens"}


def describe_sampling(values: Mapping[str, Any]) -> str:
    """Parameters as text, such as ``temperature 0.2, top_p 0.9``."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


_FOREIGN_DEFAULTS = {
    field.name: field.default for field in msgspec.structs.fields(SamplingParams) if field.name in FOREIGN_FIELDS
}


def excluding_fields(params: SamplingParams) -> list[str]:
    """The fields of a request that may exclude tokens, with the form's own name, such as ``structured_outputs.regex``.

    ``logit_bias`` is not among them: it is finite, so a token that has the least of it can still be chosen.
    """
    names = [name for name in ("bad_words", "allowed_token_ids", "min_tokens", "extra_args") if getattr(params, name)]
    if params.logits_processors:
        names.append("logits_processors")
    if params.structured_outputs is not None:
        names.append(f"structured_outputs.{params.structured_outputs.form}")
    return names


def no_token_message(fields: Sequence[str], num_tokens: int) -> str:
    """What a request is told whose ``excluding_fields`` leave no token after so many tokens of output."""
    what = "excludes" if len(fields) == 1 else f"and {', '.join(fields[1:])} together exclude"
    place = f"after {num_tokens} tokens of the output"
    return f"{fields[0]} {what} every token {place}: all are masked, and {NO_TOKEN_LEFT}"


def check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Refuses what is not a finite number in [low, high], or in (low, high] if ``above``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _finite(value):
        raise InvalidRequestError(f"{name} must be a finite number, not {value!r}")
    if value < low or value > high or (above and value == low):
        if high == math.inf:
            raise InvalidRequestError(f"{name} must be {'greater than' if above else 'at least'} {low:g}, not {value}")
        raise InvalidRequestError(f"{name} must be in {'(' if above else '['}{low:g}, {high:g}], not {value}")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of float
        return False


def check_integer(name: str, value: object, low: int, high: int | None) -> None:
    """Refuses what is not an integer in [low, high], or at least low if ``high`` is None."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidRequestError(f"{name} must be {limit}, not {value}")


def _texts(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, list) or not all(isinstance(t, str) and t for t in value):
        raise InvalidRequestError(f"{name} must be a list of non-empty texts, not {value!r}")
    if len(value) > MAX_STOPS:
        raise InvalidRequestError(f"{name} may hold at most {MAX_STOPS} texts, not {len(value)}")


def _token_ids(name: str, value: Sequence[int] | None) -> None:
    if value is None:
        return
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{name} must be a list of token ids, not {value!r}")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InvalidRequestError(f"{name} must hold token ids (integers from 0), not {token!r}")


# Parameters of beam search.

#: A step looks at ``beam_width`` candidates of each beam and one for each stop token; at most 100 are computed.
MAX_BEAM_WIDTH = 32


class BeamSearchParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Beam search: keep the ``beam_width`` most likely continuations at every step.

    >>> BeamSearchParams(beam_width=4, max_tokens=64)

    The search and its scores are those of ``transformers``' ``generate(num_beams=beam_width)``: a hypothesis scores its
    summed logprobs divided by ``generated_tokens ** length_penalty``.

    Raises:
        InvalidRequestError: a value is out of range or of the wrong type.
    """

    #: Hypotheses kept at every step, and returned at the end, best first.
    beam_width: int
    #: Most tokens to generate; as in ``SamplingParams``.
    max_tokens: int = DEFAULT_MAX_TOKENS
    #: Above 0 favours long hypotheses, below 0 short ones.
    length_penalty: float = 1.0
    #: True: end when ``beam_width`` hypotheses are complete. False: continue while a running one scores better now.
    #: "never": continue while a running one could still score better at any length.
    early_stopping: bool | Literal["never"] = False
    #: Continue after the end-of-sequence token.
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    #: Of other engines; 0 here, as nothing is drawn.
    temperature: float = 0.0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Checks every field.

        Raises:
            InvalidRequestError: naming the field, its value and what would be right.
        """
        check_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_integer("max_tokens", self.max_tokens, 1, None)
        check_number("length_penalty", self.length_penalty, -math.inf, math.inf)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(f"early_stopping must be True, False or 'never', not {self.early_stopping!r}")
        check_number("temperature", self.temperature, 0.0, math.inf)
        if self.temperature:
            raise InvalidRequestError(
                f"temperature must be 0 with beam search, not {self.temperature!r}: it takes the likeliest tokens"
            )
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, not {getattr(self, name)!r}")


# What a speech model's answer may look like: times between texts (Radford et al. 2022, section 2.3 and 4.5).


class TimestampRules(msgspec.Struct, frozen=True, array_like=True):
    """Token ids and bounds of one model, for one request.

    Tokens from ``first_time`` on are times, in order. Those between ``end`` and ``first_time`` are neither text nor
    time. Logprobs of a request with rules are those of what the rules leave.
    """

    #: The token that ends the answer; ids below are text.
    end: int
    #: The token of time 0.
    first_time: int
    #: Never chosen; and not chosen as the first token.
    suppress: list[int] = []
    suppress_first: list[int] = []
    #: Whether the answer has times: it begins with one, they come in pairs around texts, and never decrease. If not,
    #: it has none.
    has_times: bool = True
    #: Most steps of time that the first one is after 0.
    latest_first: int = 50
