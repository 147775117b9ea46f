"""Drafters with a network of their own beside the model's (speculative decoding): draft_model, eagle, eagle3, mtp.

``StepPlan.num_drafts`` says how many tokens to draft at most for each sequence. The worker drafts them at the beginning
of that very step, when the tokens of earlier steps are known, puts them into ``StepPlan.drafts``, and verifies them as
it verifies drafts that a plan brings. So a draft never travels. ``num_tokens`` counts the drafts, and the plan has
allocated (and copied, where shared) the blocks of their positions: vLLM's lookahead slots. A drafter may draft fewer
tokens, or none; ``StepResult.num_drafts`` says how many there were.

KV cache. A drafter's layers have caches of their own shape in the model's blocks: one block table addresses both, so
allocation, prefix cache, copy-on-write, swaps and sleep are the model's, and a block is larger by the drafter's layers
(``KVLayers.shapes``). Nothing that a drafter reads there decides an answer, so it may be missing or stale. A
drafter may write where the step computes, and, for earlier positions, what belongs there: in shared blocks, all
sequences that share them have the same tokens.

Each rank of a tensor-parallel group drafts, and must come to the same tokens. With one rank, a drafter that raises is
reported (``StepResult.draft_error``) and the step goes on without drafts.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.config.engine_config import EngineConfig
from octavo.config.kv_spec import KVSpec
from octavo.config.options import SpeculativeConfig
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.core.plan import NewSequence, StepPlan, StepResult
from octavo.kernels.forward_batch import Forward, ForwardBatch, ForwardOutput
from octavo.kernels.interface import Array, LayerCache
from octavo.layers.layer import LayerContext
from octavo.loader.mtp import drafter_folder, require_mtp
from octavo.loader.resolve import gguf_source, weight_quantization
from octavo.loader.weights import (
    load_head,
    load_model,
    make_dummy_head,
    make_dummy_model,
    read_assistant,
    read_dummy_config,
    read_head_config,
)
from octavo.models.config_files import read_model_config
from octavo.models.decoder import Decoder
from octavo.models.draft_head import DraftHead, FeatureReader
from octavo.models.eagle import EagleConfig
from octavo.models.gemma4_assistant import AssistantConfig, Gemma4Assistant
from octavo.models.mtp import MTPConfig
from octavo.models.network import Network, weight_bytes
from octavo.runner.cache_engine import DraftedBlocks
from octavo.runner.input_batch import Int64Array, StepInputs, offsets_of
from octavo.runner.row_feature import RowContext, RowFeature

if TYPE_CHECKING:
    from octavo.runner.adapters import LoraPreparer
    from octavo.runner.model_runner import QueuedStep

logger = logging.getLogger("octavo")


@dataclass(slots=True)
class Drafts:
    #: By row: one token or more.
    tokens: dict[int, list[int]] = field(default_factory=dict)
    #: Time and number of tokens that the drafter had not computed when they were sampled, such as a prompt's.
    catch_up_seconds: float = 0.0
    catch_up_tokens: int = 0

    def add(self, rows: Int64Array, token_ids: Int64Array) -> None:
        """Appends one token to each row; a negative id stands for none."""
        for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
            if token >= 0:
                self.tokens.setdefault(row, []).append(token)


class WorkerDrafter(RowFeature, ABC):
    """A network that drafts. Rows are those of ``InputBatch``, whose tokens and block tables it reads."""

    #: Holds the drafter's weights; sleep mode moves them to host memory and back, or drops them.
    network: Network
    kv_specs: list[KVSpec]
    #: Whether it computes each token once, from the model's hidden states, so that stored blocks must have its layers.
    follows_model = False
    #: The model's caches that its layers read, by their numbers. Its networks get them behind its own.
    shared_caches: Sequence[int] = ()
    _source: DraftSource
    _context: LayerContext
    #: The captured network, between ``capture`` and ``release``.
    _forward: Forward

    @property
    def folder(self) -> Path:
        """The checkpoint of its network."""
        return self._source.folder

    @abstractmethod
    def describe(self) -> str: ...

    def position_bytes(self) -> int:
        """Bytes of its tables for each position of the longest sequence."""
        return self.network.position_bytes()

    @abstractmethod
    def load(self, model: Network) -> None:
        """Reads the weights, again after ``network`` was deleted; ``model`` is the network that it drafts for."""

    @abstractmethod
    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> ForwardOutput:
        """Runs its network eagerly; also on the largest batch, before ``start``, to measure memory."""

    def start(self, worker: RowContext) -> None:
        super().start(worker)
        self._batch, self._sampler, self._device = worker.batch, worker.sampler, worker.device
        self._largest = worker.largest
        self._allocate(self._batch.tokens.num_rows, self._source.speculation.num_speculative_tokens)

    @abstractmethod
    def _allocate(self, num_rows: int, num_drafts: int) -> None:
        """Allocates the state of rows, for drafts of up to ``num_drafts`` tokens."""

    def capture(self) -> None:
        caches = self.worker.cache.drafter_caches
        self.network.extend_positions(self._largest.max_seq_len)
        self._forward = self._context.kernels.capture(lambda batch: self.forward(batch, caches), self._largest)

    def release(self) -> None:
        del self._forward

    def make_reader(self) -> FeatureReader | None:
        """Makes a reader of the model's residual stream, which becomes a part of the model's captured forward."""
        return None

    def change_plan(self, plan: StepPlan, result: StepResult) -> StepPlan:
        """Drafts the tokens that the plan asks for: the plan with ``drafts``, and with their number in ``num_tokens``.

        If the drafter raises, a single rank reports it and goes on; with several ranks the step fails, as the others
        may have drafts.
        """
        if not plan.num_drafts:
            return plan
        start = time.perf_counter()
        seq_ids = {self._batch.row(seq_id): seq_id for seq_id in plan.num_drafts}
        tokens: dict[int, list[int]] = {}
        try:
            drafts = self.draft({row: plan.num_drafts[seq_id] for row, seq_id in seq_ids.items()})
        except Exception as e:
            if self._context.tp_size > 1:
                raise
            logger.error("the drafter failed", exc_info=e)
            result.draft_error = f"{type(e).__name__}: {e}"
        else:
            tokens = {seq_ids[row]: drafted for row, drafted in drafts.tokens.items()}
            result.draft_catch_up_seconds = drafts.catch_up_seconds
            result.draft_catch_up_tokens = drafts.catch_up_tokens
        result.num_drafts = {seq_id: len(drafted) for seq_id, drafted in tokens.items()}
        missing = {seq_id: count - result.num_drafts.get(seq_id, 0) for seq_id, count in plan.num_drafts.items()}
        num_tokens = [n - missing.get(s, 0) for s, n in zip(plan.seq_ids, plan.num_tokens, strict=True)]
        result.draft_seconds = time.perf_counter() - start
        return msgspec.structs.replace(plan, num_tokens=num_tokens, drafts={**plan.drafts, **tokens})

    @abstractmethod
    def draft(self, counts: dict[int, int]) -> Drafts:
        """Drafts at most ``counts[row]`` (1 or more) tokens for each row, all tokens of which are known."""


@dataclass(frozen=True)
class DraftSource:
    """The checkpoint of a drafter's network, before its weights are loaded."""

    #: The engine's options; of a draft model, with its model and quantization.
    options: EngineConfig
    speculation: SpeculativeConfig
    folder: Path
    config: ModelConfig

    def context(self, context: LayerContext) -> LayerContext:
        """The context that the drafter's layers are built with, from the model's."""
        quantization = self.quantization(context.kernels.name)
        return replace(context, quantization=quantization, max_loras=0, max_lora_rank=0, virtual_tokens=0)

    @property
    def is_published_head(self) -> bool:
        return isinstance(self.config, EagleConfig | AssistantConfig)

    def quantization(self, kernels: str, *, is_gguf: bool | None = None) -> str | None:
        """As ``weight_quantization``; published heads are in the model's type."""
        if self.is_published_head:
            return None
        return weight_quantization(self.options, kernels, self.config.quantization, is_gguf=is_gguf)

    def load(self, context: LayerContext, model: Network, loras: LoraPreparer | None) -> WorkerDrafter:
        if self.speculation.method == "draft_model":
            return DraftModel(self, context, model)
        kind = AssistantDrafter if isinstance(self.config, AssistantConfig) else HeadDrafter
        return kind(self, context, model, loras)


