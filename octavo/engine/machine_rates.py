"""Measured rates of this machine: products by weight format and rows, attention, and the cost of a step around them.

``octavo fit`` multiplies them by the sizes of a network. Each rate is measured when it is first asked for, in a second
or less, and kept in the cache folder under the processor's name, the kernels and the version of the package.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo import __version__
from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType, rounded
from octavo.core.errors import ConfigError
from octavo.engine.memory_needs import packed_bytes
from octavo.kernels.forward_batch import make_batch
from octavo.kernels.interface import Array, AttentionSpec, Kernels, PackedWeight
from octavo.kernels.weight_rows import GGUFRows
from octavo.loader.files import cache_dir

logger = logging.getLogger("octavo.startup")

#: Rows of the measured products; inputs and outputs of their matrices.
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_WIDTH = 2048
#: Matrices that are multiplied in turn: one stays in a processor's caches, the last number fills more than most have.
_COUNTS = (1, 4, 16)
#: From this number of rows on, computing takes longer than reading. It is measured with two matrices as wide as those
#: of feed-forward networks, whose factors exceed a core's caches.
_MANY_ROWS, _WIDE = 64, 8192
#: Context of the measured attention, its key heads and the tokens of a block.
_CONTEXT, _HEADS, _BLOCK = 2048, 8, 16
#: A rate is that of the fastest of at least 5 runs in at least 0.03 s: what else runs on the machine slows some down.
_RUNS, _SECONDS = 5, 0.03


class ProductRate(msgspec.Struct, frozen=True):
    """Of a product of some rows with one matrix after the other, which all together have this number of bytes."""

    rows: int
    working_set: int
    #: Seconds for each element of a matrix.
    seconds: float


class AttentionRate(msgspec.Struct, frozen=True):
    #: Seconds of a decode for each byte of keys and values that it reads.
    byte: float
    #: Seconds of a prompt for each operation (a multiply-add is two).
    operation: float


class StepRate(msgspec.Struct, frozen=True):
    """What a step takes beside products and attention, in seconds; and memory of the processes, in bytes."""

    step: float
    layer: float
    row: float
    #: Of each logit.
    logit: float
    #: Resident memory of an engine without weights and cache, and its address space.
    engine_bytes: int
    engine_addresses: int
    #: Resident memory of the process that serves HTTP.
    server_bytes: int


class _Kept(msgspec.Struct):
    machine: str
    products: dict[str, list[ProductRate]] = {}
    attention: dict[str, AttentionRate] = {}
    step: StepRate | None = None
    #: Whether other processes ran while some of it was measured.
    busy: bool = False


class MachineRates:
    """The rates of a CPU with its kernels; measures those that are not kept yet.

    Rates that were measured beside other processes count until the machine is idle, and are then measured again.
    """

    def __init__(self, processor: str, kernels: Kernels, folder: Path | None = None) -> None:
        """``processor``: its name; ``folder``: of the kept rates, by default in the cache folder."""
        self._kernels = kernels
        machine = f"octavo {__version__}, {processor}, {kernels.describe()}"
        name = hashlib.sha256(machine.encode()).hexdigest()[:16]
        self._file = (folder or cache_dir() / "rates") / f"{name}.json"
        self._kept = _read(self._file, machine)
        if self._kept.busy and not _is_busy():
            self._kept = _Kept(machine)

    @property
    def machine(self) -> str:
        return self._kept.machine

    def product(self, form: str, rows: float, working_set: float) -> float:
        """Seconds for each element of a matrix that is multiplied with ``rows`` rows.

        Straight lines between the measured rows, and between the logarithms of the measured working sets.

        Args:
            form: a type or quantization of the kernels ("bfloat16", "int4"), or a type of GGUF blocks ("Q4_K").
            rows: of the other factor.
            working_set: bytes of all weights that a step reads.
        """
        rates = self._kept.products.get(form)
        if rates is None:
            rates = self._keep(f"products in {form}", self._kept.products, form, self._measure_products)
        curves: dict[int, list[tuple[float, float]]] = {}
        for rate in rates:
            curves.setdefault(rate.rows, []).append((math.log(rate.working_set), rate.seconds))
        log_size = math.log(max(1.0, working_set))
        points = [(float(n), interpolate(sorted(curve), log_size)) for n, curve in sorted(curves.items())]
        (x0, y0), (x1, y1) = points[-2:]
        return interpolate(points, rows) if rows <= x1 else y1 + (rows - x1) * max(0.0, y1 - y0) / (x1 - x0)

    def attention(self, dtype: str, kv_dtype: str, head_dim: int, queries: int) -> AttentionRate:
        """``head_dim``: a head's numbers; ``queries``: query heads of each key head."""
        key = f"{dtype} {kv_dtype} {head_dim} x {queries}"
        kept = self._kept.attention.get(key)
        measure = self._measure_attention
        return kept or self._keep(
            f"attention in {dtype} over {kv_dtype}",
            self._kept.attention,
            key,
            lambda _: measure(dtype, kv_dtype, head_dim, queries),
        )

    def step(self) -> StepRate:
        if self._kept.step is None:
            self._announce("the cost of a step")
            self._kept.step = _measure_step()
            self._write()
        return self._kept.step

    def _keep(self, what: str, kept: dict[str, Any], key: str, measure: Callable[[str], Any]) -> Any:
        self._announce(what)
        kept[key] = measure(key)
        self._write()
        return kept[key]

    def _announce(self, what: str) -> None:
        logger.info("measuring %s (kept in %s)", what, self._file)
        if _is_busy():
            if not self._kept.busy:
                logger.warning(
                    "other processes are busy, so the rates are too low; an idle machine measures them again"
                )
            self._kept.busy = True

    def _write(self) -> None:
        """A folder that cannot be written to costs the measurement again, and nothing else."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._file.parent, delete=False) as file:
                file.write(msgspec.json.format(msgspec.json.encode(self._kept), indent=1))
            os.replace(file.name, self._file)
        except OSError as e:
            logger.warning("the measured rates cannot be kept: %s", e)

    def _measure_products(self, form: str) -> list[ProductRate]:
        dtype = DType.FLOAT32 if form == "float32" else DType.BFLOAT16
        pack = self._packer(form, _WIDTH, _WIDTH)
        matrices = [pack() for _ in range(_COUNTS[-1])]
        size, elements = packed_bytes(form, (_WIDTH, _WIDTH)), _WIDTH**2
        rates = []
        for rows in (rows for rows in _ROWS if rows < _MANY_ROWS):
            x = self._kernels.array(_random((rows, _WIDTH), dtype))
            for count in _COUNTS:
                seconds = _seconds(functools.partial(_multiply, matrices[:count], x))
                rates.append(ProductRate(rows, count * size, seconds / count / elements))
        del matrices
        wide = {inputs: self._packer(form, outputs, inputs)() for outputs, inputs in ((_WIDE, _WIDTH), (_WIDTH, _WIDE))}
        for rows in (rows for rows in _ROWS if rows >= _MANY_ROWS):
            seconds = 0.0
            for inputs, matrix in wide.items():
                x = self._kernels.array(_random((rows, inputs), dtype))
                seconds += _seconds(functools.partial(matrix, x))
            rates.append(ProductRate(rows, size, seconds / (2 * _WIDE * _WIDTH)))
        return rates

    def _packer(self, form: str, outputs: int, inputs: int) -> Callable[[], PackedWeight]:
        if form in ("float32", "bfloat16", "int8", "int4"):
            dtype = DType.FLOAT32 if form == "float32" else DType.BFLOAT16
            values, kind = _random((outputs, inputs), dtype), form if form.startswith("int") else None
            return lambda: self._kernels.pack([values], None, kind, dtype=dtype)
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType[form.upper()]]
        except KeyError:
            raise ConfigError(f"no product of weights in {form!r} can be measured") from None
        rows = GGUFRows(form.upper(), np.zeros((outputs, inputs // block * size), np.uint8), inputs, block)
        return lambda: self._kernels.pack([rows], None, "gguf", dtype=DType.BFLOAT16)

    def _measure_attention(self, dtype: str, kv_dtype: str, head_dim: int, queries: int) -> AttentionRate:
        kernels, activations = self._kernels, DType(dtype)
        spec = KVSpec("full", _HEADS, head_dim, kv_dtype)
        blocks = _CONTEXT // _BLOCK
        caches = kernels.make_group_cache(spec, 4, blocks, _BLOCK)
        tokens = kernels.array(_random((_CONTEXT, _HEADS, head_dim), activations))
        for cache in caches:
            kernels.reshape_and_cache(tokens, tokens, cache, kernels.wrap(np.arange(_CONTEXT)))
        tables = np.arange(blocks, dtype=np.int32).reshape(1, -1)
        how = AttentionSpec(head_dim**-0.5)

        def seconds(length: int, end: int) -> float:
            batch = make_batch([length], [end], tables, _BLOCK, kernels)
            q = kernels.array(_random((length, _HEADS * queries, head_dim), activations))
            return _seconds(lambda: [kernels.paged_attention(q, cache, batch, how) for cache in caches]) / len(caches)

        length = 512
        operations = 4 * _HEADS * queries * head_dim * length * (length + 1) // 2
        return AttentionRate(
            byte=seconds(1, _CONTEXT) / (_CONTEXT * spec.bytes_per_token),
            operation=seconds(length, length) / operations,
        )


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Straight lines between ascending points; before the first and after the last, their own values."""
    xs = [each for each, _ in points]
    i = bisect_right(xs, x)
    if i in (0, len(xs)):
        return points[min(i, len(xs) - 1)][1]
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (x - x0) * (y1 - y0) / (x1 - x0)


