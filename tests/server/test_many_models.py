"""Several models behind one port: which are loaded, which make room, and what their clients see."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec

import httpx
import psutil
import pytest
from starlette.requests import Request

from octavo.cli.serve import make_parser, read_models
from octavo.config.engine_config import EngineConfig
from octavo.config.model_list import ListedModel, entries_of_folder, list_models, read_entries
from octavo.config.server_options import ServerOptions
from octavo.core.errors import ConfigError, EngineKilledError, WeightError
from octavo.engine import model_catalog
from octavo.engine.memory_needs import MemoryNeed, SizedModel, size_model
from octavo.loader.adapters import AdapterTargets
from octavo.models.config_files import read_model_config
from octavo.server.http.errors import ApiError
from octavo.server.metrics import Metrics
from octavo.server.model_set import FIRST_RETRY, RESIDENCE, ModelSet, Slot, named_model
from tests.busy_machine import eventually
from tests.embedding_models import make_encoder
from tests.runner.plan_worker import make_adapter
from tests.server.running_server import Running, check_refusal, start
from tests.small_llama import save_distinct_llama

# Without engines: the rules by which models are loaded and unloaded.


class Engine:
    """What a ``ModelSet`` needs of a ``ServerState``."""

    def __init__(self, names: list[str]) -> None:
        self.model_names, self.died = names, asyncio.Event()
        tokenizer = SimpleNamespace(name=names[0], vocab_size=1 << 18)
        self.llm = SimpleNamespace(adapters={}, sleep=self.sleep, wake_up=self.wake_up, tokenizer=tokenizer)
        self.calls: list[str] = []
        self.is_shut_down = False
        self.hold: Callable[[], Callable[[], None]] = lambda: lambda: None

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    async def wake_up(self) -> None:
        self.calls.append("wake up")

    async def refuse_requests(self) -> None: ...

    async def shut_down(self, timeout: float) -> None:
        await asyncio.sleep(0)
        self.is_shut_down = True


class Fakes:
    """A set of models whose engines are ``Engine``s; bytes of each by name."""

    def __init__(self, needs: dict[str, int], memory: int, pinned: str = "", **options: Any) -> None:
        self.now, self.needs = 1000.0, needs
        self.started: list[str] = []
        self.failing: set[str] = set()
        #: Engines whose processes are killed while they start.
        self.kills = 0
        self.caches: dict[str, int] = {}
        models = [ListedModel(EngineConfig(model=n), (n, f"{n}-alias"), None, n == pinned) for n in needs]
        self.metrics = Metrics("")
        self.set = ModelSet(
            models, ServerOptions(**options), self.metrics, self.start, self.size, memory, clock=lambda: self.now
        )
        self.slot = {slot.name: slot for slot in self.set.slots}

    def size(self, config: EngineConfig, memory: int) -> SizedModel:
        need, cache = self.needs[config.model], self.caches.get(config.model, 0)
        return SizedModel(config, MemoryNeed(need - cache, 0, cache, 0), ("generate",), 128)

    async def start(self, slot: Slot, config: EngineConfig) -> Any:
        await asyncio.sleep(0)
        held = sum(other.held for other in self.set.slots)
        assert held + slot.need <= self.set.memory
        if slot.name in self.failing:
            raise WeightError(f"{config.model}/model.safetensors is damaged")
        if self.kills:
            self.kills -= 1
            raise EngineKilledError("the engine's process was ended by signal 9")
        self.started.append(slot.name)
        return Engine([slot.name])

    async def ask(self, name: str) -> None:
        async with self.set.lease(await self.set.find(name)):
            self.now += 1

    @property
    def loaded(self) -> set[str]:
        return {slot.name for slot in self.set.slots if slot.is_ready}

    def begin(self, name: str) -> tuple[asyncio.Task[None], asyncio.Event]:
        """A request that goes on until the event is set."""
        end = asyncio.Event()

        async def request() -> None:
            async with self.set.lease(await self.set.find(name)):
                await end.wait()

        return asyncio.ensure_future(request()), end


P = ParamSpec("P")


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **keywords: P.kwargs) -> None:
        asyncio.run(test(*args, **keywords))

    return run


async def turns(number: int = 50) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def settled(condition: Callable[[], bool]) -> None:
    """Waits for what follows from calls in threads."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@on_a_loop