def find_draft_source(options: EngineConfig, config: ModelConfig, model_folder: Path) -> DraftSource | None:
    """The drafter of the options for the model in this folder; None: no drafter has a network of its own.

    Finds (or fetches) the drafter's checkpoint and reads its config.json.
    """
    speculation = options.speculative_config
    if speculation is None or not speculation.drafts_on_workers:
        return None
    if speculation.method == "mtp" and speculation.model is None:
        return DraftSource(options, speculation, model_folder, require_mtp(model_folder, config, options))
    assert speculation.model is not None
    dummy, folder = options.load_format == "dummy", drafter_folder(options)
    if speculation.method == "mtp":
        return DraftSource(options, speculation, folder, read_assistant(folder, config, has_weights=not dummy))
    if speculation.method == "draft_model":
        changes = {
            "model": speculation.model,
            "quantization": speculation.quantization or "auto",
            "revision": speculation.revision,
        }
        return DraftSource(
            options.model_copy(update=changes), speculation, folder, read_model_config(folder, model_impl="octavo")
        )
    assert speculation.method in ("eagle", "eagle3")
    read = read_dummy_config if dummy else read_head_config
    return DraftSource(options, speculation, folder, read(folder, speculation.method, config))


# --- draft_model ------------------------------------------------------------------------------------------------------


