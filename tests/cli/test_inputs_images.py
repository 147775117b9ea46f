"""Images for ``octavo generate``, ``octavo chat`` and ``octavo info``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.chat import Conversation, run_command
from octavo.config.engine_config import EngineConfig
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.model_files import find_files
from tests.cli.helpers import Capture, Run
from tests.image_models import picture, save_llava
from tests.images.image_cases import bomb, file_of

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

A, B = picture(40, 56, 1), picture(90, 31, 2)
OPTIONS = ("--dtype", "float32", "--num-gpu-blocks-override", "64", "--max-tokens", "6", "--temperature", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    save_llava(path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("files")
    for name, image in (("a.png", A), ("b.png", B)):
        (path / name).write_bytes(file_of(image))
    (path / "bomb.png").write_bytes(bomb())
    return [path / "a.png", path / "b.png", path / "bomb.png"]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[..., tuple[list[int], list[int]]]:
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64)

    def generate(text: str, *images: object) -> tuple[list[int], list[int]]:
        prompt = {"prompt": text, "multi_modal_data": {"image": list(images)}}
        [output] = llm.generate(prompt, SamplingParams(max_tokens=6, temperature=0.0), use_tqdm=False)
        return output.prompt_token_ids, output.outputs[0].token_ids

    return generate


def generated(octavo: Run, capsys: Capture, *words: object) -> list[tuple[list[int], list[int]]]:
    assert octavo("generate", *words, *OPTIONS, "--json", "-") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(line["prompt_token_ids"], line["outputs"][0]["token_ids"]) for line in lines[:-1]]


def test_images_come_with_each_prompt(
    octavo: Run, capsys: Capture, folder: Path, files: list[Path], expected: Callable[..., tuple[list[int], list[int]]]
) -> None:
    a, b, _ = files
    images = ("--image", a, "--image", b)
    made = generated(octavo, capsys, folder, "what?", "first <image> then <image>", *images)
    assert made == [expected("<image><image>what?", A, B), expected("first <image> then <image>", A, B)]
    made = generated(octavo, capsys, folder, "what?", "--chat", "--image", a)
    assert made == [expected("<user><image>what?<assistant>", A)]


def test_images_that_cannot_be_used_are_refused_before_the_model_is_loaded(
    octavo: Run, capsys: Capture, folder: Path, files: list[Path], tiny_model: Path
) -> None:
    for words, message in (
        ((folder, "x", "--image", files[2]), "bomb.png has 100000 x 100000 pixels; at most"),
        (
            ("no/where", "x", "--image", "missing.png"),
            "the image missing.png cannot be read: No such file or directory",
        ),
        ((tiny_model, "x", "--image", files[0]), "the model reads text alone: leave out the image"),
    ):
        assert octavo("generate", *words, *OPTIONS) == 2
        assert message in capsys.readouterr().err


def test_of_several_files_the_one_that_cannot_be_used_is_named(
    octavo: Run, capsys: Capture, folder: Path, files: list[Path]
) -> None:
    images = [word for file in (files[0], files[2]) for word in ("--image", file)]
    assert octavo("generate", folder, "<image> <image>", *images, *OPTIONS) == 2
    assert f"{files[2]} has 100000 x 100000 pixels" in capsys.readouterr().err


def test_a_prompt_whose_places_do_not_fit_the_images_fails_alone(
    octavo: Run, capsys: Capture, folder: Path, files: list[Path]
) -> None:
    assert octavo("generate", folder, "<image>a<image>", "b", *OPTIONS, "--image", files[0]) == 1
    assert "prompt 1: prompt has 2 places for images" in capsys.readouterr().err


def test_a_conversation_about_images(
    capsys: Capture,
    folder: Path,
    files: list[Path],
    expected: Callable[..., tuple[list[int], list[int]]],
    tmp_path: Path,
) -> None:
    engine = LLMEngine(find_files(EngineConfig(model=str(folder), dtype="float32", num_gpu_blocks_override=64)))
    talk = Conversation(engine, SamplingParams(max_tokens=6, temperature=0.0), None)
    run_command(talk, f"/image {files[2]}")
    assert talk.failures == 1 and "has 100000 x 100000 pixels" in capsys.readouterr().err
    run_command(talk, f"/image {files[0]}")
    run_command(talk, f"/image {files[1]}")
    talk.ask("what?")
    answer = engine.tokenizer.decode(expected("<user><image><image>what?<assistant>", A, B)[1])
    assert capsys.readouterr().out.strip() == answer.strip()
    assert not talk.images and len(talk.messages[0]["content"]) == 3
    run_command(talk, f"/save {tmp_path}/talk.json")
    before = list(talk.messages)
    talk.ask("and now?")  # the images stay in the conversation
    assert talk.failures == 1 and len(talk.messages) == 4
    second = talk.messages[-1]
    run_command(talk, f"/load {tmp_path}/talk.json")
    assert [m["content"] for m in talk.messages[1:]] == [before[1]["content"]]
    assert [part.get("path") for part in talk.messages[0]["content"]] == [str(files[0]), str(files[1]), None]
    talk.ask("and now?")
    assert talk.messages[-1] == second
    files[0].rename(files[0].with_name("moved.png"))
    run_command(talk, f"/load {tmp_path}/talk.json")
    files[0].with_name("moved.png").rename(files[0])
    assert "cannot be read" in capsys.readouterr().err and len(talk.messages) == 4


def test_info_says_that_a_model_takes_images(octavo: Run, capsys: Capture, folder: Path, tiny_model: Path) -> None:
    assert octavo("info", folder, "--json", "-") == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["inputs"], model["image_placeholder"], model["tokens_of_an_image"]) == (
        ["text", "image"],
        "<image>",
        16,
    )
    assert octavo("info", tiny_model, "--json", "-") == 0
    assert "inputs" not in json.loads(capsys.readouterr().out)["model"]
