"""``octavo simulate --record``: a file of views that covers the run, the same for equal calls; and what is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from octavo.cli.main import main
from octavo.core.errors import ConfigError
from octavo.core.stats import FORMAT, EngineEvent, read_recording
from octavo.lab.simulate import recording

WORDS = ["simulate", "--profile", "smollm2-135m-2-cores", "--num-requests", "20", "--request-rate", "50", "--seed", "3"]
SMALL = [*WORDS, "--num-gpu-blocks-override", "150", "--preemption-mode", "swap"]


def events(path: Path) -> list[EngineEvent]:
    _, *lines = read_recording(path).splitlines()
    return [msgspec.json.decode(line, type=EngineEvent) for line in lines]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of every step of a run."""
    path = tmp_path_factory.mktemp("recording") / "one.jsonl"
    assert main([*SMALL, "--record", str(path)]) == 0
    return path


def test_equal_calls_write_equal_recordings_of_every_step(one: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    assert main([*SMALL, "--record", str(other)]) == 0
    assert one.read_bytes() == other.read_bytes()
    views = [event.views[0] for event in events(one)]
    assert [record.step for view in views for record in view.steps] == list(range(1, views[-1].state.steps + 1))
    changed = {change.kind for view in views for change in view.changes}
    assert {"swap", "swap_out", "swap_in"} <= changed
    assert views[-1].state.num_running == 0


def test_a_long_run_is_thinned_and_still_covered(one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thinned = tmp_path / "thinned.jsonl"
    monkeypatch.setattr(recording, "NUM_VIEWS", 40)
    assert main([*SMALL, "--record", str(thinned)]) == 0
    every, some = events(one), events(thinned)
    assert 40 <= len(some) < 80 <= len(every)
    assert {event.time for event in some} <= {event.time for event in every}
    assert some[-1].time > 0.9 * every[-1].time
    assert sum(event.views[0].num_changes for event in some) <= sum(event.views[0].num_changes for event in every)


@pytest.mark.parametrize("flags", [["--replicas", "2"], ["--compare", "sjf"]])
def test_several_engines_or_policies_are_not_recorded(flags: list[str], tmp_path: Path) -> None:
    assert main([*WORDS, *flags, "--record", str(tmp_path / "x.jsonl")]) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "first line"),
        (b'{"format":"other"}\n', FORMAT),
        (b'{"format":"octavo-recording","version":9}\n', "version 9"),
        (b'{"format":"octavo-recording","version":1}\n{"time":1}\n', "line 2"),
        (b'{"format":"octavo-recording","version":1}\n\xff\n', "line 2"),
    ],
)
def test_what_is_no_recording_is_refused_with_the_line(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_recording(path)


def test_the_recording_of_the_documentation_shows_what_its_title_says() -> None:
    shown = events(Path(__file__).resolve().parents[3] / "docs" / "recordings" / "a_busy_half_minute.jsonl")
    views = [event.views[0] for event in shown if event.views]
    assert {"fork", "copy", "recompute", "swap", "swap_out", "swap_in"} <= {
        change.kind for view in views for change in view.changes
    }
    assert max(view.state.prefix_hit_tokens for view in views) > 0
    assert any(row.status != "ready" for event in shown for row in event.replicas)
    assert any(row.is_resumed for view in views for row in view.groups) and not views[-1].groups
    assert {event.why for view in views for event in view.lives if event.kind == "end"} == {"length"}


def test_a_recording_is_not_read_if_it_is_too_large_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(ConfigError, match=r"r\.jsonl is missing"):
        read_recording(path)
    path.write_bytes(b'{"format":"octavo-recording","version":1}\n')
    monkeypatch.setattr("octavo.core.stats.MAX_BYTES", 20)
    with pytest.raises(ConfigError, match=r"r\.jsonl has 42 bytes; at most 20 are read"):
        read_recording(path)


def test_too_many_events_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"format":"octavo-recording","version":1}\n' + b'{"time":1,"replicas":[],"views":[]}\n' * 4)
    assert len(events(path)) == 4
    monkeypatch.setattr("octavo.core.stats.MAX_EVENTS", 3)
    with pytest.raises(ConfigError, match="4 events"):
        read_recording(path)
