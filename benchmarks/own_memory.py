"""Memory that belongs to one process alone. As a program: its peak, sampled until the standard input ends.

python benchmarks/own_memory.py PID
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

SAMPLE_EVERY_S = 0.02


def own_memory(pid: int | str = "self") -> int:
    """Return the memory that belongs to a process alone (RssAnon), in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) * 1024


class PeakMemory:
    """Peak of the memory that belongs to this process alone, in bytes.

    Another process samples it: a thread would need a part of this process's CPU time.
    """

    def __init__(self) -> None:
        self.peak = 0

    def __enter__(self) -> PeakMemory:
        command = [sys.executable, __file__, str(os.getpid())]
        self._sampler = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        output, _ = self._sampler.communicate("", timeout=10)
        self.peak = int(output or 0)


def main() -> None:
    """Print the peak of a process."""
    pid, peak = int(sys.argv[1]), 0
    while not select.select([sys.stdin], [], [], SAMPLE_EVERY_S)[0]:
        peak = max(peak, own_memory(pid))
    print(peak)


if __name__ == "__main__":
    main()
