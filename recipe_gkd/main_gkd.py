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
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from recipe_gkd.checkpoints import Progress, find_checkpoint, read_progress
from recipe_gkd.cli import config_parser
from recipe_gkd.cluster import choose_device, ray_cluster
from recipe_gkd.config import Config, load_config
from recipe_gkd.config.load import compose_config
from recipe_gkd.data import PromptData, PromptLoader, read_table
from recipe_gkd.errors import ConfigError, DataError, GkdError
from recipe_gkd.preflight import Student, meet_teacher, read_student, with_model_path
from recipe_gkd.rewards import RewardItems, RewardScorer
from recipe_gkd.trainer import Trainer
from recipe_gkd.validation import Validation, read_validation
from recipe_gkd.workers import start_workers
from teacher.client import TeacherClient
from teacher.errors import TeacherError
from teacher.records import TeacherInfo

log = logging.getLogger("recipe_gkd")


class Terminated(BaseException):
    """SIGTERM, on its way up to :func:`main`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 trained to the end, 1 an error, 130 Ctrl-C, 143 SIGTERM."""
    arguments = _parse(argv)
    try:
        config = load_config(arguments.config_name, arguments.overrides, arguments.config_dir)
        composed = OmegaConf.to_yaml(compose_config(arguments.config_name, arguments.overrides, arguments.config_dir))
        if arguments.cfg:
            print(composed)
            return 0
        check_outputs(config)
        _start_logging(_folder(config))
        signal.signal(signal.SIGTERM, _terminate)
        run(config, composed)
    except (GkdError, TeacherError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Terminated) as stop:
        interrupted = isinstance(stop, KeyboardInterrupt)
        print(f"\n{'interrupted' if interrupted else 'terminated'}; complete checkpoints are kept", file=sys.stderr)
        return 128 + (signal.SIGINT if interrupted else signal.SIGTERM)
    return 0


def run(config: Config, composed: str) -> None:
    """First all that needs no process, so that what is wrong is said at once; then Ray, the workers, the training.

    ``composed``: the configuration as YAML, to be kept beside what the run writes.
    """
    student = read_student(config)
    config = with_model_path(config, student.path)
    table = read_table(config.data.train_files, config.data.prompt_key)
    teacher = config.actor_rollout_ref.teacher
    with TeacherClient(teacher.server_ip, teacher.server_port, timeout_s=teacher.timeout_s) as client:
        info = meet_teacher(client, student, config)
        log.info(
            "student %s; teacher %s, top %d of %d ids", student.path, info.model_name, info.n_logprobs, info.vocab_size
        )
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
        (_folder(config) / "config.yaml").write_text(composed)
        items = _items(config, data, student)
        with _scorer(config) as scorer, ray_cluster(config):
            training = _train(config, client, info, loader, progress, checkpoint, scorer, items, validation)
            asyncio.run(_until_sigterm(training))


def _items(config: Config, data: PromptData, student: Student) -> RewardItems | None:
    """What the reward function is given of the training data; None: its answers are not judged.

    They are if a loss needs it, or else if the data has what answers are compared with: then rewards are measured.
    """
    if config.custom_reward_function.path is None:
        return None
    try:
        return RewardItems(data, config.data, student.tokenizer)
    except DataError as error:
        if config.gkd.use_rl_loss:
            raise
        log.info("training answers are not judged: %s", error)
        return None


def _scorer(config: Config) -> AbstractContextManager[RewardScorer | None]:
    function = config.custom_reward_function
    return nullcontext() if function.path is None else RewardScorer(function)


async def _train(
    config: Config,
    client: TeacherClient,
    teacher: TeacherInfo,
    loader: PromptLoader,
    progress: Progress,
    checkpoint: Path | None,
    scorer: RewardScorer | None,
    items: RewardItems | None,
    validation: Validation | None,
) -> None:
    device = choose_device(config.trainer.device)
    total_steps = loader.last_step(progress.prompts_trained, progress.step)
    async with start_workers(config, device, total_steps=total_steps, stop_token_ids=teacher.eos_token_ids) as workers:
        trainer = Trainer(config, workers, client, loader, progress, scorer, items, validation)
        if checkpoint is not None:
            await trainer.call_actors("load_checkpoint", str(checkpoint.absolute() / "actor"))
            log.info("resumed from %s", checkpoint)
        await trainer.fit()


async def _until_sigterm(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; SIGTERM cancels it, so that it closes what it opened, and then raises :class:`Terminated`."""
    task = asyncio.ensure_future(work)
    terminated = asyncio.Event()

    def stop() -> None:
        terminated.set()
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)  # after ray.init, which sets one of its own
    try:
        await task
    except asyncio.CancelledError:
        if terminated.is_set():
            raise Terminated from None
        raise


def _terminate(*_: object) -> NoReturn:
    raise Terminated


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


def _start_logging(folder: Path) -> None:
    """Everything to ``run.log``; to the console what a person wants to see while it runs."""
    console, file = logging.StreamHandler(), logging.FileHandler(folder / "run.log")
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
