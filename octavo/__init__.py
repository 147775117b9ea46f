"""Octavo serves large language models: paged KV cache, continuous batching, answers that do not depend on the company.

>>> from octavo import LLM, SamplingParams
>>> llm = LLM(model="smollm2-135m")
>>> outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=16))
>>> print(outputs[0].outputs[0].text)

Public names are imported on first use, so that ``import octavo`` costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.core.adapters import LoRARequest, PromptAdapterRequest
    from octavo.core.beam_search_params import BeamSearchParams
    from octavo.core.config import EngineConfig
    from octavo.core.errors import (
        AdapterConflictError,
        AdapterError,
        AdapterNotFoundError,
        AudioError,
        ClientLimitError,
        ConfigError,
        DownloadError,
        EngineDeadError,
        EngineKilledError,
        EngineStateError,
        InsufficientMemoryError,
        InvalidRequestError,
        ModelNotFoundError,
        OctavoError,
        SandboxError,
        SequenceError,
        TokenizerError,
        UnsupportedModelError,
        WeightError,
        WorkerError,
    )
    from octavo.core.logits_plugins import LogitsProcessorPlugin
    from octavo.core.metric_values import Counter, Gauge, Metric
    from octavo.core.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.core.pooling_outputs import (
        ClassificationOutput,
        EmbeddingOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
    )
    from octavo.core.pooling_params import PoolingParams
    from octavo.core.prompts import TextPrompt, TokensPrompt
    from octavo.core.sampling_params import RequestOutputKind, SamplingParams
    from octavo.core.stats import StepStats
    from octavo.core.structured_outputs import StructuredOutputsParams
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.llm import LLM
    from octavo.engine.llm_engine import LLMEngine
    from octavo.engine.stat_loggers import StatLogger
    from octavo.speech.audio_files import AudioLimits
    from octavo.speech.segments import Transcription
    from octavo.speech.transcription_params import TranscriptionParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AdapterConflictError",
    "AdapterError",
    "AdapterNotFoundError",
    "AsyncLLM",
    "AudioError",
    "AudioLimits",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClientLimitError",
    "CompletionOutput",
    "ConfigError",
    "Counter",
    "DownloadError",
    "EmbeddingOutput",
    "EngineConfig",
    "EngineDeadError",
    "EngineKilledError",
    "EngineStateError",
    "Gauge",
    "InsufficientMemoryError",
    "InvalidRequestError",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessorPlugin",
    "Logprob",
    "Metric",
    "ModelNotFoundError",
    "OctavoError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptAdapterRequest",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SandboxError",
    "ScoringOutput",
    "SequenceError",
    "StatLogger",
    "StepStats",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenizerError",
    "TokensPrompt",
    "Transcription",
    "TranscriptionParams",
    "UnrecordableError",
    "UnsupportedModelError",
    "WeightError",
    "WorkerError",
    "__version__",
]

_ELSEWHERE = {
    "AsyncLLM": "octavo.engine.async_llm",
    "LLM": "octavo.engine.llm",
    "LLMEngine": "octavo.engine.llm_engine",
    "EngineConfig": "octavo.core.config",
    "LoRARequest": "octavo.core.adapters",
    "PromptAdapterRequest": "octavo.core.adapters",
    "BeamSearchParams": "octavo.core.beam_search_params",
    "SamplingParams": "octavo.core.sampling_params",
    "StatLogger": "octavo.engine.stat_loggers",
    "StepStats": "octavo.core.stats",
    "StructuredOutputsParams": "octavo.core.structured_outputs",
    "LogitsProcessorPlugin": "octavo.core.logits_plugins",
    "RequestOutputKind": "octavo.core.sampling_params",
    "RequestOutput": "octavo.core.outputs",
    **dict.fromkeys(
        ("PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput", "ClassificationOutput", "ScoringOutput"),
        "octavo.core.pooling_outputs",
    ),
    "PoolingParams": "octavo.core.pooling_params",
    "AudioLimits": "octavo.speech.audio_files",
    "Transcription": "octavo.speech.segments",
    "TranscriptionParams": "octavo.speech.transcription_params",
    "CompletionOutput": "octavo.core.outputs",
    "Logprob": "octavo.core.outputs",
    "TextPrompt": "octavo.core.prompts",
    "TokensPrompt": "octavo.core.prompts",
    "Metric": "octavo.core.metric_values",
    "Counter": "octavo.core.metric_values",
    "Gauge": "octavo.core.metric_values",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ELSEWHERE.get(name, "octavo.core.errors")), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
