"""Text for the end of a run: its newest checkpoint, and the command that resumes from it."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from recipe_gkd.checkpoints.newest import newest_complete
from recipe_gkd.checkpoints.resume import START_NEW
from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.checkpoints.run_lock import LOCK
from recipe_gkd.config.caller import VARIABLE
from recipe_gkd.config.keys import key_name
from recipe_gkd.config.schema import TrainerConfig
from recipe_gkd.runtime.threads import run_until

READ_TIMEOUT_S = 5.0
COMMAND = ("python", "-m", "recipe_gkd.main_gkd")
_RESUME_KEYS = (
    key_name(lambda config: config.trainer.resume_mode),
    key_name(lambda config: config.trainer.resume_from_path),
)


def resume_hint(trainer: TrainerConfig, arguments: Sequence[str]) -> str:
    """Return a clause that names the newest checkpoint of the run, and the command that resumes from it.

    Args:
        trainer: Section ``trainer`` of the configuration.
        arguments: Arguments of the command that ends.
    """
    root = folder_of(trainer).absolute()
    [found] = run_until(time.monotonic() + READ_TIMEOUT_S, [lambda: (newest_complete(root),)])
    if found is None:
        return f"the checkpoints in {root} could not be read; once its disk answers, the same command resumes from them"
    [newest] = found
    if newest.folder is None:
        if newest.reasons:
            return f"{root} has no complete checkpoint ({'; '.join(newest.reasons)}); {START_NEW}"
        return f"{root} has no checkpoint, so that the same command starts from the beginning"
    if trainer.resume_mode != "auto" and _is_older_than_run(newest.folder):
        start = "the beginning" if trainer.resume_from_path is None else trainer.resume_from_path
        return f"this run has saved no checkpoint, so that the same command starts from {start} again"
    if trainer.resume_mode != "auto":
        keys = tuple(f"{key}=" for key in _RESUME_KEYS)
        arguments = [argument for argument in arguments if not argument.lstrip("+").startswith(keys)]
        arguments.append("trainer.resume_mode=auto")
        if trainer.resume_from_path is not None:  # it may be in a YAML file
            arguments.append("trainer.resume_from_path=null")
    caller = ["env", f"{VARIABLE}={os.environ[VARIABLE]}"] if VARIABLE in os.environ else []
    return f"the newest checkpoint is {newest.folder}\nto resume from it: {shlex.join([*caller, *COMMAND, *arguments])}"


def _is_older_than_run(checkpoint: Path) -> bool:
    """Return True if another run saved the checkpoint before this one began. Both times are those of the same disk."""
    try:
        return (checkpoint / "trainer.json").stat().st_mtime < (checkpoint.parent / LOCK).stat().st_mtime
    except OSError:
        return False
