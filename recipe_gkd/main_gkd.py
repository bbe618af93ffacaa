"""The command: compose the configuration, check it, start Ray, distil.

python -m recipe_gkd.main_gkd --config-name on_policy_distill_trainer key=value ...
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from recipe_gkd.checkpoints.folders import recover
from recipe_gkd.checkpoints.resume import ResumePoint, load_first_usable, resume_points
from recipe_gkd.checkpoints.run_folder import CONFIG, LOG, RunFolder, run_folder
from recipe_gkd.checkpoints.state import Progress, ResumeState
from recipe_gkd.checkpoints.store import forget_best, read_best
from recipe_gkd.commands.arguments import config_parser
from recipe_gkd.config import Config, load_config
from recipe_gkd.config.load import compose_config
from recipe_gkd.data.prompts import PromptData, PromptLoader, read_table
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import DataError, UnexpectedError
from recipe_gkd.preflight import Student, check_stop_ids, meet_teachers, read_student, with_model_path
from recipe_gkd.ray_cluster.connection import choose_device, ray_cluster
from recipe_gkd.rewards import RewardItems, RewardScorer
from recipe_gkd.runtime.threads import run_until
from recipe_gkd.teacher_routing import Teachers, open_teachers, read_routes
from recipe_gkd.trainer import RewardContext, Trainer
from recipe_gkd.validation import Validation, read_validation
from recipe_gkd.workers import Workers, start_workers

log = logging.getLogger("recipe_gkd")


LAST_RECOVERY_S = 10.0
"""Time that the removal of half a save may take at the end of a run."""
_SAME_REQUEST_S = 1.0
"""Signals within this time are one request: a terminal, ``timeout`` and wrapper scripts deliver it more than once."""
_FILE_ONLY = "file_only"
"""Attribute of a log record that is not for the console, such as one with a traceback."""


class Terminated(BaseException):
    """SIGTERM, or SIGHUP of a terminal that is gone, on its way up to :func:`main`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 trained to the end, 1 an error, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP."""
    arguments = _parse(argv)
    try:
        config = load_config(arguments.config_name, arguments.overrides, arguments.config_dir)
        composed = OmegaConf.to_yaml(compose_config(arguments.config_name, arguments.overrides, arguments.config_dir))
        if arguments.cfg:
            print(composed)
            return 0
        with run_folder(config) as folder:
            _start_logging(folder.path)
            _raise_on_signals()
            run(config, composed, folder)
    except Exception as error:  # noqa: BLE001 - the one place that reports it to the user
        return _failed(error)
    except KeyboardInterrupt:
        return _stopped("interrupted", signal.SIGINT)
    except Terminated as stop:
        return _stopped("terminated", stop.number)
    return 0


def _failed(error: Exception) -> int:
    """Print one error, whatever was raised; a traceback of the unexpected goes to ``run.log`` if there is one."""
    known = as_known_error(error, "outside the training")
    where = ""
    if isinstance(known, UnexpectedError):
        files = [handler.baseFilename for handler in logging.getLogger().handlers if hasattr(handler, "baseFilename")]
        if files:
            log.error("the run ends with an unexpected error", exc_info=known, extra={_FILE_ONLY: True})
            where = f"\nthe traceback is in {files[0]}"
        else:
            where = "\n" + "".join(traceback.format_exception(known)).rstrip()
    with suppress(OSError):  # the terminal may be gone
        print(f"\nerror: {known}{where}", file=sys.stderr)
    return 1


def _stopped(how: str, number: int) -> int:
    with suppress(OSError):  # the terminal may be gone
        print(f"\n{how}; complete checkpoints are kept", file=sys.stderr)
    return 128 + number


def run(config: Config, composed: str, folder: RunFolder) -> None:
    """Validate everything that needs no worker first, so that mistakes fail fast; then start Ray and train.

    ``composed``: the configuration as YAML, to be kept beside what the run writes.
    """
    student = read_student(config)
    config = with_model_path(config, student.path)
    table = read_table(config.data.train_files, config.data.prompt_key)
    routes = read_routes(table, config.actor_rollout_ref.teacher)
    with open_teachers(config, routes) as teachers:
        log.info("student %s: %d ids, output layer of %d", student.path, student.n_tokens, student.vocab_size)
        stop_token_ids = meet_teachers(teachers.clients, student, config)
        stops = check_stop_ids(config, student, stop_token_ids)
        data = PromptData(
            table, config.data, student.tokenizer, given_answers=config.gkd.sft_share > 0, stop_token_ids=stops
        )
        loader = PromptLoader(
            data,
            config.data,
            n=config.actor_rollout_ref.rollout.n,
            epochs=config.trainer.total_epochs,
            max_steps=config.trainer.total_training_steps,
            sft_share=config.gkd.sft_share,
        )
        validation = read_validation(config, student.tokenizer)
        fresh = Progress(
            step=0,
            prompts_trained=0,
            n_prompts=len(data),
            data_seed=config.data.seed,
            shuffle=config.data.shuffle,
            data_fingerprint=data.fingerprint,
            answers_fingerprint=data.answers_fingerprint,
        )
        recover(folder.path)
        points = resume_points(config, fresh)
        progress = points[0].progress if points else fresh
        last_step = loader.last_step(progress.prompts_trained, progress.step)
        if progress.step == last_step:
            log.info("%s is at step %d of %d: there is nothing left to train", points[0].folder, last_step, last_step)
            return
        log.info("%d prompts, steps %d to %d", len(data), progress.step + 1, last_step)
        items = _items(config, data, student)
        (folder.path / CONFIG).write_text(composed, encoding="utf-8")
        with _judging(config, items, validation) as reward_context, ExitStack() as opened:
            with _hangup_ignored():
                opened.enter_context(ray_cluster(config))
            _raise_on_signals()  # again: Ray sets a handler of its own
            training = _train(
                config,
                teachers,
                loader,
                points,
                fresh,
                reward_context,
                folder=folder,
                stop_token_ids=stop_token_ids,
                n_tokens=student.n_tokens,
            )
            try:
                asyncio.run(_until_terminated(training))
            finally:
                _recover_at_the_end(folder.path)


def _recover_at_the_end(root: Path) -> None:
    """Remove what actors may have gone on writing when the run ended. Never raises, to keep the error of the run."""

    def attempt() -> bool:
        try:
            recover(root)
        except OSError as error:
            log.warning("saves that were not completed may be left in %s: %s", root, error)
        return True

    if run_until(time.monotonic() + LAST_RECOVERY_S, [attempt]) != [True]:
        log.warning(
            "the disk of %s did not answer within %g s; saves that were not completed may be left there, and the next "
            "run removes them",
            root,
            LAST_RECOVERY_S,
        )


def _items(config: Config, data: PromptData, student: Student) -> RewardItems | None:
    """What the reward function is given of the training data; None: its answers are not judged.

    They are if a loss needs it, or else if they may be and the data has what answers are compared with: then rewards
    are measured.
    """
    function = config.custom_reward_function
    if function.path is None or not (function.on_training or config.gkd.use_rl_loss):
        return None
    try:
        return RewardItems(data, config.data, student.tokenizer, must_have_truth=config.gkd.use_rl_loss)
    except DataError as error:
        if config.gkd.use_rl_loss:
            raise
        log.info("training answers are not judged: %s", error)
        return None


@contextmanager
def _judging(config: Config, items: RewardItems | None, validation: Validation | None) -> Iterator[RewardContext | None]:
    """The reward function in its processes; None if nothing is to be judged."""
    if items is None and validation is None:
        yield None
    else:
        with RewardScorer(config.custom_reward_function) as scorer:
            yield RewardContext(scorer, items, validation)


async def _train(
    config: Config,
    teachers: Teachers,
    loader: PromptLoader,
    points: Sequence[ResumePoint],
    fresh: Progress,
    reward_context: RewardContext | None,
    *,
    folder: RunFolder,
    stop_token_ids: Sequence[int],
    n_tokens: int,
) -> None:
    """Start the workers, resume from the first of ``points`` that they can load, if there are any, and train."""

    def last_step(progress: Progress) -> int:
        return loader.last_step(progress.prompts_trained, progress.step)

    planned = last_step(points[0].progress if points else fresh)
    async with start_workers(
        config,
        choose_device(config.trainer.device),
        total_steps=planned,
        stop_token_ids=stop_token_ids,
        n_tokens=n_tokens,
    ) as workers:
        folder.accept()
        if points:
            start = await _resume(config, workers, points, folder.path)
        else:
            forget_best(folder.path)
            start = ResumeState(fresh)
        if (total := last_step(start.progress)) != planned:  # of another checkpoint than planned
            await workers.actors.call(
                "set_total_steps", total, timeout_s=config.actor_rollout_ref.actor.timeout_s, phase="resume"
            )
        await Trainer(config, workers, teachers, loader, start, reward_context).fit()


async def _resume(config: Config, workers: Workers, points: Sequence[ResumePoint], root: Path) -> ResumeState:
    async def load(path: str) -> None:
        timeout_s = config.actor_rollout_ref.actor.timeout_s
        await workers.actors.call("load_checkpoint", path, timeout_s=timeout_s, phase="load_checkpoint")

    point = await load_first_usable(points, load, may_skip=config.trainer.resume_mode == "auto")
    log.info("resumed from %s", point.folder)
    best = read_best(root, config.trainer.best_metric, until=point.progress.step)
    return ResumeState(point.progress, point.folder, best)


async def _until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; a signal cancels it, so that it closes what it opened, and is then raised.

    The first signal lets a checkpoint in the background be completed. A second one ends this wait, or cuts the closing
    of workers short; what remains takes seconds and ends all processes, whatever else is sent. Ctrl-C is raised as
    KeyboardInterrupt, others as :class:`Terminated`.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    got: list[tuple[int, float]] = []

    def stop(number: int) -> None:
        if got and (number == signal.SIGHUP or time.monotonic() - got[-1][1] < _SAME_REQUEST_S):
            return
        if not got:
            log.warning(
                "%s: the run ends in order; a second signal ends it without waiting", signal.Signals(number).name
            )
        got.append((number, time.monotonic()))
        task.cancel()

    numbers = [*_terminating(), *([signal.SIGINT] if signal.getsignal(signal.SIGINT) != signal.SIG_IGN else [])]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    loop.set_exception_handler(_log_background_error)
    try:
        await task
    except asyncio.CancelledError:
        if not got:
            raise
        raise (KeyboardInterrupt if got[0][0] == signal.SIGINT else Terminated(got[0][0])) from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


def _log_background_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what asyncio reports of tasks that nobody awaits to the file only; the console shows the run's own error."""
    log.error("%s", context.get("message"), exc_info=context.get("exception"), extra={_FILE_ONLY: True})


