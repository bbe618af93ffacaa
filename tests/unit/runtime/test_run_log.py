"""Console and file of a run, with and without a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path
from recipe_gkd.metrics.loggers.console_logger import ConsoleLogger
from recipe_gkd.runtime.run_log import FILE_ONLY, log, start_logging

start_logging(Path(sys.argv[1]))
console = ConsoleLogger(0, 2)
for step in (1, 2):
    console.log(step, {"actor/kl_loss": 0.5})
    log.info("weight sync v%d: begins", step, extra=FILE_ONLY)
    log.info("weight sync v%d: 1.0 MB", step)
console.close()
"""


def run_in_terminal(script: str, *arguments: str) -> str:
    """Run a Python script whose streams are one pseudo-terminal, and return what it printed."""
    main, secondary = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=secondary, stderr=secondary) as process:
        os.close(secondary)
        printed = b""
        try:
            while chunk := os.read(main, 65536):
                printed += chunk
        except OSError:  # Linux raises it at the end of a pseudo-terminal
            pass
        os.close(main)
        assert process.wait(timeout=60) == 0
    return printed.decode()


def test_redirected_log_has_one_line_per_sync_and_no_control_characters(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run.log")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.splitlines() == ["step 1/2  loss 0.5000", "step 2/2  loss 0.5000"]
    assert [line.split(": ", 1)[1] for line in run.stderr.splitlines()] == [f"weight sync v{n}: 1.0 MB" for n in (1, 2)]
    assert (tmp_path / "run.log").read_text().count("begins") == 2


def test_terminal_shows_progress_bar_below_complete_lines(tmp_path: Path) -> None:
    printed = run_in_terminal(SCRIPT, str(tmp_path / "run.log"))
    assert "\x1b[" in printed and "remaining" in printed
    lines = [re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", line) for line in printed.replace("\x1b[2K", "\n").splitlines()]
    for wanted in ("step 1/2  loss 0.5000", "step 2/2  loss 0.5000"):
        assert wanted in lines
    assert [line for line in lines if re.fullmatch(r"[\d:]+ I recipe_gkd: weight sync v2: 1.0 MB", line)]
