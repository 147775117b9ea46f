"""A language model as a judge of pairs: it is asked whether a document fits a query, and answers yes or no."""

from __future__ import annotations

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.prompts import Prompt
from octavo.engine.model_files import ModelFiles

#: As the Qwen3-Reranker models were trained (Zhang et al. 2025, "Qwen3 Embedding", section 2).
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
#: Tokens of the answers, if config.json names none as ``classifier_from_token``.
_ANSWERS = ("no", "yes")


class Judge:
    """Makes prompts of pairs. The score is the probability of the last of ``answer_ids`` among them."""

    def __init__(self, files: ModelFiles) -> None:
        """The answers are those of the option ``hf_overrides`` (``classifier_from_token``), or "no" and "yes".

        Raises:
            ConfigError: an answer is no token of the model, or the model has no tokenizer.
        """
        self._tokenizer = files.tokenizer
        words = (files.options.hf_overrides or {}).get("classifier_from_token", _ANSWERS)
        ids = [self._tokenizer.convert_tokens_to_ids(word) for word in words]
        if len(ids) != 2 or None in ids:
            raise ConfigError(
                f"task 'score' needs two tokens as answers, but {words!r} are not: name them in hf_overrides as "
                "classifier_from_token"
            )
        self.answer_ids = [index for index in ids if index is not None]

    def prompt(self, query: str, document: str, most: int | None) -> Prompt:
        """The prompt of a pair, with the model's chat template if it has one; its document is cut to ``most`` tokens.

        Raises:
            InvalidRequestError: the rest alone is longer.
        """
        ids = self._encode(query, document)
        if most is not None and len(ids) > most:
            words = self._tokenizer.encode(document, add_special_tokens=False)
            kept = len(words)
            while len(ids) > most:
                kept -= len(ids) - most
                if kept < 0:
                    raise InvalidRequestError(f"the query alone is longer than {most} tokens")
                ids = self._encode(query, self._tokenizer.decode(words[:kept]))
        return {"prompt": f"{query} {document}", "prompt_token_ids": ids}

    def _encode(self, query: str, document: str) -> list[int]:
        text = f"<Instruct>: {_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        if not self._tokenizer.chat_templates:
            return self._tokenizer.encode(f"{_SYSTEM}\n\n{text}\n\nAnswer:")
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)
        return self._tokenizer.encode(rendered, add_special_tokens=False)
