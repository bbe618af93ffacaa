"""The command ``python -m teacher`` with a fault: ``FAULT=leak|crash python -m tests.fuzz.faulty_proxy proxy ...``."""

from __future__ import annotations

import os
import sys
from typing import Any

from teacher.__main__ import main
from teacher.errors import TeacherProtocolError
from teacher.wire import protocol

if __name__ == "__main__":
    decode, kept = protocol.decode, []

    def leak(frames: Any) -> Any:
        """Keep a copy of each message."""
        kept.append([bytes(frame.buffer) for frame in frames])
        return decode(frames)

    def crash(frames: Any) -> Any:
        """Raise another error than the documented one for a refused message."""
        try:
            return decode(frames)
        except TeacherProtocolError as error:
            raise IndexError from error

    protocol.decode = {"leak": leak, "crash": crash}[os.environ["FAULT"]]
    sys.exit(main())
