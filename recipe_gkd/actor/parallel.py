"""Process groups, this rank's place in the layout, and seeds."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from recipe_gkd.config.schema import MegatronConfig
from recipe_gkd.errors import ConfigError, DeadlineError

COLLECTIVE_GRACE_S = 60.0
"""Collectives of the actor wait longer than a weight sync by this: the other ranks are inside the export while rank 0
waits for the receivers, and its error, which names the receiver that is missing, must come before theirs."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """This rank's coordinates: tensor, pipeline and data parallel; and among the experts of a mixture.

    Megatron numbers ranks stage by stage. In a stage, the ranks of a tensor-parallel group are neighbors; for experts
    the same ranks are counted anew: neighbors divide each expert, then follow those that divide the set of experts.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    """Which of the ``ep_size`` equal parts of the experts this rank has."""
    ep_size: int
    etp_rank: int
    """Which of the ``etp_size`` parts of each of them."""
    etp_size: int

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def __str__(self) -> str:
        experts = f"expert {self.ep_size} x expert tensor {self.etp_size}"
        return f"tensor {self.tp_size} x pipeline {self.pp_size} x data {self.dp_size}, {experts}"


def check_world_size(config: MegatronConfig, world_size: int) -> None:
    """Raise :class:`ConfigError` if whole copies of the model do not fill ``world_size`` ranks."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    if world_size % (tp * pp):
        raise ConfigError(
            f"{world_size} actor ranks cannot hold whole copies of a model that takes tensor {tp} x pipeline {pp} = "
            f"{tp * pp} ranks; start a multiple of that, or change actor_rollout_ref.actor.megatron"
        )
    ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size or tp
    if world_size % (etp * ep * pp):
        raise ConfigError(
            f"{world_size} actor ranks cannot hold whole sets of experts that take expert tensor {etp} x expert {ep} "
            f"x pipeline {pp} = {etp * ep * pp} ranks; start a multiple of that, or change "
            "actor_rollout_ref.actor.megatron"
        )


def find_store(address: tuple[str, int], *, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """The store at a known address, which rank 0 opens there unless torchrun or rank 0's own worker has done so.

    Raises :class:`DeadlineError` if it does not answer within ``timeout_s``.
    """
    host, port = address
    try:
        store, _, _ = next(
            dist.rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=timedelta(seconds=timeout_s))
        )
    except dist.DistError as error:
        raise DeadlineError(
            f"actor rank {rank} of {world_size}: not all ranks met at {host}:{port} within {timeout_s:g} s ({error}); "
            "find the rank that failed to start, check that this port is open between the machines, or raise "
            "actor_rollout_ref.nccl_timeout"
        ) from error
    return store


def meet(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Wait for all ranks at ``store``. Raises :class:`DeadlineError` that names those which have not come."""
    keys = [f"here/{other}" for other in range(world_size)]
    try:
        store.set(keys[rank], "")
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistError as error:
        missing: list[str] = []
        with contextlib.suppress(dist.DistError):  # rank 0, whose process has the store, may be gone
            missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        raise DeadlineError(
            f"actor rank {rank} of {world_size}: rank {', '.join(missing) or '0'} did not come to the meeting of all "
            f"ranks within {timeout_s:g} s ({error}); find out why it failed to start, or raise "
            "actor_rollout_ref.nccl_timeout"
        ) from error


def init_parallel(
    config: MegatronConfig,
    *,
    rank: int,
    world_size: int,
    store: dist.Store,
    device: torch.device,
    timeout_s: float,
    seed: int,
) -> Layout:
    """Make all process groups, once every rank has come to ``store``, for which it has ``timeout_s``.

    Every collective of every group gives up after ``timeout_s`` + ``COLLECTIVE_GRACE_S``.
    Raises :class:`DeadlineError` that names the ranks which have not come.
    """
    meet(store, rank, world_size, timeout_s)
    collective_timeout_s = timeout_s + COLLECTIVE_GRACE_S
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        create_gloo_process_groups=False,  # second ones beside NCCL's, for ways to save that are not used here
        distributed_timeout_minutes=collective_timeout_s / 60,  # only ever multiplied, so a fraction is fine
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return Layout(
        rank=rank,
        world_size=world_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        ep_size=mpu.get_expert_model_parallel_world_size(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        etp_size=mpu.get_expert_tensor_parallel_world_size(),
    )


def tensor_group(layout: Layout) -> ProcessGroup | None:
    """The group that divides the vocabulary; None if nothing is divided."""
    return mpu.get_tensor_model_parallel_group() if layout.tp_size > 1 else None


def leave_parallel() -> None:
    """Undo :func:`init_parallel`, so that the process may join another layout."""
    mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