async def test_the_least_recently_used_idle_model_makes_room() -> None:
    fakes = Fakes({"a": 4, "b": 4, "c": 4, "large": 8}, 9)
    for name, loaded in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("a-alias", "ac"), ("b", "ab")):
        await fakes.ask(name)
        assert fakes.loaded == set(loaded)
    await fakes.ask("large")
    assert fakes.loaded == {"large"}
    assert fakes.started == ["a", "b", "c", "b", "large"]


@on_a_loop
async def test_the_tokenizers_of_the_models_that_were_unloaded_last_are_kept() -> None:
    fakes = Fakes(dict.fromkeys("abcd", 4), 5)
    for name in "abcabd":
        await fakes.ask(name)
    kept: list[Any] = [*fakes.set._tokenizers]
    assert [tokenizer.name for tokenizer in kept] == ["a", "b"]  # 2 x 262,144 tokens
    assert fakes.loaded == {"d"}


@on_a_loop
async def test_a_cache_is_given_up_before_weights_if_that_is_enough() -> None:
    fakes = Fakes({"a": 6, "b": 4, "c": 2}, 10)
    fakes.caches = {"a": 3, "b": 2}
    await fakes.ask("a")
    await fakes.ask("b")
    fakes.set.memory = 9
    first: Any = fakes.slot["a"].service
    await fakes.ask("c")
    assert first.calls == ["sleep 1"] and fakes.slot["a"].status == "sleeping"
    assert fakes.loaded == {"b", "c"} and fakes.started == ["a", "b", "c"]
    await fakes.ask("a")  # b, which was asked before c, gives up its cache, and that is not enough
    assert first.calls == ["sleep 1", "wake up"]
    assert fakes.started == ["a", "b", "c"] and "a" in fakes.loaded
    assert sum(slot.held for slot in fakes.set.slots) <= 9


@on_a_loop
async def test_a_sleeping_model_that_is_asked_for_makes_room_for_one_that_was_asked_for_before() -> None:
    fakes = Fakes({"a": 6, "b": 4, "c": 9}, 10)
    fakes.caches = {"a": 3, "b": 2}
    for name in "cab":
        await fakes.ask(name)
    fakes.set.memory = 9
    await fakes.set._sleep(fakes.slot["a"])
    user, end = fakes.begin("b")
    await turns()
    first, second = asyncio.ensure_future(fakes.ask("c")), asyncio.ensure_future(fakes.ask("a"))
    await turns()
    assert fakes.slot["a"].users and fakes.slot["a"].load is not None
    end.set()
    async with asyncio.timeout(5):
        await asyncio.gather(user, first, second)
    assert fakes.started == ["c", "a", "b", "c", "a"]


@on_a_loop
async def test_a_limit_on_their_number() -> None:
    fakes = Fakes({"a": 1, "b": 1, "c": 1}, 100, max_loaded=1)
    for name in "abc":
        await fakes.ask(name)
        assert fakes.loaded == {name}


@on_a_loop
async def test_a_pinned_model_stays_and_what_does_not_fit_beside_it_is_refused() -> None:
    fakes = Fakes({"a": 4, "b": 4, "c": 6}, 9, pinned="a")
    await fakes.set.preload()
    await fakes.ask("b")
    with pytest.raises(ApiError, match="more than") as refusal:
        await fakes.ask("c")
    assert (refusal.value.status, refusal.value.code) == (503, "model_load_failed")
    assert fakes.loaded == {"a", "b"}
    assert not await fakes.set.unload(fakes.slot["a"])


@on_a_loop
async def test_a_busy_model_is_left_by_its_requests_before_it_makes_room() -> None:
    fakes = Fakes({"a": 4, "b": 4}, 4)
    busy, end = fakes.begin("a")
    await settled(lambda: fakes.loaded == {"a"})
    engine: Any = fakes.slot["a"].service
    fakes.now += RESIDENCE * 100
    other, other_end = fakes.begin("b")
    await settled(lambda: fakes.slot["a"].is_draining)
    later, later_end = fakes.begin("a")  # waits, or those who want b would wait for ever
    await turns()
    assert not engine.is_shut_down and fakes.slot["a"].users == 1
    end.set()
    await busy
    await settled(lambda: fakes.loaded == {"b"})
    assert engine.is_shut_down
    other_end.set()
    later_end.set()
    await asyncio.gather(other, later)
    assert fakes.started == ["a", "b", "a"]


