"""What bodies of requests and responses are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

#: Integers that the engine's messages can hold; the engine checks ranges.
Int = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Field(max_length=512)]
#: A text that is searched for in the output at every token.
Phrase = Annotated[str, Field(max_length=256)]


class RequestModel(BaseModel):
    """A request body; strict: "5" is not a number and true is not 1."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class ResponseModel(BaseModel):
    """A response or a part of one. Fields that were not set are not sent."""

    model_config = ConfigDict(protected_namespaces=())

    def encode(self) -> bytes:
        """As JSON."""
        return self.model_dump_json(exclude_unset=True).encode()
