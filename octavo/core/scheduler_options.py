"""The options of the scheduler."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from octavo.core.option_part import OptionPart

#: Defaults of ``max_num_batched_tokens``: in general, and on a CPU with batching=mixed.
TOKEN_BUDGET, CPU_TOKEN_BUDGET = 2048, 512
#: That of encoders on a CPU: products of more rows are not faster, and a step is what a new text waits for.
ENCODER_TOKEN_BUDGET = 1024


def _shares(value: Any) -> Any:
    """The mapping of a text such as "alice=2,bob=0.5"; anything else as it is."""
    if not isinstance(value, str):
        return value
    return dict(part.rpartition("=")[::2] for part in value.split(","))


#: Positive numbers by name; in flags and variables ``name=number`` with commas between.
Weights = Annotated[dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], BeforeValidator(_shares)]


class SchedulerOptions(OptionPart):
    """How a step is filled, in which order requests run, and which are preempted."""

    max_num_seqs: int = Field(
        256,
        ge=1,
        description="Most sequences that run at once; by default no more than a max_num_batched_tokens that is given.",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Token budget: most tokens computed in one step, prompts and decodes together. Default: "
        f"{TOKEN_BUDGET}; {CPU_TOKEN_BUDGET} on a CPU with batching=mixed, {ENCODER_TOKEN_BUDGET} of encoders; where "
        "prompts are computed whole, the context length if that is more; never less than max_num_seqs. A text that is "
        "longer is computed by an encoder in a step of its own.",
    )
    max_num_encoder_input_tokens: int | None = Field(
        None,
        ge=1,
        description="Of encoder-decoder models: most tokens of encoders' inputs that are computed in one step, beside "
        "its other tokens, so that long inputs do not stall decodes. An input is computed whole; one that is longer "
        "has no other beside it. Default: max_num_batched_tokens.",
    )
    batching: Literal["mixed", "prefill_first"] = Field(
        "mixed",
        description="How a step is filled. mixed: decodes first, then prompt chunks, under one token budget; "
        "prefill_first: whole prompts in steps of their own, which go before decodes.",
    )
    enable_chunked_prefill: bool = Field(
        True, description="Split prompts over steps to fill the token budget; off: a prompt is computed in one step."
    )
    scheduling_policy: str = Field(
        "fcfs",
        description="Order of admission, preemption and return: fcfs (arrival), static (the request's priority, lower "
        "first), sjf (smallest max_tokens), ldf (most tokens of prompt and output), lcfs (latest arrival), srpt "
        "(fewest remaining tokens, as predicted from finished requests), fair (the user with the least service), "
        "deadline (the next token due, of those that can be in time), mlfq (least service received, in queues), or "
        "module:Class.",
    )
    user_weights: Weights | None = Field(
        None,
        description="With scheduling_policy fair: shares of users (the request's field user) as alice=2,bob=0.5; 1 for "
        "those that are not named.",
    )
    ttft_target: float | None = Field(
        None,
        gt=0,
        description="With scheduling_policy deadline: seconds from its arrival in which a request that brings no "
        "ttft_target of its own shall have its first token; default: no deadline.",
    )
    tpot_target: float | None = Field(
        None,
        gt=0,
        description="With scheduling_policy deadline: seconds between tokens after the first, of a request that brings "
        "no tpot_target of its own; default: no deadline.",
    )
    aging_limit: float | None = Field(
        60.0,
        ge=0,
        description="Seconds after which no later arrival goes before a request, whatever the policy; none: no limit.",
    )
    preemption_mode: Literal["auto", "recompute", "swap", "by_sequences"] = Field(
        "auto",
        description="What becomes of the blocks of a preempted request: given up and computed again, or moved to host "
        "memory and back. by_sequences: swap for several sequences, recompute for one; auto: swap for several, for one "
        "whichever has been observed to cost less time.",
    )
    preemption_victim: Literal["last", "least_computed", "most_blocks"] = Field(
        "last",
        description="Which request is preempted of those that the policy puts after the one that needs blocks: the "
        "last of them, or the one with the fewest computed tokens, or with the most blocks.",
    )
    priority_preemption: bool = Field(
        False, description="Let a waiting request preempt running ones of lower priority (scheduling_policy static)."
    )
    scheduler_delay_factor: float = Field(
        0.0,
        ge=0,
        description="With batching=prefill_first: waiting prompts are admitted when the first that arrived has waited "
        "this many times the last prompt step's time, so that more arrive meanwhile.",
    )
    max_num_partial_prefills: int | None = Field(
        None, ge=1, description="Most prompts being computed at once; default: as many as the token budget takes."
    )
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        description="Prompts of more tokens are long: short ones pass them, one is computed at once, and it gets at "
        "most this many tokens a step. 0: none is.",
    )
    async_scheduling: bool | None = Field(
        None,
        description="Prepare the next step while the device computes this one; default: true on a GPU, else false.",
    )

    jump_forward: bool = Field(
        True,
        description="With structured outputs: append tokens that a grammar forces without sampling them, and compute "
        "them together, which changes no answer. Not done with async_scheduling.",
    )

    def plans_ahead(self, device: str) -> bool:
        """Whether ``async_scheduling`` is on, on a device of this kind ("cpu" or "cuda")."""
        return device != "cpu" if self.async_scheduling is None else self.async_scheduling

    @property
    def cuts_prompts(self) -> bool:
        """Whether a prompt may be computed in chunks of any length."""
        return self.enable_chunked_prefill and self.batching == "mixed"

    @property
    def encoder_budget(self) -> int:
        """``max_num_encoder_input_tokens``, by default as many as ``token_budget``."""
        return self.max_num_encoder_input_tokens or self.token_budget

    @property
    def token_budget(self) -> int:
        """``max_num_batched_tokens``, once it is resolved (``with_token_budget``); before that, its general default."""
        return self.max_num_batched_tokens or max(TOKEN_BUDGET, self.max_num_seqs)

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            if "max_num_seqs" in self.model_fields_set:
                raise ValueError(
                    f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({self.max_num_seqs}): each "
                    "running sequence decodes one token a step"
                )
            object.__setattr__(self, "max_num_seqs", budget)  # a default, so it does not become a given field
        if self.scheduler_delay_factor and self.batching != "prefill_first":
            raise ValueError(
                f"scheduler_delay_factor ({self.scheduler_delay_factor:g}) needs batching 'prefill_first'; batching "
                f"{self.batching!r} has no prompt steps that could be delayed"
            )
        if self.priority_preemption and self.scheduling_policy != "static" and ":" not in self.scheduling_policy:
            raise ValueError(
                f"priority_preemption needs a policy that looks at priorities, such as static; scheduling_policy "
                f"{self.scheduling_policy!r} does not"
            )
        return self

    @model_validator(mode="after")
    def _settings_of_the_policy(self) -> Self:
        chosen = self.scheduling_policy
        for name, policy in (("user_weights", "fair"), ("ttft_target", "deadline"), ("tpot_target", "deadline")):
            value = getattr(self, name)
            if value is not None and chosen != policy and ":" not in chosen:
                raise ValueError(f"{name} ({value}) is of scheduling_policy {policy!r}; {chosen!r} does not look at it")
        return self
