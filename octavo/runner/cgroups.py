"""Memory limits of the control groups (cgroups) that this process is in: version 2, version 1, or both.

A limit of any group on the way up to the root counts: systemd sets ``MemoryMax=`` on a slice or a service, container
runtimes on the container, batch systems on the job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryLimit:
    """A limit, and what counts towards it, in bytes."""

    #: The folder of a control group; or another name, for limits of other kinds.
    source: str
    limit: int
    #: Of a control group: without the page cache that the kernel would drop first.
    used: int

    @property
    def available(self) -> int:
        """What may still be taken."""
        return max(0, self.limit - self.used)


def group_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """The limits of this process's groups and of all their parents that can be seen, innermost first.

    None where there are no control groups. ``root`` is where ``proc`` and the mounted hierarchies are.
    """
    return [limit for folder in _folders(root) if (limit := _read_limit(folder)) is not None]


#: The files of each version: the limits, the usage, and the field of memory.stat that counts inactive page cache.
#: Above memory.high a group's processes are slowed down until it holds less, so it counts as a limit.
_V2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
#: Version 1 says "no limit" by the largest multiple of a page below 2**63.
_UNLIMITED = 1 << 62


def _read_limit(folder: Path) -> MemoryLimit | None:
    for limits, usage, cache in (_V2, _V1):
        found = [size for name in limits if (size := _read_int(folder / name)) is not None and size < _UNLIMITED]
        used = _read_int(folder / usage)
        if found and used is not None:
            return MemoryLimit(str(folder), min(found), max(0, used - _read_stat(folder / "memory.stat", cache)))
    return None


def _folders(root: Path) -> Iterator[Path]:
    """The folders of the process's groups in the hierarchies that limit memory, with all their parents."""
    groups = _own_groups(root / "proc/self/cgroup")
    for version, mounted, target in _mounts(root / "proc/self/mountinfo"):
        group = groups.get(version)
        if group is None:
            continue
        top = root / target.lstrip("/")
        # A container sees its own group as the root of the mount, under the name that it has on the host or as "/".
        below = Path(group).relative_to(mounted) if Path(group).is_relative_to(mounted) else Path()
        if ".." in below.parts:  # the process is outside the part of the hierarchy that is mounted
            below = Path()
        yield from (top / part for part in (below, *below.parents))


def _own_groups(file: Path) -> dict[int, str]:
    """By version, the path of the process's group in the hierarchy that may limit memory."""
    groups = {}
    for line in _lines(file):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            groups[2] = path
        elif "memory" in controllers.split(","):
            groups[1] = path
    return groups


def _mounts(file: Path) -> Iterator[tuple[int, str, str]]:
    """(version, group that is mounted, mount point) of the hierarchies that may limit memory; see proc(5)."""
    for line in _lines(file):
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield 2, _unescaped(fields[3]), _unescaped(fields[4])
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield 1, _unescaped(fields[3]), _unescaped(fields[4])


def _unescaped(path: str) -> str:
    r"""Spaces and the like are written as octal numbers: \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _read_int(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _read_stat(file: Path, name: str) -> int:
    values = (line.split() for line in _lines(file))
    return next((int(value[1]) for value in values if len(value) == 2 and value[0] == name), 0)
