"""Options and keywords about which Octavo has no choice, vLLM's and former ones: accepted if they ask for what it does.

All sources of options know them (keywords, YAML, variables, flags, which help leaves out). They change nothing: a value
that would is refused with the reason. An entry goes when its option becomes one of ``EngineConfig``, or its keyword one
of the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.core.errors import ConfigError, InvalidRequestError


class ForeignOption(NamedTuple):
    """The values that are accepted (``ANY``: all of them), and why no others are."""

    accepted: tuple[object, ...]
    reason: str = ""

    @property
    def boolean(self) -> bool:
        """Whether it is on or off, and so a flag without a value."""
        return isinstance(next(iter(self.accepted), None), bool)


#: It decides nothing here, whatever it is.
ANY = ForeignOption(())
ON_OR_OFF = ForeignOption((False, True))

_ONE_WORKER = "workers divide matrices and layers, nothing else"
_PROCESSED = "a model's own files say how images are processed"
_GENERATES = "a model does all that its network has a head for, or what the option task says"
_POOLING = "the model's files say how it pools, and PoolingParams what a request wants (docs/embeddings.md)"
_SPECULATION = "drafts are asked for with speculative_config"
_FROM_CHECKPOINT = "it is read from the checkpoint's config.json"
_NO_TRANSFER = "the KV cache is not shared between engines"

FOREIGN_OPTIONS: dict[str, ForeignOption] = {
    # The model and its files
    "trust_remote_code": ON_OR_OFF,  # a permission, of which no use is made
    "tokenizer_mode": ForeignOption(
        ("auto", "hf"), "tokenizers are read from tokenizer.json, or from the files of their family"
    ),
    "tokenizer_revision": ForeignOption((None,), "the tokenizer has the model's revision, or is a folder (tokenizer)"),
    "code_revision": ForeignOption((None,), "no code of a checkpoint is run"),
    "hf_token": ForeignOption((None,), "the hub's token is read from the variable HF_TOKEN"),
    "hf_config_path": ForeignOption((None,), _FROM_CHECKPOINT),
    "config_format": ForeignOption(("auto", "hf"), "configurations are read from config.json"),
    "rope_scaling": ForeignOption((None, {}), _FROM_CHECKPOINT),
    "rope_theta": ForeignOption((None,), _FROM_CHECKPOINT),
    "disable_sliding_window": ForeignOption((False,), _FROM_CHECKPOINT),
    "download_dir": ForeignOption((None,), "hub models are under HF_HOME, others under OCTAVO_CACHE"),
    "ignore_patterns": ForeignOption((None, []), "only the files that are needed are fetched"),
    "model_loader_extra_config": ForeignOption((None, {}), "loading has no further options"),
    "model_impl": ForeignOption(("auto",), "the networks are Octavo's own"),
    "use_tqdm_on_load": ON_OR_OFF,
    "runner": ForeignOption(("auto", "generate", "pooling"), _GENERATES),
    "convert": ForeignOption(("auto", "none", "embed"), _GENERATES),
    "pooler_config": ForeignOption((None,), _POOLING),
    "override_pooler_config": ForeignOption((None,), _POOLING),
    "mm_processor_kwargs": ForeignOption((None, {}), _PROCESSED),
    "allowed_local_media_path": ForeignOption(("", None), "no files of the server's machine are read for clients"),
    "disable_mm_preprocessor_cache": ON_OR_OFF,
    "disable_chunked_mm_input": ON_OR_OFF,
    "mm_processor_cache_gb": ANY,
    "skip_mm_profiling": ON_OR_OFF,
    "language_model_only": ON_OR_OFF,
    "enable_prompt_embeds": ForeignOption((False,), "prompts are text or token ids"),
    "override_generation_config": ForeignOption(
        (None, {}), "generation_config names a folder with defaults, and requests bring parameters of their own"
    ),
    "logprobs_mode": ForeignOption(
        ("raw_logprobs",), "logprobs are the model's own, before penalties, temperature and filters"
    ),
    "enable_trace_replay": ForeignOption((False,), "prompt_logprobs scores an answer that is known"),
    "screen_lm_head": ForeignOption((False,), "the language-model head has no copy in fewer bits any more"),
    # Workers
    "decode_context_parallel_size": ForeignOption((1,), _ONE_WORKER),
    "enable_expert_parallel": ON_OR_OFF,  # experts are divided as other matrices are, to the same end
    "worker_extension_cls": ForeignOption(("", None), "collective_rpc calls functions with each worker"),
    "max_parallel_loading_workers": ForeignOption((None,), _ONE_WORKER),
    "worker_cls": ForeignOption(("auto",), "there are no other workers"),
    "disable_custom_all_reduce": ON_OR_OFF,
    "ray_workers_use_nsight": ForeignOption((False,), _ONE_WORKER),
    # Memory and graphs
    "cpu_offload_gb": ForeignOption((0,), "the weights stay on the device that computes"),
    "kv_transfer_config": ForeignOption((None,), _NO_TRANSFER),
    "kv_events_config": ForeignOption((None,), _NO_TRANSFER),
    "disable_hybrid_kv_cache_manager": ON_OR_OFF,
    "calculate_kv_scales": ON_OR_OFF,  # an 8-bit KV cache always has scales of its own tokens
    "prefix_caching_hash_algo": ANY,
    "use_v2_block_manager": ON_OR_OFF,
    "enable_sleep_mode": ON_OR_OFF,  # sleep() needs no preparation
    "compilation_config": ForeignOption((None, {}, 0), "networks are not compiled (decode steps are captured on GPUs)"),
    "optimization_level": ANY,
    "attention_backend": ANY,  # the device says which kernels there are
    "enable_flashinfer_autotune": ON_OR_OFF,
    "max_seq_len_to_capture": ANY,  # graphs are captured by batch size, for sequences of every length
    "max_context_len_to_capture": ANY,
    # Steps
    "num_scheduler_steps": ForeignOption((1,), "each step is scheduled; async_scheduling plans one ahead"),
    "multi_step_stream_outputs": ON_OR_OFF,
    "num_lookahead_slots": ForeignOption((0,), _SPECULATION),
    "max_long_partial_prefills": ForeignOption((1,), "one long prompt is computed at once"),
    "disable_async_output_proc": ON_OR_OFF,
    "disable_cascade_attn": ON_OR_OFF,
    "scheduler_cls": ForeignOption((None,), "an order of one's own is given as scheduling_policy (module:Class)"),
    "speculative_model": ForeignOption((None,), _SPECULATION),
    "num_speculative_tokens": ForeignOption((None,), _SPECULATION),
    "lora_dtype": ANY,
    "fully_sharded_loras": ON_OR_OFF,
    "guided_decoding_backend": ANY,  # all mean the same by a grammar
    "reasoning_config": ForeignOption(
        (None, {}), "marks of reasoning are those that the chat template speaks of; --reasoning-parser names others"
    ),
    "enable_auto_tool_choice": ON_OR_OFF,  # a request may always leave the choice to the model
    "logits_processor_pattern": ForeignOption((None,), "name them one by one (logits_processors, module:Class)"),
    # Logs
    "disable_log_stats": ON_OR_OFF,
    "disable_log_requests": ON_OR_OFF,
    "enable_log_requests": ON_OR_OFF,
    "collect_detailed_traces": ForeignOption((None,), "traces have one level of detail"),
    "additional_config": ForeignOption((None, {}), "there is nothing that it would configure"),
}

#: Keywords of ``LLM.generate``, ``LLM.chat`` and ``LLM.beam_search``.
FOREIGN_KEYWORDS: dict[str, ForeignOption] = {
    "guided_options_request": ForeignOption((None,), "its name is SamplingParams.structured_outputs"),
    "tokenization_kwargs": ForeignOption((None, {}), "SamplingParams.truncate_prompt_tokens shortens prompts"),
    "prompt_token_ids": ForeignOption((None,), "a prompt is TokensPrompt(prompt_token_ids=...) or the list itself"),
    "mm_processor_kwargs": ForeignOption((None, {}), _PROCESSED),
    "chat_template_content_format": ForeignOption(("auto", "string"), "a template gets parts where it reads them"),
    "concurrency_limit": ANY,  # the scheduler runs as many as fit
}

#: Other names of options, which mean the same: vLLM's, and former ones.
OTHER_NAMES = {
    "cudagraph_capture_sizes": "graph_capture",
    "status_interval": "log_stats_interval",
}

#: Other names of an option's values.
ALIASES = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "scheduling_policy": {"priority": "static"},
}


def own_value(name: str, value: Any) -> Any:
    """The value of an option by the name that it has here: ``float16`` for ``half`` and for ``torch.float16``."""
    if type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    return ALIASES.get(name, {}).get(value, value) if isinstance(value, str) else value


def own_name(name: str) -> str:
    """The name that an option has here."""
    return OTHER_NAMES.get(name, name)


def own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one source by the names that they have here.

    Raises:
        ConfigError: an option is given by two of its names.
    """
    by_name: dict[str, Any] = {}
    for name, value in options.items():
        if own_name(name) in by_name:
            raise ConfigError(f"option {own_name(name)!r} is given twice, by different names")
        by_name[own_name(name)] = value
    return by_name


