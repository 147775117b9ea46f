"""The option ``speculative_config``: which drafter proposes tokens, and how many."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from octavo.core.option_part import OptionPart, make_part, read_mapping
from octavo.core.option_parts import Quantization

#: Methods whose drafts the workers propose, with a network of their own that ``model`` names.
MODEL_METHODS = ("draft_model", "eagle", "eagle3")
#: Methods of vLLM that are not supported.
_FOREIGN_METHODS = ("medusa", "mlp_speculator", "mtp")
_OWN_METHODS = ("ngram", "suffix", *MODEL_METHODS, "prediction")
#: Self-speculation, see docs/speculation.md.
_LAYER_SKIP = "the first layers of a model that is not trained for it seldom say what the whole model says"


class SpeculativeConfig(OptionPart):
    """How drafts are made. Names of fields are those of vLLM, where it has them."""

    model_config = ConfigDict(strict=True)

    #: ``ngram``: what followed the same tokens earlier in the sequence. ``suffix``: also what followed them in recent
    #: outputs of other requests. ``draft_model``: what a smaller model with the same vocabulary says. ``eagle`` and
    #: ``eagle3``: what a head says that was trained on the model's hidden states. ``prediction``: what a request says
    #: that its answer is likely to be; alone, as other methods draft from that, too.
    method: Literal["ngram", "suffix", "prediction", "draft_model", "eagle", "eagle3"]
    #: Most draft tokens of a sequence in a step; with the token before them, 7 make a tile of the CPU kernels.
    num_speculative_tokens: int = Field(7, ge=1, le=64)
    #: Fewest and most tokens that must have occurred before.
    prompt_lookup_min: int = Field(2, ge=1, le=32)
    prompt_lookup_max: int = Field(4, ge=1, le=32)
    #: Of ``suffix``: most tokens of a match, and tokens of outputs that are kept.
    suffix_decoding_max_tree_depth: int = Field(24, ge=2, le=256)
    suffix_decoding_max_cached_tokens: int = Field(1 << 18, ge=1 << 10, le=1 << 28)
    #: Of ``draft_model``, ``eagle`` and ``eagle3``: a name or folder as in the option ``model``; of ``draft_model``,
    #: also how its matrices are quantised, as in the option ``quantization``.
    model: str | None = None
    quantization: Quantization | None = None
    revision: str | None = None
    #: Whether the number of draft tokens follows what is accepted and what a step costs.
    adaptive: bool = True

    @property
    def drafts_on_workers(self) -> bool:
        """Whether the workers propose the drafts, with a network of their own."""
        return self.method in MODEL_METHODS

    @model_validator(mode="before")
    @classmethod
    def _bounds_meet(cls, fields: Any) -> Any:
        """A bound that is given alone moves a default of the other that contradicts it."""
        if not isinstance(fields, dict):
            return fields
        low, high = fields.get("prompt_lookup_min"), fields.get("prompt_lookup_max")
        if isinstance(low, int) and high is None:
            return {**fields, "prompt_lookup_max": max(low, 4)}
        if isinstance(high, int) and low is None:
            return {**fields, "prompt_lookup_min": min(high, 2)}
        return fields

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
    fields = read_mapping(value, _EXAMPLE)
    return make_part(SpeculativeConfig, _checked(fields)) if isinstance(fields, dict) else fields


_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 7}'


def _checked(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields by name, with the method in ``method``; refuses methods that do not exist here."""
    model = fields.get("model")
    if "method" not in fields and isinstance(model, str):  # as in vLLM
        named = model.strip("[]")
        fields["method"] = named if named in _OWN_METHODS + _FOREIGN_METHODS else "draft_model"
    method = fields.get("method")
    if method is None:
        raise ValueError(f"method is missing: name one of {', '.join(_OWN_METHODS)}, as in {_EXAMPLE}")
    if method not in _OWN_METHODS:
        reason = f": {_LAYER_SKIP}" if method == "layer_skip" else ""
        raise ValueError(f"method {method!r} is not supported{reason}; the methods are {', '.join(_OWN_METHODS)}")
    if isinstance(model, str) and model.strip("[]") == method:
        model = fields.pop("model")
    _check_model(method, fields)
    return fields


def _check_model(method: str, fields: dict[str, Any]) -> None:
    """Refuses a method that needs a model without one, and what is said of a model where none is taken."""
    if method in MODEL_METHODS:
        if not fields.get("model"):
            raise ValueError(f"method {method!r} needs a model: name it in model, as the option model does")
        if method != "draft_model" and "quantization" in fields:
            raise ValueError(f"quantization: heads of method {method!r} are not quantised; leave it out")
        return
    for name in ("model", "quantization", "revision"):
        if name in fields:
            raise ValueError(f"{name} {fields[name]!r}: method {method!r} takes no model; leave it out")


class SpeculativeOptions(OptionPart):
    """Speculative decoding: tokens are guessed, and several of a sequence are computed in one step."""

    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(_parse)] = Field(
        None,
        description="Draft tokens to verify in each step, as a mapping (JSON on the command line): method (ngram: what "
        "followed the same tokens earlier in the request; suffix: also in recent outputs of other requests; "
        "draft_model: what a smaller model of the same vocabulary says; eagle, eagle3: what a head trained for the "
        "model says; prediction: what requests predict alone, from which every method drafts), model (of draft_model, "
        "eagle and eagle3: as the option model; alone it means draft_model), quantization (of a draft_model) and "
        "revision (as the options of these names), "
        "num_speculative_tokens (most of a sequence in a step, 7), prompt_lookup_min and prompt_lookup_max (tokens to "
        "match, 2 and 4), suffix_decoding_max_tree_depth (24), suffix_decoding_max_cached_tokens (262144, of 24 "
        "bytes each), adaptive (whether the number follows what is accepted and what it costs, true). Answers do not "
        "change. Default: what requests predict.",
    )
