"""Sampling parameters of a request, with beam search and structured outputs: validated and serialisable."""

from __future__ import annotations

import copy
import enum
import functools
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from octavo.core.errors import InvalidRequestError, did_you_mean
from octavo.core.failures import GRAMMAR, NO_TOKEN_LEFT, SequenceFailure
from octavo.core.foreign import FOREIGN, ForeignKeywords

# Parameters are declared once, as annotated fields of a struct. Flags, request bodies, help texts, reference pages and
# checks are made of the declarations.


#: Texts of ``stop`` and of ``bad_words``.
MAX_STOPS = 64


def parameter(description: str, low: float | None = None, high: float | None = None, *, above: bool = False) -> Any:
    """The annotation of a parameter: its description, and its range [low, high], or (low, high] if ``above``."""
    return msgspec.Meta(description=description, extra={"low": low, "high": high, "above": above})


class Parameter(NamedTuple):
    """A declared parameter."""

    name: str
    description: str
    #: Its types, without None.
    types: tuple[Any, ...]
    optional: bool
    default: Any
    low: float | None
    high: float | None
    above: bool

    def check(self, value: Any) -> None:
        """Raises InvalidRequestError for a wrong type, or a number out of range."""
        kind, name = self.types[-1], self.name
        if value is None and self.optional:
            return
        if kind is int:
            check_integer(name, value, self.low, self.high)
        elif kind is float:
            check_number(name, value, self.low, self.high, above=self.above)
        elif kind is bool and not isinstance(value, bool):
            raise InvalidRequestError("must be True or False", path=name, got=value)
        elif kind == list[str]:
            _check_texts(name, value)
        elif kind == list[int]:
            _check_token_ids(name, value)
        elif get_origin(kind) is dict and not isinstance(value, dict):
            raise InvalidRequestError("must be a mapping", path=name, got=value)


@functools.cache
def parameters(kind: type[msgspec.Struct]) -> dict[str, Parameter]:
    """The declared parameters of a struct by name, without fields that exist in Python only."""
    declared = {}
    for field in msgspec.structs.fields(kind):
        for meta in getattr(field.type, "__metadata__", ()):
            inner = field.type.__origin__
            types = get_args(inner) if get_origin(inner) in (Union, UnionType) else (inner,)
            without = tuple(each for each in types if each is not type(None))
            declared[field.name] = Parameter(
                field.name, meta.description, without, without != types, field.default, **meta.extra
            )
    return declared


def check_parameters(params: msgspec.Struct) -> None:
    """Checks every declared parameter that differs from its default; raises InvalidRequestError."""
    for name, declared in parameters(type(params)).items():
        if (value := getattr(params, name)) is not declared.default:
            declared.check(value)


def check_number(name: str, value: object, low: float | None, high: float | None, *, above: bool = False) -> None:
    """Raises InvalidRequestError for anything but a finite number in [low, high], or in (low, high] if ``above``."""
    # NaN is not within the range of float, nor is every integer.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise InvalidRequestError("must be a finite number", path=name, got=value)
    if (low is not None and (value < low or (above and value == low))) or (high is not None and value > high):
        start = "(" if above else "["
        limit = (
            f"{'greater than' if above else 'at least'} {low:g}"
            if high in (None, math.inf)
            else f"in {start}{low:g}, {high:g}]"
        )
        raise InvalidRequestError(f"must be {limit}", path=name, got=value)


