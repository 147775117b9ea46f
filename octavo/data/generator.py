"""The model that an actor holds: a column of prompts in; texts, or vectors, and errors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.errors import ConfigError
from octavo.core.outputs import RequestOutput
from octavo.core.pooling_params import PoolingParams
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Vectors:
    """Asks for vectors in place of texts; see ``LLM.embed``."""

    pooling_params: PoolingParams
    prompt_name: str | None = None


Params = SamplingParams | BeamSearchParams | Vectors


@dataclass(frozen=True)
class Columns:
    """The column of prompts and those that are added."""

    prompt: str
    output: str

    @property
    def error(self) -> str:
        """The column that says why there is no output; null where there is one."""
        return f"{self.output}_error"

    def check(self, there: Sequence[str]) -> None:
        """Refuses rows without prompts, and those that have a column of these names already.

        Raises:
            ConfigError: with the names of the columns.
        """
        if self.prompt not in there:
            raise ConfigError(f"there is no column {self.prompt!r} (prompt_column); there are: {', '.join(there)}")
        for name in (self.output, self.error):
            if name in there:
                raise ConfigError(f"there is a column {name!r} already; choose another output_column")


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """What became of a prompt: a text, several if the parameters ask for several completions, or a vector."""

    output: str | list[str] | list[float] | None
    error: str | None = None


class Generator:
    """Completes prompts: texts, token ids, or conversations (lists of messages, for the chat template).

    Or it makes vectors of texts and token ids. The actor of ``octavo.data.generate`` and ``octavo.data.embed``.
    """

    def __init__(self, engine_options: Mapping[str, Any], params: Params | None, columns: Columns) -> None:
        """Loads the model; without ``params`` it has its own defaults.

        Raises:
            OctavoError: it is unknown, unreadable, unsupported or too large.
        """
        from octavo.engine.llm import LLM

        self._llm = LLM(**engine_options)
        self._params: Params = params if params is not None else self._llm.get_default_sampling_params()
        self.columns = columns

    @property
    def several(self) -> bool:
        """Whether an answer is a list of texts."""
        return isinstance(self._params, BeamSearchParams) or (
            isinstance(self._params, SamplingParams) and self._params.n > 1
        )

    def answer(self, prompts: Sequence[Any]) -> list[RowAnswer]:
        """The answers, in order; a prompt that cannot be served fails alone."""
        prompts = [prompt.tolist() if hasattr(prompt, "tolist") else prompt for prompt in prompts]
        forms = "text or token ids" if isinstance(self._params, Vectors) else "text, token ids or messages"
        answers = [RowAnswer(None, f"a prompt must be {forms}, not {prompt!r}"[:200]) for prompt in prompts]
        chats = [i for i, prompt in enumerate(prompts) if _is_chat(prompt)]
        texts = [i for i, prompt in enumerate(prompts) if isinstance(prompt, (str, list)) and not _is_chat(prompt)]
        if isinstance(self._params, Vectors):
            for i, answer in zip(texts, self._embed([prompts[i] for i in texts], self._params), strict=True):
                answers[i] = answer
            return answers
        for indices, complete in ((texts, self._llm.generate), (chats, self._llm.chat)):
            if not indices:
                continue
            outputs = complete([prompts[i] for i in indices], self._params, use_tqdm=False)
            for i, output in zip(indices, outputs, strict=True):
                answers[i] = self._make_answer(output)
        return answers

    def _embed(self, prompts: list[Any], vectors: Vectors) -> list[RowAnswer]:
        if not prompts:
            return []
        outputs = self._llm.embed(
            prompts, pooling_params=vectors.pooling_params, prompt_name=vectors.prompt_name, use_tqdm=False
        )
        results = [output.outputs for output in outputs]
        return [RowAnswer(None if each.error else each.embedding, each.error) for each in results]

    def __call__(self, table: pa.Table) -> pa.Table:
        """The table with the columns of outputs and errors."""
        import pyarrow as pa

        columns = self.columns
        columns.check(table.column_names)
        answers = self.answer(table.column(columns.prompt).to_pylist())
        kind = pa.list_(pa.string()) if self.several else pa.string()
        if isinstance(self._params, Vectors):
            kind = pa.list_(pa.float32())
        table = table.append_column(columns.output, pa.array([answer.output for answer in answers], kind))
        return table.append_column(columns.error, pa.array([answer.error for answer in answers], pa.string()))

    def _make_answer(self, output: RequestOutput) -> RowAnswer:
        for completion in output.outputs:
            if completion.finish_reason not in ("stop", "length"):
                return RowAnswer(None, completion.error or f"the request ended by {completion.finish_reason}")
        texts = [completion.text for completion in output.outputs]
        return RowAnswer(texts if self.several else texts[0])


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
