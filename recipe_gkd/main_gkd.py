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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import OmegaConf

from recipe_gkd.config import Config, load_config
from recipe_gkd.config.load import compose_config
from recipe_gkd.errors import GkdError
from teacher.errors import TeacherError

log = logging.getLogger("recipe_gkd")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 trained to the end, 1 an error, 130 Ctrl-C, 143 SIGTERM."""
    arguments = _parse(argv)
    logging.basicConfig(format="%(asctime)s %(levelname).1s %(name)s: %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("recipe_gkd").setLevel(logging.INFO)
    try:
        if arguments.cfg:
            print(OmegaConf.to_yaml(compose_config(arguments.config_name, arguments.overrides, arguments.config_dir)))
            return 0
        run(load_config(arguments.config_name, arguments.overrides, arguments.config_dir))
        return 0
    except (GkdError, TeacherError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; checkpoints written so far are kept", file=sys.stderr)
        return 128 + signal.SIGINT
    except _Terminated:
        print("\nterminated; checkpoints written so far are kept", file=sys.stderr)
        return 128 + signal.SIGTERM


def run(config: Config) -> None:
    """Everything that needs no process first, so that what is wrong is said at once; then Ray, workers, training."""
    from recipe_gkd.checkpoints import Progress, find_checkpoint, read_progress
    from recipe_gkd.data import PromptData, PromptLoader
    from recipe_gkd.preflight import meet_teacher, read_student
    from teacher.client import TeacherClient

    student = read_student(config)
    data = PromptData(config.data.train_files, config.data, student.tokenizer)
    trainer = config.trainer
    loader = PromptLoader(data, config.data, n=config.actor_rollout_ref.rollout.n, epochs=trainer.total_epochs,
                          max_steps=trainer.total_training_steps)
    progress = Progress(0, 0, len(data), config.data.seed, config.data.shuffle)
    if checkpoint := find_checkpoint(config):
        progress = read_progress(checkpoint, expected=progress)
    teacher = config.actor_rollout_ref.teacher
    with TeacherClient(teacher.server_ip, teacher.server_port, timeout_s=teacher.timeout_s) as client:
        info = meet_teacher(client, student, config)
        log.info("student %s, teacher %s (top %d of %d ids), %d prompts, steps %d to %d", student.path, info.model,
                 info.n_logprobs, info.vocab_size, len(data), progress.step,
                 progress.step + loader.steps_from(progress.prompts_trained))
        with _sigterm_ends_it():
            asyncio.run(_train(config, client, loader, progress, checkpoint))


async def _train(config, client, loader, progress, checkpoint) -> None:  # type: ignore[no-untyped-def]
    from recipe_gkd.cluster import ray_cluster
    from recipe_gkd.trainer import Trainer
    from recipe_gkd.workers import start_workers