def _raise_on_signals() -> None:
    """Have the signals that end the run raise :class:`Terminated` in whatever this process does."""
    for number in _terminating():
        signal.signal(number, _terminate)


def _terminating() -> list[signal.Signals]:
    """Return the signals, besides SIGINT, that end the run in order, except ignored ones (SIGHUP under nohup)."""
    numbers = [signal.SIGTERM, signal.SIGHUP]
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def _hangup_ignored() -> Iterator[None]:
    """Processes that are started meanwhile, and those that they start, ignore SIGHUP.

    A terminal that goes away sends it to all of them, and the driver could no longer close them in order.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _terminate(number: int, _: object) -> NoReturn:
    raise Terminated(number)


def _start_logging(folder: Path) -> None:
    """Everything to ``run.log``; to the console what a person wants to see while it runs."""
    console, file = logging.StreamHandler(), logging.FileHandler(folder / LOG, encoding="utf-8")
    console.addFilter(lambda record: record.levelno >= logging.WARNING or record.name != "recipe_gkd.weight_sync.synchronizer")
    console.addFilter(lambda record: not hasattr(record, _FILE_ONLY))
    logging.raiseExceptions = False  # a disk that is full must not print a traceback for each line
    logging.basicConfig(
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        level=logging.WARNING,
        handlers=[console, file],
        force=True,
    )
    log.setLevel(logging.INFO)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = config_parser("main_gkd", __doc__)
    parser.add_argument("--cfg", choices=["job"], help="check the composed configuration, print it and exit")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
