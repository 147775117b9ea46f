"""Fields of sampling that every route that generates takes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from octavo.server.protocol_base import Int, RequestModel, Seed


class SamplingFields(RequestModel):
    """How the answer is sampled."""

    temperature: float | None = Field(
        None, description="0 always takes the most likely token (default: the model's, else 1)."
    )
    top_p: float | None = Field(None, description="Keep the smallest set of tokens that reaches this probability.")
    top_k: Int | None = Field(None, description="Keep this many of the most likely tokens; 0 or -1 is off.")
    min_p: float | None = Field(None, description="Drop tokens below this share of the likeliest one's probability.")
    seed: Seed | None = Field(None, description="Fixes the random numbers.")
    presence_penalty: float | None = Field(None, description="Subtracted once from logits of generated tokens.")
    frequency_penalty: float | None = Field(None, description="Subtracted for each time a token was generated.")
    repetition_penalty: float | None = Field(None, description="Divides logits of tokens in prompt or output.")
    logit_bias: dict[str, float] | None = Field(None, description="Token id to what is added to its logit.")
    stop_token_ids: list[Int] | None = Field(None, description="Token ids that end the answer.")
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-sequence token.")
    min_tokens: Int | None = Field(None, description="No end, not even an ignored one, before this many tokens.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text (default true).")
    priority: Int | float | None = Field(
        None, description="Lower goes first; only 0 under a scheduling policy that does not look at it."
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Requests with different salts share no cached prefix."
    )
    thinking_token_budget: Int | None = Field(
        None, description="Most tokens of reasoning, which is closed then; -1 (default): no limit."
    )