def own_options(options: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The options without those of ``FOREIGN_OPTIONS``, with values by their names here.

    Args:
        options: by name.
        sources: option -> where its value came from, for messages.

    Raises:
        ConfigError: one of ``FOREIGN_OPTIONS`` has a value that is not accepted.
    """
    values = {}
    for name, value in options.items():
        if name in FOREIGN_OPTIONS:
            refusal = _refusal(name, FOREIGN_OPTIONS[name], value)
            if refusal is not None:
                raise ConfigError(refusal if sources is None else f"{refusal} (from {sources[name]})")
        else:
            values[name] = own_value(name, value)
    return values


def check_keywords(method: str, keywords: Mapping[str, Any]) -> None:
    """Checks the further keywords of a method.

    Raises:
        InvalidRequestError: one of ``FOREIGN_KEYWORDS`` has a value that is not accepted.
        TypeError: there is another one.
    """
    for name, value in keywords.items():
        if name not in FOREIGN_KEYWORDS:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        refusal = _refusal(name, FOREIGN_KEYWORDS[name], value)
        if refusal is not None:
            raise InvalidRequestError(refusal)


def _refusal(name: str, option: ForeignOption, value: object) -> str | None:
    """Why the value is not accepted, or None if it is."""
    accepted = option.accepted
    if value is None or not accepted:  # None: as if it were not given
        return None
    # bool is a kind of int: True is no number here.
    if any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in accepted):
        return None
    *first, last = map(repr, accepted)
    allowed = f"{', '.join(first)} or {last}" if first else last
    return f"{name} must be {allowed}, not {value!r}" + (f": {option.reason}" if option.reason else "")
