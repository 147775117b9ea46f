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
    from octavo.config.engine_config import EngineConfig
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
        UnexpectedKeywordError,
        UnsupportedModelError,
        WeightError,
        WorkerError,
    )
    from octavo.core.outputs import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        Logprob,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
    )
    from octavo.core.plugins import LogitsProcessorPlugin
    from octavo.core.request import LoRARequest, PromptAdapterRequest, TextPrompt, TokensPrompt
    from octavo.core.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
    from octavo.core.stats import Counter, Gauge, Metric, StepStats
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.front_end import StatLogger
    from octavo.engine.llm import LLM
    from octavo.engine.llm_engine import LLMEngine
    from octavo.speech.audio_files import AudioLimits
    from octavo.speech.segments import Transcription
    from octavo.speech.transcription import TranscriptionParams

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
    "UnexpectedKeywordError",
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
    "EngineConfig": "octavo.config.engine_config",
    "LoRARequest": "octavo.core.request",
    "PromptAdapterRequest": "octavo.core.request",
    "BeamSearchParams": "octavo.core.sampling_params",
    "SamplingParams": "octavo.core.sampling_params",
    "StatLogger": "octavo.engine.front_end",
    "StepStats": "octavo.core.stats",
    "StructuredOutputsParams": "octavo.core.sampling_params",
    "LogitsProcessorPlugin": "octavo.core.plugins",
    "RequestOutputKind": "octavo.core.sampling_params",
    "RequestOutput": "octavo.core.outputs",
    **dict.fromkeys(
        ("PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput", "ClassificationOutput", "ScoringOutput"),
        "octavo.core.outputs",
    ),
    "PoolingParams": "octavo.core.outputs",
    "AudioLimits": "octavo.speech.audio_files",
    "Transcription": "octavo.speech.segments",
    "TranscriptionParams": "octavo.speech.transcription",
    "CompletionOutput": "octavo.core.outputs",
    "Logprob": "octavo.core.outputs",
    "TextPrompt": "octavo.core.request",
    "TokensPrompt": "octavo.core.request",
    "Metric": "octavo.core.stats",
    "Counter": "octavo.core.stats",
    "Gauge": "octavo.core.stats",
}


#: Names that ``octavo.compat.vllm`` alone has.
_OF_VLLM = frozenset({
    "AsyncEngineArgs", "AsyncLLMEngine", "ClassificationRequestOutput", "EmbeddingRequestOutput", "EngineArgs",
    "ExplicitEncoderDecoderPrompt", "PromptType", "ScoringRequestOutput",
})  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in __all__:
        if name in _OF_VLLM:  # an AttributeError's text would be lost: "from octavo import" has a message of its own
            raise ImportError(f"octavo has no {name}; it is a name of vLLM: from octavo.compat.vllm import {name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ELSEWHERE.get(name, "octavo.core.errors")), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
