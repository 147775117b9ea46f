"""The names of adapters: what may be loaded, unloaded and named, and where a server may read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import integers, sampled_from

from octavo.core.errors import AdapterConflictError, AdapterError, AdapterNotFoundError, ConfigError
from octavo.core.request import AdapterRef, LoRARequest
from octavo.engine.adapters import (
    AdapterRegistry,
    AdapterResolver,
    FolderResolver,
    allowed_path,
    find_by_name,
    make_resolver,
)


def make(enabled: bool = True, reads: list[str] | None = None) -> AdapterRegistry:
    """A registry of adapters whose content is named by the last part of their path."""

    def check(name: str, path: str) -> AdapterRef:
        if reads is not None:
            reads.append(path)
        return AdapterRef(Path(path).name, name, path, 8)

    return AdapterRegistry(check, enabled=enabled, reserved=["base"])


def test_a_request_loads_its_adapter_once() -> None:
    reads: list[str] = []
    registry = make(reads=reads)
    request = LoRARequest("sql", 1, "/a/x")
    first = registry.load(request)
    assert (first.name, first.key, first.path) == ("sql", "x", "/a/x")
    assert registry.load(request) is registry.load(LoRARequest("sql", 1)) is first
    assert reads == ["/a/x"]
    # Another path with the same content is the same adapter, another one is not.
    assert registry.load(LoRARequest("sql", 1, "/b/x")) is first
    with pytest.raises(AdapterConflictError, match="'sql' already, with other content"):
        registry.load(LoRARequest("sql", 1, "/a/y"))
    assert registry.load(LoRARequest("copy", 2, "/a/x")).key == "x"


@pytest.mark.parametrize(
    ("request_", "kind", "message"),
    [
        (LoRARequest("", 1, "x"), AdapterError, "name must be 1 to 256"),
        (LoRARequest("a" * 257, 1, "x"), AdapterError, "name must be 1 to 256"),
        (LoRARequest("a\nb", 1, "x"), AdapterError, "printable"),
        (LoRARequest("a", 0, "x"), AdapterError, "lora_int_id must be .* at least 1"),
        (LoRARequest("a", True, "x"), AdapterError, "lora_int_id"),
        (LoRARequest("a", 1, 3), AdapterError, "lora_path must be a path"),  # type: ignore[arg-type]
        (LoRARequest("base", 2, "x"), AdapterConflictError, "a name of the model itself"),
        (LoRARequest("skl", 2), AdapterNotFoundError, "did you mean 'sql'"),
        (LoRARequest("sql", 2), AdapterError, "lora_int_id 1, not 2"),
        (LoRARequest("a", 1, "x"), AdapterConflictError, "lora_int_id 1 is that of adapter 'sql'"),
        ({"lora_name": "a"}, AdapterError, "must be a LoRARequest"),
    ],
)
def test_what_cannot_be_loaded_is_refused(request_: LoRARequest, kind: type[Exception], message: str) -> None:
    registry = make()
    registry.load(LoRARequest("sql", 1, "/a/x"))
    with pytest.raises(kind, match=message):
        registry.load(request_)
    assert [adapter.name for adapter in registry] == ["sql"]


def test_an_engine_without_adapters_names_the_option() -> None:
    with pytest.raises(AdapterError, match="enable_lora=True"):
        make(enabled=False).load(LoRARequest("a", 1, "x"))


def test_new_content_in_place_leaves_running_requests_alone() -> None:
    registry = make()
    old = registry.load(LoRARequest("a", 1, "x"))
    registry.begin(7, old)
    request = LoRARequest("a", 1, "y")
    assert registry.add(request, registry.read(request), in_place=True)
    assert registry.load(LoRARequest("a", 1)).key == "y"
    assert registry.names_of("x") == () and [*registry.names_of("y")] == ["a"]
    registry.end(7)
    registry.remove("a")


def test_unloading_refuses_or_waits() -> None:
    registry = make()
    ref = registry.load(LoRARequest("a", 1, "x"))
    for group in (1, 2):
        registry.begin(group, ref)
    with pytest.raises(AdapterConflictError, match="in use by 2 open requests"):
        registry.remove("a")
    gone: list[str] = []
    registry.retire("a", lambda: gone.append("first"))
    registry.retire("a", lambda: gone.append("second"))
    for request in (LoRARequest("a", 1), LoRARequest("a", 1, "x")):
        with pytest.raises(AdapterConflictError, match="being unloaded"):
            registry.load(request)
    with pytest.raises(AdapterConflictError, match="being unloaded"):
        registry.add(LoRARequest("a", 1, "x"), ref)
    registry.end(1)
    assert not gone
    registry.end(2)
    registry.end(2)  # of a request without an adapter
    assert gone == ["first", "second"]
    assert registry.load(LoRARequest("a", 5, "x")) == ref  # name and number are free again
    registry.retire("a", lambda: gone.append("third"))
    assert gone[-1] == "third"
    with pytest.raises(AdapterNotFoundError, match="loaded: none"):
        registry.remove("a")


class Machine(RuleBasedStateMachine):
    """Loading, using and unloading in any order, against a plain account."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = make()
        self.open: dict[int, str] = {}
        self.known: dict[str, str] = {}
        self.leaving: set[str] = set()
        self.groups = 0

    names = sampled_from(["a", "b", "c"])

    @rule(name=names, content=sampled_from("xy"))
    def load(self, name: str, content: str) -> None:
        request = LoRARequest(name, ord(name), content)
        if name in self.leaving or self.known.get(name, content) != content:
            with pytest.raises(AdapterConflictError):
                self.registry.load(request)
        else:
            assert self.registry.load(request).key == content
            self.known[name] = content

    @rule(name=names)
    def begin(self, name: str) -> None:
        if name not in self.known or name in self.leaving:
            with pytest.raises(AdapterError):
                self.registry.load(LoRARequest(name, ord(name)))
            return
        self.registry.begin(self.groups, self.registry.load(LoRARequest(name, ord(name))))
        self.open[self.groups] = name
        self.groups += 1

    @precondition(lambda self: self.open)
    @rule(which=integers(0, 100))
    def end(self, which: int) -> None:
        group = sorted(self.open)[which % len(self.open)]
        self.registry.end(group)
        name = self.open.pop(group)
        if name in self.leaving and name not in self.open.values():
            self.leaving.discard(name)
            del self.known[name]

    @rule(name=names, wait=sampled_from([False, True]))
    def unload(self, name: str, wait: bool) -> None:
        if name not in self.known:
            with pytest.raises(AdapterNotFoundError):
                self.registry.remove(name)
        elif wait:
            self.registry.retire(name, lambda: None)
            self.leaving.add(name)
        elif name in self.open.values():
            with pytest.raises(AdapterConflictError):
                self.registry.remove(name)
        else:
            self.registry.remove(name)
        if name in self.known and name not in self.open.values():
            self.leaving.discard(name)
            del self.known[name]

    @invariant()
    def they_agree(self) -> None:
        assert {adapter.name: adapter.ref.key for adapter in self.registry} == self.known
        for content in "xy":
            names = {name for name, its in self.known.items() if its == content}
            assert {*self.registry.names_of(content)} == names and len(self.registry.names_of(content)) == len(names)
        assert dict(self.registry.open_requests()) == self.open
        assert {a.name for a in self.registry if a.leaving} == self.leaving


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestRegistryMachine = Machine.TestCase


