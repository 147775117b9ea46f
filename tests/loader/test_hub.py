"""Models of the hub by name, and their downloads, from a hub on loopback."""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Q

from octavo.core.errors import DownloadError, ModelNotFoundError, OctavoError, UnsupportedModelError
from octavo.loader import download
from octavo.loader.hub import (
    GGUFModel,
    HubFile,
    HubModel,
    choose_gguf,
    find_cached,
    gguf_models,
    parse_hub_model,
    projectors_of,
)
from octavo.loader.resolve import gguf_source, resolve_model, resolve_tokenizer
from tests.busy_machine import PATIENCE
from tests.fake_hub import TOKEN, FakeHub, hub_environment, octavo_command, serving_hub

# ---- names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/name", HubModel("owner/name")),
        ("unsloth/Qwen3-0.6B-GGUF:Q4_K_M", HubModel("unsloth/Qwen3-0.6B-GGUF", "Q4_K_M")),
        ("owner/name:latest", HubModel("owner/name")),
        ("hf.co/owner/name:q8_0", HubModel("owner/name", "q8_0")),
        ("https://huggingface.co/owner/name/", HubModel("owner/name")),
        ("owner/name/BF16/m-00001-of-00002.gguf", HubModel("owner/name", None, "BF16/m-00001-of-00002.gguf")),
        (
            "https://huggingface.co/owner/name/resolve/v1/a%20b.gguf?download=true",
            HubModel("owner/name", None, "a b.gguf", "v1"),
        ),
        ("https://huggingface.co/owner/name/tree/v1", HubModel("owner/name", None, None, "v1")),
        ("models/mine.gguf", None),
        ("a/b/c", None),
        ("owner/name:", None),
        ("/owner/name", None),
        ("../owner/name", None),
        ("https://example.com/owner/name", None),
    ],
)
def test_names_are_read_as_people_type_them(name: str, expected: HubModel | None) -> None:
    assert parse_hub_model(name) == expected


def test_a_misspelt_file_in_a_folder_that_exists_is_no_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_hub_model("models/sub/mine.gguf") is not None
    (tmp_path / "models").mkdir()
    assert parse_hub_model("models/sub/mine.gguf") is None


# ---- the choice among GGUF files


def listing(*paths: str, **sizes: int) -> list[GGUFModel]:
    return gguf_models({path: HubFile(sizes.get(path, 10 + number)) for number, path in enumerate(paths)})


UNSLOTH = (
    *("m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-UD-Q4_K_XL.gguf", "m-UD-IQ1_S.gguf", "mmproj-F16.gguf"),
    *("BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf", "imatrix_unsloth.gguf", "config.json"),
    "m-Q6_K-00001-of-00002.gguf",
)


