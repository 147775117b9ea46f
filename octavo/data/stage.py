"""Stages of Ray Data that complete prompts or embed texts in a pool of actors, each with a model of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config.engine_config import EngineConfig
from octavo.config.sources import resolve_config
from octavo.core.errors import ConfigError
from octavo.core.outputs import PoolingParams, RequestOutput
from octavo.core.plugins import how_to_install
from octavo.core.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    import pyarrow as pa


#: Prompts that an actor completes at once. More keep the engine fuller; a stop loses those in progress.
BATCH_SIZE = 512


def generate(
    dataset: Any,
    *,
    model: str,
    sampling_params: Params | None = None,
    prompt_column: str = "prompt",
    output_column: str = "generated",
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = BATCH_SIZE,
    ray_remote_args: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> Any:
    """The data set (``ray.data.Dataset``) with the columns ``generated`` and ``generated_error``; lazy, as every stage.

    >>> ds = ray.data.read_parquet("prompts/")
    >>> ds = octavo.data.generate(ds, model="smollm2-135m", sampling_params=SamplingParams(max_tokens=64))
    >>> ds.write_parquet("answers/")

    Args:
        dataset: has a column of texts, of token ids, or of conversations (lists of messages).
        model: as for ``LLM``; a folder must be there on every machine.
        sampling_params: for all prompts; default: the model's own, as for ``LLM``. The output is a list of texts if
            they ask for several completions.
        prompt_column: name of that column.
        output_column: name of the column of texts. A prompt that cannot be served fails alone: its output is null, and
            the column ``{output_column}_error`` says why.
        concurrency: actors, each with an engine of its own; (least, most) for a pool that grows and shrinks.
        batch_size: prompts that an actor completes at once.
        ray_remote_args: of the actors, such as ``{"num_cpus": 8}``. Default: a GPU for each worker of the engine
            where the cluster has GPUs, else one CPU; none with ``distributed_executor_backend="ray"``, whose workers
            take theirs themselves.
        **engine_options: fields of ``EngineConfig``, such as ``num_threads`` or ``tensor_parallel_size``.

    Raises:
        ConfigError: Ray is not installed, or an option is wrong.
    """
    config = make_engine_config(model, engine_options)
    return map_batches(
        dataset,
        Generator,
        (config.model_dump(exclude_unset=True), sampling_params, Columns(prompt_column, output_column)),
        batch_size=batch_size,
        concurrency=concurrency,
        ray_remote_args=ray_remote_args or default_resources(config),
    )


def embed(
    dataset: Any,
    *,
    model: str,
    pooling_params: PoolingParams | None = None,
    prompt_name: str | None = None,
    prompt_column: str = "text",
    output_column: str = "embedding",
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = BATCH_SIZE,
    ray_remote_args: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> Any:
    """The data set with the columns ``embedding``, lists of float32, and ``embedding_error``; lazy.

    >>> ds = octavo.data.embed(ray.data.read_parquet("texts/"), model="all-minilm-l6-v2")

    Args:
        dataset: has a column of texts or of token ids.
        model: as for ``LLM``; a folder must be there on every machine.
        pooling_params: for all texts.
        prompt_name: which of the texts that the model's files name is put before each.
        prompt_column, output_column, concurrency, batch_size, ray_remote_args, engine_options: see ``generate``.

    Raises:
        ConfigError: Ray is not installed, or an option is wrong.
    """
    return generate(
        dataset,
        model=model,
        sampling_params=Vectors(pooling_params or PoolingParams(), prompt_name),
        prompt_column=prompt_column,
        output_column=output_column,
        concurrency=concurrency,
        batch_size=batch_size,
        ray_remote_args=ray_remote_args,
        **engine_options,
    )


def import_ray() -> Any:
    """The package ``ray.data``; raises ``ConfigError`` if it is not installed."""
    try:
        import ray.data
    except ImportError as e:
        raise ConfigError(f"octavo.data needs Ray Data ({e}): {how_to_install('ray')}") from None
    return ray.data


def make_engine_config(model: str, engine_options: Mapping[str, Any]) -> EngineConfig:
    """The options of the engines, resolved here: a wrong one fails before the job, and all actors have the same."""
    # An actor has another working directory.
    folder = Path(model)
    return resolve_config({**engine_options, "model": str(folder.resolve()) if folder.exists() else str(model)})


def default_resources(config: EngineConfig) -> dict[str, float]:
    """The cluster's resources for one actor."""
    import_ray()
    import ray

    if config.distributed_executor_backend == "ray":
        return {"num_cpus": 0}
    if not ray.is_initialized():
        ray.init()
    if config.device == "cuda" or (config.device == "auto" and ray.cluster_resources().get("GPU", 0) >= 1):
        return {"num_gpus": config.world_size}
    return {"num_cpus": 1}