def _is_busy() -> bool:
    """Whether half of the processors had work in the last minute."""
    return os.getloadavg()[0] > (os.cpu_count() or 1) / 2


def _read(file: Path, machine: str) -> _Kept:
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return _Kept(machine)
    return kept if kept.machine == machine else _Kept(machine)


_RNG = np.random.default_rng(0)


def _random(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    return rounded(_RNG.standard_normal(shape, np.float32), dtype)


def _multiply(matrices: Sequence[PackedWeight], x: Array) -> None:
    for matrix in matrices:
        matrix(x)


def _seconds(run: Callable[[], object]) -> float:
    run()  # first uses allocate
    times: list[float] = []
    while len(times) < _RUNS or sum(times) < _SECONDS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


# The cost of a step, in a process of its own: tiny networks, whose products take next to nothing.


def _measure_step() -> StepRate:
    words = [sys.executable, "-m", "octavo.engine.machine_rates"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if result.returncode:
        raise ConfigError(f"the cost of a step could not be measured: {result.stderr.strip()[-500:]}")
    return msgspec.json.decode(result.stdout.splitlines()[-1], type=StepRate)


#: (layers, vocabulary, sequences) of the tiny networks' decodes; differences between them are the costs of each part.
_BASE = (2, 512, 1)
_LAYERS, _SEQUENCES, _VOCABULARY = (18, 512, 1), (2, 512, 16), (2, 65536, 16)


def _measure_here() -> None:
    """Prints a ``StepRate`` as JSON."""
    logging.disable(logging.CRITICAL)
    measured = {case: _measure_decodes(*case) for case in (_BASE, _LAYERS, _SEQUENCES, _VOCABULARY)}
    seconds = {case: each for case, (each, *_) in measured.items()}
    _, resident, addresses = measured[_BASE]
    layer = max(0.0, seconds[_LAYERS] - seconds[_BASE]) / (_LAYERS[0] - _BASE[0])
    sequences = _SEQUENCES[2]
    logits = sequences * (_VOCABULARY[1] - _SEQUENCES[1])
    rate = StepRate(
        step=max(0.0, seconds[_BASE] - _BASE[0] * layer),
        layer=layer,
        row=max(0.0, seconds[_SEQUENCES] - seconds[_BASE]) / (sequences - 1),
        logit=max(0.0, seconds[_VOCABULARY] - seconds[_SEQUENCES]) / logits,
        engine_bytes=resident,
        engine_addresses=addresses,
        server_bytes=_server_bytes(),
    )
    print(msgspec.json.encode(rate).decode())


def _measure_decodes(layers: int, vocabulary: int, sequences: int) -> tuple[float, int, int]:
    """Seconds of a step that decodes a token of each sequence (the lower quartile); bytes of memory and addresses."""
    import psutil

    from octavo.core.sampling_params import SamplingParams
    from octavo.engine.llm import LLM

    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
    }
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    facts: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
    }
    facts |= {"rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape | facts))
        options: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "kv_cache_memory_bytes": 8 << 20,
        }
        llm = LLM(folder, max_num_seqs=sequences, **options)
        engine = llm.llm_engine
        for number in range(sequences):
            params = SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.0)
            engine.add_request(str(number), {"prompt_token_ids": [2 + number] * 8}, params)
        times = [time.perf_counter()]
        while engine.has_unfinished_requests():
            engine.step()
            times.append(time.perf_counter())
        memory = psutil.Process().memory_info()  # while the engine's threads live
    quick = statistics.quantiles([b - a for a, b in itertools.pairwise(times[4:])], n=4)[0]
    return quick, memory.rss, _peak_addresses(memory.vms)


def _peak_addresses(now: int) -> int:
    """Of this process, where the system counts the peak; allocators reserve more for a moment than they keep."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return now
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmPeak")), now)


def _server_bytes() -> int:
    """Resident memory of a process with the modules of a server."""
    code = (
        "import octavo.engine.async_llm, octavo.server.app, octavo.server.metrics, octavo.server.openai.completions, "
        "octavo.server.http.connection, octavo.server.state, psutil; print(psutil.Process().memory_info().rss)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return int(result.stdout) if result.returncode == 0 else 0


if __name__ == "__main__":
    _measure_here()
