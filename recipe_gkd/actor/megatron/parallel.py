"""Megatron's process groups, this rank's coordinates in them, and random seeds."""

from __future__ import annotations

from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from recipe_gkd.actor.ranks import Layout, RankSpec, collective_timeout_s, join_ranks, leave_ranks
from recipe_gkd.config.keys import MEGATRON
from recipe_gkd.config.schema import Config, MegatronConfig
from recipe_gkd.errors import ConfigError

REMEDY = f"start a multiple of that, or change {MEGATRON}"


def check_world_size(config: MegatronConfig, world_size: int) -> None:
    """Check that complete copies of the model fill all ranks.

    Args:
        config: Parallel layout.
        world_size: Number of actor ranks.

    Raises:
        ConfigError: ``world_size`` is not a multiple of the ranks of one copy.
    """
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    cp = config.context_parallel_size
    if world_size % (tp * cp * pp):
        raise ConfigError(
            f"{world_size} actor ranks cannot hold complete copies of a model that needs tensor {tp} x context {cp} x "
            f"pipeline {pp} = {tp * cp * pp} ranks",
            remedy=REMEDY,
            keys=_keys("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"),
        )
    ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size or tp
    if world_size % (etp * ep * pp):
        raise ConfigError(
            f"{world_size} actor ranks cannot hold complete sets of experts that need expert tensor {etp} x expert "
            f"{ep} x pipeline {pp} = {etp * ep * pp} ranks",
            remedy=REMEDY,
            keys=_keys("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size"),
        )


def _keys(*names: str) -> tuple[str, ...]:
    return tuple(f"{MEGATRON}.{name}" for name in names)


def init_parallel(config: Config, spec: RankSpec) -> Layout:
    """Wait for all ranks, then create all process groups and seed the random generators.

    Args:
        config: Configuration of the run. ``nccl_timeout`` is the deadline of the rendezvous, ``data.seed`` the seed of
            torch and of Megatron's generators.
        spec: This process.

    Returns:
        Coordinates of this rank.

    Raises:
        DeadlineError: A rank did not reach the rendezvous. ``missing`` has its label.
    """
    join_ranks(config, spec)
    megatron = config.actor_rollout_ref.actor.megatron
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
        context_parallel_size=megatron.context_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=megatron.expert_tensor_parallel_size,
        create_gloo_process_groups=False,  # needed only by ways of saving that are not used here
        # Megatron only multiplies it, so a fraction works.
        distributed_timeout_minutes=collective_timeout_s(config, spec.device) / 60,
    )
    model_parallel_cuda_manual_seed(config.data.seed)
    return _read_layout(spec)


def _read_layout(spec: RankSpec) -> Layout:
    return Layout(
        rank=spec.rank,
        world_size=spec.world_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        cp_rank=mpu.get_context_parallel_rank(),
        cp_size=mpu.get_context_parallel_world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        ep_size=mpu.get_expert_model_parallel_world_size(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        etp_size=mpu.get_expert_tensor_parallel_world_size(),
    )


def tensor_group(layout: Layout) -> ProcessGroup | None:
    """Return the group that divides the vocabulary; None without tensor parallelism."""
    return mpu.get_tensor_model_parallel_group() if layout.tp_size > 1 else None


def context_group(layout: Layout) -> ProcessGroup | None:
    """Return the group that divides the sequences; None without context parallelism."""
    return mpu.get_context_parallel_group() if layout.cp_size > 1 else None


def destroy_parallel() -> None:
    """Destroy all process groups. The process can then call :func:`init_parallel` with another layout."""
    mpu.destroy_model_parallel()
    leave_ranks()
