"""The drafter ``draft_model``: a smaller model with the vocabulary of the one that it drafts for.

Its first forward of a step computes the tokens that it has not seen, which are one or two where it has drafted in the
step before, and each further one a draft token of every row. What it has computed is known by row and by block, so that
it is found again with the prefix cache and after a swap.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.config.engine_config import EngineConfig
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch, ForwardOutput
from octavo.kernels.interface import Array, LayerCache
from octavo.layers.layer import LayerContext
from octavo.loader.resolve import gguf_source, resolve_model, weight_quantization
from octavo.loader.weights import (
    load_head,
    load_model,
    make_dummy_head,
    make_dummy_model,
    read_dummy_config,
    read_head_config,
)
from octavo.models.config_files import read_model_config
from octavo.models.decoder import Decoder
from octavo.models.eagle import EagleConfig, EagleHead, FeatureReader
from octavo.models.network import Network, weight_bytes
from octavo.runner.cache_engine import DraftedBlocks
from octavo.runner.input_batch import InputBatch, StepInputs
from octavo.runner.network_drafter import Drafts, DraftSource, WorkerDrafter
from octavo.sampling.sampler import Sampler

if TYPE_CHECKING:
    from octavo.runner.device import Device


@dataclass(frozen=True)
class DraftModelSource(DraftSource):
    """A model's folder."""

    #: The engine's, with the model and quantization of the drafter.
    options: EngineConfig
    folder: Path
    config: ModelConfig

    @classmethod
    def of(cls, options: EngineConfig) -> DraftModelSource:
        """Finds (or fetches) the model that ``options.speculative_config`` names, and reads its config.json.

        Raises:
            OctavoError: there is none, or it is not supported.
        """
        given = options.speculative_config
        assert given is not None and given.model is not None
        changes = {"model": given.model, "quantization": given.quantization or "auto", "revision": given.revision}
        own = options.model_copy(update=changes)
        dummy = options.load_format == "dummy"
        folder = resolve_model(own.model, revision=own.revision, weights=not dummy)
        return cls(own, folder, read_model_config(folder))

    def load(self, context: LayerContext, model: Network) -> DraftModel:
        """See ``DraftSource``."""
        return DraftModel(self, context, model)

    def context(self, context: LayerContext) -> LayerContext:
        """See ``DraftSource``."""
        return replace(
            context,
            quantization=weight_quantization(self.options, context.kernels.name, self.config.quantization),
            max_loras=0,
            max_lora_rank=0,
            virtual_tokens=0,
        )


