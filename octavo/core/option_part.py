"""The base of the parts of the engine's options."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class OptionPart(BaseModel):
    """A part: unknown names are refused, and nothing changes after it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
