"""The training command: compose the configuration, validate it, start Ray and the workers, and train.

python -m recipe_gkd.main_gkd --config-name on_policy_distill_trainer key=value ...
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

from omegaconf import OmegaConf

from recipe_gkd.checkpoints.resume_hint import resume_hint
from recipe_gkd.checkpoints.run_folder import LOG, RunFolder, run_folder
from recipe_gkd.commands.arguments import config_parser
from recipe_gkd.config.load import read_config
from recipe_gkd.config.stored import stored_config
from recipe_gkd.diagnostics.exit_messages import leave_dead_streams, report_error, report_saved_stop, report_stop
from recipe_gkd.errors import CheckpointMismatch
from recipe_gkd.metrics.run_events import RunEvents
from recipe_gkd.runtime.closed_output import until_closed
from recipe_gkd.runtime.run_log import start_logging
from recipe_gkd.runtime.signals import Terminated, raise_on_signals

log = logging.getLogger("recipe_gkd")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training command.

    Returns:
        Exit status: 0 if the training is complete, 1 after an error, 75 if it was saved between steps after SIGTERM,
        SIGUSR1, SIGHUP or ``trainer.save_before``. 128 + the number of the signal if a signal ended it at once.
    """
    try:
        return _run_command(argv)
    finally:
        leave_dead_streams()


def _run_command(argv: Sequence[str] | None) -> int:
    arguments = _parse(argv)
    hint: Callable[[], str] = str
    folder: RunFolder | None = None
    try:
        loaded = read_config(arguments.config_name, arguments.overrides, arguments.config_dir)
        if arguments.cfg:
            for text in loaded.warnings:
                print(f"warning: {text}", file=sys.stderr)
            with until_closed():
                print(OmegaConf.to_yaml(loaded.composed))
            return 0
        with run_folder(loaded.config) as folder:
            start_logging(folder.path / LOG)
            for text in loaded.warnings:
                log.warning("%s", text)
            raise_on_signals()
            from recipe_gkd.run import run  # imports Ray, which a mistake in the configuration does not wait for

            hint = partial(resume_hint, loaded.config.trainer, sys.argv[1:] if argv is None else argv)
            with RunEvents(folder.path) as events:
                stopped_by = events.stopped_by = run(loaded.config, stored_config(loaded.composed), folder)
    except Exception as error:  # noqa: BLE001 - the only handler that reports errors to the user
        # The command that would resume is this one, whose settings a mismatch refuses.
        is_resumable = folder is not None and folder.is_accepted and not isinstance(error, CheckpointMismatch)
        return report_error(error, hint() if is_resumable else "")
    except KeyboardInterrupt:
        return report_stop("interrupted", signal.SIGINT, hint())
    except Terminated as stop:
        return report_stop("terminated", stop.number, hint())
    return 0 if stopped_by is None else report_saved_stop(stopped_by, hint())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = config_parser("main_gkd", __doc__)
    parser.add_argument("--cfg", choices=["job"], help="validate the composed configuration, print it and exit")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())