class DraftModel(WorkerDrafter):
    """Owns the network; what it keeps of each row is how many of its tokens are computed."""

    def __init__(self, source: DraftModelSource, context: LayerContext, model: Network) -> None:
        """Loads the weights.

        Raises:
            OctavoError: as ``load_model``.
        """
        self._source, self._context = source, source.context(context)
        # As for the model: tables need not be longer, and for two kinds of scaling they had better not be.
        self.config = replace(source.config, max_position=min(source.config.max_position, model.config.max_position))
        self.load(model)
        self.kv_specs = self.network.kv_specs

    def position_bytes(self) -> int:
        """See ``WorkerDrafter``."""
        return self.network.position_bytes()

    def load(self, model: Network) -> None:
        """See ``WorkerDrafter``."""
        options, context = self._source.options, self._context
        if options.load_format == "dummy":
            self.network = make_dummy_model(self.config, context, options.seed)
            return
        self.network = load_model(self._source.folder, self.config, context, gguf_source(options.model))

    def describe(self) -> str:
        """See ``WorkerDrafter``."""
        quantized = f", quantised to {self._context.quantization}" if self._context.quantization else ""
        size = weight_bytes(self.network) / (1 << 30)
        return f"draft_model {self._source.options.model} ({self.config.architecture}){quantized}, {size:.2f} GiB"

    def start(
        self, batch: InputBatch, sampler: Sampler, device: Device, largest: BatchSize, caches: Sequence[LayerCache]
    ) -> None:
        """See ``WorkerDrafter``."""
        self._batch, self._sampler, self._device = batch, sampler, device
        self._largest = replace(largest, sampled=largest.sequences)
        given = self._source.options.speculative_config
        assert given is not None
        rows = batch.tokens.num_rows
        #: Tokens of each row that are computed for certain, and the drafts behind them that were computed.
        self._num_computed = np.zeros(rows, np.int64)
        self._num_drafts = np.zeros(rows, np.int64)
        self._drafts = np.zeros((rows, given.num_speculative_tokens), np.int64)
        # Its layers may have blocks of several groups; then, or with windows, each row is computed anew.
        groups = {cache.group for cache in caches}
        whole = all(spec.window is None for spec in self.kv_specs)
        self._blocks = DraftedBlocks(batch, groups.pop()) if len(groups) == 1 and whole else None
        self.capture(caches)

    def capture(self, caches: Sequence[LayerCache]) -> None:
        """See ``WorkerDrafter``."""
        if self._blocks is not None:
            self._blocks.clear()
        self.network.extend_positions(min(self._largest.max_seq_len, self.config.max_position))
        self._forward: Forward = self._context.kernels.capture(lambda batch: self.forward(batch, caches), self._largest)

    def release(self) -> None:
        """See ``WorkerDrafter``."""
        del self._forward

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> ForwardOutput:
        """See ``WorkerDrafter``."""
        kernels, network = self._context.kernels, self.network
        kernels.adapters.begin(batch)
        hidden = network.forward(batch, list(caches))
        return ForwardOutput(hidden, network.logits(kernels.take_sampled(hidden, batch)))

    # --- rows and blocks --------------------------------------------------------------------------------------------

    def add(self, row: int) -> None:
        """See ``WorkerDrafter``."""
        self._num_computed[row] = self._num_drafts[row] = 0

    def apply(self, plan: StepPlan) -> None:
        """See ``WorkerDrafter``."""
        if self._blocks is not None:
            self._blocks.apply(plan)

    def fork(self, parent: int, child: int) -> None:
        """See ``WorkerDrafter``."""
        for state in (self._num_computed, self._num_drafts, self._drafts):
            state[child] = state[parent]

    def _computed(self, rows: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each row that need not be computed: all but the last one, as far as drafts have become tokens."""
        tokens, certain = self._batch.tokens.ids, self._num_computed[rows]
        offsets = np.arange(self._drafts.shape[1])
        places = certain[:, None] + offsets
        right = (offsets < self._num_drafts[rows, None]) & (places < known[:, None])
        right &= tokens[rows[:, None], np.minimum(places, tokens.shape[1] - 1)] == self._drafts[rows]
        certain = certain + np.logical_and.accumulate(right, axis=1).sum(axis=1)
        if self._blocks is not None:
            certain = self._blocks.extend(rows, certain, known)
        return np.minimum(certain, known - 1)

    # --- a step -----------------------------------------------------------------------------------------------------

    def draft(self, counts: dict[int, int]) -> Drafts:
        """See ``WorkerDrafter``. Of tokens that it has not seen, a step computes as many as the token budget has."""
        found, table = Drafts(), self._batch.tokens
        rows, wanted = (np.fromiter(values, np.int64, len(counts)) for values in (counts.keys(), counts.values()))
        known = table.num_tokens[rows]
        # The last draft is not computed, so it may be one past the context.
        wanted = np.minimum(wanted, self.config.max_position + 1 - known)
        rows, wanted, known = (values[wanted > 0] for values in (rows, wanted, known))
        starts = self._computed(rows, known)
        order = np.argsort(known - starts, kind="stable")
        rows, wanted, known, starts = (values[order] for values in (rows, wanted, known, starts))
        lengths = known - starts
        ends = starts + np.clip(self._largest.tokens - (np.cumsum(lengths) - lengths), 0, lengths)
        begun = ends > starts
        if not begun.any():
            return found
        ones_first = np.argsort((ends - starts)[begun] > 1, kind="stable")
        rows, wanted, known, starts, ends = (v[begun][ones_first] for v in (rows, wanted, known, starts, ends))
        complete = ends == known
        logits = self._timed_first(rows, starts, ends, complete, found)
        if self._blocks is not None:
            self._blocks.fill(rows, self._num_computed[rows], ends)
        self._num_computed[rows], self._num_drafts[rows] = ends, 0
        rows, wanted, known = rows[complete], wanted[complete], known[complete]
        for number in range(int(wanted.max(initial=0))):
            places = known + number
            if number:
                logits = self._run(rows, places - 1, places, np.ones(len(rows), bool))
                self._num_drafts[rows] = number
            chosen = self._choose(logits, rows, places)
            table.ids[rows, places] = self._drafts[rows, number] = chosen
            for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
                if token >= 0:
                    found.tokens.setdefault(row, []).append(token)
            more = (chosen >= 0) & (wanted > number + 1)
            rows, wanted, known = rows[more], wanted[more], known[more]
            if not len(rows):
                break
        return found

    def _timed_first(
        self,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        complete: NDArray[np.bool_],
        found: Drafts,
    ) -> Array:
        start = time.perf_counter()
        logits = self._run(rows, starts, ends, complete)
        lengths = ends - starts
        # Two: where all drafts were accepted, the last of them and the token after it.
        found.catch_up_tokens = int(np.maximum(lengths - 2, 0).sum())
        found.catch_up_seconds = found.catch_up_tokens / int(lengths.sum()) * (time.perf_counter() - start)
        return logits

    def _run(
        self, rows: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64], sampled: NDArray[np.bool_]
    ) -> Array:
        """Computes the tokens ``starts`` to ``ends`` of these rows; logits of the last one of those ``sampled``."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(ends - starts, out=offsets[1:])
        inputs = self._batch.flatten(rows, starts, ends, offsets, offsets[1:][sampled] - 1, adapters=False)
        logits = self._forward(self._device.to_device(inputs, ())).logits
        assert logits is not None
        return logits

    def _choose(self, logits: Array, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """With the noise of the rows' requests; tokenizers may have fewer tokens than either network has logits."""
        size = self._sampler.vocab_size
        width = min(size, logits.shape[1])
        return self._sampler.draft(logits[:, :width], rows, positions, edited=width == size)


# The drafters ``eagle`` and ``eagle3``: a head that drafts from the model's hidden states (``octavo.models.eagle``).


@dataclass(frozen=True)
class EagleSource(DraftSource):
    """A head's folder."""

    options: EngineConfig
    folder: Path
    config: EagleConfig

    @classmethod
    def of(cls, options: EngineConfig, model: ModelConfig) -> EagleSource:
        """Finds (or fetches) the head that ``options.speculative_config`` names, and compares it with the model.

        Raises:
            OctavoError: there is none, or it is not for this model.
        """
        given = options.speculative_config
        assert given is not None and given.model is not None and given.method in ("eagle", "eagle3")
        dummy = options.load_format == "dummy"
        folder = resolve_model(given.model, revision=given.revision, weights=not dummy)
        read = read_dummy_config if dummy else read_head_config
        return cls(options, folder, read(folder, given.method, model))

    def context(self, context: LayerContext) -> LayerContext:
        """See ``DraftSource``; published heads are in the model's type."""
        return replace(context, quantization=None, max_loras=0, max_lora_rank=0, virtual_tokens=0)

    def load(self, context: LayerContext, model: Network) -> EagleDrafter:
        """See ``DraftSource``."""
        return EagleDrafter(self, context, model)


class EagleDrafter(WorkerDrafter):
    """Owns the head, and of each row the results that the next drafts may begin with."""

    network: EagleHead

    def __init__(self, source: EagleSource, context: LayerContext, model: Network) -> None:
        """Loads the weights; see ``load_head``.

        Raises:
            ConfigError: the model is none that a head can be for.
            WeightError: the weights cannot be read.
        """
        self._source, self._context = source, source.context(context)
        self._kernels = context.kernels
        self.load(model)
        self.kv_specs = self.network.kv_specs
        shape = source.options.token_budget, source.config.hidden_size
        #: Input of the head: a row for each token.
        self._features = context.kernels.zeros(shape, DType.FLOAT32)

    def describe(self) -> str:
        """See ``WorkerDrafter``."""
        given, size = self._source.options.speculative_config, weight_bytes(self.network) / (1 << 30)
        assert given is not None
        return f"{given.method} {given.model} ({self._source.config.architecture}), {size:.2f} GiB"

    def position_bytes(self) -> int:
        """See ``WorkerDrafter``."""
        return self.network.position_bytes()

    def load(self, model: Network) -> None:
        """See ``WorkerDrafter``."""
        method = self._source.config.method
        if not isinstance(model, Decoder) or (method == "eagle" and model.embed_tokens.scale != 1.0):
            raise ConfigError(
                f"speculative_config: method {method!r} is not supported for {type(model).__name__}; take method "
                "'draft_model', 'ngram' or 'suffix'"
            )
        options, config = self._source.options, self._source.config
        if options.load_format == "dummy":
            self.network = make_dummy_head(config, self._context, options.seed)
        else:
            self.network = load_head(self._source.folder, config, self._context)
        self.network.attach_target(model)

    def start(
        self, batch: InputBatch, sampler: Sampler, device: Device, largest: BatchSize, caches: Sequence[LayerCache]
    ) -> None:
        """See ``WorkerDrafter``."""
        self._batch, self._sampler, self._device, self._largest = batch, sampler, device, largest
        given = self._source.options.speculative_config
        assert given is not None
        rows, width = batch.tokens.num_rows, self._features.shape[1]
        #: Rows that a sequence samples at most.
        self._window = given.num_speculative_tokens + 1
        #: Results at the sampled rows of each row's last step, and the number of known tokens before it; 0: none.
        self._results = self._kernels.zeros((rows * self._window, width), DType.FLOAT32)
        self._known = np.zeros(rows, np.int64)
        self.capture(caches)

    def capture(self, caches: Sequence[LayerCache]) -> None:
        """See ``WorkerDrafter``."""
        self.network.extend_positions(self._largest.max_seq_len)
        self._forward: Forward = self._kernels.capture(lambda batch: self.forward(batch, caches), self._largest)

    def release(self) -> None:
        """See ``WorkerDrafter``."""
        del self._forward

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> ForwardOutput:
        """See ``WorkerDrafter``: the head's results at the sampled rows, without logits."""
        self._kernels.adapters.begin(batch)
        hidden = self.network.forward_layers(self._features[: len(batch.token_ids)], batch, list(caches))
        return ForwardOutput(self._kernels.take_sampled(hidden, batch))

    def make_reader(self) -> FeatureReader | None:
        """See ``WorkerDrafter``."""
        return self.network.make_reader()

    # --- rows -------------------------------------------------------------------------------------------------------

    def add(self, row: int) -> None:
        """See ``WorkerDrafter``."""
        self._known[row] = 0

    def fork(self, parent: int, child: int) -> None:
        """See ``WorkerDrafter``: the child's next token is another one."""
        self._known[child] = 0

    # --- after a step -----------------------------------------------------------------------------------------------

    def after_step(self, inputs: StepInputs, batch: ForwardBatch, output: ForwardOutput, sampled: Any | None) -> None:
        """See ``WorkerDrafter``: computes the tokens of the step."""
        features = output.hidden if output.features is None else output.features
        self._kernels.put_rows(self._features, np.arange(len(features)), features)
        tokens = self._next_tokens(inputs, batch, sampled)
        hidden = self._forward(replace(batch, token_ids=tokens)).hidden
        if not len(inputs.sampling):
            return
        rows = inputs.rows[inputs.sampling]
        positions = inputs.arrays["positions"][inputs.arrays["sampled_rows"]]
        places = rows * self._window
        if inputs.drafted is None:
            self._known[rows] = positions[: len(rows)] + 1
        else:
            counts, count = inputs.drafted.counts[: len(rows)], self._num_own(inputs)
            offsets = inputs.drafted.offsets[:count]
            places = np.repeat(places, counts) + offsets
            self._known[rows] = positions[:count][offsets == 0] + 1
            # Drafts that others propose, such as predictions, may be more than the head's.
            hidden, places = self._within_window(hidden[:count], places, offsets)
        self._kernels.put_rows(self._results, places, hidden[: len(places)])

    def _within_window(
        self, hidden: Array, places: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> tuple[Array, NDArray[np.int64]]:
        kept = np.flatnonzero(offsets < self._window)
        if len(kept) == len(offsets):
            return hidden, places
        return self._kernels.take_rows(hidden, kept), places[kept]

    @staticmethod
    def _num_own(inputs: StepInputs) -> int:
        """Sampled rows of the step's sequences, which those of sequences just forked from them follow."""
        count = len(inputs.sampling)
        return count if inputs.drafted is None else int(inputs.drafted.counts[:count].sum())

    def _next_tokens(self, inputs: StepInputs, batch: ForwardBatch, sampled: Any | None) -> Array:
        """The token that follows each token of the step, int64 [T]; what is not known is any token."""
        if sampled is not None and inputs.all_sampled and inputs.forked is None:
            return self._kernels.as_token_ids(sampled)
        lengths = np.diff(inputs.arrays["query_start_loc"])
        rows, positions = np.repeat(inputs.rows, lengths), inputs.arrays["positions"]
        tokens = self._kernels.wrap(self._batch.tokens.ids[rows, positions + 1].astype(np.int64))
        if sampled is not None:
            count = self._num_own(inputs)
            self._kernels.put_tokens(tokens, inputs.arrays["sampled_rows"][:count], sampled, np.arange(count))
        return tokens

    # --- drafts -----------------------------------------------------------------------------------------------------

    def draft(self, counts: dict[int, int]) -> Drafts:
        """See ``WorkerDrafter``. A row whose last step was not seen gets none, such as a child of a fork."""
        found, table = Drafts(), self._batch.tokens
        rows, wanted = (np.fromiter(values, np.int64, len(counts)) for values in (counts.keys(), counts.values()))
        computed = self._batch.num_computed[rows]
        offsets = computed - self._known[rows]
        # Of tokens that were appended without being sampled, the head has not computed the one before the last.
        seen = (self._known[rows] > 0) & (offsets >= 0) & (offsets < self._window)
        seen &= computed == table.num_tokens[rows] - 1
        rows, wanted, offsets = rows[seen], wanted[seen], offsets[seen]
        hidden = self._kernels.take_rows(self._results, rows * self._window + offsets)
        number = 0
        while len(rows):
            places = table.num_tokens[rows] + number
            if number:
                hidden = self._follow(rows, places, hidden)
            chosen = self._choose(hidden, rows, places)
            table.ids[rows, places] = chosen
            for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
                if token >= 0:
                    found.tokens.setdefault(row, []).append(token)
            number += 1
            more = (chosen >= 0) & (wanted > number)
            if not more.all():
                hidden = self._kernels.take_rows(hidden, np.flatnonzero(more))
                rows, wanted = rows[more], wanted[more]
        return found

    def _follow(self, rows: NDArray[np.int64], places: NDArray[np.int64], hidden: Array) -> Array:
        """The head's results for its own, ``hidden``, and the drafts before ``places``: [S, E]."""
        starts, offsets = places - 2, np.arange(len(rows) + 1)
        inputs = self._batch.flatten(rows, starts, starts + 1, offsets, offsets[:-1])
        inputs.arrays["token_ids"] = self._batch.tokens.ids[rows, places - 1].astype(np.int64)
        self._kernels.put_rows(self._features, np.arange(len(rows)), hidden)
        return self._forward(self._device.to_device(inputs, ())).hidden

    def _choose(self, hidden: Array, rows: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """With the noise of the rows' requests."""
        slots = self._batch.adapters[rows]
        self._kernels.adapters.use(self._kernels.wrap(slots) if (slots >= 0).any() else None)
        logits, ids = self.network.logits(hidden), self.network.target_ids
        if ids is not None:
            logits = self._kernels.scatter_columns(logits, ids, self._sampler.vocab_size)
        return self._sampler.draft(logits, rows, places)
