"""Which GGUF files are computed with in their own bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo import LLM, SamplingParams
from octavo.config.engine_config import make_config
from octavo.config.sources import resolve_config
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.kernels.cpu.backend import CpuKernels
from octavo.loader.gguf_file import GGUFFile
from octavo.loader.resolve import weight_quantization

SMALL: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 16, "num_threads": 1}


@pytest.fixture
def file(tmp_path: Path, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    path: Path = tiny_llama(tmp_path / "m.gguf", Q.Q4_0)
    return path


def logprobs(file: Path, **options: Any) -> Any:
    """The logprobs of eight greedy tokens, every bit of them."""
    llm = LLM(str(file), **{**SMALL, **options})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    return llm.generate("hello world", params, use_tqdm=False)[0].outputs[0].logprobs


def test_a_file_is_computed_with_in_its_own_bits_unless_it_is_to_be_widened(file: Path) -> None:
    pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")
    own = logprobs(file)
    assert own == logprobs(file, quantization="gguf")
    assert own == logprobs(file, quantization=None), "None is the default"
    widened = logprobs(file, quantization="none")
    assert own != widened
    assert widened != logprobs(file, quantization="none", dtype="float32")
    assert logprobs(file, kernels="reference"), "other kernels compute in dtype"


@pytest.mark.parametrize(
    ("options", "kernels", "expected"),
    [
        ({}, "cpu", "gguf"),
        ({}, "reference", None),
        ({}, "triton", None),
        ({"load_format": "dummy"}, "cpu", None),
        ({"quantization": "none"}, "cpu", None),
        ({"quantization": "gguf"}, "reference", "gguf"),
        ({"quantization": "int8"}, "cpu", "int8"),
        ({"model": "smollm2-135m"}, "cpu", None),
        ({"model": "owner/name"}, "cpu", None),
    ],
)
def test_the_default_depends_on_file_and_kernels(
    file: Path, options: dict[str, Any], kernels: str, expected: str | None
) -> None:
    assert weight_quantization(make_config(**{"model": str(file), **options}), kernels) == expected


def test_none_is_a_value_and_no_reset(file: Path) -> None:
    environ = {"OCTAVO_QUANTIZATION": "none"}
    assert resolve_config({"model": "m"}, environ=environ).quantization == "none"
    assert resolve_config({"model": "m", "quantization": None}, environ=environ).quantization == "auto"
    with pytest.raises(ConfigError, match="'int7'"):
        make_config(model="m", quantization="int7")


def test_what_becomes_of_a_file_is_said_at_start(file: Path, tiny_llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")
    values = np.random.default_rng(0).standard_normal((512, 256), np.float32)
    blocks = gguf.quants.quantize(values, Q.MXFP4)
    tiny_llama(file, Q.TQ2_0, tensors={"blk.0.ffn_up.weight": (blocks, Q.MXFP4)})
    description = GGUFFile(file).describe(CpuKernels().form_of, DType.BFLOAT16)
    assert description.startswith("GGUF file type TQ2_0: TQ2_0 as it is (")
    assert "; MXFP4 as it is (" in description
    tiny_llama(file, Q.IQ1_S)
    description = GGUFFile(file).describe(CpuKernels().form_of, DType.BFLOAT16)
    assert description == "GGUF file type IQ1_S: IQ1_S quantised again to 8 bits (0.00 GiB)"
    assert "IQ1_S as bfloat16" in GGUFFile(file).describe(lambda kind: None, DType.BFLOAT16)
    with caplog.at_level("INFO", "octavo"):
        logprobs(file)
    assert description in caplog.text


def test_types_without_products_of_their_own_are_widened_to_8_bits(file: Path, tiny_llama: Any) -> None:
    pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")
    tiny_llama(file, Q.Q6_K)
    assert logprobs(file) == logprobs(file, quantization="gguf") != logprobs(file, quantization="none")
