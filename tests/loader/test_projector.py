"""Language models in GGUF files with the projectors of their images, against the same models as folders."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo import LLM, SamplingParams
from octavo.cli.info import describe_model
from octavo.config.engine_config import EngineConfig
from octavo.config.model_list import ModelEntry, entries_of_folder
from octavo.core.errors import ConfigError, ModelNotFoundError, OctavoError, UnsupportedModelError, WeightError
from octavo.engine.memory_needs import size_model
from octavo.images.processors import LlavaProcessor, read_image_processor
from octavo.kernels.weight_rows import to_values
from octavo.loader import hub as hub_room
from octavo.loader import projector as room
from octavo.loader.files import PROJECTOR_LINK, cached_models
from octavo.loader.gguf_file import GGUFFile
from octavo.loader.local_models import local_models
from octavo.loader.projector import FAMILIES, ProjectorCheckpoint
from octavo.loader.resolve import find_projector, resolve_model
from octavo.loader.weights import check_headers, check_model, read_safetensors
from octavo.models.checkpoint import Pairs
from octavo.models.config_files import read_json, read_model_config
from octavo.models.network import build_without_weights
from tests.fake_hub import FakeHub, serving_hub
from tests.image_models import SPECIAL, picture
from tests.loader.test_gguf_architectures_converted import _DRIVER, CHECKOUT
from tests.models.zoo import rename_tensors
from tests.ollama_store import LIBRARY, Store
from tests.projector_files import CHANNELS, save_folder, write_files
from tests.projector_files import FAMILIES as SAVED


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    room._tell.cache_clear()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each family, as it is used first."""
    root = tmp_path_factory.mktemp("saved")

    class Folders(dict[str, Path]):
        def __missing__(self, family: str) -> Path:
            self[family] = save_folder(root / family, family)
            return self[family]

    return Folders()


@pytest.fixture
def files(tmp_path: Path, saved: dict[str, Path]) -> tuple[Path, Path]:
    """The two files of a SmolVLM, in one folder."""
    (tmp_path / "models").mkdir()
    language, projector = tmp_path / "models" / "tiny-Q4_K_M.gguf", tmp_path / "models" / "mmproj-tiny-F16.gguf"
    write_files(saved["idefics3"], "idefics3", language, projector)
    return language, projector


