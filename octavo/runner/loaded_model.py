"""What a worker has before there is a KV cache: its device, its kernels, and the network with its weights."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from octavo.config.engine_config import EngineConfig
from octavo.config.kv_spec import KVSpec, LayerGroup, group_layers
from octavo.config.options import ParallelLayout
from octavo.core.dtypes import DType
from octavo.core.model_config import ModelConfig
from octavo.core.plugins import LogitsPlugins
from octavo.kernels import load_kernels, resolve_device
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput
from octavo.kernels.interface import Communicator, KernelClock, Kernels, LayerCache
from octavo.layers.layer import LayerContext
from octavo.loader.resolve import gguf_source, weight_quantization
from octavo.loader.weights import load_model, make_dummy_model
from octavo.models.network import Network, build_rank_without_weights, build_without_weights, weight_bytes
from octavo.process.startup import phase
from octavo.runner import memory
from octavo.runner.cache_engine import KVLayers, Workspace, find_groups
from octavo.runner.device import HostDevice
from octavo.runner.memory import WorkerShare
from octavo.runner.preparers import PreparerContext, WorkerPreparations, make_preparers
from octavo.sampling.sampler import Sampler, TokenTable

if TYPE_CHECKING:
    from octavo.runner.device import Device
    from octavo.runner.encoders import ImagePreparer
    from octavo.runner.network_drafter import DraftSource, WorkerDrafter
    from octavo.runner.preparer_kinds import EncoderInputPreparer, GrammarPreparer, LoraPreparer, PromptAdapters


# Chooses the device of a worker; what a GPU needs is imported for one only.


def make_device(options: EngineConfig, config: ModelConfig, share: WorkerShare) -> Device:
    """The device that ``options.device`` means.

    Raises:
        ConfigError: a GPU was asked for and torch sees none.
    """
    if resolve_device(options.device) == "cpu":
        return HostDevice(options, config, share)
    from octavo.runner.cuda import CudaDevice

    return CudaDevice(options, config, share)


# What connects a worker with the others of its network: collectives of its stage, links to the stages beside it.


class StageLink(Protocol):
    """One way from a worker to the one at its place in the next stage; what is sent is received in order."""

    def send(self, x: Any) -> None:
        """Sends x, float32 [T, E] as host calls get it; its memory may be reused afterwards."""
        ...

    def receive(self, x: Any) -> None:
        """Waits for what was sent, of the same shape, and writes it to x."""
        ...


@dataclass(frozen=True)
class Ranks:
    """A worker's place, and its connections."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    #: The tensor-parallel group of its stage; None: it is alone.
    group: Communicator | None = None
    #: From the stage before and to the one after; None: there is none.
    incoming: StageLink | None = None
    outgoing: StageLink | None = None


class SharedMemoryLink:
    """A link between two processes of one machine: a ring of slots, and a pipe that wakes the receiver.

    A slot is written again ``slots`` sends later. The sender need not ask whether it has been read: fewer steps than
    that are in flight.
    """

    def __init__(self, memory: mmap.mmap, slots: int, pipe: int) -> None:
        """``memory`` is shared by both ends; ``pipe`` is the descriptor to write to, or to read from."""
        self._slots = np.frombuffer(memory, dtype=np.float32).reshape(slots, -1)
        self._pipe = pipe
        self._count = 0

    def send(self, x: Any) -> None:
        """See ``StageLink``."""
        self._next(x)[:] = np.asarray(x).reshape(-1)
        os.write(self._pipe, b"\0")

    def receive(self, x: Any) -> None:
        """See ``StageLink``.

        Raises:
            ConnectionError: the sender has ended.
        """
        if not os.read(self._pipe, 1):
            raise ConnectionError("the worker of the pipeline stage before this one has ended")
        np.asarray(x).reshape(-1)[:] = self._next(x)

    def _next(self, x: Any) -> NDArray[np.float32]:
        slot = self._slots[self._count % len(self._slots), : math.prod(x.shape)]
        self._count += 1
        return slot


# What a worker computes with: its kernels, how layers are built, and the network with its weights.