@on_a_loop
async def test_a_model_that_was_just_loaded_stays_for_a_while() -> None:
    fakes = Fakes({"a": 4, "b": 4}, 4)
    busy, end = fakes.begin("a")
    await settled(lambda: fakes.loaded == {"a"})
    other, other_end = fakes.begin("b")
    await settled(lambda: fakes.slot["b"].progress == "waiting for memory")
    await turns()
    assert not fakes.slot["a"].is_draining
    await fakes.ask("a")
    end.set()
    other_end.set()
    await asyncio.gather(busy, other)


@on_a_loop
async def test_what_a_background_task_holds_is_not_unloaded() -> None:
    fakes = Fakes({"a": 4, "b": 4}, 4)
    await fakes.ask("a")
    service: Any = fakes.slot["a"].service
    release = service.hold()
    other, end = fakes.begin("b")
    await settled(lambda: fakes.slot["b"].progress == "waiting for memory")
    await turns()
    assert fakes.loaded == {"a"}
    release()
    release()
    await settled(lambda: fakes.loaded == {"b"})
    end.set()
    await other
    assert fakes.slot["a"].users == fakes.slot["b"].users == 0


@on_a_loop
async def test_a_failed_load_fails_its_requests_and_is_tried_again_later() -> None:
    fakes = Fakes({"a": 4, "b": 4}, 9)
    fakes.failing = {"a"}
    for _ in range(2):  # the second is refused without another try
        results = await asyncio.gather(fakes.ask("a"), fakes.ask("a"), return_exceptions=True)
        assert [getattr(result, "code", None) for result in results] == ["model_load_failed"] * 2
    assert fakes.slot["a"].status == "failed" and fakes.slot["a"].num_failures == 1
    await fakes.ask("b")
    fakes.failing.clear()
    fakes.now += FIRST_RETRY
    await fakes.ask("a")
    assert fakes.loaded == {"a", "b"} and fakes.slot["a"].failure is None


@on_a_loop
async def test_a_load_whose_process_is_killed_is_tried_again() -> None:
    fakes = Fakes({"a": 1, "b": 1}, 4)
    fakes.kills = 3
    await fakes.ask("a")
    assert fakes.loaded == {"a"} and fakes.kills == 0
    fakes.kills = 4  # one more than engine_restarts
    with pytest.raises(ApiError) as e:
        await fakes.ask("b")
    assert e.value.status == 503 and fakes.kills == 0


@on_a_loop
async def test_keep_alive_counts_from_the_end_of_the_last_request() -> None:
    fakes = Fakes({"a": 4, "b": 4}, 9)
    await fakes.ask("a")
    await fakes.ask("b")
    fakes.slot["a"].keep_alive = 60.0
    busy, end = fakes.begin("a")
    await turns()
    fakes.slot["a"].keep_alive = 60.0
    fakes.now += 100
    await fakes.set.unload_expired()
    assert fakes.loaded == {"a", "b"}
    end.set()
    await busy
    fakes.now += 50
    assert await fakes.set.unload_expired() == 10
    fakes.now += 10
    assert await fakes.set.unload_expired() is None
    assert fakes.loaded == {"b"}  # it has no keep_alive


@on_a_loop
async def test_a_lost_engine_is_loaded_again() -> None:
    fakes = Fakes({"a": 4, "b": 4}, 9)
    await fakes.ask("a")
    await fakes.ask("b")
    service: Any = fakes.slot["a"].service
    service.died.set()
    await settled(lambda: fakes.slot["a"].service is None)
    assert fakes.loaded == {"b"} and service.is_shut_down
    await fakes.ask("a")
    assert fakes.started == ["a", "b", "a"]


@on_a_loop
async def test_names() -> None:
    fakes = Fakes({"llama": 4, "vectors": 4}, 9)
    for name in ("llama", "llama-alias", "llama:latest"):
        assert await fakes.set.find(name) is fakes.slot["llama"]
    with pytest.raises(ApiError, match="did you mean 'vectors'") as unknown:
        await fakes.set.find("vektors")
    assert (unknown.value.status, unknown.value.code) == (404, "model_not_found")
    with pytest.raises(ApiError, match="llama, vectors") as none:
        await fakes.set.find(None)
    assert (none.value.status, none.value.code) == (400, "model_missing")
    await fakes.ask("vectors")
    assert await fakes.set.find(None) is fakes.slot["vectors"]  # the only one that is loaded