def check_integer(name: str, value: object, low: float | None, high: float | None) -> None:
    """Raises InvalidRequestError for anything but an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError("must be an integer", path=name, got=value)
    if (low is not None and value < low) or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidRequestError(f"must be {limit}", path=name, got=value)


def check_truncation(limit: int | None) -> None:
    """Refuses 0 as ``truncate_prompt_tokens``."""
    if limit == 0:
        raise InvalidRequestError("must be at least 1, or -1", path="truncate_prompt_tokens", got=limit)


def _check_texts(name: str, value: object) -> None:
    if not isinstance(value, list) or not all(isinstance(t, str) and t for t in value):
        raise InvalidRequestError("must be a list of non-empty texts", path=name, got=value)
    if len(value) > MAX_STOPS:
        raise InvalidRequestError(f"may hold at most {MAX_STOPS} texts, not {len(value)}", path=name)


def _check_token_ids(name: str, value: object) -> None:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError("must be a list of token ids", path=name, got=value)
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InvalidRequestError("must hold token ids (integers from 0)", path=name, got=token)


# Structured outputs.

#: The fields of ``StructuredOutputsParams`` of which exactly one is set.
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


#: Names of these and of another field in vLLM's ``GuidedDecodingRequest``.
GUIDED_NAMES = {
    f"guided_{name}": name for name in ("json", "json_object", "regex", "choice", "grammar", "whitespace_pattern")
}


class StructuredOutputsParams(msgspec.Struct, metaclass=ForeignKeywords, kw_only=True, omit_defaults=True):
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
    #: Text before the constrained part, with special tokens, such as the header of a channel.
    begin_with: str = ""

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
            problem = f"must have exactly one of {', '.join(FORMS)}, not {what}"
            raise InvalidRequestError(problem, path="structured_outputs")
        _check("json", self.json, (str, dict, bool), "a JSON schema as a mapping or as text, or True")
        _check("json_object", self.json_object, bool, "True")
        _check("structural_tag", self.structural_tag, (str, dict), "a mapping or JSON text")
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check(name, getattr(self, name), str, "text")
        choice = self.choice
        if choice is not None and not (isinstance(choice, list) and choice and all(isinstance(c, str) for c in choice)):
            raise InvalidRequestError("must be a list of texts, with at least one", path="structured_outputs.choice")
        for name in ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "strict"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidRequestError("must be True or False", path=f"structured_outputs.{name}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequestError(
                "exclude each other",
                path="structured_outputs.whitespace_pattern",
                also=["structured_outputs.disable_any_whitespace"],
            )

    def _forms(self) -> list[str]:
        return [name for name in FORMS if getattr(self, name) not in (None, False)]


def structured_outputs_of(value: StructuredOutputsParams | Mapping[str, Any]) -> StructuredOutputsParams:
    """The parameters, also from a mapping; raises InvalidRequestError for unknown and invalid fields."""
    if isinstance(value, StructuredOutputsParams):
        value.validate()  # a field may have been assigned since
        return value
    if not isinstance(value, Mapping):
        problem = "must be StructuredOutputsParams or a mapping with its fields"
        raise InvalidRequestError(problem, path="structured_outputs", got=value)
    internal = ("begin_after", "begin_with")
    fields = [name for name in StructuredOutputsParams.__struct_fields__ if name not in internal]
    for name in value:
        if name not in fields and name not in FOREIGN["StructuredOutputsParams"]:
            hint = did_you_mean(str(name), fields, written=str)
            raise InvalidRequestError(f"has the unknown field {name!r:.100}; {hint}", path="structured_outputs")
    return StructuredOutputsParams(**value)


def guided_outputs_of(request: object) -> StructuredOutputsParams | None:
    """The constraint of vLLM's ``guided_options_request``: a mapping, or an object with ``guided_json`` and the like.

    Raises InvalidRequestError for unknown and invalid fields.
    """
    if not isinstance(request, Mapping):
        request = getattr(request, "__dict__", None) or {type(request).__name__: request}
    fields = {}
    for name, value in request.items():
        if name in GUIDED_NAMES:
            fields[GUIDED_NAMES[name]] = value
        elif name != "guided_decoding_backend":
            hint = did_you_mean(str(name), GUIDED_NAMES, written=str)
            raise InvalidRequestError(f"has the unknown field {name!r:.100}; {hint}", path="guided_options_request")
    return None if all(value is None for value in fields.values()) else StructuredOutputsParams(**fields)


def _check(name: str, value: object, kinds: type | tuple[type, ...], right: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise InvalidRequestError(f"must be {right}", path=f"structured_outputs.{name}", got=value)


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

MAX_CANDIDATES = 256
#: Lower temperatures are greedy.
MIN_TEMPERATURE = 1e-5
#: Fields with defaults of models (``default_sampling``).
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


class SamplingParams(msgspec.Struct, metaclass=ForeignKeywords, kw_only=True, omit_defaults=True, dict=True):
    """Sampling parameters of one request; names are vLLM's and those of the OpenAI API.

    >>> SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64)

    Order of application to the logits: custom processors, allowed tokens, bad words, minimum tokens, logit bias,
    penalties (repetition, then frequency and presence), temperature, min-p, top-k, top-p, sampling. Logprobs are those
    of the model's own distribution, before all of these. Of tokens tied at a top-k or top-p threshold, the lower ids
    stay. Raises InvalidRequestError if a value is out of range, or has the wrong type.
    """

    n: Annotated[int, parameter("Completions of each prompt.", 1, MAX_CANDIDATES)] = 1
    best_of: Annotated[
        int | None, parameter("Sample this many, return the n with the highest logprobs; default: n.", 1)
    ] = None
    presence_penalty: Annotated[float, parameter("Subtracted once from logits of generated tokens.", -2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[
        float, parameter("Subtracted from a token's logit each time it is generated.", -2.0, 2.0)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        parameter(
            "Divides positive logits of tokens in prompt or output, multiplies negative ones; 1: off.", 0.0, above=True
        ),
    ] = 1.0
    temperature: Annotated[float, parameter("Divides the logits; below 1e-5: greedy.", 0.0)] = 1.0
    top_p: Annotated[
        float,
        parameter("Sample from the smallest set of top tokens with this probability; 1: off.", 0.0, 1.0, above=True),
    ] = 1.0
    top_k: Annotated[int, parameter("Sample from this many top tokens; 0 or -1: off.", -1)] = 0
    min_p: Annotated[float, parameter("Drop tokens below this share of the top probability; 0: off.", 0.0, 1.0)] = 0.0
    seed: Annotated[
        int | None,
        parameter(
            "Seed of the request's random numbers; completion i uses seed + i. Default: drawn from the engine's seed.",
            -(2**63), 2**64 - 1,
        ),
    ] = None  # fmt: skip
    stop: Annotated[str | list[str] | None, parameter("Texts that end the answer, and are cut off.")] = None
    stop_token_ids: Annotated[list[int] | None, parameter("Token ids that end the answer.")] = None
    bad_words: Annotated[list[str] | None, parameter("Words that are never generated.")] = None
    include_stop_str_in_output: Annotated[bool, parameter("Keep the stop text in the answer.")] = False
    ignore_eos: Annotated[bool, parameter("Continue after an end-of-sequence token.")] = False
    max_tokens: Annotated[
        int | None,
        parameter(
            "Maximum tokens to generate; refused if they do not fit the context after the prompt, except for the "
            "default, which is cut. None: as many as fit. 0: only compute the prompt, for its logprobs.", 0,
        ),
    ] = DEFAULT_MAX_TOKENS  # fmt: skip
    min_tokens: Annotated[
        int, parameter("No end-of-sequence token, not even an ignored one, and no stop token before this many.", 0)
    ] = 0
    logprobs: Annotated[
        int | None,
        parameter(
            "Top logprobs at each position beside the chosen token's, up to the engine's max_logprobs. -1: all.", -1
        ),
    ] = None
    logprob_token_ids: Annotated[
        list[int] | None, parameter("Return logprobs of these tokens, not of the top ones.")
    ] = None
    prompt_logprobs: Annotated[int | None, parameter("Top logprobs at each position of the prompt.", -1)] = None
    detokenize: Annotated[bool, parameter("Turn token ids into text; off: no stop texts either.")] = True
    skip_special_tokens: Annotated[bool, parameter("Leave special tokens out of the text.")] = True
    logit_bias: Annotated[
        dict[int, float] | None,
        parameter('Added to the logits of these token ids, as in {"13": -5.0}; each within [-100, 100].', -100, 100),
    ] = None
    allowed_token_ids: Annotated[list[int] | None, parameter("Only these token ids are generated.")] = None
    #: Applied to the logits first; only in the engine's process.
    logits_processors: list[LogitsProcessor] | None = None
    extra_args: Annotated[
        dict[str, Any] | None,
        parameter('Arguments of the engine\'s logits processors (option logits_processors), as in {"scale": 0.5}.'),
    ] = None
    thinking_token_budget: Annotated[
        int | None,
        parameter("Maximum tokens of reasoning, after which its end mark is forced; 0: none, -1: no limit.", -1),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, parameter("Keep this many last tokens of the prompt; -1: as many as leave room for max_tokens.", -1)
    ] = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None,
        parameter('Constraint on the answer, as in {"regex": "[0-9]+"}; others are json, choice, grammar.'),
    ] = None
    #: None: the default of the method.
    output_kind: RequestOutputKind | None = None
    #: vLLM's beam search before ``BeamSearchParams``: the ``n`` best of ``best_of`` beams, see ``beam_search``.
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    #: vLLM's former name of ``structured_outputs``, which takes its value.
    guided_decoding: Any = None
    # Fields of vLLM with one value here (``octavo/core/foreign.json``):
    spaces_between_special_tokens: bool = True
    flat_logprobs: bool = False

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Checks every field, also once more when a request arrives; raises InvalidRequestError."""
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise InvalidRequestError("is a former name of structured_outputs: give one", path="guided_decoding")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        check_parameters(self)
        if self.best_of is not None:
            check_integer("best_of", self.best_of, self.n, MAX_CANDIDATES)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            problem = f"must not be greater than max_tokens ({self.max_tokens})"
            raise InvalidRequestError(problem, path="min_tokens", got=self.min_tokens)
        check_truncation(self.truncate_prompt_tokens)
        if self.stop and not self.detokenize:
            raise InvalidRequestError("needs detokenize=True", path="stop")
        if self.logprob_token_ids is not None:
            if self.logprobs:
                raise InvalidRequestError("names the tokens; leave logprobs None, or 0", path="logprob_token_ids")
            self.logprobs = 0
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("must not be empty; leave it None to allow every token", path="allowed_token_ids")
        self._check_biases()
        processors = () if self.logits_processors is None else self.logits_processors
        if not isinstance(processors, (list, tuple)) or not all(map(callable, processors)):
            raise InvalidRequestError("must be a list of callables", path="logits_processors", got=processors)
        if self.structured_outputs is not None:
            self.structured_outputs = structured_outputs_of(self.structured_outputs)
        if self.output_kind is not None and not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequestError("must be a RequestOutputKind", path="output_kind", got=self.output_kind)
        for name, meaning in FOREIGN["SamplingParams"].items():
            if (value := getattr(self, name, meaning.default)) is not meaning.default:
                raise InvalidRequestError(f"must be {meaning.default}, not {value!r}: {meaning.reason}", path=name)
        self._check_beam_search()

    def _check_beam_search(self) -> None:
        if not isinstance(self.use_beam_search, bool):
            raise InvalidRequestError("must be True or False", path="use_beam_search", got=self.use_beam_search)
        if self.use_beam_search:
            self.beam_search()
            return
        check_number("length_penalty", self.length_penalty, None, None)
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            value = getattr(self, name)
            if value is not default and (default is False or value != default):
                raise InvalidRequestError("is of beam search: it needs use_beam_search=True", path=name, got=value)

    def beam_search(self) -> BeamSearchParams:
        """The beam search of ``use_beam_search``: ``best_of`` beams, or ``n``. It draws no random numbers.

        Raises:
            InvalidRequestError: a field has no meaning in a beam search.
        """
        for name, declared in parameters(SamplingParams).items():
            if name in BEAM_SEARCH_FIELDS or name in NOT_IN_BEAM_SEARCH:
                continue
            if (value := getattr(self, name)) not in (declared.default, None, []):
                raise InvalidRequestError("must be left out with use_beam_search", path=name, got=value)
        if self.logits_processors:
            raise InvalidRequestError("must be left out with use_beam_search", path="logits_processors")
        if self.max_tokens is None:
            raise InvalidRequestError("must be a number with use_beam_search", path="max_tokens", got=None)
        fields = {name: getattr(self, name) for name in BEAM_SEARCH_FIELDS}
        return BeamSearchParams(beam_width=self.num_sequences, **fields)

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """The parameters of vLLM's constructor in which None, except for ``max_tokens``, means the default."""
        return cls(**{name: value for name, value in fields.items() if value is not None or name == "max_tokens"})

    def clone(self) -> SamplingParams:
        """A deep copy that shares logits processors."""
        return copy.deepcopy(self, {id(f): f for f in self.logits_processors or ()})

    def _check_biases(self) -> None:
        if self.logit_bias is None:
            return
        # Keys of JSON objects are texts: {"50256": -100}.
        try:
            self.logit_bias = {int(k) if isinstance(k, str) else k: v for k, v in self.logit_bias.items()}
        except ValueError:
            problem = "must map token ids to numbers"
            raise InvalidRequestError(problem, path="logit_bias", got=self.logit_bias) from None
        _check_token_ids("logit_bias", list(self.logit_bias))
        declared = parameters(SamplingParams)["logit_bias"]
        for token, bias in self.logit_bias.items():
            check_number(f"logit_bias[{token}]", bias, declared.low, declared.high)

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


