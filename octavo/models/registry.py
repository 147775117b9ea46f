"""The registry of networks by architecture (vLLM's ModelRegistry); a network's module is imported on first use."""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.core.outputs import PoolerActivation, PoolerConfig, PoolingKind

if TYPE_CHECKING:
    from octavo.layers.layer import LayerContext
    from octavo.models.config_files import ConfigReader
    from octavo.models.network import Network


#: Architecture in config.json -> (its model_type, module, class).
NETWORKS = {
    "ApertusForCausalLM": ("apertus", "octavo.models.dense", "DenseForCausalLM"),
    "ArceeForCausalLM": ("arcee", "octavo.models.dense", "DenseForCausalLM"),
    "BambaForCausalLM": ("bamba", "octavo.models.mamba_hybrids", "MambaHybridForCausalLM"),
    "BartForConditionalGeneration": ("bart", "octavo.models.bart", "BartForConditionalGeneration"),
    "BloomForCausalLM": ("bloom", "octavo.models.gpt", "BloomForCausalLM"),
    "Cohere2ForCausalLM": ("cohere2", "octavo.models.gpt", "CohereForCausalLM"),
    "CohereForCausalLM": ("cohere", "octavo.models.gpt", "CohereForCausalLM"),
    "CwmForCausalLM": ("cwm", "octavo.models.dense", "DenseForCausalLM"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "octavo.models.deepseek", "DeepseekForCausalLM"),
    "DeepseekV32ForCausalLM": ("deepseek_v32", "octavo.models.deepseek", "DeepseekForCausalLM"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "octavo.models.deepseek", "DeepseekForCausalLM"),
    "Dots1ForCausalLM": ("dots1", "octavo.models.mixtures", "MixtureForCausalLM"),
    "Ernie4_5ForCausalLM": ("ernie4_5", "octavo.models.dense", "DenseForCausalLM"),
    "Ernie4_5_ForCausalLM": ("ernie4_5", "octavo.models.dense", "DenseForCausalLM"),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", "octavo.models.mixtures", "MixtureForCausalLM"),
    "Exaone4ForCausalLM": ("exaone4", "octavo.models.dense", "DenseForCausalLM"),
    "FalconForCausalLM": ("falcon", "octavo.models.gpt", "FalconForCausalLM"),
    "FalconH1ForCausalLM": ("falcon_h1", "octavo.models.falcon_h1", "FalconH1ForCausalLM"),
    "FalconMambaForCausalLM": ("falcon_mamba", "octavo.models.mamba", "MambaForCausalLM"),
    "FlexOlmoForCausalLM": ("flex_olmo", "octavo.models.mixtures", "MixtureForCausalLM"),
    "GPT2LMHeadModel": ("gpt2", "octavo.models.gpt", "GPT2LMHeadModel"),
    "GPTBigCodeForCausalLM": ("gpt_bigcode", "octavo.models.gpt", "GPTBigCodeForCausalLM"),
    "GPTJForCausalLM": ("gptj", "octavo.models.gpt", "GPTJForCausalLM"),
    "GPTNeoXForCausalLM": ("gpt_neox", "octavo.models.gpt", "GPTNeoXForCausalLM"),
    "Gemma2ForCausalLM": ("gemma2", "octavo.models.gemma", "GemmaForCausalLM"),
    "Gemma3ForCausalLM": ("gemma3_text", "octavo.models.gemma", "GemmaForCausalLM"),
    "Gemma3ForConditionalGeneration": ("gemma3", "octavo.models.gemma", "Gemma3ForConditionalGeneration"),
    "Gemma4ForCausalLM": ("gemma4_text", "octavo.models.gemma4", "Gemma4ForCausalLM"),
    "Gemma4ForConditionalGeneration": ("gemma4", "octavo.models.gemma4_images", "Gemma4ForConditionalGeneration"),
    "Gemma4UnifiedForCausalLM": ("gemma4_unified_text", "octavo.models.gemma4", "Gemma4ForCausalLM"),
    "Gemma4UnifiedForConditionalGeneration": (
        "gemma4_unified",
        "octavo.models.gemma4_images",
        "Gemma4ForConditionalGeneration",
    ),
    "GemmaForCausalLM": ("gemma", "octavo.models.gemma", "GemmaForCausalLM"),
    "Glm4ForCausalLM": ("glm4", "octavo.models.dense", "DenseForCausalLM"),
    "Glm4MoeForCausalLM": ("glm4_moe", "octavo.models.mixtures", "MixtureForCausalLM"),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", "octavo.models.deepseek", "DeepseekForCausalLM"),
    "GlmForCausalLM": ("glm", "octavo.models.dense", "DenseForCausalLM"),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", "octavo.models.deepseek", "DeepseekForCausalLM"),
    "GptOssForCausalLM": ("gpt_oss", "octavo.models.gpt_oss", "GptOssForCausalLM"),
    "Granite4VisionForConditionalGeneration": (
        "granite4_vision",
        "octavo.models.granite4_vision",
        "Granite4VisionForConditionalGeneration",
    ),
    "GraniteForCausalLM": ("granite", "octavo.models.dense", "DenseForCausalLM"),
    "GraniteMoeForCausalLM": ("granitemoe", "octavo.models.mixtures", "MixtureForCausalLM"),
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", "octavo.models.mamba_hybrids", "MambaHybridForCausalLM"),
    "GraniteMoeSharedForCausalLM": ("granitemoeshared", "octavo.models.mixtures", "MixtureForCausalLM"),
    "HeliumForCausalLM": ("helium", "octavo.models.dense", "DenseForCausalLM"),
    "HunYuanDenseV1ForCausalLM": ("hunyuan_v1_dense", "octavo.models.dense", "DenseForCausalLM"),
    "HunYuanMoEV1ForCausalLM": ("hunyuan_v1_moe", "octavo.models.mixtures", "MixtureForCausalLM"),
    "HyperCLOVAXForCausalLM": ("hyperclovax", "octavo.models.dense", "DenseForCausalLM"),
    "IQuestCoderForCausalLM": ("iquestcoder", "octavo.models.dense", "DenseForCausalLM"),
    "Idefics3ForConditionalGeneration": ("idefics3", "octavo.models.idefics3", "Idefics3ForConditionalGeneration"),
    "InternLM3ForCausalLM": ("internlm3", "octavo.models.dense", "DenseForCausalLM"),
    "InternVLForConditionalGeneration": ("internvl", "octavo.models.internvl", "InternVLForConditionalGeneration"),
    "Jais2ForCausalLM": ("jais2", "octavo.models.dense", "DenseForCausalLM"),
    "JambaForCausalLM": ("jamba", "octavo.models.mamba_hybrids", "MambaHybridForCausalLM"),
    "KimiLinearForCausalLM": ("kimi_linear", "octavo.models.kimi_linear", "KimiLinearForCausalLM"),
    "Lfm2ForCausalLM": ("lfm2", "octavo.models.lfm2", "Lfm2ForCausalLM"),
    "Lfm2MoeForCausalLM": ("lfm2_moe", "octavo.models.lfm2", "Lfm2ForCausalLM"),
    "Lfm2VlForConditionalGeneration": ("lfm2_vl", "octavo.models.lfm2_vl", "Lfm2VlForConditionalGeneration"),
    "Llama4ForCausalLM": ("llama4_text", "octavo.models.mixtures", "Llama4ForCausalLM"),
    "Llama4ForConditionalGeneration": (
        "llama4",
        "octavo.models.mixtures",
        "Llama4ForConditionalGeneration",
    ),
    "LlamaForCausalLM": ("llama", "octavo.models.llama", "LlamaForCausalLM"),
    "LlavaForConditionalGeneration": ("llava", "octavo.models.llava", "LlavaForConditionalGeneration"),
    "LlavaNextForConditionalGeneration": (
        "llava_next",
        "octavo.models.llava_next",
        "LlavaNextForConditionalGeneration",
    ),
    "MBartForConditionalGeneration": ("mbart", "octavo.models.bart", "MBartForConditionalGeneration"),
    "MT5ForConditionalGeneration": ("mt5", "octavo.models.t5", "MT5ForConditionalGeneration"),
    "Mamba2ForCausalLM": ("mamba2", "octavo.models.mamba", "MambaForCausalLM"),
    "MambaForCausalLM": ("mamba", "octavo.models.mamba", "MambaForCausalLM"),
    "MarianMTModel": ("marian", "octavo.models.bart", "MarianMTModel"),
    "MiMoForCausalLM": ("mimo", "octavo.models.dense", "DenseForCausalLM"),
    "MiniMaxM2ForCausalLM": ("minimax_m2", "octavo.models.mixtures", "MixtureForCausalLM"),
    "Ministral3ForCausalLM": ("ministral3", "octavo.models.dense", "DenseForCausalLM"),
    "MinistralForCausalLM": ("ministral", "octavo.models.dense", "DenseForCausalLM"),
    "MistralForCausalLM": ("mistral", "octavo.models.llama", "LlamaForCausalLM"),
    "Mistral3ForConditionalGeneration": ("mistral3", "octavo.models.pixtral", "Mistral3ForConditionalGeneration"),
    "MixtralForCausalLM": ("mixtral", "octavo.models.mixtures", "MixtureForCausalLM"),
    "NemotronForCausalLM": ("nemotron", "octavo.models.dense", "DenseForCausalLM"),
    "NemotronHForCausalLM": ("nemotron_h", "octavo.models.nemotron_h", "NemotronHForCausalLM"),
    "OPTForCausalLM": ("opt", "octavo.models.gpt", "OPTForCausalLM"),
    "Olmo2ForCausalLM": ("olmo2", "octavo.models.dense", "DenseForCausalLM"),
    "Olmo3ForCausalLM": ("olmo3", "octavo.models.dense", "DenseForCausalLM"),
    "OlmoForCausalLM": ("olmo", "octavo.models.dense", "DenseForCausalLM"),
    "OlmoHybridForCausalLM": ("olmo_hybrid", "octavo.models.olmo_hybrid", "OlmoHybridForCausalLM"),
    "OlmoeForCausalLM": ("olmoe", "octavo.models.mixtures", "MixtureForCausalLM"),
    "PegasusForConditionalGeneration": ("pegasus", "octavo.models.bart", "PegasusForConditionalGeneration"),
    "Phi3ForCausalLM": ("phi3", "octavo.models.llama", "Phi3ForCausalLM"),
    "PhiForCausalLM": ("phi", "octavo.models.gpt", "PhiForCausalLM"),
    "PhiMoEForCausalLM": ("phimoe", "octavo.models.mixtures", "MixtureForCausalLM"),
    "PhimoeForCausalLM": ("phimoe", "octavo.models.mixtures", "MixtureForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": (
        "qwen2_5_vl",
        "octavo.models.qwen2_5_vl",
        "Qwen25VLForConditionalGeneration",
    ),
    "Qwen2ForCausalLM": ("qwen2", "octavo.models.llama", "LlamaForCausalLM"),
    "Qwen2MoeForCausalLM": ("qwen2_moe", "octavo.models.mixtures", "MixtureForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "octavo.models.llama", "LlamaForCausalLM"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "octavo.models.mixtures", "MixtureForCausalLM"),
    "Qwen3NextForCausalLM": ("qwen3_next", "octavo.models.qwen3_next", "Qwen3NextForCausalLM"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "octavo.models.qwen3_vl", "Qwen3VLForConditionalGeneration"),
    "Qwen3VLMoeForConditionalGeneration": (
        "qwen3_vl_moe",
        "octavo.models.qwen3_vl",
        "Qwen3VLMoeForConditionalGeneration",
    ),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", "octavo.models.qwen3_next", "Qwen3NextForCausalLM"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "octavo.models.qwen3_vl", "Qwen35ForConditionalGeneration"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", "octavo.models.qwen3_next", "Qwen3NextForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "octavo.models.qwen3_vl", "Qwen35ForConditionalGeneration"),
    "SeedOssForCausalLM": ("seed_oss", "octavo.models.dense", "DenseForCausalLM"),
    "SmolLM3ForCausalLM": ("smollm3", "octavo.models.dense", "DenseForCausalLM"),
    "SmolVLMForConditionalGeneration": ("smolvlm", "octavo.models.idefics3", "Idefics3ForConditionalGeneration"),
    "SolarOpenForCausalLM": ("solar_open", "octavo.models.mixtures", "MixtureForCausalLM"),
    "StableLmForCausalLM": ("stablelm", "octavo.models.gpt", "StableLmForCausalLM"),
    "Starcoder2ForCausalLM": ("starcoder2", "octavo.models.gpt", "Starcoder2ForCausalLM"),
    "T5ForConditionalGeneration": ("t5", "octavo.models.t5", "T5ForConditionalGeneration"),
    "UMT5ForConditionalGeneration": ("umt5", "octavo.models.t5", "UMT5ForConditionalGeneration"),
    "WhisperForConditionalGeneration": ("whisper", "octavo.models.whisper", "WhisperForConditionalGeneration"),
}

#: Draft heads, which cannot be served alone.
_HEADS = {
    **dict.fromkeys(
        ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
        ("", "octavo.models.gemma4_assistant", "Gemma4Assistant"),
    ),
    "EagleLlamaForCausalLM": ("", "octavo.models.eagle", "EagleForCausalLM"),
    "LlamaForCausalLMEagle3": ("", "octavo.models.eagle", "Eagle3ForCausalLM"),
    "MTPModel": ("", "octavo.models.mtp", "MTPModel"),
}

#: Encoders by the beginning of the architecture, which ends in one of ``_ENDINGS``.
ENCODERS = {
    "Bert": ("bert", "octavo.models.bert", "BertModel"),
    "Camembert": ("camembert", "octavo.models.bert", "RobertaModel"),
    "DistilBert": ("distilbert", "octavo.models.bert", "DistilBertModel"),
    "EuroBert": ("eurobert", "octavo.models.llama_encoders", "EuroBertModel"),
    "Gte": ("gte", "octavo.models.bert", "GteModel"),
    "JinaEmbeddingsV3": ("jina_embeddings_v3", "octavo.models.bert", "JinaEmbeddingsV3Model"),
    "LlamaBidirectional": ("llama_bidirec", "octavo.models.llama_encoders", "LlamaBidirectionalModel"),
    "MPNet": ("mpnet", "octavo.models.bert", "MPNetModel"),
    "ModernBert": ("modernbert", "octavo.models.bert", "ModernBertModel"),
    "NomicBert": ("nomic_bert", "octavo.models.bert", "NomicBertModel"),
    "Roberta": ("roberta", "octavo.models.bert", "RobertaModel"),
    "XLMRoberta": ("xlm-roberta", "octavo.models.bert", "RobertaModel"),
}
#: Of architectures whose language-model head does not exist or is not used.
_ENDINGS = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "Model")

#: Models with layers that keep a state of a kind that no network here has.
_STATE_SPACE = re.compile(r"rwkv|retnet|hyena|recurrent_?gemma|zamba|minimax|plamo2")
#: Likeness of relatives, at most 1, and what is added to it for names that begin with the same letters.
_NEAR, _OF_FAMILY = 0.65, 0.3
_SUFFIX = re.compile(r"ForCausalLM$|ForConditionalGeneration$|LMHeadModel$|Model$|For\w+Classification$|ForMaskedLM$")


def unsupported(what: str, name: str, supported: Sequence[str]) -> UnsupportedModelError:
    """The error for a model whose ``name`` is not ``supported``, with the reason or the nearest relatives."""
    reason = ": state-space layers are not supported" if _STATE_SPACE.search(name.lower()) else ""
    if name in _HEADS:
        reason = ": it only drafts for another model, whose speculative_config may name it"
    near = [] if reason else nearest_relatives(name, supported)
    hint = f"; the nearest {'is' if len(near) == 1 else 'are'} {', '.join(map(repr, near))}" if near else ""
    return UnsupportedModelError(
        f"{what} {name!r} is not supported{reason}{hint}; supported: {', '.join(supported)}; "
        "docs/adding-a-model.md tells how to add one"
    )


def nearest_relatives(name: str, supported: Sequence[str]) -> list[str]:
    """At most three supported names like ``name``, the nearest first; those of the same family count as nearer."""
    stem = _SUFFIX.sub("", name).lower()
    family = stem[: len(stem) - len(stem.lstrip(string.ascii_lowercase))]

    def likeness(other: str) -> float:
        other = _SUFFIX.sub("", other).lower()
        is_family = len(family) > 2 and other.startswith(family)
        return difflib.SequenceMatcher(None, stem, other).ratio() + _OF_FAMILY * is_family

    near = [other for other in supported if likeness(other) >= _NEAR]
    return sorted(near, key=likeness, reverse=True)[:3]


def supported_architectures() -> list[str]:
    """The architectures that can be served, sorted; ``find_base`` knows variants of them."""
    return sorted([*NETWORKS, *(f"{family}Model" for family in ENCODERS)])


def find_base(architecture: str) -> str | None:
    """The architecture whose network this one has, with another head or none; None: not supported.

    So any decoder may have a classification head in place of its language-model head.
    """
    if architecture in NETWORKS or architecture in _HEADS:
        return architecture
    ending = next((ending for ending in _ENDINGS if architecture.endswith(ending)), None)
    family = architecture.removesuffix(ending) if ending else ""
    if family in ENCODERS:
        return f"{family}Model"
    # The text part of a multimodal model has "Text" in its name only where it has no language-model head.
    names = (family, family.removesuffix("Text"))
    decoders = (f"{name}{head}" for name in names for head in ("ForCausalLM", "LMHeadModel"))
    return next((name for name in decoders if ending != "ForMaskedLM" and name in NETWORKS), None)


def architecture_of_type(model_type: str) -> str | None:
    """The architecture of a config.json that has this model_type and no architectures."""
    encoders = {f"{family}Model": entry for family, entry in ENCODERS.items()}
    return next((name for name, (kind, _, _) in (NETWORKS | encoders).items() if kind == model_type), None)


def model_type_of(architecture: str) -> str:
    return _entry(architecture)[0]


def network_class(architecture: str) -> type[Network]:
    _, module, name = _entry(architecture)
    network: type[Network] = getattr(import_module(module), name)
    return network


def _entry(architecture: str) -> tuple[str, str, str]:
    base = find_base(architecture)
    if base is None:
        raise unsupported("architecture", architecture, supported_architectures())
    family = base.removesuffix("Model")
    return ENCODERS[family] if family in ENCODERS else (NETWORKS | _HEADS)[base]


def make_network(config: ModelConfig, context: LayerContext) -> Network:
    """The network of ``config``, without weights."""
    return network_of(config)(config, context)


def network_of(config: ModelConfig) -> type[Network]:
    if config.model_impl == "octavo":
        return network_class(config.text_architecture or config.architecture)
    network: type[Network] = import_module("octavo.models.transformers_model").TransformersForCausalLM
    return network


def with_head(config: ModelConfig, architecture: str, reader: ConfigReader) -> ModelConfig:
    """The configuration of a base network for an architecture with a classification head, or with no head.

    Vectors are by default the mean of an encoder's hidden states, as in sentence-transformers, or a decoder's last one.
    Class scores come from an encoder's first hidden state, or a decoder's last one. ``classifier_pooling`` or
    ``pooling`` of an encoder's config.json takes their place.
    """
    head: Literal["sequence", "token"]
    if architecture.endswith("ForSequenceClassification"):
        head = "sequence"
    elif architecture.endswith("ForTokenClassification"):
        head = "token"
    else:
        kind: PoolingKind = _named_pooling(config, reader, "pooling") or ("mean" if config.is_encoder else "last")
        return replace(config, architecture=architecture, head="none", pooler=PoolerConfig(kind))
    labels = _labels(reader)
    kind = "last" if find_base(architecture) in NETWORKS else "cls"
    kind = _named_pooling(config, reader, "classifier_pooling") or _named_pooling(config, reader, "pooling") or kind
    # Softmax where one class is right, sigmoid where each may be.
    problem = reader.raw.get("problem_type")
    activation: PoolerActivation = "softmax"
    if problem == "regression":
        activation = "identity"
    elif len(labels) == 1 or problem == "multi_label_classification":
        activation = "sigmoid"
    pooler = PoolerConfig(kind, activation=activation)
    return replace(config, architecture=architecture, head=head, labels=labels, pooler=pooler)


#: Poolings by their names in config.json.
_POOLINGS: dict[object, PoolingKind] = {"avg": "mean", "bos": "cls", "cls": "cls", "last": "last", "mean": "mean"}


def _named_pooling(config: ModelConfig, reader: ConfigReader, key: str) -> PoolingKind | None:
    """The pooling that config.json of an encoder names under ``key``; None: it does not."""
    named = reader.raw.get(key) if config.is_encoder else None
    if named is None:
        return None
    if named not in _POOLINGS:
        raise UnsupportedModelError(
            f"{reader.file}: {key}={named!r} is not supported; supported: {', '.join(map(repr, _POOLINGS))}"
        )
    return _POOLINGS[named]


def _labels(reader: ConfigReader) -> tuple[str, ...]:
    """The names of the classes in order: id2label, else ``num_labels`` (default 2) generated ones."""
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
