"""`python -m teacher` with a fake engine in the workers, for PYTHON of the scripts."""

from __future__ import annotations

import sys

from teacher.__main__ import main
from teacher.commands import service
from tests._support.fake_worker import FakeEngine

if __name__ == "__main__":
    arguments = sys.argv[sys.argv.index("teacher") + 1 :]
    service.load_engine = lambda backend, config: FakeEngine()  # type: ignore[assignment]
    sys.exit(main(arguments))
