"""Finds a model and reads its small files, so that options which cannot work are refused before weights are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError, memory_errors
from octavo.core.files import read_text
from octavo.core.model_config import ModelConfig
from octavo.core.plugins import LogitsPlugins
from octavo.core.sampling_params import describe_sampling
from octavo.engine.chat_template import read_chat_template
from octavo.engine.tokenizer import Tokenizer, find_tokenizer
from octavo.kernels import check_kernel_packages
from octavo.loader.resolve import resolve_model
from octavo.models.config_files import default_sampling
from octavo.scheduler.policies import policy_class

startup_logger = logging.getLogger("octavo.startup")


@dataclass(frozen=True)
class FoundModel:
    """A model's files; its network's configuration is missing, as reading it imports the network's modules."""

    options: EngineConfig
    folder: Path
    tokenizer: Tokenizer
    #: The model's own defaults of ``SamplingParams`` fields.
    default_sampling: Mapping[str, Any]
    #: Texts and names of the option ``shared_prefix``.
    prefixes: list[tuple[str, str]]

    def with_config(self, config: ModelConfig) -> ModelFiles:
        return ModelFiles(**vars(self), model_config=config)


@dataclass(frozen=True)
class ModelFiles(FoundModel):
    """A model's files with its configuration."""

    model_config: ModelConfig


def check_classes(options: EngineConfig) -> None:
    """Checks that the classes named in options exist, before the model is looked for."""
    policy_class(options.scheduling_policy)
    LogitsPlugins(options.logits_processors or ())


@memory_errors()
def find_files(options: EngineConfig) -> ModelFiles:
    """Runs ``find_model`` and reads the configuration, for an engine in this process."""
    if options.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size ({options.data_parallel_size}) is for AsyncLLM and octavo serve; in one program "
            "make several engines, or use octavo.data"
        )
    from octavo.loader.weights import read_config  # imports numpy, which a server's front end does without

    model = find_model(options)
    return model.with_config(read_config(model.folder, options))


@memory_errors()
def find_model(options: EngineConfig, when_found: Callable[[Path], object] = lambda folder: None) -> FoundModel:
    """Finds or downloads the model, after checking the options.

    ``when_found`` is called with its folder before the tokenizer is read: a core may load the weights meanwhile.

    Raises:
        OctavoError: an option is wrong, or the model is unknown, unreadable or unsupported.
    """
    check_kernel_packages(options.kernels, options.device)
    if options.distributed_executor_backend == "ray":
        from octavo.executor.remote import import_ray

        import_ray()
    check_classes(options)
    prefixes = [(read_text(path, "shared prefix"), path) for path in options.shared_prefix or ()]
    read_chat_template(options.chat_template)
    is_dummy = options.load_format == "dummy"
    folder = resolve_model(options.model, revision=options.revision, weights=not is_dummy, mmproj=options.mmproj)
    sampling = default_sampling(options.generation_config, folder)
    if sampling:
        startup_logger.info("sampling defaults of the model: %s", describe_sampling(sampling))
    when_found(folder)
    return FoundModel(options, folder, find_tokenizer(options, folder), sampling, prefixes)
