"""Memory limits of the control groups of this process, as containers and job schedulers set them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
"""Files with the limit and the use of a group, by version of the control groups."""


@dataclass(frozen=True)
class GroupMemory:
    """Memory of the processes of a control group with a limit.

    Attributes:
        limit: Maximum memory, in bytes.
        used: Memory in use without the cached content of files, which the kernel releases when it is needed, in bytes.
    """

    limit: int
    used: int

    @property
    def free(self) -> int:
        """Memory that its processes can still allocate, in bytes."""
        return max(0, self.limit - self.used)


def limited_groups() -> Iterator[GroupMemory]:
    """Yield the control groups of this process and those around them that have a memory limit."""
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        groups = []
    folders = {(CGROUPS, 2): None, (CGROUPS / "memory", 1): None}
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root, version = (CGROUPS / "memory", 1) if controllers else (CGROUPS, 2)  # version 2 lists no controllers
            own = Path(path.lstrip("/"))
            folders |= {(root / part, version): None for part in (own, *own.parents)}
    for folder, version in folders:
        limit, used = (_read(folder / name) for name in _FILES[version])
        if limit.isdigit():  # in a container the path of the group is the host's, which has no files there
            yield GroupMemory(int(limit), max(0, int(used or 0) - _cached_files(folder, version)))


def _cached_files(folder: Path, version: int) -> int:
    """Return the cached content of files of a group and the groups below it, in bytes."""
    prefix = "" if version == 2 else "total_"
    names = f"{prefix}active_file", f"{prefix}inactive_file"
    lines = map(str.split, _read(folder / "memory.stat").splitlines())
    return sum(int(line[1]) for line in lines if line[0] in names)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
