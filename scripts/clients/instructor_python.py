"""instructor: an object by tools and by JSON schema."""
# CONFIGURE `OpenAI` with `base_url="http://HOST:8000/v1"`, `api_key="none"`

from __future__ import annotations

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Colour(BaseModel):
    """A colour."""

    hue: int = Field(ge=0)


client = OpenAI(base_url=os.environ["URL"] + "/v1", api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    patched = instructor.from_openai(client, mode=mode)
    messages = [{"role": "user", "content": "Name a hue."}]
    found = patched.chat.completions.create(
        model=os.environ["MODEL"], response_model=Colour, messages=messages, max_tokens=256, max_retries=3
    )
    assert isinstance(found, Colour)
print("WORKS objects by tools and by JSON schema")
