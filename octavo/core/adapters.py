"""What requests, plans and workers call an adapter, and what users pass to name one."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from octavo.core.errors import AdapterError


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that was checked: all that scheduler and workers need to load it."""

    #: Digest of its files' content: what the contents of blocks depend on. Two names of the same content have one key.
    key: str
    name: str
    #: Its folder, or its GGUF file.
    path: str
    #: Largest rank of its low-rank products; 0 of a prompt adapter, which has none and takes no slot.
    rank: int
    #: Virtual tokens before the prompt, of prompt and prefix tuning.
    num_virtual_tokens: int = 0


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its name and place: ``LoRARequest("sql", 1, "path/of/the/adapter")``."""

    lora_name: str
    #: At least 1, one number for each name.
    lora_int_id: int
    #: A folder of PEFT, or a GGUF file. None: one that is loaded already.
    lora_path: str | None = None


class PromptAdapterRequest(LoRARequest):
    """A prompt adapter by its name and place, under the names of vLLM.

    >>> PromptAdapterRequest("tone", 1, "path/of/the/adapter", prompt_adapter_num_virtual_tokens=20)

    A ``LoRARequest`` with the same values means the same, but does not say how many virtual tokens are expected.
    """

    def __init__(
        self,
        prompt_adapter_name: str,
        prompt_adapter_id: int,
        prompt_adapter_local_path: str | None = None,
        prompt_adapter_num_virtual_tokens: int | None = None,
    ) -> None:
        super().__init__(prompt_adapter_name, prompt_adapter_id, prompt_adapter_local_path)
        object.__setattr__(self, "num_virtual_tokens", prompt_adapter_num_virtual_tokens)

    #: How many virtual tokens the adapter must have; None: any number.
    num_virtual_tokens: int | None


def one_adapter(lora: LoRARequest | None, prompt: PromptAdapterRequest | None) -> LoRARequest | None:
    """The adapter of a request, which has at most one.

    Raises:
        AdapterError: it has two, or ``prompt`` is of another type.
    """
    if prompt is None:
        return lora
    if not isinstance(prompt, PromptAdapterRequest):
        raise AdapterError(f"prompt_adapter_request must be a PromptAdapterRequest, not {prompt!r:.300}")
    if lora is not None:
        raise AdapterError("a request has one adapter: either lora_request or prompt_adapter_request, not both")
    return prompt