def map_batches(
    dataset: Any,
    actor: type,
    arguments: tuple[Any, ...],
    *,
    batch_size: int,
    concurrency: int | tuple[int, int],
    ray_remote_args: Mapping[str, Any],
) -> Any:
    """Passes the data set, as Arrow tables of ``batch_size`` rows, through a pool of actors made with the arguments."""
    ray_data = import_ray()
    least, most = (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
    if not 1 <= least <= most:
        raise ConfigError(f"concurrency must be at least 1, or (least, most), not {concurrency!r}")
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size!r}")
    return dataset.map_batches(
        actor,
        fn_constructor_args=arguments,
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ray_data.ActorPoolStrategy(min_size=least, max_size=most),
        **ray_remote_args,
    )


# The actor.


@dataclass(frozen=True)
class Vectors:
    """Parameters of vectors in place of texts (``LLM.embed``)."""

    pooling_params: PoolingParams
    prompt_name: str | None = None


Params = SamplingParams | BeamSearchParams | Vectors


@dataclass(frozen=True)
class Columns:
    """The column of prompts and the columns that are added."""

    prompt: str
    output: str

    @property
    def error(self) -> str:
        """The column with the error of a prompt without output, else null."""
        return f"{self.output}_error"

    def check(self, there: Sequence[str]) -> None:
        """Refuses rows without the column of prompts, and rows that have an added column already."""
        if self.prompt not in there:
            raise ConfigError(f"there is no column {self.prompt!r} (prompt_column); there are: {', '.join(there)}")
        for name in (self.output, self.error):
            if name in there:
                raise ConfigError(f"there is a column {name!r} already; choose another output_column")


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The output of a prompt: a text, a list of texts if the parameters have ``n > 1``, or a vector; or an error."""

    output: str | list[str] | list[float] | None
    error: str | None = None


class Generator:
    """Completes prompts: texts, token ids, or conversations (lists of messages, for the chat template).

    With ``Vectors`` it embeds texts and token ids. It is the actor of ``generate`` and ``embed``.
    """

    def __init__(self, engine_options: Mapping[str, Any], params: Params | None, columns: Columns) -> None:
        """Loads the model; without ``params`` it has its own defaults."""
        from octavo.engine.llm import LLM

        self._llm = LLM(**engine_options)
        self._params: Params = params if params is not None else self._llm.get_default_sampling_params()
        self.columns = columns

    @property
    def several(self) -> bool:
        return isinstance(self._params, BeamSearchParams) or (
            isinstance(self._params, SamplingParams) and self._params.n > 1
        )

    def answer(self, prompts: Sequence[Any]) -> list[RowAnswer]:
        """The answers, in order; a prompt that cannot be served fails alone."""
        prompts = [prompt.tolist() if hasattr(prompt, "tolist") else prompt for prompt in prompts]
        kinds = "text or token ids" if isinstance(self._params, Vectors) else "text, token ids or messages"
        answers = [RowAnswer(None, f"a prompt must be {kinds}, not {prompt!r}"[:200]) for prompt in prompts]
        chats = [i for i, prompt in enumerate(prompts) if _is_chat(prompt)]
        texts = [i for i, prompt in enumerate(prompts) if isinstance(prompt, (str, list)) and not _is_chat(prompt)]
        if isinstance(self._params, Vectors):
            if texts:
                pooling, name = self._params.pooling_params, self._params.prompt_name
                inputs = [prompts[i] for i in texts]
                vectors = self._llm.embed(inputs, pooling_params=pooling, prompt_name=name, use_tqdm=False)
                for i, result in zip(texts, (vector.outputs for vector in vectors), strict=True):
                    answers[i] = RowAnswer(None if result.error else result.embedding, result.error)
            return answers
        for indices, complete in ((texts, self._llm.generate), (chats, self._llm.chat)):
            if not indices:
                continue
            outputs = complete([prompts[i] for i in indices], self._params, use_tqdm=False)
            for i, output in zip(indices, outputs, strict=True):
                answers[i] = self._make_answer(output)
        return answers

    def __call__(self, table: pa.Table) -> pa.Table:
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
