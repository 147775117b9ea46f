"""``LoadedModel``: a worker's device, kernels, and network with its weights, before there is a KV cache."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Iterator
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
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.core.plugins import LogitsPlugins
from octavo.kernels import load_kernels, resolve_device
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput
from octavo.kernels.interface import Communicator, KernelClock, Kernels, LayerCache
from octavo.kvstore.open import check_stores
from octavo.layers.layer import LayerContext
from octavo.loader.resolve import gguf_source, weight_quantization
from octavo.loader.weights import load_model, make_dummy_model
from octavo.models.network import (
    Network,
    build_rank_without_weights,
    build_without_weights,
    caches_of_stage,
    weight_bytes,
)
from octavo.process.startup import WorkerFacts, phase
from octavo.runner import memory
from octavo.runner.adapters import LoraPreparer, PromptAdapters
from octavo.runner.cache_engine import KVLayers, Workspace, find_groups
from octavo.runner.device import HostDevice
from octavo.runner.encoders import Alignment, Contexts, EncoderInputPreparer
from octavo.runner.grammars import ForcedTokens, GrammarPreparer
from octavo.runner.images import ImagePreparer, ImageTokens, RotaryPositions
from octavo.runner.memory import WorkerShare
from octavo.runner.pooling import Pooling, TextPairs
from octavo.runner.preparers import PreparerContext, WorkerPreparations, make_preparers
from octavo.runner.prompt_logprobs import PromptLogprobs
from octavo.runner.row_feature import RowFeature
from octavo.sampling.sampler import Sampler, TokenTable

if TYPE_CHECKING:
    from octavo.runner.device import Device
    from octavo.runner.drafters import DraftSource, WorkerDrafter


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
        """Loads the weights. ``share``: of the machine, by default all; ``ranks``: by default a worker alone.

        Raises:
            InsufficientMemoryError: the weights do not fit.
        """
        share = share or WorkerShare()
        self.options, self.config, self.folder = options, config, folder
        self.ranks = ranks or Ranks()
        self.device: Device
        if resolve_device(options.device) == "cpu":
            self.device = HostDevice(options, config, share)
        else:
            from octavo.runner.cuda import CudaDevice

            self.device = CudaDevice(options, config, share)
        layout = self.ranks.layout
        drafts: DraftSource | None = None
        if options.speculative_config is not None and options.speculative_config.drafts_on_workers:
            from octavo.runner.drafters import find_draft_source

            drafts = find_draft_source(options, config, folder)
        kv_specs = _kv_specs(options, config, dtype, drafts)
        # Backends are chosen by the layers of all stages, so that all stages compute with the same one.
        kernels = load_kernels(
            options.kernels,
            self.device.name,
            head_dim=math.gcd(*(spec.head_dim for spec in kv_specs if spec.kind != "state")) or 8,
            deterministic=options.deterministic,
            # An exchange between stages is a call on the host, which a graph cannot hold.
            enforce_eager=options.enforce_eager or layout.pipeline_parallel_size > 1,
            graph_capture="start" if options.graph_capture == "start" else "lazy",
            cudagraph_capture_sizes=options.graph_sizes,
        )
        if self.ranks.group is not None:
            kernels.join(self.ranks.group)
        threads = share.num_threads(options.num_threads)
        kernels.set_threads(threads, options.pin_threads)
        self._num_threads = threads or len(os.sched_getaffinity(0))
        #: Whether steps compute logits.
        self.generates = config.head == "lm"
        self.mode = kernels.mode
        self.clock = KernelClock(kernels)
        self.kernels = cast(Kernels, self.clock) if options.time_kernels else kernels
        self.device.kernels = kernels
        self.context = LayerContext(
            kernels=self.kernels,
            dtype=DType(dtype),
            quantization=weight_quantization(options, kernels.name, config.quantization),
            kv_cache_dtype=options.kv_cache_dtype,
            tp_rank=layout.tp_rank,
            tp_size=layout.tensor_parallel_size,
            layers=layout.layers(config.num_layers),
            # The tables grow with the KV cache, to the longest sequence that it can hold; the largest step needs these.
            positions=options.token_budget,
            max_loras=options.max_loras if options.enable_lora else 0,
            max_lora_rank=options.max_lora_rank,
            draft_tokens=options.kept_draft_tokens,
            # The virtual tokens of a step's images are written behind those of adapters.
            virtual_tokens=options.num_virtual_tokens + (0 if config.image_facts is None else options.token_budget),
        )
        # Kernels refuse types that they do not have before anything is read.
        kernels.check_dtype(self.context.dtype)
        for spec in kv_specs:
            kernels.block_bytes(spec, spec.places(options.block_size))
        check_stores(options)
        free = self.device.free_memory()
        memory.check_weights_fit(config, self.context, free)
        if drafts is not None:
            free -= weight_bytes(build_rank_without_weights(config, self.context), maps_tables=kernels.maps_tables)
            memory.check_weights_fit(drafts.config, drafts.context(self.context), free)
        self.startup_seconds: dict[str, float] = {}
        with self.timed("reading and packing weights"):
            self._network: Network | None = load_network(options, config, self.context, folder)
        samples = layout.is_last_stage
        preparers = make_preparers(
            PreparerContext(options, config, folder, self.context, self.network, samples, self.device)
        )
        self.preparations = WorkerPreparations(preparers)
        self.grammars = cast(GrammarPreparer, preparers["grammar"])
        self.encoder_inputs = cast(EncoderInputPreparer, preparers["encoder_input"])
        self.images = cast(ImagePreparer, preparers["image"])
        self.loras = cast(LoraPreparer | None, preparers.get("lora"))
        self.prompt_adapters = cast(PromptAdapters | None, preparers.get("prompt_adapter"))
        if self.loras is not None:
            self.loras.prompt_adapters = self.prompt_adapters
        self.drafter: WorkerDrafter | None = None
        if drafts is not None:
            with self.timed("drafter"):
                self.drafter = drafts.load(self.context, self.network, self.loras)
        self.device.reserved = self.preparations.reserved_bytes(share.free_memory())
        if drafts is not None and self.device.name == "cpu":
            self.device.reserved += memory.activation_bytes(drafts.config, options, kernels.name)
        draft_specs = [] if self.drafter is None else self.drafter.kv_specs
        groups = [] if config.is_encoder else self._kv_groups()
        tokens = options.state_checkpoint_tokens
        self.layers = KVLayers(
            self.kernels,
            groups,
            options.block_size,
            draft_specs,
            self._workspace(),
            tokens,
            stores_drafter=self.drafter is not None and self.drafter.follows_model,
            drafter_reads=() if self.drafter is None else self.drafter.shared_caches,
        )
        if groups:
            self.device.reserved += self.layers.workspace_bytes()

    def _kv_groups(self) -> list[LayerGroup]:
        """The network's KV groups, the one that keeps most tokens first, as the block manager expects."""
        network, layers = self.network, self.context.layers
        stage = None
        if layers is not None:
            stage = caches_of_stage(self.config, self.context)
            network = build_rank_without_weights(self.config, replace(self.context, layers=None))
        groups = group_layers(network.kv_specs, stage)
        return sorted(groups, key=lambda group: -(group.spec.window or self.config.max_position))

    def _workspace(self) -> Workspace | None:
        """The workspace of an encoder's layers, for the inputs of one step; inputs share no block."""
        spec, config = self.network.workspace, self.config
        if spec is None:
            return None
        largest = (self.largest_batch if config.is_encoder else self.largest_encoding)(config.max_position)
        blocks = largest.tokens // self.options.block_size + largest.sequences
        return Workspace(spec, blocks, config.num_layers if config.is_encoder else 1)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        with phase(part):
            yield
        self.startup_seconds[part] = time.perf_counter() - start

    @property
    def network(self) -> Network:
        assert self._network is not None, "the weights were dropped"
        return self._network

    @property
    def has_weights(self) -> bool:
        return self._network is not None

    @property
    def networks(self) -> list[Network]:
        return [self.network] if self.drafter is None else [self.network, self.drafter.network]

    def drop_weights(self) -> None:
        self.preparations.detach()
        if self.drafter is not None:
            del self.drafter.network
        self._network = None

    def read_weights(self, num_positions: int) -> None:
        """Reads the dropped weights again, for sequences of up to ``num_positions`` tokens."""
        network = load_network(self.options, self.config, self.context, self.folder)
        network.extend_positions(num_positions)
        if self.drafter is not None:
            self.drafter.load(network)
        self.preparations.attach(network)
        self._network = network

    def largest_batch(self, max_model_len: int) -> BatchSize:
        """The largest batch that a step may have, with sequences of up to ``max_model_len`` tokens."""
        options = self.options
        tokens, sequences = options.token_budget, min(options.max_num_seqs, options.token_budget)
        if self.config.is_encoder:  # a text that is longer than a step has one of its own
            return BatchSize(max(tokens, max_model_len), sequences, sequences, max_model_len, options.block_size)
        cross_blocks = -(-(self.config.longest_input(max_model_len) or 0) // options.block_size)
        groups, axes = len(self.layers.groups), self.config.rope.axes
        # Every token may be sampled at, where drafts are verified.
        return BatchSize(tokens, sequences, tokens, max_model_len, options.block_size, groups, cross_blocks, axes)

    def largest_encoding(self, max_model_len: int) -> BatchSize:
        """The largest batch of encoder inputs of a step; an input above the budget has a step to itself."""
        options, longest = self.options, self.config.longest_input(max_model_len)
        assert longest is not None
        tokens = max(options.encoder_budget, longest)
        sequences = min(options.max_num_seqs, tokens)
        return BatchSize(tokens, sequences, 1, longest, options.block_size, 2)

    def startup_facts(self, cache_bytes: int, host_cache_bytes: int) -> WorkerFacts:
        drafter = ""
        if self.drafter is not None:
            drafter = f"{self.drafter.describe()}, {self.layers.drafter_share():.1%} of the KV cache"
        return WorkerFacts(
            self.kernels.describe(),
            self.context.quantization,
            weight_bytes(self.network, maps_tables=self.kernels.maps_tables),
            cache_bytes,
            host_cache_bytes,
            dict(self.startup_seconds),
            self.preparations.describe(),
            drafter,
        )

    def make_features(self, max_model_len: int) -> list[RowFeature]:
        """What follows the rows of this worker, in the order of the steps' hooks. A new feature has its line here."""
        config, options, samples = self.config, self.options, self.ranks.layout.is_last_stage
        # Forced tokens are appended by the next plan, so steps may not be planned ahead of them.
        ahead = options.pipeline_parallel_size == 1 and options.plans_ahead(self.device.name)
        features: list[RowFeature | None] = [
            Contexts(self) if config.longest_input(max_model_len) is not None else None,
            RotaryPositions(options.max_num_seqs) if config.rope.sections else None,
            TextPairs(options.max_num_seqs) if config.is_encoder else None,
            self.loras,
            self.prompt_adapters,
            ImageTokens(self) if config.image_facts is not None else None,
            PromptLogprobs(self) if samples else None,
            Pooling(self) if samples else None,
            Alignment(self) if samples and config.encoder_facts is not None else None,
            self.drafter,
            ForcedTokens() if options.jump_forward and not ahead else None,
        ]
        return [feature for feature in features if feature is not None]

    def make_sampler(self, tokens: TokenTable) -> Sampler:
        vocab_size = self.config.vocab_size
        backend = self.kernels.make_sampling_backend(vocab_size)
        plugins = LogitsPlugins(self.options.logits_processors or ())
        return Sampler(vocab_size, tokens, backend, self._num_threads, plugins, self.grammars.find_for)

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> ForwardOutput:
        """Computes this stage's layers; hidden states come from the stage before and go to the one after."""
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
        sampled = hidden if batch.sampled_only is not None else kernels.take_sampled(hidden, batch)
        logits = network.logits(sampled)
        return ForwardOutput(hidden, logits, None if reader is None else reader.features)


def _kv_specs(options: EngineConfig, config: ModelConfig, dtype: str, drafts: DraftSource | None) -> set[KVSpec]:
    """The specs of all layers of all stages and of the drafter: a backend must serve every one."""
    network = build_without_weights(
        config, dtype, kv_cache_dtype=options.kv_cache_dtype, draft_tokens=options.kept_draft_tokens
    )
    kv_specs = set(network.kv_specs)
    if any(spec.kind == "state" for spec in kv_specs):
        distance, size = options.state_checkpoint_tokens, options.block_size
        if distance % size:
            raise ConfigError(f"state_checkpoint_tokens must be a multiple of block_size ({size}), not {distance}")
    elif (distance := options.state_checkpoint_tokens) != EngineConfig.model_fields["state_checkpoint_tokens"].default:
        raise ConfigError(
            f"state_checkpoint_tokens ({distance}) is for models with recurrent states, and {config.architecture} has "
            "none: leave it out"
        )
    if network.tower is not None:
        kv_specs |= {network.tower.workspace, network.tower.whole_workspace or network.tower.workspace}
    if network.workspace is not None:
        return kv_specs | {network.workspace}
    if drafts is not None:
        draft_specs = build_without_weights(drafts.config, dtype, kv_cache_dtype=options.kv_cache_dtype).kv_specs
        if any(spec.kind == "state" for spec in draft_specs):
            raise ConfigError(
                f"speculative_config: {drafts.config.architecture} cannot draft, as it has recurrent states; take a "
                "draft model of attention alone, or method 'ngram' or 'suffix'"
            )
        find_groups(draft_specs, list(kv_specs))
        kv_specs |= set(draft_specs)
    return kv_specs


def load_network(options: EngineConfig, config: ModelConfig, context: LayerContext, folder: Path) -> Network:
    """Reads the weights of the checkpoint; makes random ones with ``load_format="dummy"``."""
    if options.load_format == "dummy":
        return make_dummy_model(config, context, options.seed)
    return load_model(folder, config, context, gguf_source(options.model, options.revision))


class StageLink(Protocol):
    """A one-way link from a worker to its counterpart in the next pipeline stage."""

    def send(self, x: Any) -> None:
        """Sends x, float32 [T, E] as host calls get it; its memory may be reused afterwards."""
        ...

    def receive(self, x: Any) -> None:
        """Waits for the sender's x, of the same shape, and copies it to x."""
        ...


@dataclass(frozen=True)
class Ranks:
    """A worker's place, its collectives within its stage, and its links to the stages beside it."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    #: The tensor-parallel group of its stage; None: one rank.
    group: Communicator | None = None
    #: From the stage before and to the one after.
    incoming: StageLink | None = None
    outgoing: StageLink | None = None


class SharedMemoryLink:
    """A link between two processes of one machine: a ring of slots, and a pipe that wakes the receiver.

    The sender does not ask whether a slot has been read: fewer than ``slots`` steps are in flight.
    """

    def __init__(self, memory: mmap.mmap, slots: int, pipe: int) -> None:
        """``memory`` is shared by both ends; ``pipe`` is the descriptor to write to, or to read from."""
        self._slots = np.frombuffer(memory, dtype=np.float32).reshape(slots, -1)
        self._pipe = pipe
        self._count = 0

    def send(self, x: Any) -> None:
        self._next(x)[:] = np.asarray(x).reshape(-1)
        os.write(self._pipe, b"\0")

    def receive(self, x: Any) -> None:
        if not os.read(self._pipe, 1):
            raise ConnectionError("the worker of the pipeline stage before this one has ended")
        np.asarray(x).reshape(-1)[:] = self._next(x)

    def _next(self, x: Any) -> NDArray[np.float32]:
        slot = self._slots[self._count % len(self._slots), : math.prod(x.shape)]
        self._count += 1
        return slot