def answers(model: Path, **options: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompts, greedy tokens and logprobs of three questions at once: about two images, about one, and about none."""
    options |= {"quantization": "none", "dtype": "float32", "num_gpu_blocks_override": 64, "num_threads": 1}
    llm = LLM(str(model), max_model_len=512, device="cpu", **options)

    def question(*images: np.ndarray) -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": image} for image in images]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]

    asked = [question(picture(64, 64), picture(64, 64, 1)), question(picture(64, 64, 2)), question()]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    found = []
    for output in llm.chat(asked, params, use_tqdm=False):
        [answer] = output.outputs
        assert answer.logprobs is not None and output.prompt_token_ids is not None
        logprobs = [next(iter(step.values())).logprob for step in answer.logprobs]
        found.append((list(output.prompt_token_ids), list(answer.token_ids), logprobs))
    return found


@pytest.mark.parametrize("family", SAVED)
def test_two_files_answer_as_the_folder(family: str, tmp_path: Path, saved: dict[str, Path]) -> None:
    language, projector = tmp_path / "tiny.gguf", tmp_path / "other" / "mine.gguf"
    projector.parent.mkdir()
    kind = Q.BF16 if family in ("gemma3", "gemma4", "internvl") else Q.F32
    write_files(saved[family], family, language, projector, kind=kind)
    expected, found = answers(saved[family]), answers(language, mmproj=str(projector))
    if family == "qwen3_5":  # files have the negated exponentials of its decays
        assert [answer[:2] for answer in found] == [answer[:2] for answer in expected]
        for (_, _, logprobs), (_, _, theirs) in zip(found, expected, strict=True):
            assert logprobs == pytest.approx(theirs, abs=1e-5)
    else:
        assert found == expected
    assert len({(*tokens, *logprobs) for _, tokens, logprobs in expected}) == 3


@pytest.mark.parametrize("family", SAVED)
def test_the_tower_is_given_the_same_as_of_the_folder(family: str, tmp_path: Path, saved: dict[str, Path]) -> None:
    language, projector = tmp_path / "tiny.gguf", tmp_path / "mmproj.gguf"
    write_files(saved[family], family, language, projector)
    folder = resolve_model(str(language), mmproj=str(projector))
    expected, found = tower_of(saved[family]), tower_of(folder, projector)
    assert found.keys() == expected.keys() != set()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def tower_of(folder: Path, projector: Path | None = None) -> dict[str, np.ndarray]:
    """What the tower of a folder's network is given: of the folder's safetensors, or of a projector."""
    config = read_model_config(folder)
    network = build_without_weights(config, "float32")
    shapes = network.tensor_shapes()
    pairs: Pairs = read_safetensors(folder) if projector is None else ()
    if projector is not None:
        own = {name: shape for name, shape in shapes.items() if name.startswith("tower.")}
        pairs = ProjectorCheckpoint(projector, own, network.entries(), config.architecture).read(shapes)
    for entry in network.entries():
        pairs = entry.apply(pairs, shapes)
    return {name: np.asarray(to_values(tensor), np.float32) for name, tensor in pairs if name.startswith("tower.")}


def test_a_file_of_llava_may_lack_the_layers_behind_its_features(tmp_path: Path, saved: dict[str, Path]) -> None:
    language, projector = tmp_path / "tiny.gguf", tmp_path / "mmproj.gguf"
    write_files(saved["llava"], "llava", language, projector, drop=r"v\.blk\.2\.")
    assert answers(language, mmproj=str(projector)) == answers(saved["llava"])


def test_a_template_of_texts_gets_what_stands_around_an_image(tmp_path: Path, saved: dict[str, Path]) -> None:
    language, projector = tmp_path / "tiny.gguf", tmp_path / "mmproj.gguf"
    folder = shutil.copytree(saved["qwen2_5_vl"], tmp_path / "folder")
    text = (folder / "tokenizer.json").read_text().replace("<row_1_col_1>", "<|vision_start|>")
    (folder / "tokenizer.json").write_text(text.replace("<row_1_col_2>", "<|vision_end|>"))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    write_files(folder, "qwen2_5_vl", language, projector, template=template)
    pad, start, end = map(SPECIAL.index, ("<|image_pad|>", "<row_1_col_1>", "<row_1_col_2>"))
    for prompt, _, _ in answers(language)[:2]:
        special = [token for token in prompt if token < len(SPECIAL)]
        assert special == [start, *[pad] * 64, end] * (len(special) // 66) != []


def test_the_one_beside_is_found(files: tuple[Path, Path], saved: dict[str, Path], tmp_path: Path) -> None:
    language, projector = files
    assert find_projector(language) == projector
    folder = resolve_model(str(language))
    assert read_json(folder / "config.json")["architectures"] == ["Idefics3ForConditionalGeneration"]
    assert resolve_model(str(language), mmproj=str(projector)) == folder
    text = resolve_model(str(language), mmproj="none")
    assert read_json(text / "config.json")["architectures"] == ["LlamaForCausalLM"]
    # A file with other content is another model; what is linked is not counted as the cache's.
    write_files(
        saved["idefics3"], "idefics3", tmp_path / "x.gguf", projector, edit={"clip.vision.image_mean": [0.0] * 3}
    )
    os.utime(projector, ns=(1, 1))
    assert resolve_model(str(language)) not in (folder, text)
    assert all(model.size < language.stat().st_size for model in cached_models())


def test_one_of_several_types_is_chosen(files: tuple[Path, Path]) -> None:
    language, f16 = files
    others = {kind: f16.with_name(f"mmproj-tiny-{kind}.gguf") for kind in ("BF16", "F32", "Q8_0")}
    for path in others.values():
        shutil.copyfile(f16, path)
    assert find_projector(language) == others["BF16"]
    assert find_projector(language, "q8_0") == others["Q8_0"]
    assert find_projector(language, "F16") == f16
    with pytest.raises(ModelNotFoundError, match=r"no projector 'Q4_0': .* there is mmproj-tiny-BF16.gguf, mmproj-ti"):
        find_projector(language, "Q4_0")
    with pytest.raises(ModelNotFoundError, match=r"no projector 'nosuch.gguf'"):
        resolve_model(str(language), mmproj="nosuch.gguf")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]) -> Iterator[FakeHub]:
    """A repository with a model in a folder, and projectors of two types above it."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    language, projector = (path.read_bytes() for path in files)
    with serving_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        contents = {"sub/m-Q4_K_M.gguf": language, "mmproj-F32.gguf": projector, "mmproj-Q8_0.gguf": projector}
        hub.add("owner/m-GGUF", contents)
        yield hub


def architecture(folder: Path) -> str:
    [name] = read_json(folder / "config.json")["architectures"]
    return str(name)


def test_that_of_a_repository_is_fetched_with_the_model(hub: FakeHub, files: tuple[Path, Path]) -> None:
    folder = resolve_model("owner/m-GGUF", progress=False)
    assert architecture(folder) == "Idefics3ForConditionalGeneration"
    check_headers(folder, read_model_config(folder), files[0])
    assert hub.received("mmproj-Q8_0.gguf") == [] and len(hub.received("mmproj-F32.gguf")) == 1
    [model] = hub_room.cached_models()
    assert (model.name, model.projector, model.size) == (
        "owner/m-GGUF:Q4_K_M",
        "mmproj-F32.gguf",
        files[0].stat().st_size,
    )
    assert architecture(resolve_model("owner/m-GGUF", mmproj="none")) == "LlamaForCausalLM"
    other = resolve_model("owner/m-GGUF", progress=False, mmproj="Q8_0")
    assert os.readlink(other / PROJECTOR_LINK).endswith("mmproj-Q8_0.gguf")
    hub_room.remove(model)
    assert not (Path(os.environ["HF_HUB_CACHE"]) / "models--owner--m-GGUF").exists()


def test_without_weights_headers_are_enough(hub: FakeHub) -> None:
    folder = resolve_model("owner/m-GGUF", weights=False)
    assert architecture(folder) == "Idefics3ForConditionalGeneration"
    assert not (folder / PROJECTOR_LINK).is_symlink()


@pytest.mark.parametrize("name", ["owner/m-GGUF/mmproj-Q8_0.gguf", "owner/m-GGUF:Q8_0", "hf.co/owner/m-GGUF:q8_0"])
def test_a_local_model_may_have_one_of_the_hub(name: str, hub: FakeHub, files: tuple[Path, Path]) -> None:
    folder = resolve_model(str(files[0]), mmproj=name, progress=False)
    assert os.readlink(folder / PROJECTOR_LINK).endswith("mmproj-Q8_0.gguf")
    assert hub.received("m-Q4_K_M.gguf") == []
    with pytest.raises(ModelNotFoundError, match=r"has no projector 'owner/m-GGUF:F16'; it has mmproj-F32.gguf, mmpro"):
        resolve_model(str(files[0]), mmproj="owner/m-GGUF:F16")


def test_that_of_a_manifest_of_ollama_is_used(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    store = Store(tmp_path / "ollama")
    store.add(f"{LIBRARY}/tiny/latest", files[0], projector=files[1])
    [model] = local_models()
    assert model.projector is not None and model.projector.samefile(files[1]) and model.cached.projector
    assert architecture(resolve_model("ollama:tiny")) == "Idefics3ForConditionalGeneration"
    assert architecture(resolve_model("ollama:tiny", mmproj="none")) == "LlamaForCausalLM"
    with describe_model(EngineConfig(model="ollama:tiny")) as described:
        assert described.folder is not None and architecture(described.folder).startswith("Idefics3")


def test_that_beside_a_model_of_lm_studio_is_used(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "none"))
    folder = tmp_path / ".lmstudio" / "models" / "owner" / "tiny-GGUF"
    shutil.copytree(files[0].parent, folder)
    [model] = local_models()
    assert model.name == "owner/tiny-GGUF/tiny-Q4_K_M.gguf" and model.projector == folder / files[1].name
    assert architecture(resolve_model("lmstudio:owner/tiny-GGUF")) == "Idefics3ForConditionalGeneration"


def test_commands_count_it(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    from octavo.cli.main import main

    def facts(*flags: str) -> dict[str, Any]:
        assert main(["info", str(files[0]), "--json", "-", *flags]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)["model"]
        return found

    whole, text = facts(), facts("--no-mmproj")
    assert (whole["inputs"], whole["projector"], whole["supported"]) == (["text", "image"], files[1].name, True)
    assert "inputs" not in text and whole["parameters"] > text["parameters"]
    assert whole["weight_bytes"] - text["weight_bytes"] == files[1].stat().st_size
    assert entries_of_folder(files[0].parent) == [ModelEntry(source=str(files[0]), name="tiny-Q4_K_M")]


def test_a_folder_has_all_of_its_weights(saved: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"mmproj='m.gguf' is for a language model in a GGUF file"):
        resolve_model(str(saved["llava"]), mmproj="m.gguf")


def test_a_projector_is_no_model(files: tuple[Path, Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no language model: give that model's GGUF file as the model"):
        resolve_model(str(files[1]))
    with pytest.raises(UnsupportedModelError, match=r"is no projector: its general.architecture is 'llama'"):
        resolve_model(str(files[0]), mmproj=str(files[0]))


def test_one_that_does_not_fit_is_refused_if_it_is_named_and_else_not_used(
    tmp_path: Path, saved: dict[str, Path], files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    language, projector = files
    write_files(saved["qwen2_5_vl"], "qwen2_5_vl", tmp_path / "qwen.gguf", projector)
    with pytest.raises(
        UnsupportedModelError,
        match=r"mmproj-tiny-F16.gguf does not fit tiny-Q4_K_M.gguf: it is for qwen2vl with embeddings of 64 numbers; "
        r"this model is of architecture llama. Give the projector that was published with it, or mmproj='none'",
    ):
        resolve_model(str(language), mmproj=str(projector))
    with caplog.at_level(logging.WARNING, "octavo"):
        assert read_json(resolve_model(str(language)) / "config.json")["architectures"] == ["LlamaForCausalLM"]
    assert "beside the model is not used" in caplog.text and "does not fit" in caplog.text


def test_the_width_of_features_is_that_of_the_tensors(
    tmp_path: Path, files: tuple[Path, Path], tiny_llama: Any
) -> None:
    wide = tiny_llama(tmp_path / "wide.gguf")
    with pytest.raises(UnsupportedModelError, match=r"with embeddings of 64 numbers; this model is llama, 256 wide"):
        resolve_model(str(wide), mmproj=str(files[1]))


@pytest.mark.parametrize(
    ("edit", "error", "problem"),
    [
        (
            {"clip.projector_type": "resampler"},
            UnsupportedModelError,
            "'resampler' is not supported; supported: gemma3",
        ),
        ({"clip.projector_type": None}, UnsupportedModelError, "projector without a type is not supported"),
        ({"clip.has_vision_encoder": False}, UnsupportedModelError, "is not supported"),
        ({"clip.vision.image_mean": [0.5, 0.5]}, WeightError, "image_mean must be three numbers"),
        ({"clip.vision.image_std": [0.5, float("nan"), 0.5]}, WeightError, "image_std must be three numbers"),
        ({"clip.vision.image_std": [0.5, 0.0, 0.5]}, ConfigError, "image_std must be three numbers"),
        ({"clip.vision.block_count": 99}, WeightError, "block_count is 99, but there are 2 layers"),
        ({"clip.vision.attention.head_count": 0}, WeightError, "head_count must be a positive integer, not 0"),
        ({"clip.vision.attention.head_count": 7}, ConfigError, "must be a multiple of num_attention_heads"),
        ({"clip.vision.image_size": "large"}, WeightError, "image_size must be a positive integer, not 'large'"),
        ({"clip.vision.patch_size": 2**31}, WeightError, "patch_size must be a positive integer"),
        (
            {"clip.vision.embedding_length": 96},
            WeightError,
            r"mmproj.gguf: tensor 'mm.model.fc.weight' has shape \[64, 192\]",
        ),
        ({"clip.vision.image_size": 64}, WeightError, r"'v.position_embd.weight' has shape \[16, 48\], not \[64, 48\]"),
        ({"clip.vision.projector.scale_factor": 1}, WeightError, r"'mm.model.fc.weight' has shape \[64, 192\], not"),
    ],
)
def test_damaged_metadata_is_named(
    edit: dict[str, Any], error: type[OctavoError], problem: str, tmp_path: Path, saved: dict[str, Path]
) -> None:
    language, projector = tmp_path / "tiny.gguf", tmp_path / "mmproj.gguf"
    write_files(saved["idefics3"], "idefics3", language, projector, edit=edit)
    with pytest.raises(error, match=problem):
        check(language, projector)


def check(language: Path, projector: Path) -> None:
    folder = resolve_model(str(language), mmproj=str(projector))
    check_headers(folder, read_model_config(folder), language)
    read_image_processor(folder, read_json(folder / "config.json"))


@pytest.mark.parametrize(
    ("drop", "problem"),
    [
        (r"v\.post_ln\.bias", r"lacks the tensors of tower.vision.post_norm.bias"),
        (r"v\.blk\.1\.", "block_count is 2, but there are 1 layers"),
        (r"mm\.", "has no matrix 'mm.model.fc.weight', which makes the features"),
    ],
)
def test_missing_tensors_are_named(drop: str, problem: str, tmp_path: Path, saved: dict[str, Path]) -> None:
    language, projector = tmp_path / "tiny.gguf", tmp_path / "mmproj.gguf"
    write_files(saved["idefics3"], "idefics3", language, projector, drop=drop)
    with pytest.raises(WeightError, match=problem):
        check(language, projector)


def test_a_tensor_too_many_is_named(tmp_path: Path, saved: dict[str, Path]) -> None:
    language, projector = tmp_path / "tiny.gguf", tmp_path / "mmproj.gguf"
    write_files(saved["llava"], "llava", language, projector, edit={"clip.vision.image_grid_pinpoints": [336, 672]})
    with pytest.raises(UnsupportedModelError, match=r"image_grid_pinpoints, .* but no tensor 'model.image_newline'"):
        check(language, projector)
    write_files(saved["idefics3"], "idefics3", language, projector, edit={"clip.projector_type": "mlp"})
    with pytest.raises(WeightError, match=r"has no matrix 'mm.2.weight'"):
        check(language, projector)
    write_files(saved["idefics3"], "idefics3", language, projector)
    rewrite(projector, {"v.pre_ln.weight": np.ones(48, np.float32)})
    with pytest.raises(
        UnsupportedModelError, match=r"the tower of Idefics3ForConditionalGeneration has no tensor 'v.pre"
    ):
        check(language, projector)
    rewrite(projector, {"resampler.query": np.ones(48, np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"has the tensor 'resampler.query', which the tower of"):
        check(language, projector)


def rewrite(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Adds tensors to a file of float32 tensors."""
    file = GGUFFile(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "clip")
    for key, value in file.metadata.items():
        if key.startswith("clip."):
            if isinstance(value, np.ndarray):
                writer.add_array(key, value.tolist())
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_uint32(key, value)
    kept = {name: file.read_rows(t).view(np.float32).reshape(t.shape) for name, t in file.tensors.items()}
    for name, value in (kept | tensors).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


def test_settings_that_files_lack_are_those_of_the_published_models(tmp_path: Path, saved: dict[str, Path]) -> None:
    language, projector = tmp_path / "tiny.gguf", tmp_path / "mmproj.gguf"

    def processor(family: str, **edit: Any) -> Any:
        edits = {f"clip.vision.{key}": value for key, value in edit.items()}
        write_files(saved[family], family, language, projector, edit=edits)
        folder = resolve_model(str(language), mmproj=str(projector))
        return read_image_processor(folder, read_json(folder / "config.json"))

    llava = processor("llava", image_aspect_ratio=None)
    assert isinstance(llava, LlavaProcessor) and llava.padding == (122, 116, 104)
    assert processor("idefics3", preproc_image_size=None).longest_edge == 4 * 32
    qwen = processor("qwen2_5_vl", image_min_pixels=None, image_max_pixels=None)
    assert (qwen.min_pixels, qwen.max_pixels) == (3136, 12845056)
    intern = processor("internvl", preproc_min_tiles=None, preproc_max_tiles=None)
    assert (intern.min_tiles, intern.max_tiles) == (1, 12)
    lfm2 = processor("lfm2_vl", image_min_pixels=None, image_max_pixels=None)
    assert (lfm2.min_features, lfm2.max_whole, lfm2.min_tiles, lfm2.max_tiles) == (64, 256, 2, 10)
    assert (lfm2.tile, lfm2.tolerance, lfm2.has_whole) == (512, 2.0, True)
    assert processor("gemma4", image_max_pixels=None).max_features == 280
    following = processor("llava_next", image_grid_pinpoints=None)
    assert following.sizes == [(32, 64), (64, 32), (64, 64), (96, 32), (32, 96)]


@pytest.mark.parametrize("family", ["gemma4", "gemma4_large"])
def test_images_see_themselves_in_models_without_per_layer_embeddings(
    family: str, tmp_path: Path, saved: dict[str, Path]
) -> None:
    """As in E2B and E4B, which have such embeddings, and 26B-A4B and 31B."""
    language, projector = tmp_path / "tiny.gguf", tmp_path / "mmproj.gguf"
    write_files(saved[family], family, language, projector)
    facts = read_model_config(resolve_model(str(language), mmproj=str(projector))).image_facts
    assert facts is not None and facts.whole == (70 if family == "gemma4_large" else 0)


def test_features_of_early_layers_must_be_those_that_the_model_takes(tmp_path: Path, saved: dict[str, Path]) -> None:
    """Both models have the same width."""
    files = {}
    for family in ("qwen3_vl", "qwen3_5"):
        files[family] = tmp_path / f"{family}.gguf", tmp_path / f"mmproj-{family}.gguf"
        write_files(saved[family], family, *files[family])
    for family, other, made, taken in (("qwen3_vl", "qwen3_5", 0, 2), ("qwen3_5", "qwen3_vl", 2, 0)):
        with pytest.raises(UnsupportedModelError, match=rf"has features of {made} early layers.* those of {taken}\."):
            check(files[family][0], files[other][1])


@pytest.mark.parametrize(
    ("family", "other", "problem"),
    [
        (
            "internvl",
            "lfm2_vl",
            r"it is for lfm2 or lfm2moe with embeddings of 64 numbers; this model is of archit",
        ),
        ("lfm2_vl", "internvl", r"it is for llama or qwen2 or .*; this model is of architecture lfm2"),
        ("gemma4", "gemma3", r"it is for gemma3 with embeddings of 64 numbers; this model is of architecture gemma4"),
        ("qwen3_5", "gemma4", r"it is for gemma4 with embeddings of 64 numbers; this model is of architecture qwen35"),
        (
            "llava_next",
            "idefics3",
            r"it is for llama with embeddings of 64 numbers; this model is of archit",
        ),
    ],
)
def test_a_projector_of_another_family_is_refused(
    family: str, other: str, problem: str, tmp_path: Path, saved: dict[str, Path]
) -> None:
    write_files(saved[family], family, tmp_path / "tiny.gguf", tmp_path / "own.gguf")
    write_files(saved[other], other, tmp_path / "other.gguf", tmp_path / "mmproj.gguf")
    with pytest.raises(UnsupportedModelError, match=rf"mmproj.gguf does not fit tiny.gguf: {problem}"):
        check(tmp_path / "tiny.gguf", tmp_path / "mmproj.gguf")


@pytest.mark.parametrize(
    ("family", "edit", "drop", "problem"),
    [
        ("llava_next", {"clip.vision.image_grid_pinpoints": [32, 64, 32]}, "$^", "must be heights and widths in turn"),
        ("llava_next", {"clip.vision.feature_layer": ["1"]}, "$^", "feature_layer must be integers from 0 on"),
        ("llava_next", {"clip.vision.feature_layer": [1]}, "$^", r"'mm.0.weight' has shape \[64, 96\], not \[64, 48\]"),
        ("llava_next", {"clip.vision.feature_layer": [1, 4]}, "$^", "vision_feature_layer must be a layer from"),
        ("internvl", {"clip.vision.projector.scale_factor": 4}, "$^", r"'mm.model.mlp.0.\w+' has shape \[192\], not"),
        ("internvl", {}, r"v\.blk\.1\.ls2", "lacks the scale of 'tower.vision.layers.1.mlp.fc2'"),
        ("lfm2_vl", {}, r"v\.position_embd", "has no tensor 'v.position_embd.weight' with 2 dimensions"),
        (
            "lfm2_vl",
            {"clip.vision.patch_size": 4},
            "$^",
            r"'v.patch_embd.weight' has shape \[48, 192\], not",
        ),
        ("gemma4", {}, r"v\.blk\.1\.ffn_up\.output_min", "lacks the tensors of tower.layers.1.mlp.up_proj.output_min"),
        ("gemma4_large", {}, r"v\.std_scale", "lacks the tensors of tower.std_scale"),
        ("gemma4_unified", {}, r"v\.patch_norm\.3\.bias", "lacks the tensors of tower.place_norm.bias"),
        ("gemma4_unified", {"clip.vision.patch_size": 8}, "$^", r"has shape \[40, 432\], not \[40, 1728\]"),
    ],
)
def test_damaged_files_of_each_family_are_named(
    family: str, edit: dict[str, Any], drop: str, problem: str, tmp_path: Path, saved: dict[str, Path]
) -> None:
    language, projector = tmp_path / "tiny.gguf", tmp_path / "mmproj.gguf"
    write_files(saved[family], family, language, projector, edit=edit, drop=drop)
    with pytest.raises((ConfigError, WeightError), match=problem):
        check(language, projector)


def test_a_token_stands_in_for_one_that_the_vocabulary_lacks(tmp_path: Path, saved: dict[str, Path]) -> None:
    language, projector = tmp_path / "tiny.gguf", tmp_path / "mmproj.gguf"
    folder = shutil.copytree(saved["gemma3"], tmp_path / "folder")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"<image_soft_token>"', '"<unused0>"'))
    write_files(folder, "gemma3", language, projector)
    made = resolve_model(str(language), mmproj=str(projector))
    assert read_json(made / "config.json")["image_token_id"] == SPECIAL.index("<image_soft_token>")
    assert (
        read_image_processor(made, read_json(made / "config.json"))
        .process(picture(64, 64))
        .expansion.count("<unused0>")
        == 16
    )
    file.write_text(file.read_text().replace('"<start_of_image>"', '"<unused1>"'))
    write_files(folder, "gemma3", language, projector)
    with pytest.raises(UnsupportedModelError, match=r"the vocabulary has no token '<start_of_image>', which stands"):
        resolve_model(str(language), mmproj=str(projector))


def test_the_token_of_unknown_words_may_stand_for_images(tmp_path: Path, saved: dict[str, Path]) -> None:
    """Its id is 0 in the vocabulary of LLaVA 1.5, which has no token for images."""
    language, projector = tmp_path / "tiny.gguf", tmp_path / "mmproj.gguf"
    folder = shutil.copytree(saved["llava"], tmp_path / "folder")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"<bos>"', '"<unk>"').replace('"<image>"', '"<picture>"'))
    write_files(folder, "llava", language, projector)
    made = resolve_model(str(language), mmproj=str(projector))
    facts = read_model_config(made).image_facts
    assert facts is not None and facts.token_id == 0
    assert read_image_processor(made, read_json(made / "config.json")).placeholder == "<unk>"


def test_all_tensors_are_checked_and_counted(files: tuple[Path, Path], saved: dict[str, Path], tmp_path: Path) -> None:
    language, projector = files
    folder = resolve_model(str(language))
    report = check_model(folder, read_model_config(folder), language)
    assert report.problems == []
    assert report.tensors == len(GGUFFile(language).tensors) + len(GGUFFile(projector).tensors)
    options = EngineConfig(model=str(language), dtype="bfloat16")
    text = size_model(options.model_copy(update={"mmproj": "none"}), 1 << 30).need.weights
    tower = sum(np.prod(tensor.shape) for tensor in GGUFFile(projector).tensors.values())
    assert 2 * tower <= size_model(options, 1 << 30).need.weights - text <= 4 * tower
    projector.unlink()
    with pytest.raises(WeightError, match=r"mmproj-tiny-F16.gguf is missing: it has the tower"):
        check_headers(folder, read_model_config(folder), language)


def test_every_family_is_one_of_llama_cpp() -> None:
    kinds = {value for name, value in vars(gguf.VisionProjectorType).items() if name.isupper()}
    assert FAMILIES.keys() <= kinds | {"mlp", "gemma4uv"}  # of the first converter, and of a later one
    for family in FAMILIES.values():
        assert set(family.languages) <= set(gguf.MODEL_ARCH_NAMES.values())


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="LLAMA_CPP_CHECKOUT names no checkout of llama.cpp")
@pytest.mark.parametrize("family", ["gemma3", "idefics3", "qwen2_5_vl", "qwen3_vl"])
def test_files_of_llama_cpps_converter_answer_as_the_folder(
    family: str, tmp_path: Path, saved: dict[str, Path]
) -> None:
    """Of others it takes published sizes alone, or names that transformers has changed since."""
    folder = shutil.copytree(saved[family], tmp_path / "folder")
    file = folder / "preprocessor_config.json"
    mean, std = CHANNELS[family]
    file.write_text(json.dumps(read_json(file) | {"image_mean": mean, "image_std": std, "image_seq_length": 16}))
    # What files cannot say is as in published models, and so are the names.
    config = read_json(folder / "config.json")
    if family == "qwen2_5_vl":
        config["vision_config"]["window_size"] = 112
    if family == "idefics3":
        config["text_config"]["architectures"] = ["VLlama3ForCausalLM"]
    elif family == "gemma3":
        config["text_config"]["layer_types"] = ["sliding_attention"] * 3
    (folder / "config.json").write_text(json.dumps(config))
    rename_tensors(folder, lambda name: re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name))
    calls = [
        [str(folder), "--outtype", "f32", "--outfile", str(tmp_path / "tiny.gguf")],
        [str(folder), "--outtype", "f32", "--outfile", str(tmp_path / "mmproj-tiny.gguf"), "--mmproj"],
    ]
    lines = "\n".join(map(json.dumps, calls))
    driver = [sys.executable, "-c", _DRIVER, CHECKOUT]
    done = subprocess.run(driver, input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert errors == {}, errors
    if family == "qwen3_vl":  # files have no bounds of sizes: these images would be too large
        return check(tmp_path / "tiny.gguf", tmp_path / "mmproj-tiny.gguf")
    for (prompt, tokens, logprobs), expected in zip(answers(tmp_path / "tiny.gguf"), answers(folder), strict=True):
        assert (prompt, tokens) == expected[:2]
        assert logprobs == pytest.approx(expected[2], abs=1e-4)