@pytest.mark.parametrize(
    ("paths", "tag", "expected"),
    [
        (UNSLOTH, None, "m-Q4_K_M.gguf"),
        (UNSLOTH, "q2_k", "m-Q2_K.gguf"),
        (UNSLOTH, "UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        (UNSLOTH, "Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        (UNSLOTH, "bf16", "BF16/m-BF16-00001-of-00002.gguf"),
        (UNSLOTH, "F16", None),
        (UNSLOTH, "Q6_K", None),  # a part is missing
        (UNSLOTH, "Q4_K", None),
        (("a.Q3_K_S.gguf", "a.Q8_0.gguf", "a.F16.gguf"), None, "a.Q8_0.gguf"),
        (("a.i1-Q4_K_S.gguf", "a.i1-IQ3_M.gguf", "a.i1-Q6_K.gguf"), None, "a.i1-Q4_K_S.gguf"),
        (("a-IQ1_S.gguf", "a-IQ3_M.gguf"), None, "a-IQ3_M.gguf"),
        (("gpt-oss-20b-mxfp4.gguf",), None, "gpt-oss-20b-mxfp4.gguf"),
        (("gpt-oss-20b-mxfp4.gguf",), "MXFP4", "gpt-oss-20b-mxfp4.gguf"),
        (("model.gguf",), None, "model.gguf"),
        (("a.i1-Q4_K_S.gguf",), "i1-Q4_K_S", "a.i1-Q4_K_S.gguf"),
        (("big-Q4_K_M.gguf", "draft/small-Q4_K_M.gguf"), "Q4_K_M", "big-Q4_K_M.gguf"),
        ((), None, None),
    ],
)
def test_a_tag_means_a_quantisation_and_none_means_a_good_one(
    paths: tuple[str, ...], tag: str | None, expected: str | None
) -> None:
    chosen = choose_gguf(listing(*paths), tag)
    assert (None if chosen is None else chosen.files[0]) == expected


@pytest.mark.parametrize(
    ("model", "others", "tag", "expected"),
    [
        ("m-Q4_K_M.gguf", UNSLOTH, "auto", ["mmproj-F16.gguf"]),
        ("BF16/m-BF16-00001-of-00002.gguf", UNSLOTH, "auto", ["mmproj-F16.gguf"]),
        ("m-Q4_K_M.gguf", UNSLOTH, "F32", []),
        ("m-Q4_K_M.gguf", UNSLOTH, "none", []),
        ("m-Q4_K_M.gguf", ("m-mmproj-f32.gguf", "MMPROJ-BF16.gguf"), "auto", ["MMPROJ-BF16.gguf", "m-mmproj-f32.gguf"]),
        ("m-Q8_0.gguf", ("mmproj-Q8_0.gguf", "mmproj-f16.gguf"), "q8_0", ["mmproj-Q8_0.gguf"]),
        ("m-Q8_0.gguf", ("mmproj-model-f16.gguf", "other-Q8_0.gguf"), "auto", []),  # of which of the two is not said
        ("m-Q8_0.gguf", ("mmproj-m-f16.gguf", "mmproj-other-f16.gguf", "other.gguf"), "auto", ["mmproj-m-f16.gguf"]),
        ("m-it-Q8_0.gguf", ("mmproj-m-f16.gguf", "other.gguf"), "auto", ["mmproj-m-f16.gguf"]),
        ("m-Q8_0.gguf", ("vision/mmproj-F16.gguf",), "auto", []),
        ("a/m-Q8_0.gguf", ("mmproj-F16.gguf", "a/mmproj-F32.gguf"), "auto", ["a/mmproj-F32.gguf", "mmproj-F16.gguf"]),
    ],
)
def test_projectors_are_those_that_may_be_of_the_model(
    model: str, others: tuple[str, ...], tag: str, expected: list[str]
) -> None:
    assert projectors_of(model, [*others, model], tag) == expected


def test_the_choice_among_the_cached_files_is_that_among_all() -> None:
    """So processes that do not ask the hub find what another one has fetched."""
    for paths in (UNSLOTH, UNSLOTH[:1] + UNSLOTH[3:5], ("a-IQ1_S.gguf", "a-IQ3_M.gguf", "a-F16.gguf", "a-Q5_0.gguf")):
        models = listing(*paths)
        best = choose_gguf(models, None)
        assert best is not None
        assert all(choose_gguf({other: 0, best: 0}, None) == best for other in models)


# ---- downloads


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    with serving_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: self.is_set())


@pytest.fixture
def ggufs(tmp_path: Path, tiny_llama: Callable[..., Path]) -> dict[str, bytes]:
    kinds = {"m-Q4_K_M.gguf": Q.Q4_K, "m-Q8_0.gguf": Q.Q8_0}
    return {
        name: tiny_llama(tmp_path / name, kind, keys={"general.sampling.temp": 0.25}).read_bytes()
        for name, kind in kinds.items()
    }


def test_a_model_is_fetched_once_into_the_cache_of_the_hubs_library(hub: FakeHub, ggufs: dict[str, bytes]) -> None:
    from huggingface_hub import try_to_load_from_cache

    hub.add("owner/m-GGUF", ggufs)
    folder = resolve_model("owner/m-GGUF:q8_0", progress=False)
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert hub.received("m-Q4_K_M.gguf") == []
    file = gguf_source("owner/m-GGUF:Q8_0")
    assert file is not None and file.read_bytes() == ggufs["m-Q8_0.gguf"]
    assert try_to_load_from_cache("owner/m-GGUF", "m-Q8_0.gguf", cache_dir=download.hub_cache()) == str(file)
    assert resolve_model("https://huggingface.co/owner/m-GGUF/blob/main/m-Q8_0.gguf", progress=False) == folder
    assert len(hub.received("m-Q8_0.gguf")) == 1


