"""Sampling parameters of a request, with beam search and structured outputs: validated and serialisable."""

from __future__ import annotations

import copy
import enum
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from octavo.core.errors import InvalidRequestError, did_you_mean

# Structured outputs.

#: The fields of ``StructuredOutputsParams`` of which exactly one is set.
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
#: Prefixes of workers' messages: the grammar exceeds the parser's limits with the model's vocabulary, or in an output.
UNUSABLE = "the grammar cannot be used: "
TOO_COSTLY = "the grammar became too costly: "


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A constraint on an output: exactly one of the first six fields, or InvalidRequestError. Names are vLLM's.

    >>> StructuredOutputsParams(choice=["yes", "no"])
    """

    #: A JSON schema: a mapping, JSON text, or a pydantic class. True: any JSON value.
    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    #: A regex (of Rust's crate ``regex``, without look-around) that the whole output matches.
    regex: str | None = None
    choice: list[str] | None = None
    #: A grammar in llguidance's dialect of Lark, or in llama.cpp's GBNF.
    grammar: str | None = None
    #: Free text with tags that start JSON: ``{"structures": [{"begin", "schema", "end"}], "triggers": [..]}``, or JSON.
    structural_tag: str | dict[str, Any] | None = None
    #: JSON without white space between tokens. None: as in the engine's ``structured_outputs_config``.
    disable_any_whitespace: bool | None = None
    #: A regex of the white space between tokens of JSON. None: a space, or a line break and an indentation.
    whitespace_pattern: str | None = None
    #: Close objects whose schema names properties and is silent about others. None: as in the engine's option.
    disable_additional_properties: bool | None = None
    #: Refuse JSON schemas with keywords that cannot be enforced, which are left out otherwise.
    strict: bool | None = None
    disable_fallback: bool | None = None
    #: The constraint begins after the first occurrence of these tokens, such as the end of reasoning.
    begin_after: list[int] = []

    def __post_init__(self) -> None:
        if (make_schema := getattr(self.json, "model_json_schema", None)) is not None:
            self.json = make_schema()
        self.validate()

    @property
    def form(self) -> str:
        """The name of the constraint's field."""
        return self._forms()[0]

    def validate(self) -> None:
        """Raises InvalidRequestError with the invalid field and its value, or if not exactly one constraint is set."""
        forms = self._forms()
        if len(forms) != 1:
            what = " and ".join(forms) if forms else "none of them"
            raise InvalidRequestError(f"structured_outputs must have exactly one of {', '.join(FORMS)}, not {what}")
        _check("json", self.json, (str, dict, bool), "a JSON schema as a mapping or as text, or True")
        _check("json_object", self.json_object, bool, "True")
        _check("structural_tag", self.structural_tag, (str, dict), "a mapping or JSON text")
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check(name, getattr(self, name), str, "text")
        choice = self.choice
        if choice is not None and not (isinstance(choice, list) and choice and all(isinstance(c, str) for c in choice)):
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
    """The parameters, also from a mapping; raises InvalidRequestError for unknown and invalid fields."""
    if isinstance(value, StructuredOutputsParams):
        value.validate()  # a field may have been assigned since
        return value
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"structured_outputs must be StructuredOutputsParams or a mapping with its fields, not {value!r}"
        )
    fields = [name for name in StructuredOutputsParams.__struct_fields__ if name != "begin_after"]  # not for users
    for name in value:
        if name not in fields:
            hint = did_you_mean(str(name), fields, written=str)
            raise InvalidRequestError(f"structured_outputs has the unknown field {name!r:.100}; {hint}")
    return StructuredOutputsParams(**value)


