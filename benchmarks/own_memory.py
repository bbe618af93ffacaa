"""Memory that belongs to one process alone. As a program: its peak, sampled until the standard input ends.

python benchmarks/own_memory.py PID
"""

from __future__ import annotations

import select
import sys
from pathlib import Path

SAMPLE_EVERY_S = 0.02


def own_memory(pid: int | str = "self") -> int:
    """Return the memory that belongs to a process alone (RssAnon), in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) * 1024


def main() -> None:
    """Print the peak of a process."""
    pid, peak = int(sys.argv[1]), 0
    while not select.select([sys.stdin], [], [], SAMPLE_EVERY_S)[0]:
        peak = max(peak, own_memory(pid))
    print(peak)


if __name__ == "__main__":
    main()
