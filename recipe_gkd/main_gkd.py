"""The command: compose the configuration, check it, start Ray, distil.

python -m recipe_gkd.main_gkd --config-name on_policy_distill_trainer key=value ...
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from recipe_gkd.checkpoints import LINK, Progress, Start, find_checkpoint, read_best, read_progress
from recipe_gkd.cli import config_parser
from recipe_gkd.cluster import choose_device, ray_cluster
from recipe_gkd.config import Config, load_config
from recipe_gkd.config.load import compose_config
from recipe_gkd.data import PromptData, PromptLoader, read_table
from recipe_gkd.errors import ConfigError, DataError, GkdError
from recipe_gkd.preflight import Student, meet_teachers, read_student, with_model_path
from recipe_gkd.rewards import RewardItems, RewardScorer
from recipe_gkd.teachers import Teachers, open_teachers, read_routes
from recipe_gkd.trainer import Judging, Trainer
from recipe_gkd.validation import Validation, read_validation
from recipe_gkd.workers import start_workers
from teacher.errors import TeacherError

log = logging.getLogger("recipe_gkd")


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
        check_outputs(config)
        _start_logging(_folder(config))
        for number in _terminating():
            signal.signal(number, _terminate)
        run(config, composed)
    except (GkdError, TeacherError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _stopped("interrupted", signal.SIGINT)
    except Terminated as stop:
        return _stopped("terminated", stop.number)
    return 0


def _stopped(how: str, number: int) -> int:
    with suppress(OSError):  # the terminal may be gone
        print(f"\n{how}; complete checkpoints are kept", file=sys.stderr)
    return 128 + number


def run(config: Config, composed: str) -> None:
    """First all that needs no process, so that what is wrong is said at once; then Ray, the workers, the training.

    ``composed``: the configuration as YAML, to be kept beside what the run writes.
    """
    student = read_student(config)
    config = with_model_path(config, student.path)
    table = read_table(config.data.train_files, config.data.prompt_key)
    routes = read_routes(table, config.actor_rollout_ref.teacher)
    with open_teachers(config, routes) as teachers:
        log.info("student %s: %d ids, output layer of %d", student.path, student.n_tokens, student.vocab_size)
        stop_token_ids = meet_teachers(teachers.clients, student, config)
        data = PromptData(table, config.data, student.tokenizer, given_answers=config.gkd.sft_share > 0)
        loader = PromptLoader(
            data,
            config.data,
            n=config.actor_rollout_ref.rollout.n,
            epochs=config.trainer.total_epochs,
            max_steps=config.trainer.total_training_steps,
            sft_share=config.gkd.sft_share,
        )
        validation = read_validation(config, student.tokenizer)
        progress = Progress(0, 0, len(data), config.data.seed, config.data.shuffle)
        checkpoint = find_checkpoint(config)
        if checkpoint is not None:
            progress = read_progress(checkpoint, expected=progress)
        last_step = loader.last_step(progress.prompts_trained, progress.step)
        if progress.step == last_step:
            log.info("%s is at step %d of %d: there is nothing left to train", checkpoint, progress.step, last_step)
            return
        log.info("%d prompts, steps %d to %d", len(data), progress.step + 1, last_step)
        items = _items(config, data, student)
        best = read_best(_folder(config), config.trainer.best_metric, until=progress.step)
        (_folder(config) / "config.yaml").write_text(composed, encoding="utf-8")
        with _judging(config, items, validation) as judging, ExitStack() as opened:
            with _hangup_ignored():
                opened.enter_context(ray_cluster(config))
            training = _train(
                config,
                teachers,
                loader,
                Start(progress, checkpoint, best),
                judging,
                stop_token_ids=stop_token_ids,
                n_tokens=student.n_tokens,
            )
            asyncio.run(_until_terminated(training))


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
def _judging(config: Config, items: RewardItems | None, validation: Validation | None) -> Iterator[Judging | None]:
    """The reward function in its processes; None if nothing is to be judged."""
    if items is None and validation is None:
        yield None
    else:
        with RewardScorer(config.custom_reward_function) as scorer:
            yield Judging(scorer, items, validation)


async def _train(
    config: Config,
    teachers: Teachers,
    loader: PromptLoader,
    start: Start,
    judging: Judging | None,
    *,
    stop_token_ids: Sequence[int],
    n_tokens: int,
) -> None:
    device = choose_device(config.trainer.device)
    total_steps = loader.last_step(start.progress.prompts_trained, start.progress.step)
    async with start_workers(
        config, device, total_steps=total_steps, stop_token_ids=stop_token_ids, n_tokens=n_tokens
    ) as workers:
        trainer = Trainer(config, workers, teachers, loader, start, judging)
        if start.checkpoint is not None:
            await trainer.call_actors("load_checkpoint", str(start.checkpoint.absolute() / "actor"))
            log.info("resumed from %s", start.checkpoint)
        await trainer.fit()


async def _until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; a signal cancels it, so that it closes what it opened, and then raises :class:`Terminated`."""
    task = asyncio.ensure_future(work)
    got: list[int] = []

    def stop(number: int) -> None:
        if not got:  # a terminal that goes away may say so twice, which must not disturb the closing
            task.cancel()
        got.append(number)

    for number in _terminating():  # after ray.init, which sets handlers of its own
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if got:
            raise Terminated(got[0]) from None
        raise


def _terminating() -> list[signal.Signals]:
    """The signals that end the run in order; not one that is ignored, as SIGHUP is by nohup."""
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


def _folder(config: Config) -> Path:
    return Path(config.trainer.default_local_dir).expanduser()


def check_outputs(config: Config) -> None:
    """Every file that the run will write can be written: else that would be told when it is, perhaps after hours."""
    outputs = {
        "trainer.default_local_dir": _folder(config) / "run.log",
        "trainer.trace_file": config.trainer.trace_file,
        "ray_init.timeline_json_file": config.ray_init.timeline_json_file,
    }
    for key, path in outputs.items():
        if path is None:
            continue
        file = Path(path).expanduser()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{key}: {file} cannot be written: {error}; choose another place") from error
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ConfigError(f"{key}: {file} cannot be written: it is a folder or protected; choose another place")
    link = _folder(config) / LINK
    if config.trainer.best_metric is not None and link.exists() and not link.is_symlink():
        raise ConfigError(
            f"trainer.best_metric={config.trainer.best_metric}: {link} is to be a link to the best checkpoint, and "
            "something else has that name; rename it, or choose another trainer.default_local_dir"
        )


def _start_logging(folder: Path) -> None:
    """Everything to ``run.log``; to the console what a person wants to see while it runs."""
    console, file = logging.StreamHandler(), logging.FileHandler(folder / "run.log", encoding="utf-8")
    console.addFilter(lambda record: record.levelno >= logging.WARNING or record.name != "recipe_gkd.weights.sync")
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
