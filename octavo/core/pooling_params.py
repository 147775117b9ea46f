"""Parameters of requests that ask for vectors or scores."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import check_integer

#: What is computed of a prompt's hidden states: one vector (embed), one row of class scores (classify, score: of one
#: class), or a row for each token (token_embed, token_classify).
PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Parameters of one request for a vector or scores; with the names of other engines.

    >>> PoolingParams(dimensions=128)

    Raises:
        InvalidRequestError: a value is out of range or of the wrong type.
    """

    #: Most tokens of the prompt, special tokens included; what is beyond is cut off at its end. -1: as many as the
    #: model takes. None: a longer prompt is refused.
    truncate_prompt_tokens: int | None = None
    #: Numbers of a vector, of a model that was trained so that the first ones alone are a vector (Matryoshka, Kusupati
    #: et al. 2022). None: all.
    dimensions: int | None = None
    #: Whether vectors get length 1, and class scores become probabilities (sigmoid or softmax). None: as the model has
    #: it.
    use_activation: bool | None = None
    #: None: what the method that takes the parameters is for.
    task: PoolingTask | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Checks every field.

        Raises:
            InvalidRequestError: naming the field, its value and what would be right.
        """
        if self.truncate_prompt_tokens is not None:
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, None)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequestError("truncate_prompt_tokens must be at least 1, or -1, not 0")
        if self.dimensions is not None:
            check_integer("dimensions", self.dimensions, 1, None)
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise InvalidRequestError(f"use_activation must be True, False or None, not {self.use_activation!r}")
        if self.task is not None and self.task not in POOLING_TASKS:
            raise InvalidRequestError(f"task must be one of {', '.join(POOLING_TASKS)}, not {self.task!r}")
