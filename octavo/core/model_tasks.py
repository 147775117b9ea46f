"""What a model can be asked for."""

from __future__ import annotations

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig

#: By what the network makes of hidden states. "score" of a network without class scores compares two vectors.
_BY_HEAD: dict[str, tuple[str, ...]] = {
    "lm": ("generate", "embed", "token_embed"),
    "none": ("embed", "token_embed", "score"),
    "sequence": ("classify",),
    "token": ("token_classify",),
}
#: What the option ``task`` leaves of the tasks of a language model.
_OF_LANGUAGE_MODELS: dict[str, tuple[str, ...]] = {
    "generate": ("generate",),
    "embed": ("embed", "token_embed", "score"),
    "score": ("score",),
}


def model_tasks(config: ModelConfig, task: str = "auto") -> tuple[str, ...]:
    """The tasks of a model: "generate", "transcribe" and those of ``PoolingTask``. ``task`` is the option of this name.

    Raises:
        ConfigError: the model cannot be used for the task.
    """
    if config.encoder_facts is not None:
        tasks: tuple[str, ...] = ("transcribe",) if config.encoder_facts.takes_audio else ("generate",)
    elif config.head == "lm" and config.pooler.is_from_files:  # a language model that was trained for vectors
        tasks = ("embed", "token_embed", "score", "generate")
    else:
        tasks = _BY_HEAD[config.head]
    if config.head == "sequence" and len(config.labels) == 1:
        tasks = ("classify", "score")
    if task == "auto":
        return tasks
    if config.head == "lm" and config.encoder_facts is None and task in _OF_LANGUAGE_MODELS:
        return _OF_LANGUAGE_MODELS[task]
    if task not in tasks:
        raise ConfigError(f"task {task!r} is nothing that {config.architecture} does; it does: {', '.join(tasks)}")
    return tasks
