"""What is known of a model before its weights are read: enough to refuse what could not be served anyway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, memory_errors
from octavo.core.logits_plugins import LogitsPlugins
from octavo.engine.chat_template import read_chat_template
from octavo.engine.input_processor import InputProcessor
from octavo.engine.shared_prefixes import read_files
from octavo.engine.tokenizer import Tokenizer, find_tokenizer
from octavo.loader.resolve import resolve_model
from octavo.models.config import default_sampling, read_model_config
from octavo.scheduler.policies import policy_class


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found (and fetched), for an engine in this process."""

    options: EngineConfig
    folder: Path
    tokenizer: Tokenizer
    #: The model's own values for fields of ``SamplingParams`` that a caller leaves out.
    default_sampling: Mapping[str, Any]
    #: Texts and names of the option ``shared_prefix``.
    prefixes: list[tuple[str, str]]

    def inputs(self) -> InputProcessor:
        """Checks requests before the engine is there. The engine may still refuse what exceeds its KV cache."""
        config = read_model_config(self.folder)
        return InputProcessor(
            self.tokenizer,
            self.options,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            max_model_len=self.options.max_model_len or config.max_position,
            default_sampling=self.default_sampling,
        )


def check_classes(options: EngineConfig) -> None:
    """Refuses options that name classes which are not there, before a model is looked for.

    Raises:
        ConfigError: see above.
    """
    policy_class(options.scheduling_policy)
    LogitsPlugins(options.logits_processors or ())


def find_files(options: EngineConfig) -> ModelFiles:
    """Finds (or fetches) the model; wrong names in options are refused before.

    Raises:
        OctavoError: an option is wrong, or the model is unknown, unreadable or unsupported.
    """
    if options.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size ({options.data_parallel_size}) is for AsyncLLM and octavo serve; in one program "
            "make several engines, or use octavo.data"
        )
    check_classes(options)
    prefixes = read_files(options)
    read_chat_template(options.chat_template)
    folder = resolve_model(
        options.model,
        revision=options.revision,
        weights=options.load_format != "dummy",
    )
    with memory_errors():
        tokenizer = find_tokenizer(options, folder)
        return ModelFiles(options, folder, tokenizer, default_sampling(options.generation_config, folder), prefixes)
