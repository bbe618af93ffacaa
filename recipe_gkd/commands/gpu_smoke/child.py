"""Process of one check: ``python -m recipe_gkd.commands.gpu_smoke.child NAME``, started by :mod:`.runner`.

It writes its result to a JSON file, and the stacks of all threads to its log shortly before its deadline.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import traceback
from pathlib import Path

from recipe_gkd.commands.gpu_smoke.checks import BY_NAME
from recipe_gkd.commands.gpu_smoke.outcome import CheckFailed, Context
from recipe_gkd.errors import GkdError

STACK_MARGIN_S = 3.0
"""Time between the stacks in the log and the deadline."""


def main() -> int:
    """Run the check. Return 0 if it has passed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=BY_NAME)
    parser.add_argument("--device", required=True)
    parser.add_argument("--n-gpus", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--deadline-s", type=float, required=True)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    faulthandler.dump_traceback_later(max(1.0, given.deadline_s - STACK_MARGIN_S), exit=False)
    context = Context(device=given.device, n_gpus=given.n_gpus, folder=given.folder, deadline_s=given.deadline_s)
    status, detail = "FAILED", ""
    try:
        detail = BY_NAME[given.name].load()(context)
        status = "passed"
    except CheckFailed as error:
        detail = str(error)
    except GkdError as error:
        traceback.print_exc()
        detail = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - a check may find anything, and the table contains it
        traceback.print_exc()
        detail = f"unexpected {type(error).__name__}: {error}"
    found = {"status": status, "detail": detail, "figures": context.figures}
    part = given.result.with_suffix(".part")
    part.write_text(json.dumps(found, default=float))
    part.rename(given.result)
    return 0 if status == "passed" else 1


if __name__ == "__main__":
    sys.exit(main())