class DraftModel(WorkerDrafter):
    """The drafter ``draft_model``: a smaller model with the vocabulary of the one that it drafts for.

    Its first forward of a step computes the tokens that it has not seen: one or two per row if it has drafted in the
    step before. Each further forward computes a draft token of every row. It knows its computed tokens by row and by
    block, so it finds them again with the prefix cache and after a swap.
    """

    def __init__(self, source: DraftSource, context: LayerContext, model: Network) -> None:
        self._source, self._context = source, source.context(context)
        # As for the model: tables need not be longer, and for two kinds of scaling they had better not be.
        self.config = replace(source.config, max_position=min(source.config.max_position, model.config.max_position))
        self.load(model)
        self.kv_specs = self.network.kv_specs

    def load(self, model: Network) -> None:
        options, context = self._source.options, self._context
        if options.load_format == "dummy":
            self.network = make_dummy_model(self.config, context, options.seed)
            return
        gguf = gguf_source(options.model, options.revision)
        self.network = load_model(self._source.folder, self.config, context, gguf)

    def describe(self) -> str:
        quantized = f", quantised to {self._context.quantization}" if self._context.quantization else ""
        size = weight_bytes(self.network) / (1 << 30)
        return f"draft_model {self._source.options.model} ({self.config.architecture}){quantized}, {size:.2f} GiB"

    def _allocate(self, num_rows: int, num_drafts: int) -> None:
        self._largest = replace(self._largest, sampled=self._largest.sequences)
        #: Tokens of each row that are computed for certain, and the drafts behind them that were computed.
        self._num_computed = np.zeros(num_rows, np.int64)
        self._num_drafts = np.zeros(num_rows, np.int64)
        self._drafts = np.zeros((num_rows, num_drafts), np.int64)
        # Its layers may have blocks of several groups; then, or with windows, each row is computed anew.
        groups = {cache.group for cache in self.worker.cache.drafter_caches}
        whole = all(spec.window is None for spec in self.kv_specs)
        self._blocks = DraftedBlocks(self._batch, groups.pop()) if len(groups) == 1 and whole else None

    def capture(self) -> None:
        if self._blocks is not None:
            self._blocks.clear()
        super().capture()

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> ForwardOutput:
        kernels, network = self._context.kernels, self.network
        kernels.adapters.begin(batch)
        hidden = network.forward(batch, list(caches))
        return ForwardOutput(hidden, network.logits(kernels.take_sampled(hidden, batch)))

    def add(self, sequence: NewSequence, row: int) -> None:
        self._num_computed[row] = self._num_drafts[row] = 0

    def change_plan(self, plan: StepPlan, result: StepResult) -> StepPlan:
        if self._blocks is not None:
            self._blocks.apply(plan)
        return super().change_plan(plan, result)

    def fork(self, parent: int, row: int) -> None:
        for state in (self._num_computed, self._num_drafts, self._drafts):
            state[row] = state[parent]

    def _computed(self, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """The number of leading tokens of each row whose entries are computed: never the last token."""
        tokens, certain = self._batch.tokens.ids, self._num_computed[rows]
        offsets = np.arange(self._drafts.shape[1])
        places = certain[:, None] + offsets
        accepted = (offsets < self._num_drafts[rows, None]) & (places < num_tokens[:, None])
        accepted &= tokens[rows[:, None], np.minimum(places, tokens.shape[1] - 1)] == self._drafts[rows]
        certain = certain + np.logical_and.accumulate(accepted, axis=1).sum(axis=1)
        if self._blocks is not None:
            certain = self._blocks.extend(rows, certain, num_tokens)
        return np.minimum(certain, num_tokens - 1)

    def draft(self, counts: dict[int, int]) -> Drafts:
        """Drafts; of tokens that the drafter has not computed, a step computes no more than the token budget."""
        drafts, table = Drafts(), self._batch.tokens
        rows, limits = (np.fromiter(values, np.int64, len(counts)) for values in (counts.keys(), counts.values()))
        num_tokens = table.num_tokens[rows]
        # The last draft is not computed, so it may be one past the context.
        limits = np.minimum(limits, self.config.max_position + 1 - num_tokens)
        rows, limits, num_tokens = (values[limits > 0] for values in (rows, limits, num_tokens))
        starts = self._computed(rows, num_tokens)
        order = np.argsort(num_tokens - starts, kind="stable")
        rows, limits, num_tokens, starts = (values[order] for values in (rows, limits, num_tokens, starts))
        lengths = num_tokens - starts
        ends = starts + np.clip(self._largest.tokens - (np.cumsum(lengths) - lengths), 0, lengths)
        begun = ends > starts
        if not begun.any():
            return drafts
        ones_first = np.argsort((ends - starts)[begun] > 1, kind="stable")
        rows, limits, num_tokens, starts, ends = (
            v[begun][ones_first] for v in (rows, limits, num_tokens, starts, ends)
        )
        complete = ends == num_tokens
        start, lengths = time.perf_counter(), ends - starts
        logits = self._run(rows, starts, ends, complete)
        # Two: where all drafts were accepted, the last of them and the token after it.
        drafts.catch_up_tokens = int(np.maximum(lengths - 2, 0).sum())
        drafts.catch_up_seconds = drafts.catch_up_tokens / int(lengths.sum()) * (time.perf_counter() - start)
        if self._blocks is not None:
            self._blocks.fill(rows, self._num_computed[rows], ends)
        self._num_computed[rows], self._num_drafts[rows] = ends, 0
        rows, limits, num_tokens = rows[complete], limits[complete], num_tokens[complete]
        for number in range(int(limits.max(initial=0))):
            places = num_tokens + number
            if number:
                logits = self._run(rows, places - 1, places, np.ones(len(rows), bool))
                self._num_drafts[rows] = number
            # Tokenizers may have fewer tokens than either network has logits.
            width = min(self._sampler.vocab_size, logits.shape[1])
            edited = width == self._sampler.vocab_size
            chosen = self._sampler.draft(logits[:, :width], rows, places, edited=edited)
            table.ids[rows, places] = self._drafts[rows, number] = chosen
            drafts.add(rows, chosen)
            more = (chosen >= 0) & (limits > number + 1)
            rows, limits, num_tokens = rows[more], limits[more], num_tokens[more]
            if not len(rows):
                break
        return drafts

    def _run(self, rows: Int64Array, starts: Int64Array, ends: Int64Array, sampled: NDArray[np.bool_]) -> Array:
        """Computes the tokens ``starts`` to ``ends`` of these rows: logits of the last token of ``sampled`` rows."""
        offsets = offsets_of(ends - starts)
        inputs = self._batch.flatten(rows, starts, ends, offsets, offsets[1:][sampled] - 1)
        inputs.has_adapters = False
        logits = self._forward(self._device.to_device(inputs, ())).logits
        assert logits is not None
        return logits


# --- eagle, eagle3 and mtp: a head that drafts from the model's hidden states -----------------------------------------


class FeatureDrafter(WorkerDrafter):
    """Drafts from the model's features, which it keeps of each row's last positions."""

    network: DraftHead

    def __init__(self, source: DraftSource, context: LayerContext, model: Network, loras: LoraPreparer | None) -> None:
        """``loras``: of the model's rows, as a head may use the model's own projection to logits."""
        self._loras = loras
        self._source, self._config, self._context = source, source.config, source.context(context)
        self._kernels = context.kernels
        self.load(model)
        self.kv_specs = self.network.kv_specs
        self._features = context.kernels.zeros((source.options.token_budget, self.network.feature_width), DType.FLOAT32)

    def describe(self) -> str:
        method, size = self._source.speculation.method, weight_bytes(self.network) / (1 << 30)
        if isinstance(self._config, MTPConfig):
            return f"mtp ({self._config.num_layers} of the checkpoint's own layers), {size:.2f} GiB"
        return f"{method} {self._source.speculation.model} ({self._config.architecture}), {size:.2f} GiB"

    def load(self, model: Network) -> None:
        options, config, method = self._source.options, self._config, self._source.speculation.method
        if not isinstance(model, Decoder) or (method == "eagle" and model.embed_tokens.scale != 1.0):
            raise ConfigError(
                f"speculative_config: method {method!r} is not supported for {type(model).__name__}; take method "
                "'draft_model', 'ngram' or 'suffix'"
            )
        is_dummy, context = options.load_format == "dummy", self._context
        network: Network
        if self._source.is_published_head:
            folder, seed = self._source.folder, options.seed
            network = make_dummy_head(config, context, seed) if is_dummy else load_head(folder, config, context)
        elif is_dummy:
            network = make_dummy_model(config, context, options.seed)
        else:
            gguf = gguf_source(options.model, options.revision)
            network = load_model(self._source.folder, config, context, gguf)
        assert isinstance(network, DraftHead)
        self.network = network
        self.network.attach_target(model)

    def _keep_positions(self, num_rows: int, room: int) -> None:
        """Allocates ``room`` positions of each row whose features are kept."""
        self._room = room
        #: The model's features at position p of a row, in the row's place p % room.
        self._kept = self._kernels.zeros((num_rows * room, self.network.feature_width), DType.FLOAT32)
        #: By row, the positions whose features are kept, and that a head with a cache has not computed: from first up
        #: to end.
        self._first, self._end = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)

    def _run_step(self, step: int, caches: Sequence[LayerCache], batch: ForwardBatch) -> ForwardOutput:
        self._kernels.adapters.begin(batch)
        hidden = self.network.forward_step(step, self._features[: len(batch.token_ids)], batch, list(caches))
        return ForwardOutput(self._kernels.take_sampled(hidden, batch))

    def forget(self, seq_id: int, row: int) -> None:
        self._first[row] = self._end[row] = 0

    def add(self, sequence: NewSequence, row: int) -> None:
        self._first[row] = self._end[row] = sequence.num_computed

    def fork(self, parent: int, row: int) -> None:
        self._copy(np.array([parent]), np.array([row]))

    def _copy(self, parents: Int64Array, rows: Int64Array) -> None:
        self._first[rows], self._end[rows] = self._first[parents], self._end[parents]
        places = np.arange(self._room)
        sources, targets = ((each[:, None] * self._room + places).reshape(-1) for each in (parents, rows))
        self._kernels.put_rows(self._kept, targets, self._kernels.take_rows(self._kept, sources))

    def _keep(self, rows: Int64Array, positions: Int64Array, features: Array) -> None:
        self._kernels.put_rows(self._kept, rows * self._room + positions % self._room, features)

    def draft(self, counts: dict[int, int]) -> Drafts:
        """Drafts; a row gets no drafts if the model's last features are not kept."""
        drafts, table = Drafts(), self._batch.tokens
        rows, limits = (np.fromiter(values, np.int64, len(counts)) for values in (counts.keys(), counts.values()))
        computed = self._batch.num_computed[rows]
        seen = (self._first[rows] < computed) & (computed <= self._end[rows]) & (computed == table.num_tokens[rows] - 1)
        rows, limits = rows[seen], limits[seen]
        if not len(rows):
            return drafts
        hidden = self._first_results(rows, computed[seen])
        number = 0
        while len(rows):
            places = table.num_tokens[rows] + number
            if number:
                hidden = self._follow(rows, places, hidden, number)
            if self._loras is not None:
                self._loras.use(rows)
            logits, ids = self.network.logits(hidden), self.network.target_ids
            if ids is not None:
                logits = self._kernels.scatter_columns(logits, ids, self._sampler.vocab_size)
            chosen = self._sampler.draft(logits, rows, places)
            table.ids[rows, places] = chosen
            drafts.add(rows, chosen)
            number += 1
            more = (chosen >= 0) & (limits > number)
            if not more.all():
                hidden = self._kernels.take_rows(hidden, np.flatnonzero(more))
                rows, limits = rows[more], limits[more]
        return drafts

    @abstractmethod
    def _first_results(self, rows: Int64Array, computed: Int64Array) -> Array:
        """The network's results [S, E] for the last known tokens of these rows, which have ``computed`` before them."""

    @abstractmethod
    def _follow(self, rows: Int64Array, places: Int64Array, hidden: Array, number: int) -> Array:
        """The network's results [S, E] from its last results, ``hidden``, and the drafts before ``places``."""


