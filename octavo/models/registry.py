"""The registry of networks by architecture (vLLM's ModelRegistry); a network's module is imported on first use."""

from __future__ import annotations

import difflib
import re
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
    "BartForConditionalGeneration": ("bart", "octavo.models.bart", "BartForConditionalGeneration"),
    "BloomForCausalLM": ("bloom", "octavo.models.gpt", "BloomForCausalLM"),
    "CohereForCausalLM": ("cohere", "octavo.models.gpt", "CohereForCausalLM"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "octavo.models.deepseek", "DeepseekForCausalLM"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "octavo.models.deepseek", "DeepseekForCausalLM"),
    "FalconForCausalLM": ("falcon", "octavo.models.gpt", "FalconForCausalLM"),
    "GPT2LMHeadModel": ("gpt2", "octavo.models.gpt", "GPT2LMHeadModel"),
    "GPTBigCodeForCausalLM": ("gpt_bigcode", "octavo.models.gpt", "GPTBigCodeForCausalLM"),
    "GPTJForCausalLM": ("gptj", "octavo.models.gpt", "GPTJForCausalLM"),
    "GPTNeoXForCausalLM": ("gpt_neox", "octavo.models.gpt", "GPTNeoXForCausalLM"),
    "Gemma2ForCausalLM": ("gemma2", "octavo.models.gemma", "GemmaForCausalLM"),
    "Gemma3ForCausalLM": ("gemma3_text", "octavo.models.gemma", "GemmaForCausalLM"),
    "Gemma3ForConditionalGeneration": ("gemma3", "octavo.models.gemma", "Gemma3ForConditionalGeneration"),
    "GemmaForCausalLM": ("gemma", "octavo.models.gemma", "GemmaForCausalLM"),
    "Idefics3ForConditionalGeneration": ("idefics3", "octavo.models.idefics3", "Idefics3ForConditionalGeneration"),
    "LlamaForCausalLM": ("llama", "octavo.models.llama", "LlamaForCausalLM"),
    "LlavaForConditionalGeneration": ("llava", "octavo.models.llava", "LlavaForConditionalGeneration"),
    "MBartForConditionalGeneration": ("mbart", "octavo.models.bart", "MBartForConditionalGeneration"),
    "MT5ForConditionalGeneration": ("mt5", "octavo.models.t5", "MT5ForConditionalGeneration"),
    "MarianMTModel": ("marian", "octavo.models.bart", "MarianMTModel"),
    "MistralForCausalLM": ("mistral", "octavo.models.llama", "LlamaForCausalLM"),
    "MixtralForCausalLM": ("mixtral", "octavo.models.llama", "MixtureForCausalLM"),
    "OPTForCausalLM": ("opt", "octavo.models.gpt", "OPTForCausalLM"),
    "Olmo2ForCausalLM": ("olmo2", "octavo.models.llama", "Olmo2ForCausalLM"),
    "OlmoeForCausalLM": ("olmoe", "octavo.models.llama", "OlmoeForCausalLM"),
    "PegasusForConditionalGeneration": ("pegasus", "octavo.models.bart", "PegasusForConditionalGeneration"),
    "Phi3ForCausalLM": ("phi3", "octavo.models.llama", "Phi3ForCausalLM"),
    "PhiForCausalLM": ("phi", "octavo.models.gpt", "PhiForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": (
        "qwen2_5_vl",
        "octavo.models.qwen2_5_vl",
        "Qwen25VLForConditionalGeneration",
    ),
    "Qwen2ForCausalLM": ("qwen2", "octavo.models.llama", "LlamaForCausalLM"),
    "Qwen2MoeForCausalLM": ("qwen2_moe", "octavo.models.llama", "MixtureForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "octavo.models.llama", "LlamaForCausalLM"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "octavo.models.llama", "MixtureForCausalLM"),
    "SmolVLMForConditionalGeneration": ("smolvlm", "octavo.models.idefics3", "Idefics3ForConditionalGeneration"),
    "StableLmForCausalLM": ("stablelm", "octavo.models.gpt", "StableLmForCausalLM"),
    "Starcoder2ForCausalLM": ("starcoder2", "octavo.models.gpt", "Starcoder2ForCausalLM"),
    "T5ForConditionalGeneration": ("t5", "octavo.models.t5", "T5ForConditionalGeneration"),
    "UMT5ForConditionalGeneration": ("umt5", "octavo.models.t5", "UMT5ForConditionalGeneration"),
    "WhisperForConditionalGeneration": ("whisper", "octavo.models.whisper", "WhisperForConditionalGeneration"),
}

#: Draft heads, which cannot be served alone.
_HEADS = {
    "EagleLlamaForCausalLM": ("", "octavo.models.eagle", "EagleForCausalLM"),
    "LlamaForCausalLMEagle3": ("", "octavo.models.eagle", "Eagle3ForCausalLM"),
}

#: Encoders by the beginning of the architecture, which ends in one of ``_ENDINGS``.
ENCODERS = {
    "Bert": ("bert", "octavo.models.bert", "BertModel"),
    "Camembert": ("camembert", "octavo.models.bert", "RobertaModel"),
    "DistilBert": ("distilbert", "octavo.models.bert", "DistilBertModel"),
    "MPNet": ("mpnet", "octavo.models.bert", "MPNetModel"),
    "ModernBert": ("modernbert", "octavo.models.bert", "ModernBertModel"),
    "NomicBert": ("nomic_bert", "octavo.models.bert", "NomicBertModel"),
    "Roberta": ("roberta", "octavo.models.bert", "RobertaModel"),
    "XLMRoberta": ("xlm-roberta", "octavo.models.bert", "RobertaModel"),
}
#: Of architectures whose language-model head does not exist or is not used.
_ENDINGS = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "Model")

