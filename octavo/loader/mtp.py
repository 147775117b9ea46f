"""Finds what drafts for a model: layers for multi-token prediction in its checkpoint, or a checkpoint of a drafter."""

from __future__ import annotations

import logging
from pathlib import Path

from octavo.config.engine_config import EngineConfig
from octavo.config.options import MTP_TOKENS, ModelOptions, SpeculativeConfig
from octavo.core.errors import ConfigError, ModelNotFoundError, UnsupportedModelError, WeightError
from octavo.core.model_config import ModelConfig
from octavo.loader.gguf_file import GGUFFile
from octavo.loader.resolve import gguf_source, resolve_model
from octavo.loader.weights import check_headers, read_headers
from octavo.models.config_files import read_json
from octavo.models.mtp import FORMATS, MTPConfig, count_modules, mtp_config
from octavo.models.network import build_without_weights

logger = logging.getLogger("octavo")


def find_mtp(folder: Path, config: ModelConfig, gguf: Path | None) -> MTPConfig | None:
    """The modules in a checkpoint of the model ``config``, or in ``gguf``, by the headers alone. None: it has none."""
    if config.architecture not in FORMATS:
        return None
    if gguf is not None:
        file = GGUFFile(gguf)
        named = file.metadata.get(f"{file.metadata.get('general.architecture')}.nextn_predict_layers")
        is_held = f"blk.{config.num_layers}.nextn.eh_proj.weight" in file.tensors
        depth = named if isinstance(named, int) and is_held else 0
    else:
        try:
            depth = count_modules(config, read_headers(folder))
        except WeightError:  # no weights, or none that can be read: loading them says why
            return None
    return mtp_config(config, depth) if depth else None


def require_mtp(folder: Path, config: ModelConfig, options: ModelOptions) -> MTPConfig:
    """As ``find_mtp`` by the options, of which random weights have a module; raises ConfigError if there are none."""
    if options.load_format == "dummy" and config.architecture in FORMATS:
        return mtp_config(config, max(1, getattr(config, "prediction_layers", 1)))
    found = find_mtp(folder, config, gguf_source(options.model, options.revision))
    if found is None:
        known = f"its checkpoint {folder} has none" if config.architecture in FORMATS else "this network reads none"
        raise ConfigError(
            f"speculative_config: method 'mtp' needs layers for multi-token prediction, but {config.architecture}: "
            f"{known}; take method 'ngram' or 'suffix'"
        )
    return found


def drafter_folder(options: EngineConfig) -> Path:
    """The folder of the model that ``speculative_config`` names, fetched if need be."""
    speculation = options.speculative_config
    assert speculation is not None and speculation.model is not None
    has_weights = options.load_format != "dummy"
    try:
        return resolve_model(speculation.model, revision=speculation.revision, weights=has_weights, mmproj="none")
    except ModelNotFoundError as e:
        raise ModelNotFoundError(f"speculative_config: {e}") from None


def _is_assistant(folder: Path) -> bool:
    from octavo.models.gemma4_assistant import is_assistant

    file = folder / "config.json"
    return file.is_file() and is_assistant(read_json(file))


def with_own_drafts(options: EngineConfig, config: ModelConfig, folder: Path, *, on_cpu: bool) -> EngineConfig:
    """The options with ``speculative_config`` resolved.

    The method is mtp if the draft model is an assistant of Gemma 4. If no method is named it is mtp if the checkpoint
    has such layers, but not where drafts would have to be of a fixed length (``external_launcher``), with pipeline
    stages, with random weights, or beside recurrent states on kernels that have no drafts there.
    """
    named = options.speculative_config
    if named is not None:
        if named.method == "none":
            return options.model_copy(update={"speculative_config": None})
        if named.method == "draft_model" and _is_assistant(drafter_folder(options)):
            drafts = named.model_copy(update={"method": "mtp"})
            if "num_speculative_tokens" not in named.model_fields_set:
                drafts = drafts.model_copy(update={"num_speculative_tokens": MTP_TOKENS})
            return options.model_copy(update={"speculative_config": drafts})
        return options
    if (
        options.pipeline_parallel_size > 1
        or options.distributed_executor_backend == "external_launcher"
        or options.load_format == "dummy"
        or (found := find_mtp(folder, config, gguf_source(options.model, options.revision))) is None
    ):
        return options
    if not on_cpu and options.kernels != "reference":
        specs = build_without_weights(config, "float32").kv_specs
        if any(spec.kind == "state" for spec in specs):
            return options
    try:
        check_headers(folder, found, gguf_source(options.model, options.revision))
    except (WeightError, UnsupportedModelError) as e:
        logger.warning("the checkpoint's layers for multi-token prediction are not used: %s", e)
        return options
    drafts = SpeculativeConfig(method="mtp", num_speculative_tokens=MTP_TOKENS)
    return options.model_copy(update={"speculative_config": drafts})
