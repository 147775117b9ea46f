"""From texts and pairs of texts to requests for vectors and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.model_config import model_tasks
from octavo.core.outputs import Pooled, PoolingParams, PoolingTask
from octavo.core.request import DEFAULT_OPTIONS, AdapterRef, Pool, Prompt, RequestOptions
from octavo.engine.input_processor import InputProcessor
from octavo.engine.model_files import ModelFiles
from octavo.engine.output_processor import NO_SAMPLING, PoolingState

if TYPE_CHECKING:
    import numpy as np


# A language model as a judge of pairs: it is asked whether a document fits a query, and answers yes or no.

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


#: Keys of a prompt's dictionary beside ``PROMPT_KEYS``: the segment of each token; positions before this one are not
#: pooled.
_TYPES, _FIRST = "token_type_ids", "first_pooled"


class PoolingInputs:
    """Checks requests for vectors and scores against one model."""

    def __init__(self, files: ModelFiles, inputs: InputProcessor) -> None:
        """``inputs`` numbers the requests, and reads prompts.

        Raises:
            ConfigError: the option ``task`` names what the model cannot do.
        """
        self._files, self._inputs, self.tokenizer = files, inputs, files.tokenizer
        self.config, self.pooler = files.model_config, files.model_config.pooler
        #: What the model can do: "generate", and those of ``PoolingTask``.
        self.tasks = model_tasks(self.config, files.options.task)
        self._judge = Judge(files) if self.config.head == "lm" and self.tasks == ("score",) else None

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt."""
        return self._inputs.max_model_len

    def require(self, task: str) -> None:
        """Refuses a task that the model cannot do.

        Raises:
            InvalidRequestError: it names what it can do.
        """
        if task not in self.tasks:
            raise InvalidRequestError(
                f"the model {self._files.options.model!r} ({self.config.architecture}) cannot {_VERBS[task]}; it can: "
                + ", ".join(_VERBS[name] for name in self.tasks)
            )

    # --- prompts ------------------------------------------------------------------------------------------------------

    def embedding_prompt(self, prompt: Prompt, prompt_name: str | None = None) -> Prompt:
        """The prompt with the text before it that the model's files give this name, or that they use by default.

        Raises:
            InvalidRequestError: they have no text of that name, or the prompt is no text.
        """
        name = prompt_name if prompt_name is not None else self.pooler.default_prompt_name
        if name is None:
            return prompt
        before = self.pooler.prompts.get(name)
        if before is None:
            names = ", ".join(map(repr, self.pooler.prompts)) or "none"
            raise InvalidRequestError(f"prompt_name must be one of the model's prompts ({names}), not {name!r}")
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if not isinstance(text, str) or (isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None):
            if prompt_name is None:
                return prompt  # ids are what the caller has made of a text, prompts included
            raise InvalidRequestError(f"prompt_name {name!r} is put before texts, not before token ids")
        others = prompt if isinstance(prompt, Mapping) else {}
        fields: dict[str, Any] = {**others, "prompt": before + text}
        if not self.pooler.include_prompt:
            fields[_FIRST] = self._prompt_length(before)
        return fields

    def _prompt_length(self, before: str) -> int:
        """Tokens of a text before an input, as sentence-transformers counts them: without a special one at its end."""
        ids = self.tokenizer.encode_cut(before, self.max_model_len)
        return len(ids) - (bool(ids) and ids[-1] in self.tokenizer.special_ids)

    def pair_prompts(self, query: str, document: str, truncate: int | None = None) -> list[Prompt]:
        """What is computed to score a pair: one prompt with both texts, or one for each, whose vectors are compared.

        ``truncate``: as ``PoolingParams.truncate_prompt_tokens``.

        Raises:
            InvalidRequestError: a text is none, or the model cannot score.
        """
        self.require("score")
        for name, text in (("query", query), ("document", document)):
            if not isinstance(text, str):
                raise InvalidRequestError(f"the {name} of a score must be text, not {text!r}")
        if self._compares:
            prompts = self.pooler.prompts
            return [
                self.embedding_prompt(query, "query" if "query" in prompts else None),
                self.embedding_prompt(document, "document" if "document" in prompts else None),
            ]
        if self._judge is not None:
            return [self._judge.prompt(query, document, self._most(truncate))]
        ids, second = self.tokenizer.encode_pair(query, document, self._most(truncate))
        types = [0] * second + [1] * (len(ids) - second) if second else None
        return [{"prompt": f"{query} {document}", "prompt_token_ids": ids, _TYPES: types}]

    @property
    def _compares(self) -> bool:
        """Whether a pair is scored by comparing vectors."""
        return self.config.head in ("none", "lm") and self._judge is None

    def score(self, outputs: Sequence[Pooled]) -> float:
        """The score of a pair, of the outputs of its prompts.

        Raises:
            InvalidRequestError: one of them has failed.
        """
        rows = []
        for output in outputs:
            if output.outputs.error is not None:
                raise InvalidRequestError(output.outputs.error)
            rows.append(output.outputs.data)
        return float(rows[0][0]) if len(rows) == 1 else similarity(self.pooler.similarity, *rows)

    def score_params(self, params: PoolingParams | None) -> PoolingParams:
        """The parameters of each prompt of ``pair_prompts``."""
        return msgspec.structs.replace(params or PoolingParams(), task="embed" if self._compares else "score")

    def tokenize(self, prompt: Prompt, params: PoolingParams) -> Prompt:
        """The prompt with token ids, where it is a text; for a thread, if the text is long."""
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        text = fields.get("prompt")
        if not isinstance(text, str) or fields.get("prompt_token_ids") is not None:
            return prompt
        most = self._most(params.truncate_prompt_tokens)
        ids = self.tokenizer.encode(text) if most is None else self.tokenizer.encode_cut(text, most)
        return {**fields, "prompt_token_ids": ids}

    def _most(self, truncate: int | None) -> int | None:
        """Tokens that a prompt is cut to; None: it is not."""
        return None if truncate is None else self.max_model_len if truncate == -1 else truncate

    # --- requests -----------------------------------------------------------------------------------------------------

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        adapter: AdapterRef | None = None,
    ) -> PoolingState:
        """Tokenizes and checks one request, for ``OutputProcessor.open``; nothing is changed if it is refused.

        Raises:
            InvalidRequestError: the prompt or a parameter cannot be served by this model.
        """
        arrival, options = self._inputs.begin(prompt, options)
        params.validate()  # a field may have been assigned after construction
        task_name = self._task(params)
        fields = dict(prompt) if isinstance(prompt, Mapping) else {}
        types, first = fields.pop(_TYPES, None), fields.pop(_FIRST, 0)
        given = self.tokenize(fields or prompt, params)
        text, token_ids = self._inputs.read_prompt(given)
        if (most := self._most(params.truncate_prompt_tokens)) is not None:
            token_ids = token_ids[:most]
        virtual = 0 if adapter is None else adapter.num_virtual_tokens
        token_ids = self._check_length(token_ids, virtual)
        task = Pool(
            msgspec.structs.replace(params, task=task_name),
            "last" if self._judge is not None else self.pooler.kind,
            self._first_pooled(first, len(token_ids), task_name) + virtual,
            _second_text(types, token_ids),
            [] if self._judge is None else self._judge.answer_ids,
        )
        group = self._inputs.core_request(token_ids, task, arrival, options, adapter)
        return PoolingState(request_id, text, token_ids, NO_SAMPLING, group)

    def _first_pooled(self, first: int, num_tokens: int, task: PoolingTask) -> int:
        """The first position that is pooled, of a prompt whose first ``first`` tokens are not.

        Where no token is left (the text is empty, or cut within its prompt), vectors are those of
        sentence-transformers: zero, or of the first token.

        Raises:
            InvalidRequestError: there is no such vector, as the largest of no numbers.
        """
        if first < num_tokens:
            return first
        kind = self.pooler.kind
        if kind == "max" and task == "embed":
            raise InvalidRequestError("no token of the text is left beside those of its prompt, which is not pooled")
        if kind == "cls" or task != "embed":
            return 0 if task == "embed" else num_tokens - 1
        return num_tokens

    def _task(self, params: PoolingParams) -> PoolingTask:
        """The task of a request, by default the first that the model can do."""
        task: Any = params.task
        if task is None:
            task = next((name for name in self.tasks if name not in ("generate", "score")), "score")
        if task == "score" and self._compares:
            raise InvalidRequestError("this model scores pairs by comparing vectors: ask for both with task embed")
        self.require(task)
        if params.dimensions is not None:
            self._check_dimensions(task, params.dimensions)
        checked: PoolingTask = task
        return checked

    def _check_dimensions(self, task: str, dimensions: int) -> None:
        """Refuses vectors of other sizes than those that the model was trained for."""
        if task not in ("embed", "token_embed"):
            raise InvalidRequestError(f"dimensions is for vectors, and must be left out of {task}")
        size, sizes = self.vector_size, self.pooler.dimensions
        if dimensions > size or (sizes is not None and dimensions != size and dimensions not in sizes):
            those = f"1 to {size}" if sizes is None else ", ".join(map(str, (*sizes, size)))
            raise InvalidRequestError(f"dimensions must be one of the model's ({those}), not {dimensions}")

    @property
    def vector_size(self) -> int:
        """Numbers of a whole vector."""
        return self.pooler.dense[-1].outputs if self.pooler.dense else self.config.hidden_size

    def _check_length(self, token_ids: Sequence[int], virtual: int) -> list[int]:
        checked = self._inputs.prompt_ids(token_ids)
        if virtual + len(token_ids) > self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids) + virtual} tokens, but the model takes at most {self.max_model_len}; "
                "truncate_prompt_tokens=-1 cuts it there"
            )
        return checked


