"""What a network has after its last layer: the architecture says so by the end of its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.core.pooler_config import PoolerActivation, PoolerConfig, PoolingKind
from octavo.models.config_reader import ConfigReader

_HEADS: dict[str, Literal["sequence", "token"]] = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
}


def with_head(config: ModelConfig, architecture: str, reader: ConfigReader) -> ModelConfig:
    """The configuration of a base network as that of an architecture with a classification head, or with none.

    Vectors are by default the mean of an encoder's hidden states, as sentence-transformers makes them of a model that
    says nothing, and the last one of a decoder's. Class scores are made of an encoder's first one, unless the model
    says otherwise (``classifier_pooling``), and of a decoder's last one.

    Raises:
        ConfigError: the classes are not named as they should be.
    """
    head = next((head for ending, head in _HEADS.items() if architecture.endswith(ending)), None)
    if head is None:
        vectors: PoolingKind = "mean" if config.is_encoder else "last"
        return replace(config, architecture=architecture, head="none", pooler=PoolerConfig(vectors))
    labels = _labels(reader)
    pooler = PoolerConfig(_classifier_pooling(reader, config), activation=_activation(reader, labels))
    return replace(config, architecture=architecture, head=head, labels=labels, pooler=pooler)


def _classifier_pooling(reader: ConfigReader, config: ModelConfig) -> PoolingKind:
    if not config.is_encoder:
        return "last"
    kind = reader.raw.get("classifier_pooling") or "cls"
    if kind not in ("cls", "mean"):
        raise ConfigError(f"{reader.file}: classifier_pooling must be cls or mean, not {kind!r}")
    return "mean" if kind == "mean" else "cls"


def _labels(reader: ConfigReader) -> tuple[str, ...]:
    """Names of the classes, in their order: those of id2label, or of ``num_labels`` (2 where nothing is said)."""
    named = reader.table("id2label")
    if not named:
        return tuple(f"LABEL_{i}" for i in range(reader.positive("num_labels", 2)))
    try:
        ordered = sorted((int(key), str(value)) for key, value in named.items())
    except ValueError:
        raise ConfigError(f"{reader.file}: keys of id2label must be integers, not {list(named)!r}") from None
    if [key for key, _ in ordered] != list(range(len(ordered))):
        raise ConfigError(f"{reader.file}: id2label must name the classes 0 to {len(ordered) - 1}, not {list(named)!r}")
    return tuple(name for _, name in ordered)


def _activation(reader: ConfigReader, labels: tuple[str, ...]) -> PoolerActivation:
    """What makes class scores probabilities: softmax where one class is right, sigmoid where each may be."""
    problem = reader.raw.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if len(labels) == 1 or problem == "multi_label_classification" else "softmax"
