"""Memory limits of control groups, in trees of files as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.runner import memory
from octavo.runner.memory import group_limits

MIB = 1 << 20
#: What version 1 shows where there is no limit.
NO_LIMIT = 9223372036854771712


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return root


def v1(root: Path, group: str, mounted: str = "/") -> Path:
    mounts = f"35 31 0:32 {mounted} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
    other = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
    return write(
        root,
        {"proc/self/cgroup": f"4:memory:{group}\n1:cpu:/\n0::/", "proc/self/mountinfo": f"{other}\n{mounts}"},
    )


def v2(root: Path, group: str, mounted: str = "/", at: str = "/sys/fs/cgroup") -> Path:
    mounts = f"30 23 0:26 {mounted} {at} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
    return write(
        root, {"proc/self/cgroup": f"0::{group}", "proc/self/mountinfo": f"23 1 8:1 / / rw - ext4 a rw\n{mounts}"}
    )


def in_mib(root: Path) -> list[tuple[str, int, int]]:
    return [(Path(limit.source).name, limit.limit // MIB, limit.used // MIB) for limit in group_limits(root)]


def test_version_1_limits_the_process_in_its_own_group(tmp_path: Path) -> None:
    v1(tmp_path, "/jobs/seven")
    folder = "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {
            f"{folder}/memory.limit_in_bytes": NO_LIMIT,
            f"{folder}/memory.usage_in_bytes": 9000 * MIB,
            f"{folder}/jobs/memory.limit_in_bytes": NO_LIMIT,
            f"{folder}/jobs/memory.usage_in_bytes": 8000 * MIB,
            f"{folder}/jobs/seven/memory.limit_in_bytes": 900 * MIB,
            f"{folder}/jobs/seven/memory.usage_in_bytes": 500 * MIB,
            f"{folder}/jobs/seven/memory.stat": f"inactive_file 1\ntotal_inactive_file {200 * MIB}",
        },
    )
    assert in_mib(tmp_path) == [("seven", 900, 300)]


def test_version_2_counts_every_parent(tmp_path: Path) -> None:
    """As systemd nests them: a slice, and a service in it with MemoryMax=."""
    v2(tmp_path, "/system.slice/octavo.service")
    folder = "sys/fs/cgroup/system.slice"
    write(
        tmp_path,
        {
            f"{folder}/memory.max": 4000 * MIB,
            f"{folder}/memory.high": "max",
            f"{folder}/memory.current": 3500 * MIB,
            f"{folder}/memory.stat": f"anon 5\ninactive_file {100 * MIB}",
            f"{folder}/octavo.service/memory.max": 1000 * MIB,
            f"{folder}/octavo.service/memory.high": 900 * MIB,
            f"{folder}/octavo.service/memory.current": 100 * MIB,
        },
    )
    assert in_mib(tmp_path) == [("octavo.service", 900, 100), ("system.slice", 4000, 3400)]
    assert min(limit.available for limit in group_limits(tmp_path)) == 600 * MIB


@pytest.mark.parametrize(("group", "mounted"), [("/", "/"), ("/docker/a b", "/docker/a\\040b"), ("/..", "/")])
def test_a_container_sees_its_group_at_the_root_of_the_mount(tmp_path: Path, group: str, mounted: str) -> None:
    v2(tmp_path, group, mounted)
    write(tmp_path, {"sys/fs/cgroup/memory.max": 700 * MIB, "sys/fs/cgroup/memory.current": 900 * MIB})
    assert in_mib(tmp_path) == [("cgroup", 700, 900)]
    assert group_limits(tmp_path)[0].available == 0


def test_both_versions_may_be_mounted(tmp_path: Path) -> None:
    v1(tmp_path, "/a")
    with (tmp_path / "proc/self/mountinfo").open("a") as file:
        file.write("41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n")
    write(
        tmp_path,
        {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": MIB, "sys/fs/cgroup/memory/a/memory.usage_in_bytes": 0},
    )
    assert in_mib(tmp_path) == [("a", 1, 0)]


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert group_limits(tmp_path) == []


def test_the_least_of_all_limits_and_of_the_machine_is_available(tmp_path: Path) -> None:
    everything = memory.available_memory(tmp_path)
    v1(tmp_path, "/a")
    folder = "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {
            f"{folder}/memory.limit_in_bytes": 1 << 60,
            f"{folder}/memory.usage_in_bytes": 5,
            f"{folder}/a/memory.limit_in_bytes": 3 * MIB,
            f"{folder}/a/memory.usage_in_bytes": 2 * MIB,
        },
    )
    assert memory.available_memory(tmp_path) == MIB < everything
