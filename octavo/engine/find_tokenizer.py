"""Which tokenizer an engine uses, and what stands in where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import tokenizers

from octavo.core.errors import InvalidRequestError
from octavo.engine.chat_template import read_chat_template
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.loader.tokenizer_backend import has_tokenizer
from octavo.models.config_files import check_architecture
from octavo.models.pooling_files import transformer_settings

if TYPE_CHECKING:
    from octavo.core.config import EngineConfig


def find_tokenizer(options: EngineConfig, folder: Path) -> Tokenizer:
    """The tokenizer that ``options`` name, else that of the model in ``folder``, with the chat template that they name.

    With random weights the model may have none: then there is one that refuses whatever needs text.
    With ``skip_tokenizer_init`` none is loaded, and output has no text.

    Raises:
        UnsupportedModelError, ConfigError: as for ``check_architecture``, which comes first: what else a model
            lacks that cannot be served does not matter; ``read_chat_template``.
        TokenizerError: as for ``load_tokenizer`` and ``read_chat_template``.
    """
    check_architecture(folder)
    if options.skip_tokenizer_init:
        return SkippedTokenizer(folder)
    template = read_chat_template(options.chat_template)
    if options.tokenizer is None and options.load_format == "dummy" and not has_tokenizer(folder):
        return NoTokenizer(folder)
    tokenizer = load_tokenizer(folder if options.tokenizer is None else Path(options.tokenizer), template)
    settings = transformer_settings(folder)
    if settings is not None and settings.flag("do_lower_case"):
        lower_case(tokenizer.backend)
    return tokenizer


def lower_case(backend: tokenizers.Tokenizer) -> None:
    """Makes texts lower case before all else, as sentence-transformers does where no normalizer is there for it."""
    normalizers, before = tokenizers.normalizers, backend.normalizer
    parts: list[Any] = [] if before is None else [before]
    if isinstance(before, normalizers.Sequence):
        parts = [before[index] for index in range(len(before))]
    if not any(isinstance(part, normalizers.Lowercase) for part in parts):
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])


class NoTokenizer(Tokenizer):
    """Stands in where there is none: every token's text is empty, and text is refused."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is where a tokenizer.json was looked for."""
        self._folder = folder
        super().__init__(tokenizers.Tokenizer(tokenizers.models.BPE()), {}, {})

    def check_can_decode(self, has_stops: bool = False) -> None:
        """Refuses."""
        raise self._refusal("output cannot be text: set detokenize=False")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Refuses; ``encode_batch`` and what else is made of it do too."""
        raise self._refusal("text cannot be made into tokens: give the prompt as token ids")

    def encode_cut(self, text: str, max_tokens: int) -> list[int]:
        """Refuses."""
        return self.encode(text)

    def encode_pair(self, first: str, second: str, max_tokens: int | None = None) -> tuple[list[int], int]:
        """Refuses."""
        return self.encode(first), 0

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Refuses."""
        return [self.encode(text) for text in texts]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> NoReturn:
        """Refuses."""
        raise self._refusal("a conversation cannot be made into tokens: give the prompt as token ids")

    def _refusal(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the model has no tokenizer ({self._folder} holds no tokenizer.json), so {what}, or name a folder with "
            "one in the option tokenizer"
        )

    def _find_anchor(self) -> list[int]:
        return []


class SkippedTokenizer(NoTokenizer):
    """Stands in with ``skip_tokenizer_init``: output is token ids with an empty text, and text is refused."""

    def token_text(self, token_id: int) -> str:
        """``token_id:`` and the id, so that a client of the server can read the ids among the logprobs."""
        return f"token_id:{token_id}"

    def check_can_decode(self, has_stops: bool = False) -> None:
        """Refuses stop strings: there is no text to look for them in."""
        if has_stops:
            raise self._refusal("stop strings cannot be found: use stop_token_ids")

    def _refusal(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(f"no tokenizer is loaded (skip_tokenizer_init), so {what}, or load it")