def _check(name: str, value: object, kinds: type | tuple[type, ...], right: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise InvalidRequestError(f"structured_outputs.{name} must be {right}, not {value!r:.200}")


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A checked grammar for the engine core."""

    #: Digest of the other fields.
    key: str
    #: In llguidance's notation (Lark, or JSON).
    source: str
    begin_after: list[int] = []


# Sampling.

#: ``f(output_token_ids, logits)`` or ``f(prompt_token_ids, output_token_ids, logits)``, called by its number of
#: arguments. ``logits``: float32 [vocab_size] of the next token, a tensor if torch is imported in the process, else a
#: numpy array. The return value, of either kind, replaces it.
LogitsProcessor = Callable[..., Any]

#: Fields of vLLM with one value here, and why no other is accepted.
FOREIGN_FIELDS = {
    "guided_decoding": "its name is structured_outputs, and takes StructuredOutputsParams",
    "spaces_between_special_tokens": "texts are those of the tokenizer's decoder",
    "flat_logprobs": "logprobs are one dictionary a position",
}


class RequestOutputKind(enum.Enum):
    """What the outputs of a growing request hold."""

    #: Everything so far; default of ``AsyncLLM.generate`` and ``LLMEngine.step``.
    CUMULATIVE = 0
    #: What is new since the output before; default of ``AsyncLLM.submit``.
    DELTA = 1
    #: Everything at the end; as in ``LLM``.
    FINAL_ONLY = 2


class DefaultMaxTokens(int):
    """A default ``max_tokens``: cut to the context, where an explicit one is refused."""


DEFAULT_MAX_TOKENS = DefaultMaxTokens(16)

MAX_STOPS = 64
MAX_CANDIDATES = 256
#: Lower temperatures are greedy.
MIN_TEMPERATURE = 1e-5
#: Prefix of a worker's message if every token is masked.
NO_TOKEN_LEFT = "no token is left to choose"
#: Fields with defaults of models (``default_sampling``).
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, dict=True):
    """Sampling parameters of one request; names are vLLM's and those of the OpenAI API.

    >>> SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64)

    Order of application to the logits: custom processors, allowed tokens, bad words, minimum tokens, logit bias,
    penalties (repetition, then frequency and presence), temperature, min-p, top-k, top-p, sampling. Logprobs are those
    of the model's own distribution, before all of these. Of tokens tied at a top-k or top-p threshold, the lower ids
    stay. Raises InvalidRequestError if a value is out of range, or has the wrong type.
    """

    n: int = 1
    #: Completions to sample; the ``n`` with the highest cumulative logprob are returned, best first. None: ``n``.
    best_of: int | None = None
    #: Subtracted once from the logit of every generated token.
    presence_penalty: float = 0.0
    #: Subtracted for each occurrence of a generated token.
    frequency_penalty: float = 0.0
    #: Divides positive logits, and multiplies negative ones, of tokens in prompt or output. 1: off.
    repetition_penalty: float = 1.0
    #: Below 1e-5: greedy.
    temperature: float = 1.0
    #: Sample from the smallest set of top tokens with this probability. 1: off.
    top_p: float = 1.0
    #: Sample from this many top tokens. 0 or -1: off.
    top_k: int = 0
    #: Drop tokens below this share of the top token's probability. 0: off.
    min_p: float = 0.0
    #: Seed of the random numbers; completion ``i`` uses ``seed + i``.
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    #: Keep the stop string (or stop token's text) in the output.
    include_stop_str_in_output: bool = False
    #: Continue after EOS tokens.
    ignore_eos: bool = False
    #: Maximum tokens to generate; refused if they do not fit the context after the prompt, except for the default,
    #: which is cut. None: as many as fit. 0: only compute the prompt, for its logprobs.
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    #: No EOS token (even with ``ignore_eos``) and no stop token before this many tokens.
    min_tokens: int = 0
    #: Top logprobs at each position beside the chosen token's, up to the engine's ``max_logprobs``. -1: all tokens'.
    logprobs: int | None = None
    #: Token ids whose logprobs are returned instead of the top ones', up to the engine's ``max_logprobs``.
    logprob_token_ids: list[int] | None = None
    #: Number of top logprobs at each position of the prompt.
    prompt_logprobs: int | None = None
    #: False: return token ids only, without stop strings.
    detokenize: bool = True
    skip_special_tokens: bool = True
    #: Added to the logits of these token ids, each within [-100, 100].
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    #: Applied to the logits first; only in the engine's process.
    logits_processors: list[LogitsProcessor] | None = None
    #: Arguments of the engine's logits processors (option ``logits_processors``), by name.
    extra_args: dict[str, Any] | None = None
    #: Maximum tokens of reasoning, after which its end mark is forced. 0: none; -1 or None: no limit.
    thinking_token_budget: int | None = None
    #: Keep only the last tokens of the prompt. -1: as many as leave room for ``max_tokens``.
    truncate_prompt_tokens: int | None = None
    #: Also a mapping of its fields.
    structured_outputs: StructuredOutputsParams | None = None
    #: None: the default of the method.
    output_kind: RequestOutputKind | None = None
    # Fields of vLLM with one value here, see ``FOREIGN_FIELDS``:
    guided_decoding: None = None
    spaces_between_special_tokens: bool = True
    flat_logprobs: bool = False

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Checks every field, also once more when a request arrives; raises InvalidRequestError."""
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
        """A deep copy that shares logits processors."""
        return copy.deepcopy(self, {id(f): f for f in self.logits_processors or ()})

    def _check_numbers(self) -> None:
        check_integer("n", self.n, 1, MAX_CANDIDATES)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True)
        check_number("temperature", self.temperature, 0.0, math.inf)
        check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        check_integer("top_k", self.top_k, -1, None)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_integer("min_tokens", self.min_tokens, 0, None)
        optional = (
            ("best_of", self.n, MAX_CANDIDATES), ("seed", -(2**63), 2**64 - 1), ("max_tokens", 0, None),
            ("thinking_token_budget", -1, None), ("truncate_prompt_tokens", -1, None),
            ("logprobs", -1, None), ("prompt_logprobs", -1, None),  # at most max_logprobs, an option of the engine
        )  # fmt: skip
        for name, low, high in optional:
            if (value := getattr(self, name)) is not None:
                check_integer(name, value, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not be greater than max_tokens ({self.max_tokens})"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens must be at least 1, or -1, not 0")
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
            # Keys of JSON objects are texts: {"50256": -100}.
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
        """``best_of``, or ``n``."""
        return self.n if self.best_of is None else self.best_of

    @property
    def runs_custom_code(self) -> bool:
        """Whether custom logits processors change the logits."""
        return bool(self.logits_processors or self.extra_args)

    @property
    def greedy(self) -> bool:
        """Whether the top token is always chosen."""
        return self.temperature < MIN_TEMPERATURE


