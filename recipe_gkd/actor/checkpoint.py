"""Save the state of training with Megatron's ``dist_checkpointing``, and restore it in that layout or another."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from recipe_gkd.actor.parallel import Layout
from recipe_gkd.actor.shape import ModelShape
from recipe_gkd.actor.writer_results import install_queue
from recipe_gkd.errors import CheckpointError, DeadlineError

# The optimiser's default sharding cannot be saved (dist_checkpointing/mapping.py:134); this one moves to any layout.
OPTIMIZER_SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The parts of an actor that a checkpoint holds, apart from the number of the step."""

    chunks: Sequence[GPTModel]
    optimizer: MegatronOptimizer
    shape: ModelShape
    layout: Layout
    dtype: str

    @property
    def optimizer_kind(self) -> dict[str, Any]:
        distributed = isinstance(self.optimizer.chained_optimizers[0], DistributedOptimizer)
        return {"use_distributed_optimizer": distributed, "dtype": self.dtype}


class StateWriter:
    """Saves, in the background if wished; one background save at a time."""

    def __init__(self) -> None:
        self._queue = AsyncCallsQueue(persistent=False)  # the persistent worker counts GPUs, and hangs without any

    def save(self, path: Path, state: TrainingState, step: int, contents: Sequence[str], *, background: bool) -> None:
        """Collective. In the background the checkpoint is complete only once :meth:`finish` has returned."""
        if state.layout.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        dist.barrier()
        install_queue()
        sharded = _model_state(state)
        if "optimizer" in contents:
            sharded["optimizer"] = state.optimizer.sharded_state_dict(
                dict(sharded), is_loading=False, metadata=OPTIMIZER_SHARDING
            )
        if "extra" in contents:
            sharded |= {"step": step, "rng": _rng_state(state.layout)}
        sharded["about"] = _about(state, contents)
        request = dist_checkpointing.save(
            sharded,
            str(path),
            get_default_save_sharded_strategy("torch_dist"),
            async_sharded_save=background,
            content_metadata=OPTIMIZER_SHARDING,
        )
        if background:
            self._queue.schedule_async_request(request)

    def finish(self, timeout_s: float) -> None:
        """Collective: wait for the background save, if there is one; :class:`DeadlineError` after ``timeout_s``."""
        if not self._queue.get_num_unfinalized_calls():
            return
        for call in self._queue.async_calls:  # Megatron itself joins its forked writers without a deadline
            if (writer := call.async_caller.process) is None:
                continue
            writer.join(timeout_s)
            if writer.is_alive():
                raise DeadlineError(
                    f"the background save of a checkpoint did not finish within {timeout_s:g} s; look at the disk, or "
                    "raise actor_rollout_ref.actor.timeout_s"
                )
        self._queue.maybe_finalize_async_calls(blocking=True)

    def finish_if_written(self) -> bool:
        """Collective: complete the background save if all ranks have written it; whether none is left open."""
        self._queue.maybe_finalize_async_calls(blocking=False)
        return not self._queue.get_num_unfinalized_calls()


def load(path: Path, state: TrainingState, contents: Sequence[str]) -> int:
    """Collective: fill ``state`` from a checkpoint of any layout; return its step (0 without `extra` in ``contents``).

    Raises :class:`CheckpointError` if it is missing or incomplete, is of another model, or lacks what is asked for.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise CheckpointError(f"{path} is no complete checkpoint of the actor (it has no metadata.json); take another")
    common = dist_checkpointing.load_common_state_dict(str(path))
    about = common["about"]
    _check_fits(path, about, state, contents)

    sharded = _model_state(state)
    if "optimizer" in contents:
        if state.optimizer_kind["use_distributed_optimizer"]:
            _allocate_adam_state(state.optimizer)
        sharded["optimizer"] = state.optimizer.sharded_state_dict(
            dict(sharded), is_loading=True, metadata=OPTIMIZER_SHARDING
        )
    same_layout = about["layout"] == str(state.layout)
    if "extra" in contents and same_layout:
        sharded["rng"] = _rng_state(state.layout)
    loaded = dist_checkpointing.load(sharded, str(path), get_default_load_sharded_strategy(str(path)))

    for number, chunk in enumerate(state.chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
    if "optimizer" in contents:
        state.optimizer.load_state_dict(loaded["optimizer"])
    else:
        state.optimizer.reload_model_params()  # its fp32 copies are still those of the weights before
    if "extra" in contents and same_layout:
        _restore_rng(loaded["rng"])
    return int(common["step"]) if "extra" in contents else 0


def _about(state: TrainingState, contents: Sequence[str]) -> dict[str, Any]:
    return {
        "model": dataclasses.asdict(state.shape),
        "layout": str(state.layout),
        "contents": list(contents),
        "optimizer_kind": state.optimizer_kind,
    }


def _check_fits(path: Path, about: dict[str, Any], state: TrainingState, contents: Sequence[str]) -> None:
    own = dataclasses.asdict(state.shape)
    if differing := [f"{k}: {v} there, {own[k]} here" for k, v in about["model"].items() if own[k] != v]:
        raise CheckpointError(f"{path} is a checkpoint of another model ({'; '.join(differing)})")
    if missing := [part for part in contents if part not in about["contents"]]:
        raise CheckpointError(
            f"{path} has no {', '.join(missing)}, only {', '.join(about['contents'])}; change "
            "actor_rollout_ref.actor.checkpoint.load_contents"
        )
    if "optimizer" in contents and about["optimizer_kind"] != state.optimizer_kind:
        raise CheckpointError(
            f"{path}: its optimiser state was saved with {about['optimizer_kind']}, this run has "
            f"{state.optimizer_kind}; make them equal, or take optimizer out of "
            "actor_rollout_ref.actor.checkpoint.load_contents"
        )


def _model_state(state: TrainingState) -> dict[str, Any]:
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    return {
        f"model{number}": chunk.sharded_state_dict(metadata=OPTIMIZER_SHARDING | {"dp_cp_group": group})
        for number, chunk in enumerate(state.chunks)
    }


def _rng_state(layout: Layout) -> ShardedObject:
    """One entry for each rank: those that share experts draw differently."""
    states = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", states, (layout.world_size,), (layout.rank,))


def _restore_rng(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def _allocate_adam_state(optimizer: MegatronOptimizer) -> None:
    """torch's AdamW makes its state at the first step, but DistributedOptimizer reads it before a load fills it."""
    for part in optimizer.chained_optimizers:
        adam = part.optimizer
        if not isinstance(adam, torch.optim.AdamW):
            continue  # Transformer Engine's and Apex's are allocated by Megatron
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