#: Positions of a row whose last tokens may not be known on the host, where steps are planned ahead.
_AHEAD = 1


class HeadDrafter(FeatureDrafter):
    """The drafters ``eagle``, ``eagle3`` and ``mtp``: a head, which shares the model's blocks and what it computes.

    The head need not run in every step. The model's features of each row's last positions are kept, and the head
    computes several at once: those of a row that drafts, of one with no room left, and of one that ends, as its
    blocks may serve others. So it costs little where nothing is drafted. Positions that a prompt has more of than there
    is room for are computed in the prompt's own step.
    """

    follows_model = True

    def _allocate(self, num_rows: int, num_drafts: int) -> None:
        # Enough for two steps with drafts.
        self._keep_positions(num_rows, max(8, 2 * (num_drafts + 1)) + self.network.depth)
        #: The head's result at the last position that it has computed of each row.
        self._results = self._kernels.zeros((num_rows, self.network.feature_width), DType.FLOAT32)

    def capture(self) -> None:
        caches = self.worker.cache.drafter_caches
        self.network.extend_positions(self._largest.max_seq_len)
        self._steps = [
            self._context.kernels.capture(partial(self._run_step, step, caches), self._largest)
            for step in range(self.network.depth)
        ]

    def release(self) -> None:
        self._steps = []
        self._first[:] = self._end[:] = 0  # nothing of the KV cache is kept

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> ForwardOutput:
        return self._run_step(0, caches, batch)

    def make_reader(self) -> FeatureReader | None:
        return self.network.make_reader()

    def begin(self, plan: StepPlan) -> None:
        """Computes what is kept of rows that end, while they have their blocks, and of all before blocks are stored."""
        seq_ids = plan.forget
        rows = [row for seq_id in seq_ids if (row := self._batch.find_row(seq_id)) is not None]
        ending = np.flatnonzero(self._first < self._end) if plan.blocks_to_store else np.array(rows, np.int64)
        if len(ending):
            # The token after the last position may be unknown.
            ends = np.minimum(self._end[ending], self._batch.num_computed[ending])
            self._catch_up(ending, np.minimum(ends, self._batch.tokens.num_tokens[ending] - 1))

    def reads_hidden(self) -> bool:
        return True

    def after_step(self, inputs: StepInputs, batch: ForwardBatch, output: ForwardOutput, step: QueuedStep) -> None:
        features = output.hidden if output.features is None else output.features
        rows, starts, ends = inputs.rows, inputs.starts, inputs.ends
        first = self._first[rows]
        # Of rejected drafts nothing is kept; positions that were not computed in steps, such as forced ones, are lost.
        first = np.where((first <= starts) & (starts <= self._end[rows]), first, starts)
        self._first[rows], self._end[rows] = first, ends
        full = ends - first > self._room
        positions, token_rows = inputs.arrays["positions"], rows
        if len(positions) != len(rows):
            token_rows = np.repeat(rows, ends - starts)
        if not full.any():
            self._keep(token_rows, positions, features)
        else:
            self._make_room(inputs, features, full)
        if inputs.forked is not None:
            self._copy(rows[inputs.forked.parents], inputs.forked.rows)

    def _make_room(self, inputs: StepInputs, features: Array, full: NDArray[np.bool_]) -> None:
        """Computes as much as possible of the rows that are ``full``, and keeps the rest of the step's features."""
        rows, starts, ends = inputs.rows, inputs.starts, inputs.ends
        lengths = ends - starts
        # Of a prompt, all tokens are known, but not what follows them; of others those before this step's.
        until = np.where(lengths == 1, starts - _AHEAD, ends - 1)
        until = np.where(inputs.arrays["num_drafts"] > 0, starts, until)
        which = np.repeat(np.arange(len(rows)), lengths)
        positions = inputs.arrays["positions"]
        # A copy: the head's forward may reuse the memory.
        features = self._kernels.take_rows(features, np.arange(len(positions)))
        offsets = offsets_of(lengths)[:-1]
        chosen = np.flatnonzero(full)
        self._catch_up(rows[chosen], until[chosen], _StepFeatures(features, starts[chosen], offsets[chosen]))
        # Of more drafts than there is room for, the first are not computed.
        self._first[rows] = np.maximum(self._first[rows], ends - self._room)
        kept = np.flatnonzero(positions >= self._first[rows][which])
        self._keep(rows[which[kept]], positions[kept], self._kernels.take_rows(features, kept))

    def _catch_up(self, rows: Int64Array, ends: Int64Array, step: _StepFeatures | None = None) -> None:
        """Computes the positions of these rows up to ``ends``, whose next tokens are known.

        The results at the last of them are in ``_results``. With several layers the last positions are computed again
        later, as a layer needs further tokens than the one before it.
        """
        starts = self._first[rows].copy()
        self._first[rows] = np.maximum(starts, ends - (self.network.depth - 1))
        offsets = None if step is None else step.offsets - step.starts
        while (behind := np.flatnonzero(starts < ends)).size:
            lengths = ends[behind] - starts[behind]
            lengths = np.clip(self._largest.tokens - (np.cumsum(lengths) - lengths), 0, lengths)
            order = np.argsort(lengths != 1, kind="stable")
            order = order[lengths[order] > 0]  # rows with one token first
            piece, lengths = behind[order], lengths[order]
            until = starts[piece] + lengths
            token_rows, which = np.repeat(rows[piece], lengths), np.repeat(piece, lengths)
            first = np.cumsum(lengths) - lengths
            positions = np.arange(len(which)) + np.repeat(starts[piece] - first, lengths)
            kept = self._kernels.take_rows(self._kept, token_rows * self._room + positions % self._room)
            self._kernels.put_rows(self._features, np.arange(len(which)), kept)
            if step is not None and offsets is not None:
                new = np.flatnonzero(positions >= step.starts[which])
                sources = self._kernels.take_rows(step.features, positions[new] + offsets[which[new]])
                self._kernels.put_rows(self._features, new, sources)
            self._compute(rows[piece], starts[piece], until)
            starts[piece] = until

    def _compute(self, rows: Int64Array, starts: Int64Array, ends: Int64Array) -> None:
        """Runs all layers on positions of these rows, whose features are in ``_features``; keeps the last results."""
        table, depth, offsets = self._batch.tokens.ids, self.network.depth, offsets_of(ends - starts)
        last, all_rows = offsets[1:] - 1, np.arange(offsets[-1])
        inputs = self._batch.flatten(rows, starts, ends, offsets, last if depth == 1 else all_rows)
        token_rows, positions = np.repeat(rows, ends - starts), inputs.arrays["positions"]
        for step, forward in enumerate(self._steps):
            places = np.minimum(positions + 1 + step, table.shape[1] - 1)
            inputs.arrays["token_ids"][:] = table[token_rows, places]  # in place: a host's batch is made once
            hidden = forward(self._device.to_device(inputs, ())).hidden
            if step == 0:
                # Behind the sampled rows there may be others.
                results = hidden[: len(rows)] if depth == 1 else self._kernels.take_rows(hidden, last)
                self._kernels.put_rows(self._results, rows, results)
            if step < depth - 1:
                self._kernels.put_rows(self._features, all_rows, hidden)

    def _first_results(self, rows: Int64Array, computed: Int64Array) -> Array:
        self._catch_up(rows, computed)
        return self._kernels.take_rows(self._results, rows)

    def _follow(self, rows: Int64Array, places: Int64Array, hidden: Array, number: int) -> Array:
        step = min(number, self.network.depth - 1)
        starts, offsets = places - 2 - step, np.arange(len(rows) + 1)
        inputs = self._batch.flatten(rows, starts, starts + 1, offsets, offsets[:-1])
        inputs.arrays["token_ids"] = self._batch.tokens.ids[rows, places - 1].astype(np.int64)
        self._kernels.put_rows(self._features, np.arange(len(rows)), self.network.next_features(hidden))
        return self._steps[step](self._device.to_device(inputs, ())).hidden


