"""Interface of a fuzzing target, and its failures."""

from __future__ import annotations

from typing import Protocol

Frames = list[bytes]
"""An input: the frames of one message, the lines of an HTTP request, or the writes to a TCP connection."""

HANG_S = 1.0
"""Time after which a small input is regarded as a hang."""
BYTES_PER_HANG_S = 100_000
"""Size of an input that gets ``HANG_S`` more: recording arcs makes 0.15 s of a status of 620 kB more than 1 s."""
MAX_INPUT_GROWTH_BYTES = 64 << 20
"""Memory that one input may allocate."""
MAX_TOTAL_GROWTH_BYTES = 48 << 20
"""Memory by which a process may grow between its first check and the end of a run."""


class Hang(BaseException):
    """An input took longer than ``HANG_S``. No ``Exception``, so that the tested code does not catch it."""


class Defect(Exception):
    """Violation of a property that a target checks itself."""


class Target(Protocol):
    """Function that receives untrusted bytes.

    Attributes:
        name: Name on the command line.
        seeds: Valid inputs.
        is_message: True if the first frame of an input is a msgpack header.
        is_stateful: True if the effect of an input can depend on the inputs before it.
    """

    name: str
    seeds: list[Frames]
    is_message: bool
    is_stateful: bool

    def run(self, frames: Frames) -> bool:
        """Return True if the input was accepted, False if it was refused with the documented error.

        Every other exception is a finding.
        """
        ...

    def n_arcs(self) -> int:
        """Return the number of arcs so far."""
        ...

    def resident_bytes(self) -> int | None:
        """Return the memory of the tested process, None for a target without state."""
        ...

    def reset(self) -> None:
        """Replace everything that an input may have damaged."""
        ...

    def close(self) -> None:
        """End all threads and processes."""
        ...
