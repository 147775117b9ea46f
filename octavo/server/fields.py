"""Fields of requests that OpenAI or other engines know: those that change nothing here, and those that are refused.

A field that would change the answer is never ignored: it is a field of ``protocol``, or it is refused by its name. Null
stands for the default and is accepted everywhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.server.api_errors import ApiError, unsupported
from octavo.server.protocol import ChatCompletionRequest, CompletionRequest
from octavo.server.protocol_base import RequestModel
from octavo.server.service import Service

#: Accepted with any value: the answer is the same.
HARMLESS = frozenset(
    {
        # OpenAI: hints for its caches, labels and copies for its dashboard.
        "metadata", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "store",
        # Ids: X-Request-Id names a request here.
        "request_id", "rid",
        # Without effect on byte-level tokens, and on what the pieces of an answer add up to.
        "spaces_between_special_tokens", "stream_reasoning",
        # Which library follows a grammar: all mean the same by it.
        "guided_decoding_backend",
        # llama.cpp: where and how it caches.
        "cache_prompt", "id_slot", "n_cache_reuse",
    }
)  # fmt: skip


class Unsupported(NamedTuple):
    """A field that is refused, but for values that mean what happens anyway."""

    reason: str
    accepted: tuple[Any, ...] = ()


_LAZY = "structural_tag says where JSON begins within the answer"
_ADAPTER = "an adapter is named as the model: its name is the request's model field (/v1/models lists them)"
_EXCHANGE = "KV caches are not exchanged with other servers"
_SAMPLER = "there is no such sampler; temperature, top_k, top_p, min_p and the penalties are supported"
_CODE = "code in requests is not run"
_PENALTY = "use repetition_penalty, frequency_penalty or presence_penalty"

UNSUPPORTED = {
    # OpenAI
    "functions": Unsupported("tools has taken its place", ([],)),
    "function_call": Unsupported("tool_choice has taken its place", ("none", "auto")),
    "modalities": Unsupported("the model writes text only", (["text"],)),
    "audio": Unsupported("the model writes text only"),
    "moderation": Unsupported("there is no moderation"),
    "verbosity": Unsupported("ask for it in the messages", ("medium",)),
    "web_search_options": Unsupported("the model does not search"),
    "service_tier": Unsupported("there is one tier", ("auto", "default")),
    "suffix": Unsupported("gaps are filled by /v1/completions", ("",)),
    "top_logprobs": Unsupported("on this route logprobs is their number"),
    "max_completion_tokens": Unsupported("on this route its name is max_tokens"),
    # llama.cpp: a grammar that begins within the answer
    "grammar_lazy": Unsupported(_LAZY, (False,)),
    "grammar_triggers": Unsupported(_LAZY, ([], "")),
    # Adapters
    "lora_request": Unsupported(_ADAPTER),
    "lora_path": Unsupported(_ADAPTER),
    "lora": Unsupported(_ADAPTER, ([],)),
    # Samplers
    "logits_processors": Unsupported(_CODE, ([],)),
    "logit_processors": Unsupported(_CODE, ([],)),
    "custom_logit_processor": Unsupported(_CODE),
    "custom_params": Unsupported(_CODE),
    "repeat_penalty": Unsupported(_PENALTY, (1,)),
    "repeat_last_n": Unsupported("repetition_penalty looks at the whole prompt and output", (-1,)),
    "penalize_nl": Unsupported(_PENALTY),
    "repetition_detection": Unsupported(_PENALTY),
    "tfs_z": Unsupported(_SAMPLER, (1,)),
    "typical_p": Unsupported(_SAMPLER, (1,)),
    "top_n_sigma": Unsupported(_SAMPLER, (-1,)),
    "min_keep": Unsupported(_SAMPLER, (0, 1)),
    "samplers": Unsupported(_SAMPLER),
    "mirostat": Unsupported(_SAMPLER, (0,)),
    "mirostat_tau": Unsupported(_SAMPLER),
    "mirostat_eta": Unsupported(_SAMPLER),
    "dynatemp_range": Unsupported(_SAMPLER, (0,)),
    "dynatemp_exponent": Unsupported(_SAMPLER, (1,)),
    "xtc_probability": Unsupported(_SAMPLER, (0,)),
    "xtc_threshold": Unsupported(_SAMPLER),
    "dry_multiplier": Unsupported(_SAMPLER, (0,)),
    "dry_base": Unsupported(_SAMPLER),
    "dry_allowed_length": Unsupported(_SAMPLER),
    "dry_penalty_last_n": Unsupported(_SAMPLER),
    "dry_sequence_breakers": Unsupported(_SAMPLER),
    # When the answer ends, and what is sent of it
    "n_predict": Unsupported("its name is max_tokens"),
    "max_new_tokens": Unsupported("its name is max_tokens"),
    "n_keep": Unsupported("a prompt is never shifted out of the context", (0,)),
    "t_max_predict_ms": Unsupported("--request-timeout limits the time of an answer", (0, -1)),
    "n_indent": Unsupported("the answer does not end by indentation", (0,)),
    "stop_regex": Unsupported("stop takes texts", ([],)),
    "no_stop_trim": Unsupported("its name is include_stop_str_in_output", (False,)),
    "n_probs": Unsupported("logprobs of the OpenAI API are supported", (0,)),
    "post_sampling_probs": Unsupported("logprobs are those of the model", (False,)),
    "logprob_start_len": Unsupported("prompt_logprobs gives those of the whole prompt", (-1,)),
    "logprob_token_ids": Unsupported("logprobs gives those of the likeliest tokens"),
    "return_tokens_as_token_ids": Unsupported("logprobs name tokens by their text", (False,)),
    "return_token_ids": Unsupported("/tokenize gives token ids", (False,)),
    "return_tokens": Unsupported("/tokenize gives token ids", (False,)),
    "return_hidden_states": Unsupported("hidden states are not sent", (False,)),
    "return_routed_experts": Unsupported("routed experts are not sent", (False,)),
    "return_progress": Unsupported("progress is not sent", (False,)),
    "timings_per_token": Unsupported("/metrics has times", (False,)),
    "response_fields": Unsupported("responses have the fields of the OpenAI API", ([],)),
    "echo": Unsupported("the prompt is not repeated in a chat", (False,)),
    # Prompts
    "prompt_embeds": Unsupported("a prompt is text or token ids"),
    "image_data": Unsupported("the model reads text only", ([],)),
    "mm_processor_kwargs": Unsupported("the model reads text only", ({},)),
    "media_io_kwargs": Unsupported("the model reads text only", ({},)),
    "session_params": Unsupported("send the whole prompt: the prefix cache finds what it knows of it"),
    "extra_key": Unsupported("its name is cache_salt"),
    # Reasoning
    "thinking_forced_open": Unsupported("the option --reasoning-parser deepseek_r1 does this", (False,)),
    "thinking_token_budget": Unsupported("max_tokens limits reasoning and answer together"),
    # Several servers
    "kv_transfer_params": Unsupported(_EXCHANGE),
    "bootstrap_host": Unsupported(_EXCHANGE),
    "bootstrap_port": Unsupported(_EXCHANGE),
    "bootstrap_room": Unsupported(_EXCHANGE),
    "data_parallel_rank": Unsupported("there is one engine", (0,)),
}  # fmt: skip

_ROUTES: dict[type[RequestModel], str] = {
    CompletionRequest: "/v1/completions",
    ChatCompletionRequest: "/v1/chat/completions",
}


def refuse_unsupported(body: RequestModel, table: Mapping[str, Unsupported] = UNSUPPORTED) -> None:
    """Refuses fields that are known and would change the answer: those of the route's ``table``.

    Raises:
        ApiError: 400, naming the field, what is wrong with it, and the values that are accepted.
    """
    for name, value in _extra(body).items():
        known = table.get(name)
        if known is not None and value not in known.accepted:
            values = " or ".join(repr(accepted) for accepted in known.accepted if accepted not in ("", [], {}))
            besides = f", except {values}" if values else ""
            raise unsupported(name, f"{name} is not supported{besides}: {known.reason}")


def refuse_unknown(
    service: Service,
    body: RequestModel,
    harmless: frozenset[str] = HARMLESS,
    table: Mapping[str, Unsupported] = UNSUPPORTED,
) -> None:
    """Refuses fields that are unknown here, as OpenAI's API does; with ``unknown_fields: ignore`` it logs them once.

    Args:
        service: the service.
        body: the request.
        harmless: accepted with any value.
        table: known ones, see ``refuse_unsupported``.

    Raises:
        ApiError: 400, naming the field and the nearest one that exists.
    """
    for name in _extra(body):
        if name in harmless or name in table:
            continue
        if service.options.unknown_fields == "ignore":
            service.note_unknown(name)
            continue
        route = next((route for kind, route in _ROUTES.items() if name in kind.model_fields), None)
        near = difflib.get_close_matches(name, type(body).model_fields, n=1, cutoff=0.6)
        hint = f"it is of {route}" if route else f"did you mean {near[0]}?" if near else "/docs lists all fields"
        raise ApiError(400, f"unknown field {name[:100]!r}; {hint}", param=name[:100], code="unknown_parameter")


def _extra(body: RequestModel) -> Mapping[str, Any]:
    """Fields with a value that the route does not define."""
    return {name: value for name, value in (body.model_extra or {}).items() if value is not None}
