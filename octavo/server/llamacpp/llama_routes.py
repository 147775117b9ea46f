"""Routes of llama.cpp's server, registered together, and those that tell of the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from octavo import __version__
from octavo.server.llamacpp.llama_completions import complete, infill
from octavo.server.llamacpp.llama_protocol import AppliedTemplate, ApplyTemplateRequest, LlamaCompletion, Props, Slot
from octavo.server.prompt_fields import write_conversation
from octavo.server.service import Service, service_of


def add_llama_routes(add: Callable[..., None]) -> None:
    """Registers the routes; ``add`` is given method, path, endpoint, the response's model, and ``stream``."""
    for path in ("/completion", "/completions"):
        add("POST", path, complete, LlamaCompletion | list[LlamaCompletion], stream=True)
    add("POST", "/infill", infill, LlamaCompletion, stream=True)
    add("POST", "/apply-template", apply_template, AppliedTemplate)
    add("GET", "/props", props, Props)
    add("GET", "/slots", slots, list[Slot])


async def apply_template(request: Request, body: ApplyTemplateRequest) -> AppliedTemplate:
    """A conversation as the model's template writes it."""
    service = service_of(request)
    await service.model(None)
    return AppliedTemplate(prompt=await write_conversation(service, request, body.messages, body))


async def props(request: Request) -> Props:
    """The model, its template and its context."""
    service = service_of(request)
    tokenizer, name = service.llm.tokenizer, service.model_names[0]
    return Props(
        default_generation_settings={"n_ctx": service.llm.max_model_len, "params": default_params(service)},
        total_slots=service.llm.config.max_num_seqs,
        model_path=service.shown_path(name),
        model_alias=name,
        chat_template=tokenizer.chat_templates.get("default"),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        modalities={"vision": False, "audio": False},
        build_info=f"octavo-{__version__}",
    )


def default_params(service: Service) -> dict[str, Any]:
    """What a request without parameters is sampled with, under the names of both APIs where they differ."""
    values = service.llm.inputs.sampling_in_effect
    return {
        **values,
        "repeat_penalty": values["repetition_penalty"],
        "n_predict": values.get("max_tokens", -1),  # -1: as many as the context allows
    }


async def slots(request: Request) -> list[Slot]:
    """The sequences that can run at once; those that do come first, as none has a place of its own."""
    service = service_of(request)
    running = (await service.llm.stats()).num_running
    length = service.llm.max_model_len
    count = service.llm.config.max_num_seqs
    return [Slot(id=i, n_ctx=length, is_processing=i < running) for i in range(count)]
