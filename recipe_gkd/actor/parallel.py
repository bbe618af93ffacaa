"""Process groups, this rank's place in the layout, and seeds."""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True)
class Layout:
    """This rank's coordinates: tensor, pipeline and data parallel."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def __str__(self) -> str:
        return f"tensor {self.tp_size} x pipeline {self.pp_size} x data {self.dp_size}"


def check_layout(config: MegatronConfig, world_size: int) -> None:
    """Raise :class:`ConfigError` for a layout that does not exist or is not supported."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    section = "actor_rollout_ref.actor.megatron"
    if config.context_parallel_size > 1:
        raise ConfigError(
            f"{section}.context_parallel_size is {config.context_parallel_size}: sequences are not divided over ranks; "
            "set it to 1, and use tensor parallelism with sequence_parallel=true for long sequences"
        )
    if config.expert_model_parallel_size > 1 or (config.expert_tensor_parallel_size or 1) > 1:
        raise ConfigError(
            f"{section}.expert_model_parallel_size is {config.expert_model_parallel_size}: only dense models are "
            "supported; set it to 1 and expert_tensor_parallel_size to null"
        )
    if world_size % (tp * pp):
        raise ConfigError(
            f"{world_size} ranks (trainer.nnodes x trainer.n_gpus_per_node) cannot hold whole copies of a model that "
            f"takes tensor {tp} x pipeline {pp} = {tp * pp} ranks; make it a multiple"
        )
    if config.virtual_pipeline_model_parallel_size and pp == 1:
        raise ConfigError(
            f"{section}.virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size > 1; set it to null"
        )
    if config.sequence_parallel and tp == 1:
        raise ConfigError(f"{section}.sequence_parallel needs tensor_model_parallel_size > 1; set it to false")
    if config.param_offload or config.grad_offload or config.optimizer_offload:
        raise ConfigError(f"{section}.*_offload: nothing is moved to the host between updates; set them to false")


def init_parallel(
    config: MegatronConfig,
    *,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    device: torch.device,
    timeout_s: float,
    seed: int,
) -> Layout:
    """Join the other ranks; every collective of every group made here gives up after ``timeout_s``.

    Raises :class:`DeadlineError` if the ranks do not all arrive within that time.
    """
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{master_addr}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistStoreError as error:
        raise DeadlineError(
            f"actor rank {rank} of {world_size}: not all ranks met at {master_addr}:{master_port} within "
            f"{timeout_s:g} s ({error}); look for the rank that failed to start, or raise actor_rollout_ref.nccl_timeout"
        ) from error
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        distributed_timeout_minutes=timeout_s / 60,  # only ever multiplied, so a fraction is fine
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
    )


def tensor_group(layout: Layout) -> ProcessGroup | None:
    """The group that divides the vocabulary; None if nothing is divided."""
    return mpu.get_tensor_model_parallel_group() if layout.tp_size > 1 else None


def leave_parallel() -> None:
    """Undo :func:`init_parallel`, so that the process may join another layout."""
    mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
