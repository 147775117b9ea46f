"""``octavo info`` and ``octavo bench`` on a machine with a GPU, which is made up here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octavo.cli import info
from octavo.kernels.torch_backend import DeviceLimits
from octavo.lab.bench.gpu_scale import TINY
from tests.cli.helpers import Run

GIB = 1 << 30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown by ``info``; nothing computes on it."""
    shown = SimpleNamespace(name="Test Card", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("octavo.kernels.num_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: shown)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (130 * GIB, 140 * GIB))
    monkeypatch.setattr(info, "gpu_driver", lambda: "580.159")


def test_gpus_are_shown_with_their_compute_capability_and_software(
    octavo: Run, capsys: pytest.CaptureFixture[str], card: None
) -> None:
    assert octavo("info", "--device", "cpu", "--json", "-") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["devices"] == ["cpu", "cuda:0"]
    (gpu,) = facts["gpus"]
    assert (gpu["name"], gpu["compute_capability"], gpu["multiprocessors"]) == ("Test Card", "9.0", 132)
    assert gpu["memory_bytes"] == {"total": 140 * GIB, "available": 130 * GIB}
    assert facts["gpu_driver"] == "580.159"
    assert octavo("info", "--device", "cpu") == 0
    lines = capsys.readouterr().out
    assert "gpu 0:\n" in lines
    assert "140.0 GiB total, 130.0 GiB available" in lines


def test_limits_of_a_gpu_need_no_compiled_kernels(
    octavo: Run, capsys: pytest.CaptureFixture[str], card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = DeviceLimits(device="Test Card", copy_gb_s=4300.0, read_gb_s=4100.0, bf16_tflops=788.04)
    monkeypatch.setattr("octavo.kernels.torch_backend.measure_device", lambda device: measured)
    monkeypatch.setattr(info, "find_spec", lambda name: None)
    assert octavo("info", "--device", "cpu", "--limits", "--json", "-") == 0
    limits = json.loads(capsys.readouterr().out)["limits"]
    assert limits == {
        "gpus": [
            {
                "name": "Test Card",
                "copy_gb_per_s": 4300,
                "read_gb_per_s": 4100,
                "bfloat16_product_tflop_per_s": 788.0,
            }
        ]
    }


def test_without_a_gpu_there_is_none(octavo: Run, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert octavo("info", "--json", "-") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["gpus"], facts["devices"]) == ([], ["cpu"])


def test_a_shape_can_be_measured_without_a_checkpoint(
    octavo: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options = ["--device", "cpu", "--kernels", "reference", "--num-gpu-blocks-override", "32"]
    words = ["bench", "offline", tmp_path, "--load-format", "dummy", "--batches", "2", "--input-len", "6"]
    assert octavo(*words, *options, "--output-len", "9", "--json", "-") == 0
    (row,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert row["decode_step_ms"] > 0
    assert row["device_idle_share"] is None


@pytest.mark.gpu
def test_a_real_gpu_is_shown(octavo: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo("info", "--limits", "--json", "-") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kernels"].startswith("triton (")
    assert facts["gpus"][0]["name"] == torch.cuda.get_device_name(0)
    assert facts["limits"]["gpus"][0]["copy_gb_per_s"] > 100
