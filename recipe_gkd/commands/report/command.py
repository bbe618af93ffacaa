"""The command ``report``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import recipe_gkd.commands.report as package
from recipe_gkd.commands.report.page import render_page
from recipe_gkd.commands.report.run_files import read_run
from recipe_gkd.errors import ConfigError, GkdError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0 if the page was written, 1 after an error.
    """
    parser = argparse.ArgumentParser(
        prog="python -m recipe_gkd report",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--out", type=Path, help="file to write (default: RUN/report.html)")
    args = parser.parse_args(argv)
    run = args.run.expanduser()
    out = run / "report.html" if args.out is None else args.out.expanduser()
    try:
        write_report(run, out)
    except GkdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"report: {out}")
    return 0


def write_report(run: Path, out: Path) -> None:
    """Write the page of a run. An existing file is replaced when the new page is complete.

    Args:
        run: Folder of the run.
        out: File to write.

    Raises:
        DataError: The folder has no usable metrics.
        ConfigError: The file cannot be written.
    """
    if out.is_dir():
        remedy = "give the name of a file in it"
        raise ConfigError(f"--out {out} is a folder, expected a file", remedy=remedy, keys=("--out",))
    page = render_page(read_run(run))
    draft = out.with_name(out.name + ".writing")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(page, encoding="utf-8", errors="backslashreplace")  # JSON in the page may have surrogates
        draft.replace(out)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        what = f"--out {out} cannot be written ({error.strerror})"
        raise ConfigError(what, remedy="choose a file in a writable folder", keys=("--out",)) from error