def excluding_fields(params: SamplingParams) -> list[str]:
    """Fields of a request that exclude tokens, such as ``structured_outputs.regex``; ``logit_bias`` excludes none."""
    names = [name for name in ("bad_words", "allowed_token_ids", "min_tokens", "extra_args") if getattr(params, name)]
    if params.logits_processors:
        names.append("logits_processors")
    if params.structured_outputs is not None:
        names.append(f"structured_outputs.{params.structured_outputs.form}")
    return names


def no_token_error(fields: Sequence[str], num_tokens: int) -> InvalidRequestError:
    """The error of a request whose ``excluding_fields`` leave no token after ``num_tokens`` tokens of output."""
    verb = "excludes" if len(fields) == 1 else "together exclude"
    problem = f"{verb} every token after {num_tokens} tokens of the output: all are masked"
    return InvalidRequestError(problem, path=fields[0], also=fields[1:])


def failure_of_fields(failure: SequenceFailure, params: SamplingParams, num_tokens: int) -> InvalidRequestError | None:
    """The error of a request whose own fields made it fail after ``num_tokens`` tokens of output; None: others did."""
    if failure.kind == NO_TOKEN_LEFT and (fields := excluding_fields(params)):
        return no_token_error(fields, num_tokens)
    if failure.kind == GRAMMAR and (structured := params.structured_outputs) is not None:
        return InvalidRequestError(failure.text.partition("\n")[0], path=f"structured_outputs.{structured.form}")
    return None


