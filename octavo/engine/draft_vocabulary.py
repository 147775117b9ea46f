"""Refuses a draft model whose tokens are not those of the model, before weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, ModelNotFoundError
from octavo.core.model_config import ModelConfig
from octavo.loader.resolve import resolve_model
from octavo.models.config_files import read_model_config

if TYPE_CHECKING:
    from octavo.engine.tokenizer import Tokenizer


def check_draft_model(options: EngineConfig, config: ModelConfig, folder: Path) -> None:
    """Whether the model that ``options.speculative_config`` names, if any, has the vocabulary of the one in ``folder``.

    The tokens must be the same, with the same ids. Rows of the embedding for which there is no token, to which some
    checkpoints are padded, may be more or fewer; where tokenizers are not there to be compared, they must be as many.

    Raises:
        ConfigError: it has another vocabulary; the message names the first difference.
        OctavoError: there is no such model, or it is not supported.
    """
    draft = options.speculative_config
    if draft is None or draft.method != "draft_model":
        return
    # The core's process needs it for this alone.
    from octavo.engine.find_tokenizer import NoTokenizer, find_tokenizer

    assert draft.model is not None
    dummy = options.load_format == "dummy"
    try:
        draft_folder = resolve_model(draft.model, revision=draft.revision, weights=not dummy)
    except ModelNotFoundError as e:
        raise ModelNotFoundError(f"speculative_config: {e}") from None
    draft_size = read_model_config(draft_folder).vocab_size
    if draft_folder == folder:
        return
    tokenizer = find_tokenizer(options, folder)
    draft_tokenizer = find_tokenizer(options.model_copy(update={"tokenizer": None}), draft_folder)
    if isinstance(tokenizer, NoTokenizer) or isinstance(draft_tokenizer, NoTokenizer):
        difference = None
        if draft_size != config.vocab_size:
            difference = f"{draft_size} tokens instead of {config.vocab_size}"
    else:
        difference = _difference(tokenizer, draft_tokenizer)
    if difference is not None:
        raise ConfigError(
            f"speculative_config: the draft model {draft.model!r} has another vocabulary than the model "
            f"{options.model!r}: {difference}; take one of the same family, or method 'ngram' or 'suffix'"
        )


def _difference(model: Tokenizer, drafts: Tokenizer) -> str | None:
    """The first difference of the drafts' vocabulary from the model's own one."""
    model_tokens, draft_tokens = (
        {token_id: text for text, token_id in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
        for tokenizer in (model, drafts)
    )
    for token_id in sorted(model_tokens.keys() & draft_tokens.keys()):
        if model_tokens[token_id] != draft_tokens[token_id]:
            return f"token {token_id} is {draft_tokens[token_id]!r} instead of {model_tokens[token_id]!r}"
    if len(model_tokens) != len(draft_tokens):
        return f"{len(draft_tokens)} tokens instead of {len(model_tokens)}"
    missing = min(model_tokens.keys() ^ draft_tokens.keys(), default=None)
    return None if missing is None else f"token {missing} is in one of them alone"