_VERBS = {
    "generate": "generate text",
    "transcribe": "transcribe recordings",
    "embed": "embed",
    "token_embed": "embed tokens",
    "classify": "classify",
    "token_classify": "classify tokens",
    "score": "score pairs",
}


def _second_text(types: Any, token_ids: Sequence[int]) -> int:
    """Position from which on tokens are of the second text; 0: none are."""
    if types is None:
        return 0
    if not isinstance(types, list) or len(types) < len(token_ids):
        raise InvalidRequestError(f"'token_type_ids' must be a list of {len(token_ids)} numbers, one for each token")
    ones = types[: len(token_ids)].count(1)
    second = len(token_ids) - ones
    if types[: len(token_ids)] != [0] * second + [1] * ones or not second:
        raise InvalidRequestError("'token_type_ids' must be 0 for the tokens of the first text, then 1")
    return second if ones else 0


def similarity(kind: str, first: np.ndarray, second: np.ndarray) -> float:
    """How alike two vectors float32 [D] are, as their model compares them; the more, the greater."""
    import numpy as np  # a server that generates does without

    a, b = first.astype(np.float64), second.astype(np.float64)
    if kind == "euclidean":
        return -float(np.sqrt(np.sum((a - b) ** 2)))
    if kind == "manhattan":
        return -float(np.sum(np.abs(a - b)))
    product = float(np.sum(a * b))
    if kind == "dot":
        return product
    return product / max(float(np.sqrt(np.sum(a * a)) * np.sqrt(np.sum(b * b))), 1e-12)