def make_kernels(options: EngineConfig, device: str, kv_specs: Iterable[KVSpec], layout: ParallelLayout) -> Kernels:
    """The backend of the options; ``kv_specs`` are those of all layers of all stages, so that it serves each."""
    return load_kernels(
        options.kernels,
        device,
        head_dim=math.gcd(*(spec.head_dim for spec in kv_specs)),
        deterministic=options.deterministic,
        # An exchange between stages is a call on the host, which a graph cannot hold.
        enforce_eager=options.enforce_eager or layout.pipeline_parallel_size > 1,
        graph_capture="start" if options.graph_capture == "start" else "lazy",
        cudagraph_capture_sizes=options.graph_sizes,
    )


def make_context(
    options: EngineConfig,
    config: ModelConfig,
    kernels: Kernels,
    dtype: str,
    layout: ParallelLayout,
) -> LayerContext:
    """How the layers of this rank's stage are built."""
    return LayerContext(
        kernels=kernels,
        dtype=DType(dtype),
        quantization=weight_quantization(options, kernels.name, config.quantization),
        kv_cache_dtype=options.kv_cache_dtype,
        tp_rank=layout.tp_rank,
        tp_size=layout.tensor_parallel_size,
        layers=layout.layers(config.num_layers),
        # More are made with the KV cache, as many as it can use; the largest step has these.
        positions=options.token_budget,
        max_loras=options.max_loras if options.enable_lora else 0,
        max_lora_rank=options.max_lora_rank,
        # Those of a step's images are written behind the adapters'.
        virtual_tokens=options.num_virtual_tokens + (0 if config.image_facts is None else options.token_budget),
    )


def load_network(options: EngineConfig, config: ModelConfig, context: LayerContext, folder: Path) -> Network:
    """The network with the weights of the checkpoint, or with random ones.

    Raises:
        WeightError: a weight file is missing or wrong.
    """
    if options.load_format == "dummy":
        return make_dummy_model(config, context, options.seed)
    return load_model(folder, config, context, gguf_source(options.model))


def find_drafter(options: EngineConfig, config: ModelConfig) -> DraftSource | None:
    """The drafter of the options for a model of this configuration, if it has a network of its own.

    Raises:
        OctavoError: there is none of that name, or it does not fit the model.
    """
    speculation = options.speculative_config
    if speculation is None or not speculation.drafts_on_workers:
        return None
    if speculation.method == "draft_model":
        from octavo.runner.drafters import DraftModelSource

        return DraftModelSource.of(options)
    from octavo.runner.drafters import EagleSource

    return EagleSource.of(options, config)


