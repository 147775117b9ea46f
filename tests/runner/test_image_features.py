"""Features of images computed in parts between steps: the same bits for every division, order and abort."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config.engine_config import EngineConfig
from octavo.core.dtypes import DType
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import ImageInput, Preparation
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config
from octavo.models.network import Tower
from octavo.runner.device import HostDevice
from octavo.runner.images import ImagePreparer
from octavo.runner.memory import WorkerShare
from octavo.runner.preparers import WorkerPreparations
from tests.models.tower_harness import TowerDriver, random_image

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")
pytest.importorskip("transformers")

#: Pieces: two with 145 rows of CLIP; images of Qwen2.5-VL have one piece each, of unlike sizes, with windows.
IMAGES: dict[str, list[ImageInput]] = {
    "llava": [random_image(pieces, 96, 96, seed) for seed, pieces in enumerate((1, 3, 2))],
    "qwen": [random_image(1, *size, seed) for seed, size in enumerate(((64, 48), (24, 160), (96, 80)))],
}


def save(folder: Path, family: str) -> None:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    from tests.image_models import save_qwen2_5_vl
    from tests.models.tower_harness import save_image_model

    if family == "qwen":
        save_qwen2_5_vl(folder)
        return
    vision = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 3}
    text = {"vocab_size": 99, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=96, patch_size=8),
        text_config=LlamaConfig(**text, num_attention_heads=3, num_key_value_heads=3),
        image_token_id=98,
    )
    save_image_model(folder, LlavaForConditionalGeneration(config))


class Workplace:
    """A worker's preparations of images over one tower."""

    def __init__(self, folder: Path, family: str) -> None:
        self.images = IMAGES[family]
        kernels: Any = importlib.import_module("octavo.kernels.cpu.backend").CpuKernels()
        config, options = read_model_config(folder), EngineConfig(model=str(folder), block_size=8)
        network = load_model(folder, config, LayerContext(kernels, DType.BFLOAT16))
        tower = network.tower
        assert isinstance(tower, Tower)
        device = HostDevice(options, config, WorkerShare())
        device.kernels = kernels
        layers = SimpleNamespace(kernels=kernels)
        context: Any = SimpleNamespace(
            device=device, layers=layers, options=options, config=config, network=network, folder=folder
        )
        self._context = context
        driver = TowerDriver(tower, kernels, tokens=1024, segments=256)
        #: In one go.
        self.expected = [driver.features(tower.prepare(image)).numpy() for image in self.images]

    def preparations(self) -> tuple[ImagePreparer, WorkerPreparations]:
        preparer = ImagePreparer(self._context)
        return preparer, WorkerPreparations({"image": preparer})


@pytest.fixture(scope="module", params=IMAGES)
def workplace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp(request.param)
    save(folder, request.param)
    return Workplace(folder, request.param)


#: By step: seconds for features, and what becomes of one of the images.
steps = st.lists(
    st.tuples(st.sampled_from([1e-9, 1e-5, 1e-4, 3e-4, 1e-3]), st.sampled_from(["", "", "", "drop", "sleep"])),
    min_size=1,
    max_size=40,
)


@settings(max_examples=25)
@given(steps, st.permutations(range(3)), st.integers(0, 2))
def test_every_division_gives_the_same_bits(
    workplace: Workplace, divided: list[tuple[float, str]], order: list[int], number: int
) -> None:
    preparer, preparations = workplace.preparations()
    wanted = [
        Preparation("image", f"image {i}", msgspec.msgpack.encode(workplace.images[i]), workplace.expected[i].nbytes)
        for i in order
    ]
    prepared: set[str] = set()
    plan = StepPlan(1, prepare=wanted)
    for step, (seconds, event) in enumerate(itertools.chain(divided, itertools.repeat((1.0, ""))), 1):
        if event == "drop":  # its request is aborted, and comes again
            again = next(p for p in wanted if p.key == f"image {number}")
            plan.drop, plan.prepare = [again.key], [*plan.prepare, again]
            prepared.discard(again.key)
        elif event == "sleep":
            preparations.release()
        plan.compute_seconds = seconds
        result = StepResult(step)
        preparations.apply(plan, result)
        assert not result.prepare_errors and not prepared.intersection(result.prepared)
        prepared.update(result.prepared)
        if len(prepared) == len(wanted):
            break
        plan = StepPlan(step + 1)
    for i, expected in enumerate(workplace.expected):
        assert np.array_equal(preparer.find(f"image {i}").view(np.uint32), expected.view(np.uint32))


def test_a_step_computes_for_its_seconds_and_says_how_long(workplace: Workplace) -> None:
    """Without seconds nothing is computed."""
    _, preparations = workplace.preparations()
    image = Preparation("image", "a", msgspec.msgpack.encode(workplace.images[1]), 1)
    result = StepResult(1)
    preparations.apply(StepPlan(1, prepare=[image]), result)
    while not preparations._computing:
        preparations.apply(StepPlan(2), result)
    preparations.apply(StepPlan(3), result)
    assert not result.prepared and result.compute_seconds < 1e-3
    parts = 0
    while not result.prepared:
        result, parts = StepResult(4), parts + 1
        preparations.apply(StepPlan(4, compute_seconds=1e-5), result)
        assert result.compute_seconds > 0
    assert parts > 3
    preparations.apply(StepPlan(5, compute_seconds=1.0), later := StepResult(5))
    assert later.compute_seconds == 0
