"""KV stores of simulated engines: what they hold, when fetches end, and what a cluster keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.config.engine_config import EngineConfig
from octavo.core.plan import Fetch, StepPlan, StepResult
from octavo.core.stats import EngineEvent, read_recording
from octavo.lab.simulate.cluster.cluster_run import simulate_cluster
from octavo.lab.simulate.cluster.spec import ClusterSpec, Outage
from octavo.lab.simulate.engine import SimulatedEngine, run
from octavo.lab.simulate.figures import RunFigures
from octavo.lab.simulate.recording import RunRecorder
from octavo.lab.simulate.run import Recorder, simulate
from octavo.lab.simulate.step_profile import StepProfile, StoreCosts, load_profile
from octavo.lab.simulate.stores import SimulatedStore, StoreClient
from octavo.lab.workloads.agent import AgentTrace

PROFILE = load_profile("smollm2-135m-2-cores")
BLOCK = 16 * PROFILE.kv_bytes_per_token


def profile(**changes: Any) -> StepProfile:
    return msgspec.structs.replace(PROFILE, **changes)


def digests(*names: int) -> list[bytes]:
    return [bytes([name]) * 16 for name in names]


def plan(step: int = 0, store: list[bytes] = [], fetch: list[bytes] = [], **more: Any) -> StepPlan:  # noqa: B006
    fetches = [Fetch(step, [(0, digest) for digest in fetch])] if fetch else []
    return StepPlan(step=step, blocks_to_store=list(enumerate(store)), fetch=fetches, **more)


def ended(client: StoreClient, at: float, step: int = 1) -> dict[int, int]:
    result = StepResult(step)
    client.end(result, at)
    return result.fetched


def test_a_block_is_there_when_its_write_has_ended() -> None:
    costs = StoreCosts(call=0.5, read=1 / BLOCK, write=1 / BLOCK)
    client = StoreClient(profile(disk=costs), 16, [SimulatedStore("disk", 100 * BLOCK)])
    client.begin(plan(1, digests(1, 2)), 10.0)  # written at 11.5 and 13
    client.begin(plan(2, fetch=digests(1, 2, 3)), 12.0)
    client.begin(plan(3, fetch=digests(1, 2, 3)), 12.1)  # begins when the one before it has ended
    assert client.next_end == pytest.approx(13.5)
    assert ended(client, 13.4) == {}
    assert ended(client, 13.6) == {2: 1}
    assert ended(client, 20.0) == {3: 2}
    [stats] = client.stats()
    assert (stats.asked, stats.found, stats.written, stats.held_bytes) == (5, 3, 2, 2 * BLOCK)


def test_the_least_recently_used_block_makes_room() -> None:
    store = SimulatedStore("disk", 2 * BLOCK)
    client = StoreClient(PROFILE, 16, [store])
    client.begin(plan(1, digests(1, 2)), 0.0)
    client.begin(plan(2, fetch=digests(1)), 1.0)
    client.begin(plan(3, digests(3)), 2.0)
    client.begin(plan(4, fetch=digests(1, 3)), 3.0)
    client.begin(plan(5, fetch=digests(2)), 3.0)
    assert ended(client, 9.0) == {2: 1, 4: 2, 5: 0}
    assert store.evicted == 1


def test_what_was_not_written_is_lost_with_its_engine_and_the_rest_is_found_by_others() -> None:
    costs = StoreCosts(call=0.0, read=0.0, write=1 / BLOCK)
    shared = SimulatedStore("shared", 100 * BLOCK)
    first, second = (StoreClient(profile(shared=costs), 16, [shared]) for _ in range(2))
    first.begin(plan(1, digests(1, 2, 3)), 0.0)
    first.fail(2.5)
    second.begin(plan(1, fetch=digests(1, 2, 3)), 9.0)
    assert ended(second, 9.0) == {1: 2}


def test_a_dropped_fetch_is_not_reported() -> None:
    client = StoreClient(PROFILE, 16, [SimulatedStore("disk", BLOCK)])
    client.begin(plan(1, fetch=digests(1)), 0.0)
    client.begin(plan(2, drop_fetches=[1]), 0.0)
    assert ended(client, 9.0) == {}


def test_other_models_find_nothing() -> None:
    shared = SimulatedStore("shared", 100 * BLOCK)
    first, second = StoreClient(PROFILE, 16, [shared]), StoreClient(profile(model="other"), 16, [shared])
    first.begin(plan(1, digests(1)), 0.0)
    second.begin(plan(1, fetch=digests(1)), 9.0)
    assert ended(second, 10.0) == {1: 0}


def test_a_config_without_stores_has_no_client() -> None:
    assert SimulatedEngine(PROFILE, EngineConfig(model="none")).stores is None
    assert SimulatedEngine(PROFILE, EngineConfig(model="none", kv_disk="d")).stores is not None


# --- engines --------------------------------------------------------------------------------------------------------

TRACE = AgentTrace(turns=8, pause=20.0)
#: Bytes of a disk that evicts.
SMALL = 40 << 20


def options(**more: Any) -> EngineConfig:
    return EngineConfig(model="none", num_gpu_blocks_override=TRACE.num_blocks(16) // 2, max_model_len=8192, **more)


def share(figures: RunFigures) -> float:
    assert not figures.failed
    return figures.prefix_hit_tokens / figures.prefix_queried_tokens


def test_a_disk_finds_what_the_cache_has_evicted() -> None:
    without, disk, small = (
        simulate(PROFILE, options(**more), TRACE)
        for more in ({}, {"kv_disk": "d"}, {"kv_disk": "d", "kv_disk_bytes": SMALL})
    )
    assert share(without) + 0.2 < share(disk)
    assert share(without) <= share(small) < share(disk)
    assert small.stores["disk"].evicted > 0 and small.stores["disk"].held_bytes <= SMALL
    assert not without.stores and disk.stores["disk"].found > 0
    assert disk.ttft is not None and without.ttft is not None and disk.ttft.mean < without.ttft.mean
    assert simulate(PROFILE, options(kv_disk="d"), TRACE) == disk


def test_a_store_outlives_a_replica_and_is_shared() -> None:
    def found(replicas: int, **store: Any) -> float:
        spec = ClusterSpec(replicas=((replicas, PROFILE),), router="round_robin", outages=(Outage(0, 100.0, 1.0),))
        return share(simulate_cluster(spec, options(**store), TRACE))

    assert found(1) + 0.2 < found(1, kv_disk="d")
    assert found(2) + 0.2 < found(2, kv_store="r")


def test_a_recording_shows_fetches_tiers_and_why_blocks_were_evicted(tmp_path: Path) -> None:
    engine = SimulatedEngine(PROFILE, options(kv_disk="d", kv_disk_bytes=150 << 20))
    recorder, views = Recorder(), RunRecorder(engine)
    run(engine, AgentTrace(turns=4, pause=20.0), recorder.ended, views.sample)
    views.write(tmp_path / "run.jsonl", "stores")
    lines = read_recording(tmp_path / "run.jsonl").splitlines()[1:]
    shown = [view for line in lines for view in msgspec.json.decode(line, type=EngineEvent).views]
    assert any(row.is_fetching for view in shown for row in view.groups)
    whys = {(change.kind, change.why) for view in shown for change in view.changes}
    assert {("swap_in", "store"), ("evict", "room"), ("evict", "disk")} <= whys
    stores = shown[-1].state.stores
    assert stores is not None and [tier.tier for tier in stores.tiers] == ["disk"] and stores.tiers[0].found
