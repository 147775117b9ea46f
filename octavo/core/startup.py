"""What an engine and its workers got at their start, and the lines that say so."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.kv_groups import GroupBlocks

GIB = 1 << 30
#: Begins the lines of the log that say how far the weights are read, which a server that starts shows to anybody.
LOADING = "loading weights"


@dataclass(frozen=True)
class WorkerFacts:
    """One worker. Memory in bytes."""

    #: The kernels with their instruction set and threads, or with their GPU.
    kernels: str
    #: Format of its matrices, as in ``LayerContext.quantization``; None: in the engine's dtype.
    quantization: str | None
    weight_bytes: int
    #: The KV cache on the device, and the host blocks of preempted requests.
    cache_bytes: int
    host_cache_bytes: int
    #: Seconds of each part of the start.
    seconds: dict[str, float] = field(default_factory=dict)
    #: What it keeps of what requests need, as adapters: a line for a kind that has something to say.
    preparations: list[str] = field(default_factory=list)
    #: What drafts with a network of its own, and its share of the memory; empty if nothing does.
    drafter: str = ""


@dataclass(frozen=True)
class StartupFacts:
    """An engine that is ready."""

    model: str
    architecture: str
    #: Weights of the whole network, tied ones once.
    parameters: int
    dtype: str
    #: How the checkpoint is quantised; None: it is not.
    checkpoint_quantization: str | None
    kv_cache_dtype: str
    #: The KV cache: a group for each kind of layers.
    groups: list[GroupBlocks]
    block_size: int
    #: Longest sequence in tokens.
    max_model_len: int
    #: Most requests of ``max_model_len`` tokens that can run at once.
    full_length_requests: int
    #: Most sequences that run at once, and most tokens of a step.
    max_num_seqs: int
    token_budget: int
    #: From the first worker on until all is ready; without finding the model and its tokenizer.
    seconds: float
    #: By rank.
    workers: list[WorkerFacts]

    def lines(self) -> list[str]:
        """A line each for the model, the kernels of each worker, the KV cache, and the seconds."""
        weights, cache, host = (
            sum(sizes) / GIB
            for sizes in zip(
                *((worker.weight_bytes, worker.cache_bytes, worker.host_cache_bytes) for worker in self.workers),
                strict=True,
            )
        )
        quantization = self.workers[0].quantization
        stored = self.checkpoint_quantization
        quantized = f", quantised to {quantization}" if quantization else ""
        if stored not in (None, quantization):
            quantized += f", dequantised from {stored}"
        several = len(self.workers) > 1
        kernels = [
            f"kernels{f' of rank {rank}' if several else ''}: {w.kernels}" for rank, w in enumerate(self.workers)
        ]
        # The slowest worker decides.
        parts = {part: max(worker.seconds[part] for worker in self.workers) for part in self.workers[0].seconds}
        return [
            f"model: {self.model} ({self.architecture}), {_count(self.parameters)} parameters in "
            f"{self.dtype}{quantized}, {weights:.2f} GiB",
            *kernels,
            f"KV cache: {self._cache(cache)}, at most "
            f"{self.full_length_requests} requests of {self.max_model_len} tokens at once; "
            f"{sum(group.num_host_blocks for group in self.groups)} host blocks ({host:.2f} GiB)"
            if self.groups
            else f"no KV cache: texts of up to {self.max_model_len} tokens are computed whole, each in one step",
            *self.workers[0].preparations,
            *([f"drafts: {self.workers[0].drafter}"] if self.workers[0].drafter else []),
            f"steps: at most {self.max_num_seqs} sequences run at once, {self.token_budget} tokens a step",
            f"ready in {self.seconds:.2f} s: " + ", ".join(f"{part} {taken:.2f} s" for part, taken in parts.items()),
        ]

    def _cache(self, gib: float) -> str:
        """The blocks of each kind of layers; with a window it is not their tokens that count."""
        size, memory = self.block_size, f"{gib:.2f} GiB in {self.kv_cache_dtype}"
        if len(self.groups) == 1 and self.groups[0].window is None:
            (group,) = self.groups
            return f"{group.num_blocks} blocks of {size} tokens ({group.num_blocks * size} tokens, {memory})"
        kinds = (
            f"{group.num_blocks} for all tokens ({group.num_blocks * size} tokens)"
            if group.window is None
            else f"{group.num_blocks} for windows of {group.window} tokens"
            for group in self.groups
        )
        return f"{memory} in blocks of {size} tokens, {' and '.join(kinds)}"


def _count(number: float) -> str:
    for unit in ("", " K", " M"):
        if number < 1000:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g} B"
