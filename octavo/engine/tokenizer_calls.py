"""What programs ask a tokenizer of transformers for, in its names; ``Tokenizer`` has the methods of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, overload

import tokenizers

from octavo.core.errors import InvalidRequestError


class Encoding(dict[str, Any]):
    """The result of a call: ``input_ids`` and ``attention_mask``, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def encoding_of(input_ids: list[int] | list[list[int]]) -> Encoding:
    """Token ids of a text or of several, with a mask of ones: nothing is padded."""
    mask = [[1] * len(ids) if isinstance(ids, list) else 1 for ids in input_ids]
    return Encoding(input_ids=input_ids, attention_mask=mask)


class TokenizerCalls(ABC):
    """The part of ``Tokenizer`` that is named as in transformers."""

    backend: tokenizers.Tokenizer
    #: Texts of the special tokens under the names that templates use, such as ``bos_token``.
    named_tokens: Mapping[str, str]
    special_ids: frozenset[int]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text."""

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        padding: bool = False,
        return_tensors: None = None,
    ) -> Encoding:
        """Token ids of a text or of several, as lists; with ``truncation`` the first ``max_length`` of each.

        Raises:
            InvalidRequestError: not texts, or ``padding`` or ``return_tensors`` is asked for: these lists have none.
        """
        if padding or return_tensors is not None:
            raise InvalidRequestError("padding must be False and return_tensors None: token ids are lists of integers")
        ids = self.encode_batch([text] if isinstance(text, str) else list(text), add_special_tokens)
        if truncation and max_length is not None:
            ids = [each[:max_length] for each in ids]
        return encoding_of(ids[0] if isinstance(text, str) else ids)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """``decode`` of each."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def get_vocab(self) -> dict[str, int]:
        """Token id by the token's name in the vocabulary, added tokens included."""
        vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def tokenize(self, text: str) -> list[str | None]:
        """Names of the tokens of a text, without those that are put around it."""
        [ids] = self.encode_batch([text], add_special_tokens=False)
        return self.convert_ids_to_tokens(ids)

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...

    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """The name in the vocabulary of a token id or of several; None if unknown."""
        name = self.backend.id_to_token
        return name(ids) if isinstance(ids, int) else [name(i) for i in ids]

    @property
    def all_special_ids(self) -> list[int]:
        """Token ids of the special tokens."""
        return sorted(self.special_ids)

    @property
    def all_special_tokens(self) -> list[str | None]:
        """Names of the special tokens."""
        return self.convert_ids_to_tokens(self.all_special_ids)

    @property
    def pad_token(self) -> str | None:
        """The padding token's text, if one is named."""
        return self.named_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """Token id of ``pad_token``."""
        return None if self.pad_token is None else self.backend.token_to_id(self.pad_token)