#: Models with layers that keep a state instead of keys and values.
_STATE_SPACE = re.compile(
    r"mamba|jamba|zamba|bamba|rwkv|retnet|hyena|recurrent_?gemma|qwen3_?next|qwen3_?5|kimi_?linear|falcon_?h1"
    r"|nemotron_?h|minimax|moe_?hybrid|granite_?hybrid|lfm2|plamo2"
)
_SUFFIX = re.compile(r"ForCausalLM$|ForConditionalGeneration$|LMHeadModel$|Model$|For\w+Classification$|ForMaskedLM$")


def unsupported(what: str, name: str, supported: Sequence[str]) -> UnsupportedModelError:
    """The error for a model whose ``name`` is not ``supported``, with the reason or the nearest supported name."""
    reason = ": state-space layers are not supported" if _STATE_SPACE.search(name.lower()) else ""
    stems = {_SUFFIX.sub("", other).lower(): other for other in supported}
    near = [] if reason else difflib.get_close_matches(_SUFFIX.sub("", name).lower(), stems, n=1)
    hint = f"; the nearest is {stems[near[0]]!r}" if near else ""
    return UnsupportedModelError(f"{what} {name!r} is not supported{reason}; supported: {', '.join(supported)}{hint}")


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
    """The network of ``config.architecture``, without weights."""
    return network_class(config.architecture)(config, context)


def with_head(config: ModelConfig, architecture: str, reader: ConfigReader) -> ModelConfig:
    """The configuration of a base network for an architecture with a classification head, or with no head.

    Vectors are by default the mean of an encoder's hidden states, as in sentence-transformers, or a decoder's last one.
    Class scores come from an encoder's first hidden state, unless ``classifier_pooling`` says otherwise, or a decoder's
    last one.
    """
    head: Literal["sequence", "token"]
    if architecture.endswith("ForSequenceClassification"):
        head = "sequence"
    elif architecture.endswith("ForTokenClassification"):
        head = "token"
    else:
        vectors: PoolingKind = "mean" if config.is_encoder else "last"
        return replace(config, architecture=architecture, head="none", pooler=PoolerConfig(vectors))
    labels = _labels(reader)
    pooling: PoolingKind = "last"
    if config.is_encoder:
        pooling = reader.raw.get("classifier_pooling") or "cls"
        if pooling not in ("cls", "mean"):
            raise ConfigError(f"{reader.file}: classifier_pooling must be cls or mean, not {pooling!r}")
    # Softmax where one class is right, sigmoid where each may be.
    problem = reader.raw.get("problem_type")
    activation: PoolerActivation = "softmax"
    if problem == "regression":
        activation = "identity"
    elif len(labels) == 1 or problem == "multi_label_classification":
        activation = "sigmoid"
    pooler = PoolerConfig(pooling, activation=activation)
    return replace(config, architecture=architecture, head=head, labels=labels, pooler=pooler)


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
