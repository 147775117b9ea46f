"""Fields of requests that OpenAI's API or other engines have and this server does not obey, each with its mark.

What each mark means is said in ``field_marks``. Null stands for the default and is accepted everywhere.
"""

from __future__ import annotations

from typing import Any

from octavo.server.field_marks import hint, refused
from octavo.server.other_names import OtherNames
from octavo.server.protocol_base import RequestModel

_LABEL = "a label of the client's"
_CLIENT_CACHE = "a hint for another service's cache"
_TIER = "there is one tier of service"
_ADAPTER = "an adapter is named as the model: its name is the request's model field (/v1/models lists them)"
_EXCHANGE = "KV caches are not exchanged with other servers"
_SAMPLER = "there is no such sampler; temperature, top_k, top_p, min_p and the penalties are supported"
_CODE = "code in requests is not run"
_PENALTY = "use repetition_penalty, frequency_penalty or presence_penalty"
_LAZY = "structural_tag says where JSON begins within the answer"
_PROCESSED = "the model's own files say how images are processed"


class Labels(RequestModel):
    """Fields of every route that generates: labels and hints."""

    metadata: Any = hint(_LABEL)
    safety_identifier: Any = hint(_LABEL)
    store: Any = hint("a copy for another service's dashboard")
    service_tier: Any = hint(_TIER)
    prompt_cache_key: Any = hint(_CLIENT_CACHE)
    prompt_cache_options: Any = hint(_CLIENT_CACHE)
    prompt_cache_retention: Any = hint(_CLIENT_CACHE)
    provider_specific_fields: Any = hint("what another service says of itself")
    request_id: Any = hint("the header X-Request-Id names a request")
    rid: Any = hint("the header X-Request-Id names a request")


class EngineFields(Labels, OtherNames):
    """Fields of other engines for every route that generates."""

    spaces_between_special_tokens: Any = hint("tokens are of bytes, between which nothing is put")
    stream_reasoning: Any = hint("what the pieces of an answer add up to is the same")
    guided_decoding_backend: Any = hint("every library means the same by a grammar")
    # llama.cpp: where and how it caches.
    cache_prompt: Any = hint(_CLIENT_CACHE)
    id_slot: Any = hint(_CLIENT_CACHE)
    n_cache_reuse: Any = hint(_CLIENT_CACHE)
    # llama.cpp: a grammar that begins within the answer
    grammar_lazy: Any = refused(_LAZY, False)
    grammar_triggers: Any = refused(_LAZY, [], "")
    # Adapters
    lora_request: Any = refused(_ADAPTER)
    lora_path: Any = refused(_ADAPTER)
    lora: Any = refused(_ADAPTER, [])
    # Samplers
    logits_processors: Any = refused(_CODE, [])
    logit_processors: Any = refused(_CODE, [])
    custom_logit_processor: Any = refused(_CODE)
    custom_params: Any = refused(_CODE)
    penalize_nl: Any = refused(_PENALTY)
    repetition_detection: Any = refused(_PENALTY)
    tfs_z: Any = refused(_SAMPLER, 1)
    typical_p: Any = refused(_SAMPLER, 1)
    top_n_sigma: Any = refused(_SAMPLER, -1)
    min_keep: Any = refused(_SAMPLER, 0, 1)
    samplers: Any = refused(_SAMPLER)
    mirostat: Any = refused(_SAMPLER, 0)
    mirostat_tau: Any = refused(_SAMPLER)
    mirostat_eta: Any = refused(_SAMPLER)
    dynatemp_range: Any = refused(_SAMPLER, 0)
    dynatemp_exponent: Any = refused(_SAMPLER, 1)
    xtc_probability: Any = refused(_SAMPLER, 0)
    xtc_threshold: Any = refused(_SAMPLER)
    dry_multiplier: Any = refused(_SAMPLER, 0)
    dry_base: Any = refused(_SAMPLER)
    dry_allowed_length: Any = refused(_SAMPLER)
    dry_penalty_last_n: Any = refused(_SAMPLER)
    dry_sequence_breakers: Any = refused(_SAMPLER)
    # When the answer ends, and what is sent of it
    max_new_tokens: Any = refused("its name is max_tokens")
    n_keep: Any = refused("a prompt is never shifted out of the context", 0)
    t_max_predict_ms: Any = refused("--request-timeout limits the time of an answer", 0, -1)
    n_indent: Any = refused("the answer does not end by indentation", 0)
    stop_regex: Any = refused("stop takes texts", [])
    no_stop_trim: Any = refused("its name is include_stop_str_in_output", False)
    n_probs: Any = refused("logprobs of the OpenAI API are supported", 0)
    post_sampling_probs: Any = refused("logprobs are those of the model", False)
    logprob_start_len: Any = refused("prompt_logprobs gives those of the whole prompt", -1)
    return_tokens: Any = refused("its name is return_token_ids", False)
    return_hidden_states: Any = refused("hidden states are not sent", False)
    return_routed_experts: Any = refused("routed experts are not sent", False)
    return_progress: Any = refused("progress is not sent", False)
    timings_per_token: Any = refused("/metrics has times", False)
    response_fields: Any = refused("responses have the fields of the OpenAI API", [])
    # Prompts
    prompt_embeds: Any = refused("a prompt is text or token ids")
    image_data: Any = refused("images are parts of the messages of a chat", [])
    mm_processor_kwargs: Any = refused(_PROCESSED, {})
    media_io_kwargs: Any = refused(_PROCESSED, {})
    session_params: Any = refused("send the whole prompt: the prefix cache finds what it knows of it")
    extra_key: Any = refused("its name is cache_salt")
    thinking_forced_open: Any = refused("the option --reasoning-parser deepseek_r1 does this", False)
    # Several servers
    kv_transfer_params: Any = refused(_EXCHANGE)
    bootstrap_host: Any = refused(_EXCHANGE)
    bootstrap_port: Any = refused(_EXCHANGE)
    bootstrap_room: Any = refused(_EXCHANGE)
    data_parallel_rank: Any = refused("there is one engine", 0)


class OpenAIFields(EngineFields):
    """Fields of OpenAI's completions and chats."""

    functions: Any = refused("tools has taken its place", [])
    function_call: Any = refused("tool_choice has taken its place", "none", "auto")
    modalities: Any = refused("the model writes text only", ["text"])
    audio: Any = refused("the model writes text only")
    moderation: Any = refused("there is no moderation")
    verbosity: Any = hint("the model's template has no place for it; the messages can ask for it")
    web_search_options: Any = refused("the model does not search")
