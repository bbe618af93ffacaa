"""Process of one check, started by :mod:`.runner` with the name of the check, its context and a file for its result.

It writes its result to this JSON file, and the stacks of all threads to its log shortly before its deadline.
"""

from __future__ import annotations

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


def main(name: str, context_json: str, result: str) -> int:
    """Run the check, and return 0 if it has passed.

    Args:
        name: Name of the check.
        context_json: Fields of its :class:`Context`.
        result: File for the result.
    """
    fields = json.loads(context_json)
    context = Context(**fields | {"folder": Path(fields["folder"])})
    faulthandler.dump_traceback_later(max(1.0, context.deadline_s - STACK_MARGIN_S), exit=False)
    status, detail = "FAILED", ""
    try:
        detail = BY_NAME[name].load()(context)
        status = "passed"
    except CheckFailed as error:
        detail = str(error)
    except Exception as error:  # noqa: BLE001 - a check may find anything, and the table contains it
        traceback.print_exc()
        detail = f"{'' if isinstance(error, GkdError) else 'unexpected '}{type(error).__name__}: {error}"
    found = {"status": status, "detail": detail, "figures": context.figures}
    part = Path(result).with_suffix(".part")
    part.write_text(json.dumps(found, default=float))
    part.rename(result)
    return 0 if status == "passed" else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
