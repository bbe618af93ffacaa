"""Requirements of workers that take turns on the same devices: the hybrid engine, and a teacher that sleeps."""

from __future__ import annotations

from collections.abc import Iterator

from recipe_gkd.config.keys import HYBRID, TEACHER
from recipe_gkd.config.schema import Config
from recipe_gkd.config.staleness import staleness_bound
from recipe_gkd.errors import ConfigError


def hybrid_problems(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each value that cannot work with the hybrid engine."""
    if not config.actor_rollout_ref.hybrid_engine:
        return
    if staleness_bound(config.trainer) > 0:
        yield ConfigError(
            f"{HYBRID}=true with trainer.scheduler={config.trainer.scheduler}: actor and rollout engines take turns on "
            "the same devices, so generation and training cannot overlap",
            remedy=f"set trainer.scheduler=sync, or {HYBRID}=false",
            keys=(HYBRID, "trainer.scheduler"),
        )
    if config.trainer.device == "cuda":
        yield from hybrid_cuda_problems(config)


def hybrid_cuda_problems(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each value that cannot work if actor and rollout engines share CUDA devices.

    With ``trainer.device=auto`` the device is only known after the connection to Ray.
    """
    if not config.actor_rollout_ref.hybrid_engine:
        return
    if config.actor_rollout_ref.rollout.weight_transport == "collective":
        yield ConfigError(
            f"{HYBRID}=true with actor_rollout_ref.rollout.weight_transport=collective: NCCL does not connect two "
            "processes on one GPU",
            remedy="set it to auto or ipc",
            keys=(HYBRID, "actor_rollout_ref.rollout.weight_transport"),
        )
    if config.trainer.nnodes > 1:
        yield ConfigError(
            f"{HYBRID}=true with trainer.nnodes={config.trainer.nnodes} on CUDA: weights reach the engines through the "
            "memory of one node",
            remedy=f"set trainer.nnodes=1, or {HYBRID}=false",
            keys=(HYBRID, "trainer.nnodes"),
        )


def teacher_sleep_problems(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each value that cannot work with a teacher that sleeps between batches."""
    teacher = config.actor_rollout_ref.teacher
    if not teacher.sleep_between_batches:
        return
    if staleness_bound(config.trainer) > 0:
        yield ConfigError(
            f"{TEACHER}.sleep_between_batches=true with trainer.scheduler={config.trainer.scheduler}: the stages "
            "overlap, so the teacher has no time to sleep",
            remedy="set trainer.scheduler=sync, or sleep_between_batches=false",
            keys=(f"{TEACHER}.sleep_between_batches", "trainer.scheduler"),
        )
    if teacher.backend != "zmq":
        yield ConfigError(
            f"{TEACHER}.sleep_between_batches=true with {TEACHER}.backend={teacher.backend}: only a teacher service "
            "can sleep",
            remedy="set sleep_between_batches=false",
            keys=(f"{TEACHER}.sleep_between_batches", f"{TEACHER}.backend"),
        )