@on_a_loop
async def test_waiting_requests_are_bounded_and_may_leave() -> None:
    fakes = Fakes({"a": 4, "b": 4}, 4, max_queued_requests=1)
    busy, end = fakes.begin("a")
    await settled(lambda: fakes.loaded == {"a"})
    waiting, _ = fakes.begin("b")
    await settled(lambda: fakes.slot["b"].users == 1)
    with pytest.raises(ApiError) as full:
        await fakes.ask("b")
    assert (full.value.status, full.value.code) == (429, "queue_full")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert fakes.slot["b"].users == 0
    end.set()
    await busy


@on_a_loop
async def test_a_shutdown_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes({"a": 4, "b": 4}, 4)
    fakes.set.open()
    busy, end = fakes.begin("a")
    await settled(lambda: fakes.loaded == {"a"})
    service: Any = fakes.slot["a"].service
    waiting, _ = fakes.begin("b")
    await settled(lambda: fakes.slot["b"].users == 1)
    await fakes.set.refuse_requests()
    await fakes.set.shut_down(0)
    with pytest.raises(ApiError, match="shutting down"):
        await waiting
    end.set()
    await busy
    assert service.is_shut_down


@pytest.mark.parametrize("seed", range(3))
@on_a_loop
async def test_random_requests_are_all_answered_within_the_memory(seed: int) -> None:
    """``Fakes.start`` checks the memory; a model in use must not be shut down."""
    fakes = Fakes({"a": 4, "b": 3, "c": 2, "d": 5, "e": 1}, 8)
    fakes.caches = {"a": 1, "b": 1, "c": 1, "d": 2} if seed else {}
    randoms, answered = random.Random(seed), Counter[str]()

    async def client() -> None:
        for _ in range(25):
            name = randoms.choice("abcde")
            async with fakes.set.lease(await fakes.set.find(name)) as service:
                engine: Any = service
                for _ in range(randoms.randrange(4)):
                    fakes.now += 1
                    await asyncio.sleep(0)
                assert engine.calls.count("sleep 1") == engine.calls.count("wake up")
                assert not engine.is_shut_down
            answered[name] += 1

    async with asyncio.timeout(30):
        await asyncio.gather(*(client() for _ in range(8)))
    assert answered.total() == 200
    assert all(slot.users == 0 and not slot.is_draining for slot in fakes.set.slots)


# Which models there are.


def _configure(options: Any) -> EngineConfig:
    return EngineConfig.model_validate({"max_num_seqs": 8, **options})


def test_models_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(
        "- smollm2-135m\n"
        "- {source: other, name: b, aliases: [c], keep_alive: 60, options: {max_num_seqs: 4}}\n"
        "- {source: third, pinned: true, options: {enable_lora: true}, lora_modules: {own: /adapters/own}}\n"
    )
    first, second, third = list_models(read_entries(path), _configure, 5.0)
    assert (third.lora_modules, second.lora_modules) == ({"own": "/adapters/own"}, {})
    assert (first.names, first.config.max_num_seqs, first.keep_alive) == (("smollm2-135m",), 8, 5.0)
    assert (second.names, second.config.max_num_seqs, second.keep_alive) == (("b", "c"), 4, 60.0)
    assert (third.pinned, third.keep_alive) == (True, None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "list of models"),
        ("{a: b}", "list of models"),
        ("- {name: a}", r"models\[0\].source"),
        ("- a\n- {source: b, keepalive: 3}", r"models\[1\].keepalive"),
        ("- {source: a, name: same}\n- {source: b, aliases: [same]}", "given twice"),
        ("- a\n- a", "given twice"),
        ("- {source: a, options: {model: b}}", "its source"),
        ("- {source: a, lora_modules: {x: y}}", "enable_lora"),
        ("- {source: a, options: {enable_lora: true}, lora_modules: {b: y}}\n- b", "given twice"),
        ("- {source: a, options: {gpu_memory_utilization: 0.5}}", "gpu_memory_utilization"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        list_models(read_entries(path), _configure)


def test_options_of_one_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="served_model_name"):
        list_models([], _configure, None, {"served_model_name": "x"})


