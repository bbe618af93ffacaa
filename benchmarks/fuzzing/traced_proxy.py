"""The command ``python -m teacher`` with arc coverage: ``python -m fuzzing.traced_proxy COUNT_FILE proxy ...``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fuzzing.coverage import ArcTracer, SharedCount
from teacher.__main__ import main

if __name__ == "__main__":
    tracer = ArcTracer(on_new=SharedCount(Path(sys.argv[1])).set)
    sys.argv = ["teacher", *sys.argv[2:]]
    tracer.start()
    code = main()
    sys.stdout.flush()
    os._exit(code)
