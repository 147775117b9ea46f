"""What clients may send: the fields of the OpenAI API and the extras of this field, with what each of them means.

Unknown fields are ignored, and named once in the log: clients are written for servers that know more than this one, and
send what does not exist here yet (``store``, ``safety_identifier``, ...). What would change the answer and is not
supported is a field here, and refused in words. ``null`` means the default, as clients spell out what they leave open.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

#: What fits the messages to the engine; whether a number makes sense is judged there, in its own words.
Int = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Field(max_length=512)]
#: A text that every token is compared with.
Phrase = Annotated[str, Field(max_length=256)]


class RequestModel(BaseModel):
    """A request body; strict, so that "5" is no number and true is not 1."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(RequestModel):
    """How a stream is to be sent."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the number of tokens used.")


class GenerationRequest(RequestModel):
    """What completions and chat have in common."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    max_tokens: Int | None = Field(None, description="Most tokens to generate.")
    temperature: float | None = Field(None, description="0 always takes the most likely token (default 1).")
    top_p: float | None = Field(None, description="Keep the smallest set of tokens that reaches this probability.")
    n: Int | None = Field(None, description="Completions of each prompt (default 1).")
    best_of: Int | None = Field(None, description="Sample so many, return the n likeliest; with beam search its width.")
    stop: Phrase | list[Phrase] | None = Field(None, description="Texts that end the answer; they are not part of it.")
    seed: Seed | None = Field(None, description="Fixes the random numbers.")
    presence_penalty: float | None = Field(None, description="Subtracted once from logits of generated tokens.")
    frequency_penalty: float | None = Field(None, description="Subtracted for each time a token was generated.")
    logit_bias: dict[str, float] | None = Field(None, description="Token id to what is added to its logit.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted, without effect.")
    # Beyond OpenAI:
    top_k: Int | None = Field(None, description="Keep this many of the most likely tokens; 0 or -1 is off.")
    min_p: float | None = Field(None, description="Drop tokens below this share of the likeliest one's probability.")
    repetition_penalty: float | None = Field(None, description="Divides logits of tokens in prompt or output.")
    stop_token_ids: list[Int] | None = Field(None, description="Token ids that end the answer.")
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop text in the answer.")
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-sequence token.")
    min_tokens: Int | None = Field(None, description="No end before this many tokens.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text (default true).")
    bad_words: list[Phrase] | None = Field(None, description="Words that are never generated.")
    allowed_token_ids: list[Int] | None = Field(None, description="Only these tokens are generated.")
    prompt_logprobs: Int | None = Field(None, description="Logprobs of the prompt's tokens, with so many likeliest.")
    use_beam_search: bool | None = Field(None, description="Beam search of width best_of (or n).")
    length_penalty: float | None = Field(None, description="Beam search: above 0 favours long answers (default 1).")
    early_stopping: bool | Literal["never"] | None = Field(None, description="Beam search: when to end.")
    priority: Int | None = Field(None, description="Lower goes first, under the policies that look at it.")
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Requests with different salts share no cached prefix."
    )
    # Refused, until they work:
    response_format: dict[str, Any] | None = Field(None, description='Only {"type": "text"} is supported.')

    def unsupported(self) -> dict[str, str]:
        """Fields that were given, would change the answer and cannot: their names, and why they are refused."""
        kind = (self.response_format or {"type": "text"}).get("type")
        if kind != "text":
            return {"response_format": "response_format is not supported yet, except {'type': 'text'}"}
        return {}


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    prompt: str | list[str] | list[Int] | list[list[Int]] = Field(
        description="A text, token ids, or a list of either; each is completed."
    )
    logprobs: Int | None = Field(None, description="Logprobs of so many likeliest tokens at each position.")
    echo: bool | None = Field(None, description="Put the prompt before its completion.")
    suffix: str | None = Field(None, description="Not supported.")
    add_special_tokens: bool | None = Field(None, description="Put the model's own tokens around a text (true).")

    def unsupported(self) -> dict[str, str]:
        """See ``GenerationRequest``."""
        if self.suffix:
            return {"suffix": "suffix is not supported: the model continues texts, it does not fill gaps"}
        return super().unsupported()


class ChatMessage(RequestModel):
    """One message of a conversation."""

    role: Name = Field(description="system, developer, user, assistant or tool, as the model's template knows them.")
    content: str | list[dict[str, Any]] | None = Field(None, description='Text, or parts {"type": "text", "text": ..}.')
    name: str | None = None


class ChatCompletionRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: list[ChatMessage] = Field(description="The conversation.")
    max_completion_tokens: Int | None = Field(None, description="Most tokens to generate; wins over max_tokens.")
    logprobs: bool | None = Field(None, description="Send logprobs.")
    top_logprobs: Int | None = Field(None, description="With so many likeliest tokens at each position.")
    add_generation_prompt: bool | None = Field(None, description="Begin the assistant's answer (default true).")
    # Refused, until they work:
    tools: list[dict[str, Any]] | None = Field(None, description="Not supported yet.")
    tool_choice: str | dict[str, Any] | None = Field(None, description='Not supported yet, except "none" and "auto".')
    functions: list[dict[str, Any]] | None = Field(None, description="Not supported.")
    function_call: str | dict[str, Any] | None = Field(None, description='Not supported, except "none" and "auto".')
    modalities: list[str] | None = Field(None, description='Only ["text"] is supported.')
    audio: dict[str, Any] | None = Field(None, description="Not supported.")

    def unsupported(self) -> dict[str, str]:
        """See ``GenerationRequest``."""
        found = super().unsupported()
        for name in ("tools", "functions", "audio"):
            if getattr(self, name):
                found[name] = f"{name} is not supported{' yet' if name == 'tools' else ''}"
        for name in ("tool_choice", "function_call"):
            if getattr(self, name) not in (None, "none", "auto"):
                found[name] = f"{name} must be 'none' or 'auto': tools are not supported yet"
        if self.modalities is not None and set(self.modalities) != {"text"}:
            found["modalities"] = 'modalities must be ["text"]: the model writes text only'
        return found


class TokenizeRequest(RequestModel):
    """Body of ``/tokenize``: either a prompt or messages."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    prompt: str | None = Field(None, description="A text.")
    messages: list[ChatMessage] | None = Field(None, description="A conversation, put into words by the template.")
    add_special_tokens: bool | None = Field(None, description="The model's own tokens around a text (default true).")
    add_generation_prompt: bool | None = Field(None, description="Begin the assistant's answer (default true).")


class DetokenizeRequest(RequestModel):
    """Body of ``/detokenize``."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    tokens: list[Int] = Field(description="Token ids.")
