"""The option ``speculative_config``: which drafter proposes tokens, and how many."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from octavo.core.option_part import OptionPart

#: Methods of vLLM that draft with a network of their own.
_MODEL_METHODS = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp")
_OWN_METHODS = ("ngram", "suffix", "prediction")


class SpeculativeConfig(OptionPart):
    """How drafts are made. Names of fields are those of vLLM, where it has them."""

    model_config = ConfigDict(strict=True)

    #: ``ngram``: what followed the same tokens earlier in the sequence. ``suffix``: also what followed them in recent
    #: outputs of other requests. ``prediction``: what a request says that its answer is likely to be; alone, as other
    #: methods draft from that, too.
    method: Literal["ngram", "suffix", "prediction"]
    #: Most draft tokens of a sequence in a step; with the token before them, 7 make a tile of the CPU kernels.
    num_speculative_tokens: int = Field(7, ge=1, le=64)
    #: Fewest and most tokens that must have occurred before.
    prompt_lookup_min: int = Field(2, ge=1, le=32)
    prompt_lookup_max: int = Field(4, ge=1, le=32)
    #: Of ``suffix``: most tokens of a match, and tokens of outputs that are kept.
    suffix_decoding_max_tree_depth: int = Field(24, ge=2, le=256)
    suffix_decoding_max_cached_tokens: int = Field(1 << 18, ge=1 << 10, le=1 << 28)
    #: Whether the number of draft tokens follows what is accepted and what a step costs.
    adaptive: bool = True

    @model_validator(mode="before")
    @classmethod
    def _bounds_meet(cls, given: Any) -> Any:
        """A bound that is given alone moves a default of the other that contradicts it."""
        if not isinstance(given, dict):
            return given
        low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        if isinstance(low, int) and high is None:
            return {**given, "prompt_lookup_max": max(low, 4)}
        if isinstance(high, int) and low is None:
            return {**given, "prompt_lookup_min": min(high, 2)}
        return given

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        return self


def _parse(value: Any) -> Any:
    """A configuration from a mapping, or from one as JSON or YAML text; None and configurations as they are.

    Raises:
        ValueError: it is none, with the field, its value and what would be right.
    """
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"it must be a mapping such as {_EXAMPLE}") from None
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"it must be a mapping such as {_EXAMPLE}")
    try:
        return SpeculativeConfig(**_checked(value))
    except ValidationError as e:
        raise ValueError("; ".join(_readable(dict(error)) for error in e.errors())) from None


_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 7}'


def _checked(given: dict[Any, Any]) -> dict[str, Any]:
    """The fields by name, with the method in ``method``; refuses methods and fields that do not exist here."""
    given = {str(name): value for name, value in given.items() if value is not None}
    model = given.pop("model", None)
    if model is not None and "method" not in given:
        given["method"] = model.strip("[]") if isinstance(model, str) else model
    method = given.get("method")
    if method is None:
        raise ValueError(f"method is missing: name one of {', '.join(_OWN_METHODS)}, as in {_EXAMPLE}")
    if method not in _OWN_METHODS:
        kind = "drafts with its own network, which" if method in _MODEL_METHODS else "it"
        raise ValueError(
            f"method {method!r}: {kind} is not supported; the methods are {', '.join(_OWN_METHODS)}, without a model"
        )
    if isinstance(model, str) and model.strip("[]") != method:
        raise ValueError(f"model {model!r}: method {method!r} takes no model; leave it out")
    known = list(SpeculativeConfig.model_fields)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"unknown field {name!r}; {hint}")
    return given


def _readable(error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}, not {error['input']!r}" if where else message


class SpeculativeOptions(OptionPart):
    """Speculative decoding: tokens are guessed, and several of a sequence are computed in one step."""

    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(_parse)] = Field(
        None,
        description="Draft tokens to verify in each step, as a mapping (JSON on the command line): method (ngram: what "
        "followed the same tokens earlier in the request; suffix: also in recent outputs of other requests; "
        "prediction: what requests predict alone, from which every method drafts), num_speculative_tokens (most of a "
        "sequence in a step, 7), prompt_lookup_min and prompt_lookup_max (tokens to match, 2 and 4), "
        "suffix_decoding_max_tree_depth (24), suffix_decoding_max_cached_tokens (262144, of 24 bytes each), adaptive "
        "(whether the number follows what is accepted and what it costs, true). Answers do not change. Default: what "
        "requests predict.",
    )