@dataclass(frozen=True)
class _StepFeatures:
    """The features of a step's tokens: of some rows, the first position [S] and the index of its features."""

    features: Array
    starts: Int64Array
    offsets: Int64Array


class AssistantDrafter(FeatureDrafter):
    """The drafter ``mtp`` with an assistant of Gemma 4: it reads the model's cache and never catches up."""

    network: Gemma4Assistant

    def __init__(self, source: DraftSource, context: LayerContext, model: Network, loras: LoraPreparer | None) -> None:
        super().__init__(source, context, model, loras)
        self.shared_caches = self.network.shared_caches()

    def _allocate(self, num_rows: int, num_drafts: int) -> None:
        self._largest = replace(self._largest, tokens=self._largest.sequences, sampled=self._largest.sequences)
        # Any of a step's tokens may be the last that is accepted.
        self._keep_positions(num_rows, num_drafts + 1)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> ForwardOutput:
        return self._run_step(0, caches, batch)

    def after_step(self, inputs: StepInputs, batch: ForwardBatch, output: ForwardOutput, step: QueuedStep) -> None:
        rows, ends, lengths = inputs.rows, inputs.ends, inputs.ends - inputs.starts
        hidden, positions = output.hidden, inputs.arrays["positions"]
        token_rows, least = np.repeat(rows, lengths), np.repeat(ends - self._room, lengths)
        if batch.sampled_only is not None:  # drafts follow sampled rows alone
            sampled = inputs.arrays["sampled_rows"]
            token_rows, positions, least = token_rows[sampled], positions[sampled], least[sampled]
        kept = np.flatnonzero(positions >= least)
        if len(kept) < len(positions):
            hidden, token_rows, positions = self._kernels.take_rows(hidden, kept), token_rows[kept], positions[kept]
        self._first[rows] = self._end[rows] = ends
        np.minimum.at(self._first, token_rows, positions)
        self._keep(token_rows, positions, hidden)
        if inputs.forked is not None:
            self._copy(rows[inputs.forked.parents], inputs.forked.rows)

    def _first_results(self, rows: Int64Array, computed: Int64Array) -> Array:
        features = self._kernels.take_rows(self._kept, rows * self._room + (computed - 1) % self._room)
        return self._run(rows, computed, features)

    def _follow(self, rows: Int64Array, places: Int64Array, hidden: Array, number: int) -> Array:
        return self._run(rows, places - 1, self.network.next_features(hidden))

    def _run(self, rows: Int64Array, places: Int64Array, features: Array) -> Array:
        """The results for the tokens at ``places``, at the last position of each row that the model has computed."""
        ends, offsets = self._batch.num_computed[rows], np.arange(len(rows) + 1)
        inputs = self._batch.flatten(rows, ends - 1, ends, offsets, offsets[:-1])
        inputs.arrays["token_ids"] = self._batch.tokens.ids[rows, places].astype(np.int64)
        self._kernels.put_rows(self._features, np.arange(len(rows)), features)
        return self._forward(self._device.to_device(inputs, ())).hidden
