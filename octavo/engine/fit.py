"""What of a model fits this machine, and how fast it will be, before anything is loaded: ``octavo fit``.

``Fit`` is where to begin. Memory follows the formulas of the engine (``octavo.runner.memory``), speed the sizes of the
network times the rates of the machine (``MachineRates``).
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.config.engine_config import EngineConfig
from octavo.config.kv_spec import GroupShape, KVLayout, group_layers
from octavo.config.options import MAX_NUM_SEQS
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.engine.core import resolve_dtype
from octavo.engine.machine_rates import MachineRates
from octavo.engine.memory_needs import UNQUANTISED, GGUFSizes, find_drafter, packed_weights, weights_in_memory
from octavo.kernels.interface import Kernels
from octavo.layers.layer import Weight
from octavo.loader.files import readable_size
from octavo.loader.resolve import weight_quantization
from octavo.models.mtp import FORMATS
from octavo.models.network import Network, attended_specs, build_without_weights
from octavo.runner.cache_engine import KVLayers
from octavo.runner.memory import activation_bytes, memory_limits

#: Share of the memory that stays free: allocators round up, and other processes come and go.
_SPARE = 0.02
_LAYER = re.compile(r"\blayers\.(\d+)\.")
#: Tokens of a prompt, and least tokens of the context, if none are given.
_PROMPT, _CONTEXT = 512, 4096
#: By backend, the formats of matrices and of the KV cache: earlier ones are nearer to the checkpoint.
_QUANTIZED = {"cpu": ("int8", "int4"), "triton": ("fp8", "int8", "int4"), "reference": ()}
_KV = {"cpu": ("auto", "int8"), "triton": ("auto", "fp8", "int8"), "reference": ("auto",)}


@dataclass(frozen=True)
class Load:
    """What is asked of an engine. None: one user at least, and as many as fit; a context as long as fits."""

    users: int | None = None
    #: Tokens of prompt and answer together.
    context: int | None = None
    #: Tokens of each user's prompt.
    prompt: int | None = None
    #: Bounds in seconds: of the time to the first token of a prompt alone, and of the time per token of all users.
    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True)
class MemoryBounds:
    """Bytes that all processes of an engine may take together."""

    available: int
    #: Of each process, with ``ulimit -v``.
    addresses: int | None = None
    #: Of a GPU, if that is the device.
    total: int | None = None

    @classmethod
    def of_machine(cls, device: str, most: int | None = None) -> MemoryBounds:
        """``most``: the user's own bound."""
        if device != "cpu":
            from octavo.kernels.torch_backend import describe_gpus

            memory = describe_gpus()[0]["memory_bytes"]
            return cls(min(memory["available"], most or memory["available"]), None, memory["total"])
        limits = memory_limits()
        addresses = [limit.limit for limit in limits if limit.source == "ulimit -v"]
        available = min([_free_of_limits(), *(limit.available for limit in limits if limit.source != "ulimit -v")])
        return cls(min(available, most or available), min(addresses, default=None))


def _free_of_limits() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


@dataclass(frozen=True)
class Speed:
    """Times in seconds: of a prompt's first token, and of each later token of every user."""

    prompt: int
    users: int
    ttft: float
    tpot: float

    @property
    def tokens_per_second(self) -> float:
        """Of all users together."""
        return self.users / self.tpot


@dataclass(frozen=True)
class Choice:
    """Options of an engine, the memory they take, and the speed they give."""

    #: As the engine's options.
    dtype: str
    quantization: str
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    #: Bytes of the packed weights; of the largest step, tables and reserves; of processes without any of these.
    weight_bytes: int
    step_bytes: int
    process_bytes: int
    #: The peak while weights are loaded, in all.
    loading_bytes: int
    #: Of the weights, those of layers for multi-token prediction, with which it drafts; 0: it has none.
    draft_bytes: int = 0
    #: None: not measured.
    speed: Speed | None = None
    #: What of the load it does not give, in words; empty: all is given.
    misses: tuple[str, ...] = ()

    @property
    def needed_bytes(self) -> int:
        """Peak of the memory of all processes."""
        return max(self.loading_bytes, self.process_bytes + self.weight_bytes + self.step_bytes + self.kv_cache_bytes)

    @property
    def fits(self) -> bool:
        return not self.misses

    def describe(self) -> str:
        kv = "" if self.kv_cache_dtype == "auto" else f", {self.kv_cache_dtype} KV cache"
        users = f"{self.max_num_seqs} sequence{'s' * (self.max_num_seqs > 1)}"
        form = self.dtype if self.quantization in ("none", "auto") else self.quantization
        drafts = (
            f", {readable_size(self.draft_bytes)} of them the layers with which it drafts" if self.draft_bytes else ""
        )
        return f"{form}{kv}, {users} of {self.max_model_len} tokens in {readable_size(self.needed_bytes)}{drafts}"