def defaults_beside(given: Collection[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The model's ``defaults`` for parameters that a request leaves out; ``given``: names of those that it has."""
    # A model's min_p suits its own temperature only, and would undo another one.
    left_out = {*given, "min_p"} if "temperature" in given else {*given}
    return {name: value for name, value in defaults.items() if name not in left_out}


def sampling_in_effect(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters of a request without any: the model's ``defaults``, else those of ``SamplingParams``."""
    params = SamplingParams(**defaults)
    # ``max_tokens`` is only the model's: the front ends have different defaults.
    values = {name: getattr(params, name) for name in MODEL_DEFAULTS if name != "max_tokens"}
    return values | {name: int(value) for name, value in defaults.items() if name == "max_tokens"}


def describe_sampling(values: Mapping[str, Any]) -> str:
    """Text such as ``temperature 0.2, top_p 0.9``."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


_FOREIGN_DEFAULTS = {
    field.name: field.default for field in msgspec.structs.fields(SamplingParams) if field.name in FOREIGN_FIELDS
}


def excluding_fields(params: SamplingParams) -> list[str]:
    """Fields of a request that exclude tokens, such as ``structured_outputs.regex``; ``logit_bias`` excludes none."""
    names = [name for name in ("bad_words", "allowed_token_ids", "min_tokens", "extra_args") if getattr(params, name)]
    if params.logits_processors:
        names.append("logits_processors")
    if params.structured_outputs is not None:
        names.append(f"structured_outputs.{params.structured_outputs.form}")
    return names


def no_token_message(fields: Sequence[str], num_tokens: int) -> str:
    """The error of a request whose ``excluding_fields`` leave no token after ``num_tokens`` tokens of output."""
    verb = "excludes" if len(fields) == 1 else f"and {', '.join(fields[1:])} together exclude"
    place = f"after {num_tokens} tokens of the output"
    return f"{fields[0]} {verb} every token {place}: all are masked, and {NO_TOKEN_LEFT}"


def check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Raises InvalidRequestError for anything but a finite number in [low, high], or in (low, high] if ``above``."""
    # NaN is not within the range of float, nor is every integer.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise InvalidRequestError(f"{name} must be a finite number, not {value!r}")
    if value < low or value > high or (above and value == low):
        if high == math.inf:
            raise InvalidRequestError(f"{name} must be {'greater than' if above else 'at least'} {low:g}, not {value}")
        raise InvalidRequestError(f"{name} must be in {'(' if above else '['}{low:g}, {high:g}], not {value}")


def check_integer(name: str, value: object, low: int, high: int | None) -> None:
    """Raises InvalidRequestError for anything but an integer in [low, high], or from low on if ``high`` is None."""
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


# Beam search.

#: A step needs ``beam_width`` candidates of each beam, and one for each stop token; at most 100 are computed.
MAX_BEAM_WIDTH = 32


class BeamSearchParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Beam search: keep the ``beam_width`` most likely continuations at every step.

    >>> BeamSearchParams(beam_width=4, max_tokens=64)

    As ``transformers``' ``generate(num_beams=beam_width)``: the score of a hypothesis is its summed logprobs divided by
    ``generated_tokens ** length_penalty``. Raises InvalidRequestError for a wrong type or range.
    """

    #: Number of hypotheses, returned best first.
    beam_width: int
    #: As in ``SamplingParams``.
    max_tokens: int = DEFAULT_MAX_TOKENS
    #: Above 0 favours long hypotheses, below 0 short ones.
    length_penalty: float = 1.0
    #: True: end with ``beam_width`` complete hypotheses. False: continue while a running one scores better now.
    #: "never": continue while a running one could score better at any length.
    early_stopping: bool | Literal["never"] = False
    #: Continue after EOS tokens.
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    #: Of vLLM; 0 here.
    temperature: float = 0.0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises InvalidRequestError with the invalid field and its value."""
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


# Transcription.


class TimestampRules(msgspec.Struct, frozen=True, array_like=True):
    """Constraints on a speech model's answer: texts between timestamps (Radford et al. 2022, sections 2.3 and 4.5).

    Tokens from ``first_time`` on are timestamps, in order; those between ``end`` and ``first_time`` are neither text
    nor timestamps. Logprobs are computed after these constraints.
    """

    #: The token that ends the answer; ids below are text.
    end: int
    #: The timestamp 0.
    first_time: int
    #: Never chosen; not chosen as the first token.
    suppress: list[int] = []
    suppress_first: list[int] = []
    #: Whether the answer has timestamps: the first token is one, they come in pairs around texts, and never decrease.
    has_times: bool = True
    #: Maximum of the first timestamp, in time steps.
    latest_first: int = 50
