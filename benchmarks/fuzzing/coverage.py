"""Arc coverage of the modules of ``teacher``, with the standard library only.

An arc is a pair of consecutive lines in one call of a function. Calls in all threads are recorded that start after
``ArcTracer.start``.
"""

from __future__ import annotations

import mmap
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import teacher

TEACHER_DIR = str(Path(teacher.__file__).resolve().parent)
_LINE_BITS = 14  # no module has more than 16384 lines


class ArcTracer:
    """Recorder of arcs.

    Attributes:
        arcs: Recorded arcs.
    """

    def __init__(self, folder: str = TEACHER_DIR, on_new: Callable[[int], None] | None = None) -> None:
        """Create a stopped recorder.

        Args:
            folder: Folder of the traced modules.
            on_new: Function that receives the number of arcs after each new one.
        """
        self.arcs: set[int] = set()
        self._folder, self._on_new = folder, on_new
        self._base_of_code: dict[CodeType, int | None] = {}
        self._n_files: dict[str, int] = {}

    def start(self) -> None:
        """Trace this thread and all threads that start from now on."""
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)

    def stop(self) -> None:
        """Stop tracing this thread and new ones."""
        sys.settrace(None)
        threading.settrace(None)

    def _base(self, code: CodeType) -> int | None:
        """Return the first arc number of a module, None if it is not traced."""
        if code not in self._base_of_code:
            path = code.co_filename
            number = self._n_files.setdefault(path, len(self._n_files)) if path.startswith(self._folder) else None
            self._base_of_code[code] = None if number is None else number << 2 * _LINE_BITS
        return self._base_of_code[code]

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        base = self._base(frame.f_code)
        if base is None:
            return None
        arcs, before = self.arcs, 0

        def on_line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "line":
                line = frame.f_lineno
                arc = base + (before << _LINE_BITS) + line
                before = line
                if arc not in arcs:
                    arcs.add(arc)
                    if self._on_new is not None:
                        self._on_new(len(arcs))
            return on_line

        return on_line


class SharedCount:
    """Number in a memory-mapped file, written by one process and read by another."""

    def __init__(self, path: Path) -> None:
        """Create or open the file."""
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    def set(self, value: int) -> None:
        """Write the number."""
        struct.pack_into("<q", self._memory, 0, value)

    def get(self) -> int:
        """Read the number."""
        return int(struct.unpack_from("<q", self._memory, 0)[0])
