"""What bodies of requests and responses are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from octavo.server.field_marks import REFUSED

#: Integers that the engine's messages can hold; the engine checks ranges.
Int = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Field(max_length=512)]
#: A text that is searched for in the output at every token.
Phrase = Annotated[str, Field(max_length=256)]


def _is_text(kind: str) -> str:
    if kind not in ("text", "input_text", "output_text"):
        raise PydanticCustomError(REFUSED, ": the model reads text, not {kind}", {"kind": repr(kind[:100])})
    return kind


def _is_seen(kind: str, info: ValidationInfo) -> str:
    if info.context is not None and not info.context["sees_images"]:
        raise PydanticCustomError(REFUSED, ": the model reads text, not {kind}", {"kind": repr(kind)})
    return kind


#: For the type of a part that is an image: refused where the model sees none, as the validation's context says.
SEEN = AfterValidator(_is_seen)
#: The type of a part of a content, which is a text in the words of some API.
TextKind = Annotated[str, AfterValidator(_is_text)]


class RequestModel(BaseModel):
    """A request body or a part of one; strict: "5" is not a number and true is not 1.

    Null stands for the default. What a field does that is not obeyed says its mark (``field_marks``); others than those
    of the model are refused.
    """

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), defer_build=True)


class ResponseModel(BaseModel):
    """A response or a part of one. Fields that were not set are not sent."""

    model_config = ConfigDict(protected_namespaces=(), defer_build=True)

    def encode(self) -> bytes:
        """As JSON."""
        return self.model_dump_json(exclude_unset=True).encode()
