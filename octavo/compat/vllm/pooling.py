"""vLLM's parameters and options of pooling, as Octavo's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.model_tasks import model_tasks
from octavo.core.pooler_config import PoolingKind
from octavo.core.pooling_outputs import Pooled, PoolingOutput
from octavo.core.pooling_params import POOLING_TASKS
from octavo.core.pooling_params import PoolingParams as OwnParams

if TYPE_CHECKING:
    from octavo.engine.pooling_inputs import PoolingInputs

_KINDS: dict[str, PoolingKind] = {"CLS": "cls", "LAST": "last", "MEAN": "mean"}
#: Former names of ``use_activation``, of vectors (``normalize``) and of class scores.
_ACTIVATIONS = ("normalize", "softmax", "activation")
_NO_STEPS = "scores of tokens are given of all tokens (token_classify)"
_NO_CHUNKS = "a text is computed as a whole"
_NO_CALIBRATION = "class scores are as the model's files say"
_FORMER_TASKS = {"embedding": "embed", "reward": "auto"}


class PoolingParams(OwnParams, kw_only=True, omit_defaults=True):
    """Octavo's parameters, with vLLM's further fields: names for the same, or such that decide nothing here.

    Raises:
        InvalidRequestError: a field asks for what there is not.
    """

    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: Any = None

    def __post_init__(self) -> None:
        try:
            self.use_activation = _activation(self)
            _refuse(self, {"step_tag_id": _NO_STEPS, "returned_token_ids": _NO_STEPS, "extra_kwargs": "none is known"})
        except ConfigError as e:
            raise InvalidRequestError(str(e)) from None
        for name in (*_ACTIVATIONS, "skip_reading_prefix_cache", "output_kind", "extra_kwargs"):
            setattr(self, name, None)  # Octavo's fields say it now
        self.requires_token_ids = False
        super().__post_init__()

    def clone(self) -> PoolingParams:
        """A copy."""
        return msgspec.structs.replace(self)


@dataclasses.dataclass
class PoolerConfig:
    """How vectors and scores are made, where it is to be other than the model's files say."""

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    dimensions: int | None = None
    enable_chunked_processing: bool | None = None
    max_embed_len: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    logit_bias: float | None = None
    logit_scale: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def apply(self, pooling: PoolingInputs) -> OwnParams:
        """Sets how the model pools; what requests ask for that do not say otherwise.

        Raises:
            ConfigError: naming the field that asks for what there is not.
        """
        _refuse(self, {"enable_chunked_processing": _NO_CHUNKS, "max_embed_len": _NO_CHUNKS})
        _refuse(self, dict.fromkeys(("logit_mean", "logit_sigma", "logit_bias", "logit_scale"), _NO_CALIBRATION))
        _refuse(self, {"step_tag_id": _NO_STEPS, "returned_token_ids": _NO_STEPS})
        for name in ("pooling_type", "seq_pooling_type", "tok_pooling_type"):
            kind = getattr(self, name)
            if kind is None or (name != "seq_pooling_type" and kind == "ALL"):
                continue
            if kind not in _KINDS or name == "tok_pooling_type":
                known = "ALL" if name == "tok_pooling_type" else ", ".join(_KINDS)
                raise ConfigError(f"pooler_config: {name} must be one of {known}, not {kind!r}")
            pooling.pooler = dataclasses.replace(pooling.pooler, kind=_KINDS[kind])
        try:
            if self.task is not None and self.task in POOLING_TASKS:
                pooling.require(self.task)
            params = OwnParams(dimensions=self.dimensions, use_activation=_activation(self))
        except InvalidRequestError as e:
            raise ConfigError(f"pooler_config: {e}") from None
        return params


class PoolingOptions:
    """The options of an engine that are about pooling, taken out of all options and applied once it is made."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Takes them out of ``options``, and gives the others the names that they have here.

        Raises:
            ConfigError: there are two configurations, or one is none.
        """
        given = [options.pop(name, None) for name in ("pooler_config", "override_pooler_config")]
        configs = [config for config in given if config is not None]
        if len(configs) > 1:
            raise ConfigError("pooler_config and override_pooler_config are the same: give one of them")
        self._config = _as_config(configs[0]) if configs else None
        #: What requests ask for that do not say otherwise.
        self.defaults = OwnParams()
        self._is_pooling = options.get("runner") == "pooling" or options.get("convert") == "embed"
        if options.get("task") in _FORMER_TASKS:
            options["task"] = _FORMER_TASKS[options["task"]]
        overrides = options.get("hf_overrides")
        if isinstance(overrides, Mapping) and "classifier_from_token" in overrides:
            # A language model as a judge, which vLLM makes a class head of.
            options["hf_overrides"] = {name: value for name, value in overrides.items() if name != "architectures"}
            options["task"] = "score"
            self._is_pooling = False

    def apply(self, pooling: PoolingInputs) -> None:
        """As the engine's requests are checked from now on.

        Raises:
            ConfigError: a field of the configuration asks for what there is not.
        """
        if self._is_pooling and pooling.config.head == "lm" and "generate" in pooling.tasks:
            pooling.tasks = model_tasks(pooling.config, "embed")
        if self._config is not None:
            self.defaults = self._config.apply(pooling)

    def filled(self, params: OwnParams) -> OwnParams:
        """The parameters of a request with what the configuration says."""
        fields: dict[str, Any] = {}
        if params.use_activation is None:
            fields["use_activation"] = self.defaults.use_activation
        if params.dimensions is None and params.task in (None, "embed", "token_embed"):
            fields["dimensions"] = self.defaults.dimensions
        return msgspec.structs.replace(params, **fields)


def with_tensors(outputs: Sequence[Pooled]) -> list[Pooled]:
    """The outputs with tensors of torch, where it is installed, as scripts expect of ``encode``."""
    if find_spec("torch") is not None:
        import torch

        for output in outputs:
            if isinstance(output.outputs, PoolingOutput):
                data: Any = torch.from_numpy(output.outputs.data.copy())
                output.outputs.data = data
    return list(outputs)


def print_embeddings(values: Sequence[float], prefix: str = "Embeddings") -> None:
    """Prints the first numbers of a vector, and how many there are."""
    first = [str(value) for value in values[:4]] + (["..."] if len(values) > 4 else [])
    print(f"{prefix}: [{', '.join(first)}] (size={len(values)})")


def _as_config(given: Any) -> PoolerConfig:
    if isinstance(given, PoolerConfig):
        return given
    names = {field.name for field in dataclasses.fields(PoolerConfig)}
    if not isinstance(given, Mapping) or not given.keys() <= names:
        raise ConfigError(
            f"pooler_config must be a PoolerConfig or have its fields ({', '.join(names)}), not {given!r}"
        )
    return PoolerConfig(**given)


def _activation(given: Any) -> bool | None:
    """What the fields that mean ``use_activation`` say.

    Raises:
        ConfigError: they contradict each other.
    """
    values = {name: getattr(given, name) for name in ("use_activation", *_ACTIVATIONS)}
    said = {name: value for name, value in values.items() if value is not None}
    if len(set(said.values())) > 1:
        raise ConfigError(f"{' and '.join(said)} mean the same here, and must not differ")
    return next(iter(said.values()), None)


def _refuse(given: Any, reasons: Mapping[str, str]) -> None:
    """Refuses fields that are set.

    Raises:
        ConfigError: naming one, and why.
    """
    for name, reason in reasons.items():
        if getattr(given, name):
            raise ConfigError(f"{name} must be left out, not {getattr(given, name)!r}: {reason}")