# Folders --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``allowed`` with an adapter ``a``, and ``secret`` beside it."""
    for path in ("allowed/a", "allowed/deep/b", "secret/s", "allowed-too/t"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "adapter_config.json").write_text("{}")
    (tmp_path / "allowed" / "c.gguf").write_text("")
    return tmp_path / "allowed"


@pytest.mark.parametrize("path", ["a", "deep/b", "./a", "deep/../a", "c.gguf"])
def test_paths_in_the_folder_may_be_relative_or_absolute(folder: Path, path: str) -> None:
    for given in (path, str(folder / path)):
        assert allowed_path(folder, given) == str((folder / path).resolve())


@pytest.mark.parametrize(
    "path", ["", ".", "..", "../secret/s", "a/../../secret/s", "/etc", "/etc/nothing", "../allowed-too/t", "~root"]
)
def test_paths_out_of_the_folder_are_refused(folder: Path, path: str) -> None:
    with pytest.raises(AdapterError, match=r"not within the folder|there is no adapter"):
        allowed_path(folder, path)


def test_links_do_not_lead_out_of_the_folder(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "secret" / "s")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "inner").symlink_to(folder / "a")
    (folder / "mixed").mkdir()
    (folder / "mixed" / "adapter_config.json").symlink_to(folder.parent / "secret" / "s" / "adapter_config.json")
    with pytest.raises(AdapterError, match="not within the folder"):
        allowed_path(folder, "link")
    with pytest.raises(AdapterError, match="is a link out of the folder"):
        allowed_path(folder, "mixed")
    with pytest.raises(AdapterError):
        allowed_path(folder, "loop")
    with pytest.raises(AdapterError, match="null"):
        allowed_path(folder, "a\0b")
    assert allowed_path(folder, "inner") == str(folder / "a")
    # A folder that is a link itself is fine.
    (folder.parent / "alias").symlink_to(folder)
    assert allowed_path(folder.parent / "alias", "a") == str(folder / "a")


def test_the_folder_resolver_takes_names_and_no_paths(folder: Path) -> None:
    resolver = make_resolver("folder", folder)
    assert isinstance(resolver, FolderResolver)
    assert find_by_name(resolver, "a") == str(folder / "a")
    assert find_by_name(resolver, "c") == str(folder / "c.gguf")
    for name in ("", "b", "deep/b", "..", ".", "../secret/s", "/etc", "a\\b", "a\0b", "x" * 256, "é" * 255, "x" * 5000):
        assert find_by_name(resolver, name) is None
    (folder / "link").symlink_to(folder.parent / "secret" / "s")
    with pytest.raises(AdapterError, match="not within the folder"):
        find_by_name(resolver, "link")


class Elsewhere(AdapterResolver):
    """Finds everything beside the folder."""

    def resolve(self, name: str) -> str | None:
        return f"/adapters/{name}"


def test_a_resolver_of_ones_own(folder: Path) -> None:
    name = f"{__name__}:Elsewhere"
    free, bound = make_resolver(name, None), make_resolver(name, folder)
    assert free is not None and find_by_name(free, "a/b") == "/adapters/a/b"
    assert bound is not None
    with pytest.raises(AdapterError, match="not within the folder"):
        find_by_name(bound, "a")
    for path in ("../x", "..", "/etc/x", "a/../../x", "a//b", "./a", "a\\..\\x", "a\0b", "a\nb", "", "x" * 257):
        assert find_by_name(free, path) is None
    with pytest.raises(ConfigError, match="unknown lora_resolver 'nothing'; known: folder"):
        make_resolver("nothing", folder)