class Fit:
    """The choices for a model on this machine."""

    def __init__(
        self,
        options: EngineConfig,
        config: ModelConfig,
        kernels: Kernels,
        bounds: MemoryBounds,
        gguf: Path | None = None,
        rates: MachineRates | None = None,
        folder: Path | None = None,
    ) -> None:
        """``gguf``: the file, or its header; ``rates``: None if the speed is not to be told.

        ``folder``: of the checkpoint, whose layers for multi-token prediction are counted; None: it drafts nothing.

        Raises:
            ConfigError: the options are for several workers, adapters or a draft model.
        """
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(options, name) > 1:
                raise ConfigError(f"octavo fit is for one worker: leave out {name} ({getattr(options, name)})")
        drafts = options.speculative_config
        if options.enable_lora or options.enable_prompt_adapter or (drafts is not None and drafts.drafts_on_workers):
            raise ConfigError("octavo fit does not count adapters and draft models: leave their options out")
        self._device = "cpu" if bounds.total is None else "cuda"
        #: As given, and with the drafts that an engine makes by default.
        self.options, self._drafting, self._drafter = options, options, None
        if folder is not None:
            self._drafting, self._drafter = find_drafter(options, config, folder, on_cpu=self._device == "cpu")
        self.config, self.bounds = config, bounds
        self._kernels, self._rates = kernels, rates
        self._gguf = None if gguf is None else GGUFSizes.of(gguf)
        self._networks: dict[tuple[str, str, str], Sizes] = {}

    def engine_options(self, choice: Choice) -> dict[str, Any]:
        """The options that make an engine of this choice; those that are so already are left out."""
        given, own = self.options, self._own_quantization()
        chosen: dict[str, Any] = {}
        if choice.dtype not in (given.dtype, resolve_dtype(given, self.config)):
            chosen["dtype"] = choice.dtype
        if choice.quantization not in (given.quantization, "none" if own is None else "auto"):
            chosen["quantization"] = choice.quantization
        if choice.kv_cache_dtype != given.kv_cache_dtype:
            chosen["kv_cache_dtype"] = choice.kv_cache_dtype
        if given.speculative_config is None and self._drafter is None and self.config.architecture in FORMATS:
            chosen["speculative_config"] = "none"  # the headers do not show layers for multi-token prediction
        chosen |= {"max_model_len": choice.max_model_len, "max_num_seqs": choice.max_num_seqs}
        if choice.kv_cache_bytes and self._device == "cpu":
            chosen["kv_cache_memory_bytes"] = choice.kv_cache_bytes
            if given.swap_space is None and given.preemption_mode != "swap" and not given.host_prefix_cache:
                chosen["swap_space"] = 0.0  # the cache holds all users, so none is swapped
        return chosen

    def choices(self, load: Load) -> list[Choice]:
        """All choices, best first: those that give what is asked, the widest types first, then the others."""
        found = [
            self._choose(dtype, quantization, kv, load)
            for dtype, quantization in self._formats()
            for kv in self._kv_types()
        ]
        return sorted(found, key=lambda choice: not choice.fits)

    def nearest(self, load: Load) -> Choice | None:
        """A choice that fits with a shorter context, or fewer users, where none gives what is asked."""
        users, context = load.users or 1, load.context or min(_CONTEXT, self.config.default_length)
        fewer = [replace(load, users=users >> n) for n in range(1, users.bit_length())]
        for each in (replace(load, context=None), *fewer, replace(load, users=1, context=None)):
            least = max(1, context // 4) if each.users == load.users else self.options.block_size
            choices = [
                self._choose(dtype, quantization, kv, each, least=context if each.context else least)
                for dtype, quantization in self._formats()
                for kv in self._kv_types()
            ]
            if fitting := [choice for choice in choices if choice.fits]:
                return fitting[0] if each.context else max(fitting, key=lambda choice: choice.max_model_len)
        return None

    def least_bytes(self) -> int:
        """Bytes that the smallest of all choices takes with one sequence of one block."""
        load = Load(users=1, context=self.options.block_size)
        return min(choice.needed_bytes for choice in self.choices(load))

    def _formats(self) -> Iterator[tuple[str, str]]:
        """(dtype, quantization) as options, the nearest to the checkpoint first."""
        given = self.options
        dtype = resolve_dtype(given, self.config)
        own = self._own_quantization()
        if given.quantization != "auto":
            yield dtype, given.quantization
        elif own is not None:  # the checkpoint's own bits: nothing is nearer, and others take more memory
            yield given.dtype, "auto"
        elif self.config.model_impl == "transformers":
            yield dtype, "none"
        else:
            types = [dtype] if given.dtype != "auto" or dtype != "float32" else ["float32", "bfloat16"]
            yield from ((each, "none") for each in types)
            yield from ((types[-1], each) for each in _QUANTIZED[self._kernels.name])

    def _own_quantization(self) -> str | None:
        """That of the option "auto"; a GGUF file without quantised matrices is as good as none."""
        return weight_quantization(
            self.options.model_copy(update={"quantization": "auto"}),
            self._kernels.name,
            self.config.quantization,
            is_gguf=self._gguf is not None and not self._gguf.is_dense,
        )

    def _kv_types(self) -> tuple[str, ...]:
        given = self.options.kv_cache_dtype
        if given != "auto" or self.config.is_encoder or self.config.has_only_states:
            return (given,)
        return _KV[self._kernels.name]

    def sizes(self, dtype: str, quantization: str, kv: str) -> Sizes:
        key = dtype, quantization, kv
        if key not in self._networks:
            options = self.options.model_copy(
                update={"dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv}
            )
            form = weight_quantization(
                options, self._kernels.name, self.config.quantization, is_gguf=self._gguf is not None
            )
            resolved = resolve_dtype(options, self.config)
            draft_tokens, is_random = self._drafting.kept_draft_tokens, options.load_format == "dummy"
            network = build_without_weights(self.config, resolved, form, kv, draft_tokens=draft_tokens)
            self._networks[key] = Sizes(
                network,
                resolved,
                self._gguf if form == "gguf" else None,
                is_random,
                self._kernels.maps_tables and not is_random,
                None
                if self._drafter is None
                else build_without_weights(self._drafter.config, resolved, form, kv, draft_tokens=draft_tokens),
            )
        return self._networks[key]

    def _choose(self, dtype: str, quantization: str, kv: str, load: Load, least: int | None = None) -> Choice:
        """The longest context and the most sequences of this format, or why it does not do.

        ``least``: tokens of the context without one in ``load``.
        """
        sizes, most = self.sizes(dtype, quantization, kv), self.config.default_length
        length = load.context or min(least or _CONTEXT, most)
        misses = []
        if length > self.config.max_position:
            misses.append(f"the model's context has {self.config.max_position} tokens, less than {length}")
        users = load.users or 1
        plan = self._plan(sizes, dtype, quantization, kv, length, users)
        if missing := self._missing(plan):
            return replace(plan, misses=(*misses, missing))
        if load.context is None:
            low, high = length, most
            while low < high:
                middle = (low + high + 1) // 2
                fits = not self._missing(self._plan(sizes, dtype, quantization, kv, middle, users))
                low, high = (middle, high) if fits else (low, middle - 1)
            length = low if low == most else max(length, low // self.options.block_size * self.options.block_size)
        if load.users is None:
            counts = (MAX_NUM_SEQS >> n for n in range(MAX_NUM_SEQS.bit_length()))
            plans = (self._plan(sizes, dtype, quantization, kv, length, count) for count in counts)
            users = next((each.max_num_seqs for each in plans if not self._missing(each)), 1)
        plan = self._plan(sizes, dtype, quantization, kv, length, users, fill=True)
        speed = self._speed(sizes, plan, load)
        if speed is not None:
            for name, bound, value in (("first token", load.ttft, speed.ttft), ("token", load.tpot, speed.tpot)):
                if bound is not None and value > bound:
                    misses.append(f"{value:.3g} s for a {name}, more than {bound:g} s")
        return replace(plan, speed=speed, misses=tuple(misses))

    def _plan(
        self, sizes: Sizes, dtype: str, quantization: str, kv: str, length: int, users: int, *, fill: bool = False
    ) -> Choice:
        """The memory of ``users`` sequences of ``length`` tokens; with ``fill``, of all that the engine can use."""
        values = {"dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv, "max_num_seqs": users}
        options = self._drafting.model_copy(update=values | {"max_model_len": length})
        if self.config.is_encoder:
            options = options.for_encoder(self._device)
        else:
            options = options.with_token_budget(self._device, length)
        # Two steps are in flight on a GPU.
        in_flight = options.token_budget * (2 if options.plans_ahead(self._device) else 1)
        layout = KVLayout.of(self._groups(sizes, options), options, in_flight)
        least = layout.size([users * count for count in layout.held(length)])
        step = activation_bytes(replace(self.config, max_position=length), options, self._kernels.name)
        step += length * sizes.network.position_bytes()
        if self._drafter is not None and sizes.drafter is not None:
            step += activation_bytes(self._drafter.config, options, self._kernels.name)
            step += length * sizes.drafter.position_bytes()
        if self.config.image_facts is not None:
            step += options.image_cache_bytes
        process = self._process_bytes()
        kv_bytes = least
        if fill and layout.groups:
            left = int(self.bounds.available * (1 - _SPARE)) - process - sizes.weight_bytes - step
            kv_bytes = max(least, min(left, layout.size(layout.split(1 << 62, length))))
        loading = process + sizes.weight_bytes  # on a GPU; tensors wait in the host's memory
        if self.bounds.total is None:
            loading = process + sizes.loading_bytes
        return Choice(
            dtype, quantization, kv, length, users, kv_bytes, sizes.weight_bytes, step, process, loading,
            sizes.draft_bytes,
        )  # fmt: skip

    def _groups(self, sizes: Sizes, options: EngineConfig) -> list[GroupShape]:
        """The KV groups, the one that keeps most tokens first, with the drafter's layers."""
        groups = sorted(
            group_layers(sizes.network.kv_specs), key=lambda group: -(group.spec.window or self.config.max_position)
        )
        drafter = [] if sizes.drafter is None else sizes.drafter.kv_specs
        tokens = options.state_checkpoint_tokens
        return KVLayers(self._kernels, groups, options.block_size, drafter, state_tokens=tokens).shapes()

    def _process_bytes(self) -> int:
        """Of an engine's process and a server's, without weights and cache; of a GPU's memory, nothing is known."""
        if self.bounds.total is not None:
            return 0
        if self._rates is not None:
            step = self._rates.step()
            return step.engine_bytes + step.server_bytes
        import psutil

        return int(psutil.Process().memory_info().rss)  # about those of an engine

    def _missing(self, plan: Choice) -> str:
        """Why the memory is not enough; empty if it is."""
        bounds = self.bounds
        if bounds.total is not None:
            share = self.options.gpu_memory_utilization or 0.9
            room = int(share * bounds.total) - (bounds.total - bounds.available)
        else:
            room = int(bounds.available * (1 - _SPARE))
        if plan.needed_bytes > room:
            when = " while it is loaded" if plan.needed_bytes == plan.loading_bytes else ""
            return f"needs {readable_size(plan.needed_bytes)}{when}, of which {readable_size(max(0, room))} can be had"
        if bounds.addresses is not None and (addresses := self.addresses(plan)) > bounds.addresses * (1 - _SPARE):
            return (
                f"needs {readable_size(addresses)} of addresses, and ulimit -v allows {readable_size(bounds.addresses)}"
            )
        return ""

    def addresses(self, choice: Choice) -> int:
        """Bytes of addresses of the engine's process, which ``ulimit -v`` bounds; 0 without measured rates.

        Beside the memory that it uses, it reserves the logits of all tokens of a step, for drafts, twice.
        """
        if self._rates is None:
            return 0
        rows = self.options.with_token_budget(self._device, choice.max_model_len).token_budget
        running = (
            choice.weight_bytes + choice.step_bytes + choice.kv_cache_bytes + 2 * 4 * rows * self.config.vocab_size
        )
        return self._rates.step().engine_addresses + max(choice.loading_bytes - choice.process_bytes, running)

    def _speed(self, sizes: Sizes, plan: Choice, load: Load) -> Speed | None:
        """None: not measured."""
        is_decoder = not self.config.is_encoder and self.config.encoder_facts is None
        if self._rates is None or not is_decoder or self.config.model_impl == "transformers":
            return None
        users = load.users or 1
        prompt = min(load.prompt or _PROMPT, max(1, plan.max_model_len - 1))
        times = StepTimes(sizes, self._rates)
        budget = self.options.model_copy(update={"max_num_seqs": plan.max_num_seqs}).with_token_budget(
            self._device, plan.max_model_len
        )
        chunk = budget.token_budget
        starts = range(0, prompt, chunk)
        ttft = sum(times.prefill(start, min(chunk, prompt - start)) for start in starts)
        return Speed(prompt, users, ttft, times.decode(users, prompt))


@dataclass
class Sizes:
    """A network's weights in one format."""

    network: Network
    #: Of activations, and of weights that are not quantised.
    dtype: str
    gguf: GGUFSizes | None = None
    #: Whether weights are random, not read.
    is_random: bool = False
    #: Whether tables stay in a mapped file.
    maps_tables: bool = False
    #: The layers for multi-token prediction; their weights in a GGUF file are counted with the others.
    drafter: Network | None = None

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Of the drafter too."""
        size = weights_in_memory(self.network, self.dtype, self.gguf, maps_tables=self.maps_tables)
        return size if self.gguf is not None else size + self.draft_bytes

    @functools.cached_property
    def draft_bytes(self) -> int:
        return 0 if self.drafter is None else packed_weights(self.drafter.weights(), maps_tables=False)

    @functools.cached_property
    def parts(self) -> list[tuple[str, str, float, float]]:
        """(kind, form, share of tokens, elements) of all matrices that steps read, alike ones together.

        Sampled tokens alone pass through those of kind "head": the head, and layers that write no cache.
        """
        sums: defaultdict[tuple[str, str, float], float] = defaultdict(float)
        for weight in self.network.weights():
            if weight.kind in ("linear", "head") and weight.active:
                read_by = "head" if self._has_queries_alone(weight) else str(weight.kind)
                sums[read_by, str(weight.dtype), weight.active] += math.prod(weight.shape)
        if (gguf := self.gguf) is not None:
            active = min((share for _, _, share in sums), default=1.0)
            linear = [weight for weight in self.network.weights() if weight.kind == "linear"]
            queries = sum(math.prod(weight.shape) for weight in linear if self._has_queries_alone(weight))
            late = queries / max(1, sum(math.prod(weight.shape) for weight in linear))
            sums.clear()
            for kind, number in gguf.linear.items():
                sums["linear", self._form(kind), 1.0] += (1 - late) * number
                sums["head", self._form(kind), 1.0] += late * number
            for kind, number in gguf.experts.items():
                sums["linear", self._form(kind), active] += number
            for kind, number in gguf.head.items():
                sums["head", self._form(kind), 1.0] += number
        return [(*key, number) for key, number in sums.items()]

    def _has_queries_alone(self, weight: Weight) -> bool:
        """Whether it belongs to a layer from ``Network.query_only_from`` on."""
        first, layer = self.network.query_only_from, _LAYER.search(weight.name)
        return first is not None and layer is not None and int(layer[1]) >= first

    def _form(self, kind: str) -> str:
        """The form in which the kernels multiply a GGUF type: its own, eight bits with scales, or dtype."""
        from octavo.kernels.cpu.linear import KEPT_TYPES

        if kind in UNQUANTISED:
            return self.dtype
        return kind if kind in KEPT_TYPES else "Q8_0"

    @functools.cached_property
    def loading_bytes(self) -> int:
        """The peak while weights are loaded: what is packed, and the tensors that wait for their layer's others.

        Random ones are made in float32, and rounded to another type. A file's tensors are mapped, so that only what
        layers make of them counts, until they are packed.
        """
        if self.gguf is not None:
            return self.weight_bytes
        tensors = list(self.network.tensors())
        width = 4 if self.dtype == "float32" else 2
        left = Counter(id(layer) for _, layer, _ in tensors)
        layers = {id(layer): layer for _, layer, _ in tensors}
        packed = {key: packed_weights(layer.holds, maps_tables=self.maps_tables) for key, layer in layers.items()}
        held: Counter[int] = Counter()
        # A head of its own form is made of the embedding.
        rest = self.weight_bytes - self.draft_bytes - sum(packed.values())
        peak = done = waiting = 0
        for _, layer, shard in tensors:
            number, key = math.prod(layer.expected[shard]), id(layer)
            if not packed[key] and layer.holds:  # it stays in the file
                continue
            made = 4 * number if self.is_random and self.dtype != "float32" else 0
            held[key] += width * number
            waiting += width * number
            left[key] -= 1
            if left[key]:
                peak = max(peak, done + waiting + made)
                continue
            done, rest = done + packed[key] + rest, 0
            peak = max(peak, done + waiting + made)
            waiting -= held[key]
        return max(peak, self.weight_bytes)


class StepTimes:
    """Seconds of steps of a network on this machine.

    A step is its matrix products, the attention, and what each step, layer, row and logit takes beside them. Experts
    are taken as chosen equally often and independently. Recurrences count with the memory of their states alone.
    """

    def __init__(self, sizes: Sizes, rates: MachineRates) -> None:
        self._sizes, self._rates = sizes, rates
        self._cost = rates.step()
        network = sizes.network
        self._config = network.config
        attends = [spec for spec in attended_specs(network) if spec.kind not in ("state", "none")]
        self._attends = attends
        self._states = sum(spec.bytes_per_state for spec in network.kv_specs)

    def decode(self, sequences: int, context: int) -> float:
        """Each of the sequences has ``context`` tokens, of which it computes the last."""
        read = sum(spec.bytes_per_token * min(context, spec.window or context) for spec in self._attends)
        seconds = self._step(sequences, sequences)
        if self._attends:
            seconds += sequences * (read + 2 * self._states) * self._attention().byte
        return seconds

    def prefill(self, start: int, tokens: int) -> float:
        """A chunk of a prompt, after ``start`` tokens of it."""
        seconds = self._step(tokens, 1)
        operations = 0.0
        for spec in self._attends:
            pairs = sum(min(position + 1, spec.window or position + 1) for position in range(start, start + tokens))
            operations += 4.0 * self._config.num_heads * spec.head_dim * pairs
        return seconds + (operations * self._attention().operation if self._attends else 0.0)

    def _attention(self) -> Any:
        spec = self._attends[0]
        queries = max(1, self._config.num_heads // max(1, spec.num_kv_heads))
        return self._rates.attention(self._sizes.dtype, spec.dtype, spec.head_dim, min(queries, 8))

    def _step(self, tokens: int, sampled: int) -> float:
        cost, config = self._cost, self._config
        seconds = (
            cost.step + cost.layer * config.num_layers + cost.row * sampled + cost.logit * sampled * config.vocab_size
        )
        for kind, form, active, elements in self._sizes.parts:
            rows = float(tokens if kind == "linear" else sampled)
            # Of experts, those that some row chose, and the rows of each.
            used = 1 - (1 - active) ** rows
            rate = self._rates.product(_rate_form(form), max(1.0, rows * active / used), self._sizes.weight_bytes)
            seconds += elements * used * rate
        return seconds


def _rate_form(form: str) -> str:
    """The form whose products are measured for another of the same kernels."""
    if form in ("float32", "bfloat16", "int8", "int4"):
        return form
    if form == "float16":
        return "bfloat16"
    if form.endswith("int4"):
        return "int4"
    return "Q8_0" if form.endswith("int8") else form.upper()