def test_what_the_hubs_library_has_fetched_is_not_fetched_again(hub: FakeHub, ggufs: dict[str, bytes]) -> None:
    import huggingface_hub

    hub.add("owner/m-GGUF", ggufs)
    path = huggingface_hub.hf_hub_download(
        "owner/m-GGUF", "m-Q8_0.gguf", cache_dir=download.hub_cache(), endpoint=hub.url
    )
    before = len(hub.received("m-Q8_0.gguf"))
    resolve_model("owner/m-GGUF:Q8_0", progress=False)
    assert gguf_source("owner/m-GGUF:Q8_0") == Path(path)
    assert len(hub.received("m-Q8_0.gguf")) == before


def test_without_a_tag_the_choice_is_told_once(
    hub: FakeHub, ggufs: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("owner/told-GGUF", ggufs)
    with caplog.at_level(logging.INFO, "octavo"):
        assert resolve_model("owner/told-GGUF") == resolve_model("owner/told-GGUF:Q4_K_M")
        resolve_model("owner/told-GGUF")
    [message] = [record.message for record in caplog.records if "owner/told-GGUF" in record.message]
    assert "owner/told-GGUF:Q4_K_M (369.9 KiB) is used" in message and "Q8_0 (691.5 KiB)" in message


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_a_broken_connection_is_continued_where_it_broke(
    hub: FakeHub, ggufs: dict[str, bytes], ignores_ranges: bool
) -> None:
    hub.ignores_ranges = ignores_ranges
    hub.add("owner/m-GGUF", ggufs)
    hub.cuts = [100_000, 150_000]
    resolve_model("owner/m-GGUF:Q8_0", progress=False)
    file = gguf_source("owner/m-GGUF:Q8_0")
    assert file is not None and file.read_bytes() == ggufs["m-Q8_0.gguf"]
    second = 150_000 if ignores_ranges else 250_000
    assert hub.received("m-Q8_0.gguf") == ["bytes=0-", "bytes=100000-", f"bytes={second}-"]


@pytest.mark.usefixtures("quick_retries")
def test_a_download_that_failed_is_continued_by_the_next_call(hub: FakeHub, ggufs: dict[str, bytes]) -> None:
    hub.add("owner/m-GGUF", ggufs)
    hub.cuts = [100_000] + [0] * 10
    with pytest.raises(DownloadError, match=r"interrupted at 100000 of 708\d+ bytes .*same command continues"):
        resolve_model("owner/m-GGUF:Q8_0", progress=False)
    assert find_cached(HubModel("owner/m-GGUF", "Q8_0")) is None
    hub.cuts.clear()
    resolve_model("owner/m-GGUF:Q8_0", progress=False)
    assert hub.received("m-Q8_0.gguf")[-1] == "bytes=100000-"
    file = gguf_source("owner/m-GGUF:Q8_0")
    assert file is not None and file.read_bytes() == ggufs["m-Q8_0.gguf"]


def test_a_damaged_partial_file_is_removed(hub: FakeHub, ggufs: dict[str, bytes]) -> None:
    hub.add("owner/m-GGUF", ggufs)
    resolve_model("owner/m-GGUF:Q8_0", progress=False)
    file = gguf_source("owner/m-GGUF:Q8_0")
    assert file is not None
    blob = file.resolve()
    file.unlink()
    blob.rename(blob.with_name(f"{blob.name}.incomplete")).write_bytes(b"no such content")
    with pytest.raises(DownloadError, match=r"m-Q8_0\.gguf .*arrived damaged.*run the command again"):
        resolve_model("owner/m-GGUF:Q8_0", progress=False)
    resolve_model("owner/m-GGUF:Q8_0", progress=False)
    assert blob.read_bytes() == ggufs["m-Q8_0.gguf"]


def test_a_disk_that_is_too_small_is_named(hub: FakeHub, ggufs: dict[str, bytes], monkeypatch: Any) -> None:
    hub.add("owner/m-GGUF", ggufs)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DownloadError, match=r"cannot write to the hub's cache .*No space left.*set HF_HOME"):
        resolve_model("owner/m-GGUF", progress=False)
    assert hub.received(".gguf") == []


def split_files(path: Path) -> dict[str, bytes]:
    """A file in two parts, as gguf-split writes it."""
    import gguf
    import numpy as np

    reader, files = gguf.GGUFReader(path), {}
    for number in range(2):
        target = path.with_name(f"s-Q8_0-{number + 1:05}-of-00002.gguf")
        writer = gguf.GGUFWriter(target, "llama")
        for name, part in reader.fields.items() if number == 0 else ():
            if name.startswith("GGUF.") or name == "general.architecture":
                continue
            kind = part.types[0]
            writer.add_key_value(name, part.contents(), kind, part.types[-1] if len(part.types) > 1 else None)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files[target.name] = target.read_bytes()
    return files