def test_models_of_the_command_line(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Words, files and folders together; without any of them, what is on this machine."""
    monkeypatch.setattr(model_catalog, "list_models", lambda: [SimpleNamespace(name=str(tiny_model))])

    def names(*words: str, **options: Any) -> list[tuple[str, int]]:
        models = read_models(make_parser().read(list(words)), ServerOptions(**options))
        return [(model.names[0], model.config.max_num_seqs) for model in models]

    path = tmp_path / "models.yaml"
    path.write_text("- {source: c, options: {max_num_seqs: 2}}")
    assert names("a", "b", "a", "--max-num-seqs", "4", models=path) == [("a", 4), ("b", 4), ("c", 2)]
    assert names("a", models_dir=tiny_model.parent)[0][0] == "a"
    assert names("--max-num-seqs", "4") == [(tiny_model.name, 4)]
    monkeypatch.setattr(model_catalog, "list_models", lambda: [])
    with pytest.raises(ConfigError, match="no model given"):
        names()


def test_the_model_that_a_body_names() -> None:
    """In a form too, whatever stands before the field; the query counts where a body names none."""

    def named(request: httpx.Request) -> str | None:
        headers = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
        scope = {"type": "http", "headers": headers, "query_string": request.url.query}
        return named_model(Request(scope), request.read())

    url, file = "http://x/", {"file": ("model.wav", b'\r\nname="model"\r\n', "audio/wav")}
    assert named(httpx.Request("POST", url, data={"language": "en", "model": "whisper"}, files=file)) == "whisper"
    assert named(httpx.Request("POST", url, json={"prompt": {"model": "no"}, "model": "a"})) == "a"
    assert named(httpx.Request("POST", f"{url}?model=b", json={"prompt": "x"})) == "b"
    for body in (b"{", b"[]", b'{"model": 5}', b"\xff", b""):
        assert named(httpx.Request("POST", url, content=body)) is None


def test_names_that_clients_may_add(tiny_model: Path) -> None:
    """Those of the hub and built-in ones; a path of this machine is none of a client's business."""
    assert model_catalog.is_known("smollm2-135m") and model_catalog.is_known("owner/name-GGUF:Q4_K_M")
    for name in (str(tiny_model), "/etc/passwd", "../models/x", "~/x", "nothing-of-this-name", ""):
        assert not model_catalog.is_known(name)


@on_a_loop
async def test_a_model_that_may_be_added_is_loaded_by_the_request_that_names_it() -> None:
    fakes = Fakes({"a": 4, "owner/new": 4}, 9)
    fakes.set.remove(fakes.slot["owner/new"])
    with pytest.raises(ApiError, match="does not exist"):
        await fakes.ask("owner/new")
    models = ModelSet(
        [], ServerOptions(), Metrics(""), fakes.start, fakes.size, 9,
        listed=lambda name: ListedModel(EngineConfig(model=name), (name,)) if name == "owner/new" else None,
    )  # fmt: skip
    async with models.lease(await models.find("owner/new")):
        assert [slot.name for slot in models.slots] == ["owner/new"]


def test_models_of_a_folder(tmp_path: Path) -> None:
    for name in ("folder/config.json", "one.gguf", "parts-00001-of-00002.gguf", "parts-00002-of-00002.gguf",
                 "nested/file.gguf", "notes.txt", "empty/readme"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [entry.name for entry in entries_of_folder(tmp_path)] == ["folder", "nested", "one", "parts"]
    with pytest.raises(ConfigError, match="neither"):
        entries_of_folder(tmp_path / "empty")


def test_memory_needs(tiny_model: Path) -> None:
    """Weights by the files, and a KV cache that is a share of all, or what the option says."""
    options = EngineConfig(model=str(tiny_model), dtype="float32", device="cpu", kernels="cpu", max_num_seqs=4)
    sized = size_model(options, 1 << 30)
    stored = (tiny_model / "model.safetensors").stat().st_size
    assert stored <= sized.need.weights + 4096 and sized.need.weights < 2 * stored
    # 2 layers x (key, value) x 2 heads of 8 floats, for 4 sequences of 256 tokens.
    assert sized.need.cache == sized.options.kv_cache_memory_bytes == 2 * 2 * 2 * 8 * 4 * 4 * 256
    small = size_model(options, 1 << 18).need.cache
    assert 0 < small <= 1 << 15
    given = size_model(options.model_copy(update={"kv_cache_memory_bytes": 1 << 20}), 1 << 30)
    assert given.need.cache == 1 << 20 and given.options.kv_cache_memory_bytes == 1 << 20


# A server.


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two networks that answer differently, an encoder, and a model whose weights are damaged."""
    folder = tmp_path_factory.mktemp("many")
    for name in ("a", "b", "damaged"):
        shutil.copytree(tiny_model, folder / name)
    shape = {"max_position_embeddings": 256, "tie_word_embeddings": True}
    save_distinct_llama(folder / "b", **shape)
    weights = folder / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    make_encoder(folder / "vectors")
    return folder


@pytest.fixture(scope="module")
def many(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of four models, in memory for two of them."""
    path = tmp_path_factory.mktemp("many-models") / "models.yaml"
    names = ("a", "b", "vectors", "damaged")
    entries: list[dict[str, Any]] = [{"source": str(folder / name), "name": name} for name in names]
    entries[0]["aliases"] = ["gpt"]
    path.write_text(json.dumps(entries))
    flags = ("--max-loaded", "2", "--num-threads", "1", "--status-interval", "0",
             "--kv-cache-memory-bytes", "4MiB", "--enable-admin-routes")  # fmt: skip
    server = start(("--models", str(path)), path.with_name("log"), *flags)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def answer_of(server: Running, model: str, number: int = 0) -> Any:
    """What a model answers: tokens with logprobs, or a vector."""
    if model == "vectors":
        return server.post("/v1/embeddings", model=model, input=f"text {number}")["data"][0]["embedding"]
    body = {"prompt": f"number {number} is", "max_tokens": 12, "logprobs": 2, "seed": number, "temperature": 1.0}
    choice = server.complete(model=model, **body)
    return choice["text"], choice["logprobs"]


def state_of_models(server: Running) -> dict[str, Any]:
    with server.http() as http:
        return {model["id"]: model for model in http.get("/v1/models").json()["data"]}


def test_random_clients_get_the_bits_that_each_gets_alone(many: Running, tiny_server: Running) -> None:
    names = ("a", "b", "vectors")
    alone = {(name, number): answer_of(many, name, number) for name in names for number in range(2)}
    assert alone["a", 0] == answer_of(tiny_server, "tiny", 0)  # whose server has one model
    assert alone["a", 0] != alone["b", 0]
    problems, swaps, end = list[Any](), many_unloads(many), time.monotonic() + 3

    def client(seed: int) -> None:
        randoms = random.Random(seed)
        while time.monotonic() < end:
            name, number = randoms.choice(names), randoms.randrange(2)
            try:
                if (answer := answer_of(many, name, number)) != alone[name, number]:
                    problems.append((name, number, answer))
            except AssertionError as e:
                problems.append(e)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert sum(model["loaded"] for model in state_of_models(many).values()) <= 2
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    assert not problems
    assert many_unloads(many) > swaps


def many_unloads(server: Running) -> float:
    with server.http() as http:
        page = http.get("/metrics").text
    lines = [line for line in page.splitlines() if line.startswith("octavo_model_unloads_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_the_list_says_what_each_can_do_and_which_are_loaded(many: Running) -> None:
    answer_of(many, "a")
    eventually(lambda: "max_model_len" in state_of_models(many)["vectors"])  # read after the first load
    models = state_of_models(many)
    assert list(models) == ["a", "b", "vectors", "damaged"]
    assert models["a"]["loaded"] and models["a"]["status"]["value"] == "loaded"
    assert models["a"]["status"]["aliases"] == ["gpt"]
    assert "generate" in models["b"]["tasks"] and models["vectors"]["tasks"][0] == "embed"
    assert models["vectors"]["max_model_len"] == 64 and models["a"]["max_model_len"] == 256
    assert models["a"]["status"]["memory_bytes"] > 4 << 20
    with many.http() as http:
        assert http.get("/v1/models/gpt").json()["id"] == "a"
        assert http.get("/health").status_code == 200
        check_refusal(http.get("/v1/models/gtp"), 404, "did you mean 'gpt'", code="model_not_found")


def test_names_in_requests(many: Running) -> None:
    assert many.complete(model="gpt", prompt="x", max_tokens=3, temperature=0) == many.complete(
        model="a", prompt="x", max_tokens=3, temperature=0
    )
    with many.http() as http:
        body = {"model": "vektors", "input": "x"}
        check_refusal(http.post("/v1/embeddings", json=body), 404, "did you mean 'vectors'", code="model_not_found")
        answer_of(many, "b")
        check_refusal(http.post("/v1/completions", json={"prompt": "x"}), 400, "a, b, vectors", code="model_missing")
        check_refusal(http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}), 400)
        wrong = http.post("/v1/embeddings", json={"model": "a", "input": 5})
        check_refusal(wrong, 400, param="input")
        assert http.get("/props", params={"model": "b"}).status_code == 200


def test_metrics_are_labelled_by_model(many: Running) -> None:
    before = many.metric("octavo_generation_tokens_total", model_name="b")
    answer_of(many, "b")
    answer_of(many, "a")
    assert many.metric("octavo_generation_tokens_total", model_name="b") == before + 12
    assert many.metric("octavo_model_loaded", model_name="a") == 1
    assert many.metric("octavo_replica_up", model_name="a", replica="0") == 1
    with many.http() as http:
        page = http.get("/metrics").text
    assert page.count("# TYPE octavo_generation_tokens_total counter") == 1


def test_a_damaged_model_fails_its_requests_alone_until_it_is_repaired(many: Running, folder: Path) -> None:
    body = {"model": "damaged", "prompt": "x", "max_tokens": 2}
    with many.http() as http:
        response = http.post("/v1/completions", json=body)
        error = check_refusal(response, 503, "'damaged' cannot be loaded", code="model_load_failed")
        assert str(folder) not in error["message"]
        assert int(response.headers["retry-after"]) >= 1
        assert state_of_models(many)["damaged"]["status"]["value"] == "failed"
        answer_of(many, "b")
        shutil.copy(folder / "a" / "model.safetensors", folder / "damaged" / "model.safetensors")
        eventually(lambda: http.post("/v1/completions", json=body).status_code == 200)


def test_a_killed_engine_of_one_model_leaves_the_others_untouched(many: Running) -> None:
    """The streams of its own requests go on with the same tokens, as those of a server with one model."""
    body: dict[str, Any] = {"prompt": "n", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    whole = {name: many.complete(model=name, **{**body, "stream": False})["text"] for name in ("a", "b")}
    texts, begun = {"a": "", "b": ""}, {"a": threading.Event(), "b": threading.Event()}

    def follow(name: str) -> None:
        with many.http() as http, http.stream("POST", "/v1/completions", json={**body, "model": name}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    texts[name] += json.loads(line[6:])["choices"][0]["text"]
                    begun[name].set()

    threads = [threading.Thread(target=follow, args=(name,)) for name in texts]
    for thread in threads:
        thread.start()
    assert all(event.wait(20) for event in begun.values())
    os.kill(many.core_pid(), signal.SIGKILL)
    for thread in threads:
        thread.join(30)
    assert texts == whole
    assert state_of_models(many)["a"]["loaded"] and state_of_models(many)["b"]["loaded"]


def test_engines_are_forked_and_outlive_the_process_that_forks_them(many: Running) -> None:
    """They answer as before: ``answer_of`` of a swap is that of the first load."""
    alone = {name: answer_of(many, name) for name in ("a", "b", "vectors")}
    eventually(lambda: many.fork_server_pid() is not None)
    for name in alone:  # two are loaded at a time, so that each of these is
        assert answer_of(many, name) == alone[name]
    forks = many.fork_server_pid()
    assert forks is not None
    assert {psutil.Process(pid).ppid() for pid in many.core_pids()} == {forks}
    orphans = many.core_pids()
    os.kill(forks, signal.SIGKILL)
    eventually(lambda: many.core_pids() == [])  # they have another parent now
    assert all(psutil.pid_exists(pid) for pid in orphans)
    for name in ("b", "vectors", "a", "b"):
        assert answer_of(many, name) == alone[name]
    eventually(lambda: many.fork_server_pid() not in (None, forks))
    for name in ("vectors", "a", "b"):
        assert answer_of(many, name) == alone[name]
    assert many.fork_server_pid() in {psutil.Process(pid).ppid() for pid in many.core_pids()}


def test_a_response_goes_on_after_its_model_was_unloaded(many: Running) -> None:
    first = many.post("/v1/responses", model="a", input="hello", max_output_tokens=4)
    background = many.post("/v1/responses", model="b", input="hello", max_output_tokens=4, background=True)
    answer_of(many, "vectors")
    with many.http() as http:
        assert http.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
        eventually(lambda: http.get(f"/v1/responses/{background['id']}").json()["status"] != "in_progress"
                   and http.get(f"/v1/responses/{background['id']}").json()["status"] != "queued")  # fmt: skip
    again = many.post("/v1/responses", model="b", input="and", max_output_tokens=4, previous_response_id=first["id"])
    assert again["model"] == "b"
    eventually(lambda: all(model["status"]["open_requests"] == 0 for model in state_of_models(many).values()))


def test_ollamas_routes_load_and_unload(many: Running) -> None:
    def running() -> dict[str, Any]:
        with many.http() as http:
            return {model["name"]: model for model in http.get("/api/ps").json()["models"]}

    assert many.post("/api/generate", model="b", stream=False, keep_alive="5m")["done_reason"] == "load"
    entry = running()["b:latest"]
    assert entry["size"] > 4 << 20 and not entry["expires_at"].startswith("9999")
    chat = many.post("/api/chat", model="b:latest", stream=False, messages=[{"role": "user", "content": "x"}],
                     options={"num_predict": 3})  # fmt: skip
    assert chat["eval_count"] == 3
    assert running()["b:latest"]["expires_at"].startswith("9999")  # as the last request says nothing
    with many.http() as http:
        assert [model["name"] for model in http.get("/api/tags").json()["models"]] == [
            "a:latest", "gpt:latest", "b:latest", "vectors:latest", "damaged:latest",
        ]  # fmt: skip
        assert "completion" in http.post("/api/show", json={"model": "a"}).json()["capabilities"]
        assert http.post("/api/show", json={"model": "none"}).status_code == 404
    assert many.post("/api/generate", model="b", stream=False, keep_alive=0)["done_reason"] == "unload"
    eventually(lambda: "b:latest" not in running())
    loads = many.metric("octavo_model_loads_total", model_name="b", result="ok")
    assert many.post("/api/generate", model="b", stream=False, keep_alive=0)["done_reason"] == "unload"
    assert many.metric("octavo_model_loads_total", model_name="b", result="ok") == loads
    assert len(many.post("/api/embed", model="vectors", input=["x", "y"])["embeddings"]) == 2


def test_operators_name_a_loaded_model(many: Running) -> None:
    answer_of(many, "a")
    with many.http() as http:
        assert http.get("/is_sleeping", params={"model": "a"}).json() == {"is_sleeping": False}
        assert http.post("/v1/models/load", json={"model": "gpt"}).json()["loaded"]
        assert not http.post("/v1/models/unload", json={"model": "a"}).json()["loaded"]
        check_refusal(http.post("/v1/models/load", json={"model": "x"}), 404, code="model_not_found")
        gone = next(name for name, model in state_of_models(many).items() if not model["loaded"])
        check_refusal(http.post("/admin/restart", params={"model": gone}), 409, code="model_not_loaded")


def test_the_engines_end_with_the_server(many: Running) -> None:
    """The last test of this server."""
    answer_of(many, "a")
    with many.http() as http, http.stream("GET", "/engine/events") as events:
        assert events.status_code == 200
    assert many.stop() == 0


def test_adapters_of_one_of_several_models(folder: Path, tmp_path: Path) -> None:
    """They are named in requests, are loaded with their model, and answer alike after each load."""
    targets = AdapterTargets(read_model_config(folder / "b"))
    make_adapter(tmp_path / "adapter", targets, 0)
    path = tmp_path / "models.yaml"
    entries = [
        {"source": str(folder / "a"), "name": "a"},
        {"source": str(folder / "b"), "name": "b", "options": {"enable_lora": True},
         "lora_modules": {"styled": str(tmp_path / "adapter")}},
    ]  # fmt: skip
    path.write_text(json.dumps(entries))
    flags = ("--max-loaded", "1", "--num-threads", "1", "--kv-cache-memory-bytes", "4MiB")
    server = start(("--models", str(path)), tmp_path / "log", *flags)
    try:
        with server.http() as http:

            def listed() -> dict[str, Any]:
                return {model["id"]: model for model in http.get("/v1/models").json()["data"]}

            before = listed()["styled"]
            assert (before["parent"], before["root"]) == ("b", "adapter")
            styled = answer_of(server, "styled")
            assert listed()["styled"]["parent"] == "b" and http.get("/v1/models/styled").json()["parent"] == "b"
            plain = answer_of(server, "b")
            assert styled != plain
            answer_of(server, "a")
            assert not listed()["b"]["loaded"] and http.get("/v1/models/styled").json()["parent"] == "b"
            assert (answer_of(server, "styled"), answer_of(server, "b")) == (styled, plain)
    finally:
        assert server.stop() == 0
