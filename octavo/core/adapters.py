"""What requests, plans and workers call an adapter, and what users pass to name one."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


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