def test_a_model_in_parts_is_fetched_whole(hub: FakeHub, tmp_path: Path, tiny_llama: Callable[..., Path]) -> None:
    parts = split_files(tiny_llama(tmp_path / "whole.gguf", Q.Q8_0))
    hub.add("owner/split-GGUF", {f"Q8_0/{name}": content for name, content in parts.items()})
    for name in ("owner/split-GGUF", "owner/split-GGUF/Q8_0/s-Q8_0-00002-of-00002.gguf"):
        folder = resolve_model(name, progress=False)
        assert folder.name.startswith("s-Q8_0-")
        file = gguf_source(name)
        assert file is not None and file.name == "s-Q8_0-00001-of-00002.gguf"
        assert sorted(path.name for path in file.parent.iterdir()) == sorted(parts)


def test_of_safetensors_only_harmless_files_are_fetched(hub: FakeHub) -> None:
    wanted = [
        *("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"),
        *("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "1_Pooling/config.json", "source.spm"),
        "2_Dense/model.safetensors",
    ]
    others = [
        *("pytorch_model.bin", "model.pt", "model.pkl", "modeling_custom.py", "consolidated.safetensors"),
        *("original/consolidated.00.pth", "onnx/model.safetensors", "model-Q4_K_M.gguf", "README.md"),
    ]
    hub.add("owner/name", dict.fromkeys([*wanted, *others], b"{}"))
    folder = resolve_model("owner/name", revision="main", progress=False)
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert found == sorted(wanted)
    assert gguf_source("owner/name") is None


def test_paths_that_leave_the_cache_are_no_files_of_a_repository(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(
        "owner/name", {"config.json": b"{}", "model.safetensors": b"x", "../../../out.json": b"{}", "/out.json": b"{}"}
    )
    resolve_model("owner/name", progress=False)
    assert not list(tmp_path.rglob("out.json"))
    hub.add("owner/odd", {"config.json": b"{}", "model.safetensors": b"x"}, commit="../../out")
    with pytest.raises(DownloadError, match=r"names no commit of 'owner/odd', but '\.\./\.\./out'"):
        resolve_model("owner/odd", progress=False)


def test_a_tokenizer_of_the_hub_needs_no_weights(hub: FakeHub, ggufs: dict[str, bytes]) -> None:
    hub.add("owner/m-GGUF", ggufs)
    folder = resolve_tokenizer("owner/m-GGUF:Q8_0")
    assert (folder / "tokenizer.json").is_file()
    [wanted] = hub.received("m-Q8_0.gguf")
    assert wanted is not None and wanted.startswith("bytes=0-") and find_cached(HubModel("owner/m-GGUF")) is None
    hub.add("owner/tokenizer", {"tokenizer.json": b"{}", "model.safetensors": b"x"})
    assert [path.name for path in resolve_tokenizer("owner/tokenizer").iterdir()] == ["tokenizer.json"]


# ---- what cannot be had


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("owner/nothing", ModelNotFoundError, r"no model 'owner/nothing'.*'hf auth login', or set HF_TOKEN"),
        ("owner/m-GGUF:Q5_K_M", ModelNotFoundError, r"no GGUF file 'Q5_K_M'; it has Q4_K_M \(369.9 KiB\), Q8_0"),
        ("owner/m-GGUF/m-Q5.gguf", ModelNotFoundError, r"no file 'm-Q5.gguf'; it has m-Q4_K_M.gguf \(369.9 KiB\)"),
        ("owner/name:Q8_0", ModelNotFoundError, "has no GGUF files, so 'Q8_0' names none; its safetensors"),
        ("owner/pickles", UnsupportedModelError, "pickled weights are never loaded"),
        ("owner/pictures", UnsupportedModelError, "neither config.json nor GGUF files"),
        ("owner/gated:Q8_0", DownloadError, r"is gated: accept its licence at http.*/owner/gated, then log in"),
        ("owner/gated-weights", DownloadError, r"is gated: accept its licence at http"),
        ("owner/private", ModelNotFoundError, "or it is private"),
        ("https://hf.co/owner/m-GGUF/tree/v9", ModelNotFoundError, "no revision 'v9'"),
    ],
)
def test_what_the_hub_does_not_have_or_give_says_what_to_do(
    hub: FakeHub, ggufs: dict[str, bytes], name: str, kind: type[OctavoError], words: str
) -> None:
    hub.add("owner/m-GGUF", ggufs)
    hub.add("owner/name", {"config.json": b"{}", "model.safetensors": b"x"})
    hub.add("owner/pickles", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.add("owner/pictures", {"README.md": b"x"})
    hub.add("owner/gated", ggufs, gated=True)
    hub.add("owner/gated-weights", {"config.json": b"{}", "model.safetensors": b"x"}, gated=True)
    hub.add("owner/private", ggufs, private=True)
    with pytest.raises(kind, match=words):
        resolve_model(name, progress=False)


def test_the_token_opens_gated_repositories_and_is_in_no_message(
    hub: FakeHub, ggufs: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("owner/gated", ggufs, gated=True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong_wrong_wrong")
    with caplog.at_level(logging.DEBUG), pytest.raises(DownloadError, match="the token in use") as error:
        resolve_model("owner/gated", progress=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with caplog.at_level(logging.DEBUG):
        resolve_model("owner/gated", progress=False)
    said = caplog.text + str(error.value) + repr(error.value.__cause__)
    assert TOKEN not in said and "hf_wrong" not in said
    assert all(is_known for method, path, _, is_known in hub.requests if path.endswith(".gguf") and method == "HEAD")


def test_the_token_does_not_follow_to_another_host(hub: FakeHub, ggufs: dict[str, bytes], monkeypatch: Any) -> None:
    """Large files are behind addresses of another service."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving_hub() as store:
        store.add("owner/m-GGUF", ggufs)
        hub.add("owner/m-GGUF", ggufs).redirect = store.url.replace("127.0.0.1", "localhost")
        resolve_model("owner/m-GGUF:Q8_0", progress=False)
        assert [is_known for method, _, _, is_known in store.requests if method == "GET"] == [False]
    assert {is_known for _, path, _, is_known in hub.requests if path.endswith(".gguf")} == {True}


@pytest.mark.parametrize("way", ["HF_HUB_OFFLINE", "no network", "busy"])
def test_without_the_hub_the_cached_files_are_used_and_said(
    hub: FakeHub, ggufs: dict[str, bytes], monkeypatch: Any, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    hub.add("owner/m-GGUF", ggufs)
    folder = resolve_model("owner/m-GGUF:Q8_0", progress=False)
    if way == "HF_HUB_OFFLINE":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    elif way == "busy":
        hub.status = 503
    else:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, "octavo"):
        assert resolve_model("owner/m-GGUF", progress=False) == folder
    reason = {"HF_HUB_OFFLINE": "HF_HUB_OFFLINE is set", "busy": "the hub answers 503"}.get(way, "cannot be reached at")
    assert reason in caplog.text and "are used" in caplog.text
    with pytest.raises(DownloadError, match=rf"{reason}.*'owner/m-GGUF:Q4_K_M' is not in the hub's cache .*Q8_0"):
        resolve_model("owner/m-GGUF:Q4_K_M", progress=False)


def test_without_the_hub_a_description_alone_is_no_model(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add("owner/name", {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"x"})
    folder = resolve_model("owner/name", weights=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model("owner/name", weights=False) == resolve_tokenizer("owner/name") == folder
    with pytest.raises(DownloadError, match=r"'owner/name' is not in the hub's cache .*nor is it a path"):
        resolve_model("owner/name")


# ---- commands, in the state that the README's leave


def test_a_killed_download_is_continued_by_the_same_command(
    hub: FakeHub, ggufs: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("owner/m-GGUF", ggufs)
    hub.cuts = [300_000] + [0] * 100
    environment = hub_environment(hub, tmp_path / "home")
    command = octavo_command("pull", "owner/m-GGUF:Q8_0")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(hub.received(".gguf")) < 3:
        assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate(timeout=PATIENCE)
    hub.cuts.clear()
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).read_bytes() == ggufs["m-Q8_0.gguf"]
    assert hub.received("m-Q8_0.gguf")[-1] == "bytes=300000-"
    assert "downloading owner/m-GGUF:Q8_0" in result.stderr