# Beam search.

#: A step needs ``beam_width`` candidates of each beam, and one for each stop token; at most 100 are computed.
MAX_BEAM_WIDTH = 32


#: Fields of ``SamplingParams`` that a beam search has too, and those that do not affect it.
BEAM_SEARCH_FIELDS = ("max_tokens", "length_penalty", "early_stopping", "ignore_eos", "skip_special_tokens")
NOT_IN_BEAM_SEARCH = frozenset({"n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed"})


class BeamSearchParams(msgspec.Struct, metaclass=ForeignKeywords, kw_only=True, omit_defaults=True):
    """Beam search: keep the ``beam_width`` most likely continuations at every step.

    >>> BeamSearchParams(beam_width=4, max_tokens=64)

    As ``transformers``' ``generate(num_beams=beam_width)``: the score of a hypothesis is its summed logprobs divided by
    ``generated_tokens ** length_penalty``. Raises InvalidRequestError for a wrong type or range.
    """

    beam_width: Annotated[int, parameter("Hypotheses, and answers, best first.", 1, MAX_BEAM_WIDTH)]
    max_tokens: Annotated[int, parameter("Maximum tokens to generate.", 1)] = DEFAULT_MAX_TOKENS
    length_penalty: Annotated[float, parameter("Beam search: above 0 favours long answers, below 0 short ones.")] = 1.0
    #: True: end with ``beam_width`` complete hypotheses. False: continue while a running one scores better now.
    #: "never": continue while a running one could score better at any length.
    early_stopping: Annotated[
        bool | Literal["never"],
        parameter(
            "Beam search ends at beam_width complete answers (true), when no running one scores better now (false), or "
            "when none can at any length (never)."
        ),
    ] = False
    ignore_eos: Annotated[bool, parameter("Continue after an end-of-sequence token.")] = False
    skip_special_tokens: Annotated[bool, parameter("Leave special tokens out of the text.")] = True
    #: Of vLLM; 0 here.
    temperature: float = 0.0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises InvalidRequestError with the invalid field and its value."""
        check_parameters(self)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError("must be True, False or 'never'", path="early_stopping", got=self.early_stopping)
        check_number("temperature", self.temperature, 0.0, None)
        if self.temperature:
            problem = f"must be 0 with beam search, not {self.temperature!r}: it takes the likeliest tokens"
            raise InvalidRequestError(problem, path="temperature")


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
