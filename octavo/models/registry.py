"""The registry of networks by architecture; a network's module is imported on first use."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from octavo.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from octavo.core.model_config import ModelConfig
    from octavo.layers.context import LayerContext
    from octavo.models.network import Network

#: Architecture, as config.json names it, to (model_type of config.json, module, class).
NETWORKS = {
    "BartForConditionalGeneration": ("bart", "octavo.models.bart", "BartForConditionalGeneration"),
    "BloomForCausalLM": ("bloom", "octavo.models.bloom", "BloomForCausalLM"),
    "CohereForCausalLM": ("cohere", "octavo.models.cohere", "CohereForCausalLM"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "octavo.models.deepseek", "DeepseekForCausalLM"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "octavo.models.deepseek", "DeepseekForCausalLM"),
    "FalconForCausalLM": ("falcon", "octavo.models.falcon", "FalconForCausalLM"),
    "GPT2LMHeadModel": ("gpt2", "octavo.models.gpt2", "GPT2LMHeadModel"),
    "GPTBigCodeForCausalLM": ("gpt_bigcode", "octavo.models.gpt2", "GPTBigCodeForCausalLM"),
    "GPTJForCausalLM": ("gptj", "octavo.models.gptj", "GPTJForCausalLM"),
    "GPTNeoXForCausalLM": ("gpt_neox", "octavo.models.gpt_neox", "GPTNeoXForCausalLM"),
    "Gemma2ForCausalLM": ("gemma2", "octavo.models.gemma", "GemmaForCausalLM"),
    "Gemma3ForCausalLM": ("gemma3_text", "octavo.models.gemma", "GemmaForCausalLM"),
    "Gemma3ForConditionalGeneration": ("gemma3", "octavo.models.gemma3", "Gemma3ForConditionalGeneration"),
    "GemmaForCausalLM": ("gemma", "octavo.models.gemma", "GemmaForCausalLM"),
    "Idefics3ForConditionalGeneration": (
        "idefics3",
        "octavo.models.idefics3",
        "Idefics3ForConditionalGeneration",
    ),
    "LlamaForCausalLM": ("llama", "octavo.models.llama", "LlamaForCausalLM"),
    "LlavaForConditionalGeneration": ("llava", "octavo.models.llava", "LlavaForConditionalGeneration"),
    "MBartForConditionalGeneration": ("mbart", "octavo.models.bart", "MBartForConditionalGeneration"),
    "MT5ForConditionalGeneration": ("mt5", "octavo.models.t5", "MT5ForConditionalGeneration"),
    "MarianMTModel": ("marian", "octavo.models.marian", "MarianMTModel"),
    "MistralForCausalLM": ("mistral", "octavo.models.llama", "LlamaForCausalLM"),
    "MixtralForCausalLM": ("mixtral", "octavo.models.mixtures", "MixtureForCausalLM"),
    "OPTForCausalLM": ("opt", "octavo.models.opt", "OPTForCausalLM"),
    "Olmo2ForCausalLM": ("olmo2", "octavo.models.olmo2", "Olmo2ForCausalLM"),
    "OlmoeForCausalLM": ("olmoe", "octavo.models.mixtures", "OlmoeForCausalLM"),
    "PegasusForConditionalGeneration": ("pegasus", "octavo.models.marian", "PegasusForConditionalGeneration"),
    "Phi3ForCausalLM": ("phi3", "octavo.models.phi3", "Phi3ForCausalLM"),
    "PhiForCausalLM": ("phi", "octavo.models.phi", "PhiForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": (
        "qwen2_5_vl",
        "octavo.models.qwen2_5_vl",
        "Qwen25VLForConditionalGeneration",
    ),
    "Qwen2ForCausalLM": ("qwen2", "octavo.models.llama", "LlamaForCausalLM"),
    "Qwen2MoeForCausalLM": ("qwen2_moe", "octavo.models.mixtures", "MixtureForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "octavo.models.llama", "LlamaForCausalLM"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "octavo.models.mixtures", "MixtureForCausalLM"),
    "SmolVLMForConditionalGeneration": ("smolvlm", "octavo.models.idefics3", "Idefics3ForConditionalGeneration"),
    "StableLmForCausalLM": ("stablelm", "octavo.models.stablelm", "StableLmForCausalLM"),
    "Starcoder2ForCausalLM": ("starcoder2", "octavo.models.starcoder2", "Starcoder2ForCausalLM"),
    "T5ForConditionalGeneration": ("t5", "octavo.models.t5", "T5ForConditionalGeneration"),
    "UMT5ForConditionalGeneration": ("umt5", "octavo.models.t5", "UMT5ForConditionalGeneration"),
    "WhisperForConditionalGeneration": ("whisper", "octavo.models.whisper", "WhisperForConditionalGeneration"),
}

#: Networks that draft for another one and cannot be served alone.
_HEADS = {
    "EagleLlamaForCausalLM": ("", "octavo.models.eagle", "EagleForCausalLM"),
    "LlamaForCausalLMEagle3": ("", "octavo.models.eagle", "Eagle3ForCausalLM"),
}

#: Encoders by the beginning of their architectures' names, which end in one of ``_ENDINGS``.
ENCODERS = {
    "Bert": ("bert", "octavo.models.bert", "BertModel"),
    "Camembert": ("camembert", "octavo.models.bert", "RobertaModel"),
    "DistilBert": ("distilbert", "octavo.models.bert", "DistilBertModel"),
    "MPNet": ("mpnet", "octavo.models.mpnet", "MPNetModel"),
    "ModernBert": ("modernbert", "octavo.models.modernbert", "ModernBertModel"),
    "NomicBert": ("nomic_bert", "octavo.models.nomic_bert", "NomicBertModel"),
    "Roberta": ("roberta", "octavo.models.bert", "RobertaModel"),
    "XLMRoberta": ("xlm-roberta", "octavo.models.bert", "RobertaModel"),
}
#: What follows the name of a family in an architecture without a language-model head, or whose head is not used.
_ENDINGS = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "Model")

#: Names of models with layers that keep a state instead of keys and values, alone or between attention layers.
_STATE_SPACE = re.compile(
    r"mamba|jamba|zamba|bamba|rwkv|retnet|hyena|recurrent_?gemma|qwen3_?next|qwen3_?5|kimi_?linear|falcon_?h1"
    r"|nemotron_?h|minimax|moe_?hybrid|granite_?hybrid|lfm2|plamo2"
)
_SUFFIX = re.compile(r"ForCausalLM$|ForConditionalGeneration$|LMHeadModel$|Model$|For\w+Classification$|ForMaskedLM$")


def unsupported(what: str, name: str, supported: Sequence[str]) -> UnsupportedModelError:
    """The error for a kind of model that is not among ``supported``, with the reason or the nearest one if known."""
    reason = ": state-space layers are not supported" if _STATE_SPACE.search(name.lower()) else ""
    known = {_SUFFIX.sub("", other).lower(): other for other in supported}
    near = [] if reason else difflib.get_close_matches(_SUFFIX.sub("", name).lower(), known, n=1)
    hint = f"; the nearest is {known[near[0]]!r}" if near else ""
    return UnsupportedModelError(f"{what} {name!r} is not supported{reason}; supported: {', '.join(supported)}{hint}")


def supported_architectures() -> list[str]:
    """The architectures that can be served, sorted; ``find_base`` says which others are, too."""
    return sorted([*NETWORKS, *(f"{family}Model" for family in ENCODERS)])


def find_base(architecture: str) -> str | None:
    """The architecture whose network this one has, with another head or none; None: it is not supported.

    So any decoder may have a classification head in place of that of its language model.
    """
    if architecture in NETWORKS or architecture in _HEADS:
        return architecture
    ending = next((ending for ending in _ENDINGS if architecture.endswith(ending)), None)
    family = architecture.removesuffix(ending) if ending else ""
    if family in ENCODERS:
        return f"{family}Model"
    # The text part of a model that takes images, too, has a name of its own only where it has no head for text.
    names = (family, family.removesuffix("Text"))
    decoders = (f"{name}{head}" for name in names for head in ("ForCausalLM", "LMHeadModel"))
    return next((name for name in decoders if ending != "ForMaskedLM" and name in NETWORKS), None)


def architecture_of_type(model_type: str) -> str | None:
    """The architecture for a config.json that has this model_type and no architectures."""
    decoder = next((name for name, (known, _, _) in NETWORKS.items() if known == model_type), None)
    return decoder or next(
        (f"{family}Model" for family, (known, _, _) in ENCODERS.items() if known == model_type), None
    )


def model_type_of(architecture: str) -> str:
    """The model_type of an architecture's config.json.

    Raises:
        UnsupportedModelError: there is no such architecture.
    """
    return _entry(architecture)[0]


def network_class(architecture: str) -> type[Network]:
    """The network class of an architecture.

    Raises:
        UnsupportedModelError: there is none.
    """
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
    """The network of ``config.architecture``, without weights.

    Raises:
        UnsupportedModelError: there is no network for the architecture.
        ConfigError: the configuration contradicts itself, or cannot be divided among the ranks or stages.
    """
    return network_class(config.architecture)(config, context)