class LoadedModel:
    """A rank's share of the model on its device, ready to compute. Owns the weights, the drafter's too."""

    def __init__(
        self,
        options: EngineConfig,
        config: ModelConfig,
        folder: Path,
        dtype: str,
        share: WorkerShare | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Loads the weights.

        ``share`` is what the worker may take of its machine, by default all; ``ranks`` its place among the workers, by
        default alone.

        Raises:
            InsufficientMemoryError: the weights do not fit.
            WeightError: a weight file is missing or wrong.
        """
        share = share or WorkerShare()
        self.options, self.config, self.folder = options, config, folder
        self.ranks = ranks or Ranks()
        self.device = make_device(options, config, share)
        layout = self.ranks.layout
        drafts = find_drafter(options, config)
        kv_specs = _kv_specs(options, config, dtype, drafts)
        kernels = make_kernels(options, self.device.name, kv_specs, layout)
        if self.ranks.group is not None:
            kernels.join(self.ranks.group)
        threads = share.num_threads(options.num_threads)
        kernels.set_threads(threads, options.pin_threads)
        #: Those that compute the masks of grammars.
        self._num_threads = threads or len(os.sched_getaffinity(0))
        #: Whether texts can be generated, so that steps compute logits.
        self.generates = config.head == "lm"
        self.mode = kernels.mode
        self.clock = KernelClock(kernels)
        # The clock forwards every call to the backend that it measures.
        self.kernels = cast(Kernels, self.clock) if options.time_kernels else kernels
        self.device.kernels = kernels
        self.context = make_context(options, config, self.kernels, dtype, layout)
        # What the kernels do not have is refused before anything is read.
        kernels.check_dtype(self.context.dtype)
        for spec in kv_specs:
            kernels.block_bytes(spec, options.block_size)
        self._check_weights_fit(drafts)
        #: Seconds of each part of the start.
        self.startup_seconds: dict[str, float] = {}
        with self.timed("reading and packing weights"):
            self._network: Network | None = load_network(options, config, self.context, folder)
        #: What proposes drafts with a network of its own.
        self.drafter: WorkerDrafter | None = None
        if drafts is not None:
            with self.timed("drafter"):
                self.drafter = drafts.load(self.context, self.network)
        self._make_preparers()
        self.device.reserved = self.preparations.reserved_bytes(share.free_memory())
        if drafts is not None and self.device.name == "cpu":
            self.device.reserved += memory.activation_bytes(drafts.config, options)
        draft_specs = [] if self.drafter is None else self.drafter.kv_specs
        workspace = self._workspace()
        groups = [] if config.is_encoder else self._kv_groups()
        self.layers = KVLayers(self.kernels, groups, options.block_size, draft_specs, workspace)
        if groups:
            self.device.reserved += self.layers.workspace_bytes()

    def _make_preparers(self) -> None:
        samples = self.ranks.layout.is_last_stage
        preparers = make_preparers(
            PreparerContext(self.options, self.config, self.folder, self.context, self.network, samples, self.device)
        )
        self.preparations = WorkerPreparations(preparers, self.options.image_step_ms / 1000)
        # What steps ask of them.
        self.grammars = cast("GrammarPreparer", preparers["grammar"])
        self.encoder_inputs = cast("EncoderInputPreparer", preparers["encoder_input"])
        self.images = cast("ImagePreparer", preparers["image"])
        self.loras = cast("LoraPreparer | None", preparers.get("lora"))
        self.prompt_adapters = cast("PromptAdapters | None", preparers.get("prompt_adapter"))

    def _check_weights_fit(self, drafts: DraftSource | None) -> None:
        config, context, free = self.config, self.context, self.device.free_memory()
        memory.check_weights_fit(config, context, free)
        if drafts is not None:
            loaded = weight_bytes(build_rank_without_weights(config, context))
            memory.check_weights_fit(drafts.config, drafts.context(context), free - loaded)

    def _kv_groups(self) -> list[LayerGroup]:
        """Those of the network, the one that keeps most tokens first, as the block manager expects."""
        layers = self.context.layers
        if layers is None:
            groups = group_layers(self.network.kv_specs)
        else:
            groups = group_layers(
                build_rank_without_weights(self.config, replace(self.context, layers=None)).kv_specs, layers
            )
        return sorted(groups, key=lambda group: -(group.spec.window or self.config.max_position))

    def _workspace(self) -> Workspace | None:
        """Of an encoder: what the inputs of a step have of each layer. The blocks of an input are not shared."""
        spec, size = self.network.workspace, self.options.block_size
        if spec is None:
            return None
        if self.config.is_encoder:
            largest = self.largest_batch(self.config.max_position)
            layers = self.config.num_layers
        else:
            largest = self.largest_encoding(self.config.max_position)
            layers = 1
        return Workspace(spec, largest.tokens // size + largest.sequences, layers)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Counts the seconds of a part of the start."""
        start = time.perf_counter()
        with phase(part):
            yield
        self.startup_seconds[part] = time.perf_counter() - start

    # --- the weights ------------------------------------------------------------------------------------------------

    @property
    def network(self) -> Network:
        """The network; there must be weights."""
        assert self._network is not None, "the weights were dropped"
        return self._network

    @property
    def has_weights(self) -> bool:
        """Whether they were not dropped."""
        return self._network is not None

    @property
    def networks(self) -> list[Network]:
        """With that of the drafter, if it has one."""
        return [self.network] if self.drafter is None else [self.network, self.drafter.network]

    def drop_weights(self) -> None:
        """Frees the weights, until ``read_weights``."""
        self.preparations.detach()
        if self.drafter is not None:
            del self.drafter.network
        self._network = None

    def read_weights(self, num_positions: int) -> None:
        """Reads them again, for sequences of up to so many tokens.

        Raises:
            WeightError: the checkpoint cannot be read any more.
        """
        network = load_network(self.options, self.config, self.context, self.folder)
        network.extend_positions(num_positions)
        if self.drafter is not None:
            self.drafter.load(network)
        self.preparations.attach(network)
        self._network = network

    # --- steps ------------------------------------------------------------------------------------------------------

    def largest_batch(self, max_model_len: int) -> BatchSize:
        """The largest batch that a step may have, with sequences of up to ``max_model_len`` tokens."""
        options = self.options
        tokens, sequences = options.token_budget, min(options.max_num_seqs, options.token_budget)
        if self.config.is_encoder:  # a text that is longer than a step has one of its own
            return BatchSize(max(tokens, max_model_len), sequences, sequences, max_model_len, options.block_size)
        cross_blocks = -(-(self.config.longest_input(max_model_len) or 0) // options.block_size)
        # Every token may be sampled at, where drafts are verified.
        return BatchSize(
            tokens,
            sequences,
            tokens,
            max_model_len,
            options.block_size,
            len(self.layers.groups),
            cross_blocks,
            len(self.config.rope.sections),
        )

    def largest_encoding(self, max_model_len: int) -> BatchSize:
        """The largest batch of encoder inputs of a step; one that is longer than the budget has it to itself."""
        options, longest = self.options, self.config.longest_input(max_model_len)
        assert longest is not None
        tokens = max(options.encoder_budget, longest)
        sequences = min(options.max_num_seqs, tokens)
        return BatchSize(tokens, sequences, 1, longest, options.block_size, 2)

    def make_sampler(self, tokens: TokenTable) -> Sampler:
        """A sampler of rows with these tokens."""
        vocab_size = self.config.vocab_size
        backend = self.kernels.make_sampling_backend(vocab_size)
        plugins = LogitsPlugins(self.options.logits_processors or ())
        return Sampler(vocab_size, tokens, backend, self._num_threads, plugins)

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> ForwardOutput:
        """This stage's part of the network; hidden states come from the stage before and go to the one after."""
        ranks, kernels, network = self.ranks, self.kernels, self.network
        kernels.adapters.begin(batch)
        if ranks.incoming is None:
            residual = network.embed(batch.token_ids)
        else:
            residual = kernels.host_call(ranks.incoming.receive, kernels.token_rows(batch, self.config.hidden_size))
        reader = None if self.drafter is None else self.drafter.make_reader()
        hidden = network.forward_layers(residual, batch, caches, reader)
        if ranks.outgoing is not None:
            return ForwardOutput(kernels.host_call(ranks.outgoing.send, hidden))
        if not self.generates:
            return ForwardOutput(hidden)
        logits = network.logits(kernels.take_sampled(hidden, batch))
        return ForwardOutput(hidden, logits, None if reader is None else reader.features)


def _kv_specs(options: EngineConfig, config: ModelConfig, dtype: str, drafts: DraftSource | None) -> set[KVSpec]:
    """Of the whole network and the drafter's: kernels that serve some of its layers only are not chosen.

    Raises:
        ConfigError: the drafter's do not fit into the network's blocks.
    """
    network = build_without_weights(config, dtype, kv_cache_dtype=options.kv_cache_dtype)
    kv_specs = set(network.kv_specs)
    if network.tower is not None:
        kv_specs.add(network.tower.workspace)
    if network.workspace is not None:
        return kv_specs | {network.workspace}
    if drafts is not None:
        draft_specs = build_without_weights(drafts.config, dtype, kv_cache_dtype=options.kv_cache_dtype).kv_specs
        find_groups(draft_specs, [spec.window for spec in kv_specs])
        kv_specs |= set(draft_specs)
    return kv_specs
