"""Checkpoint and save jobs for the worker pool. Each runs on every rank and returns the values to compare."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipe_gkd.actor.checkpoint import hf_save
from recipe_gkd.actor.megatron import checkpoint_save, patches
from recipe_gkd.actor.megatron.checkpoint_state import sharded_state
from recipe_gkd.actor.megatron.megatron_model import MegatronModel
from recipe_gkd.actor.megatron.norms import RMSNorm
from recipe_gkd.commands.gpu_smoke.tiny_actor import exported
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import CheckpointError, GkdError
from tests._support.tiny_models import packed_logits, started, update, without_empty
from tests._support.waiting import PATIENCE_S

SHORT_COLLECTIVE_TIMEOUT_S = 3


def train_and_save(
    rank: int,
    world_size: int,
    port: int,
    config: Config,
    first: list[Sample],
    second: list[Sample],
    path: Path,
    folder: Path | None = None,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Run an update and save a checkpoint; return metrics and weights of a second update, the target of a resume.

    With ``folder``, the weights after the second update are also saved as a Hugging Face folder.
    """
    with started(rank, world_size, port, config) as actor:
        update(actor, first, 0)
        actor.save_checkpoint(path)
        metrics = update(actor, second, 1)
        actor.finish_saves()
        if folder is not None:
            actor.save_hf(folder)
        return metrics, exported(actor)


def resume_and_train(
    rank: int, world_size: int, port: int, config: Config, path: Path, batch: list[Sample]
) -> tuple[int, dict[str, float], dict[str, Tensor]]:
    """Load a checkpoint and run an update; return the loaded step, the metrics and the weights."""
    with started(rank, world_size, port, config) as actor:
        step = actor.load_checkpoint(path)
        return step, update(actor, batch, 1), exported(actor)


def save_before_update(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], path: Path
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Save a checkpoint before the first update; return metrics and weights of this update, the target of a resume."""
    with started(rank, world_size, port, config) as actor:
        actor.save_checkpoint(path)
        metrics = update(actor, batch, 1)
        actor.finish_saves()
        return metrics, exported(actor)


def exchange_with_extra_states(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], path: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Load a checkpoint into a model whose norms have extra states, as those of Transformer Engine; save and load that.

    Args:
        path: Folder of a checkpoint; ``path`` with the suffix ``.extra`` gets the other one.

    Returns:
        Weights after the first load, after an update, which is saved, and after the load into a model without them.
    """
    other = path.with_suffix(".extra")
    with _norms_with_extra_state(), started(rank, world_size, port, config) as actor:
        actor.load_checkpoint(path)
        loaded = exported(actor)
        update(actor, batch, 1)
        actor.save_checkpoint(other)
        updated = exported(actor)
        actor.finish_saves()
    with started(rank, world_size, port, config) as actor:
        actor.load_checkpoint(other)
        return loaded, updated, exported(actor)


@contextmanager
def _norms_with_extra_state() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RMSNorm, "get_extra_state", lambda self: torch.empty(0), raising=False)
        patch.setattr(RMSNorm, "set_extra_state", lambda self, state: None, raising=False)
        yield


def repeat_update(
    rank: int, world_size: int, port: int, config: Config, first: list[Sample], second: list[Sample], path: Path
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Save after an update, run two more, load the checkpoint and run them again; return the metrics of both times."""
    with started(rank, world_size, port, config) as actor:
        update(actor, first, 0)
        actor.save_checkpoint(path)
        want = [update(actor, batch, step) for step, batch in enumerate((second, first), start=1)]
        actor.load_checkpoint(path)
        return want, [update(actor, batch, step) for step, batch in enumerate((second, first), start=1)]


def load_gathered_state(
    rank: int, world_size: int, port: int, config: Config, first: list[Sample], second: list[Sample], path: Path
) -> tuple[tuple[int, int], int, int]:
    """Save with Megatron's functions for the optimizer state, as earlier versions did, and resume from it.

    A second update after the save must equal the same update after the load.

    Returns:
        Bytes that this version allocates for the state of a save and of a load, bytes that Megatron allocates for a
        save, and bytes of the float32 parameters.
    """
    cls = DistributedOptimizer
    own, own_load = cls.sharded_param_state_fully_reshardable, cls.load_parameter_state_from_fully_reshardable
    with started(rank, world_size, port, config) as actor:
        model = actor.backend.model
        _bytes_allocated(model, is_loading=False)  # before the first step, it allocates the optimizer state itself
        update(actor, first, 0)
        allocated = _bytes_allocated(model, is_loading=False), _bytes_allocated(model, is_loading=True)
        try:
            cls.sharded_param_state_fully_reshardable = own.__wrapped__
            gathered = _bytes_allocated(model, is_loading=False)
            actor.save_checkpoint(path)
        finally:
            cls.sharded_param_state_fully_reshardable = own
        want_metrics, want = update(actor, second, 1), exported(actor)
        assert actor.load_checkpoint(path) == 1 and cls.load_parameter_state_from_fully_reshardable is own_load
        assert update(actor, second, 1) == want_metrics | {"perf/max_memory_allocated_gb": ANY}
        weights = exported(actor)
        assert all(torch.equal(tensor, want[name]) for name, tensor in weights.items())
        return allocated, gathered, 4 * model.n_parameters


def _bytes_allocated(model: MegatronModel, *, is_loading: bool) -> int:
    with patches.on_host(), _Allocations() as allocations:
        sharded_state(model, with_optimizer=True, is_loading=is_loading)
    return allocations.n_bytes


class _Allocations(TorchDispatchMode):
    """Count of the bytes of new tensors, also of those that are freed again."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in inputs}
        for new in tree_leaves(result):
            if isinstance(new, Tensor) and new.untyped_storage().data_ptr() not in storages:
                self.n_bytes += new.untyped_storage().nbytes()
        return result


def load_with_error(rank: int, world_size: int, port: int, config: Config, path: Path) -> GkdError | None:
    """Return the error of loading a checkpoint."""
    with started(rank, world_size, port, config) as actor:
        try:
            actor.load_checkpoint(path)
        except GkdError as error:
            return error
        return None


def load_after_errors(
    rank: int, world_size: int, port: int, config: Config, damaged: list[Path], path: Path, batch: list[Sample]
) -> tuple[list[GkdError], GkdError, dict[str, float], dict[str, Tensor]]:
    """Load damaged checkpoints, try an update, then load a complete checkpoint and run an update.

    Returns:
        The errors of loading, the error of the first update, and metrics and weights of the last one.
    """
    with started(rank, world_size, port, config) as actor:
        errors = []
        for wrong in damaged:
            with pytest.raises(GkdError) as caught:
                actor.load_checkpoint(wrong)
            errors.append(caught.value)
        with pytest.raises(GkdError) as caught:
            update(actor, batch, 1)
        actor.load_checkpoint(path)
        return errors, caught.value, update(actor, batch, 1), exported(actor)


def save_with_faults(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], path: Path, faults: dict[str, int]
) -> list[CheckpointError | None]:
    """Save with each of ``faults`` on its rank, then save to ``path / "good"`` without a fault.

    See :func:`_faulty_writer` for the faults.

    Returns:
        The error of each faulty save.
    """
    failures: list[CheckpointError | None] = []
    with started(rank, world_size, port, config) as actor:
        update(actor, batch, 0)
        for fault, faulty_rank in faults.items():
            failure: CheckpointError | None = None
            actor.writer.timeout_s = 3.0 if fault == "hung" else 60.0
            with _faulty_writer(fault, rank == faulty_rank):
                try:
                    actor.save_checkpoint(path / fault)
                    while not actor.finish_saves(wait=False):
                        pass
                except CheckpointError as error:
                    failure = error
            failures.append(failure)
            assert not psutil.Process().children(), "no writer process may remain"
            assert actor.finish_saves()
        actor.writer.timeout_s = PATIENCE_S
        actor.save_checkpoint(path / "good")
        actor.finish_saves()
        return failures


@contextmanager
def _faulty_writer(fault: str, is_faulty_rank: bool) -> Iterator[None]:
    """Make writes fail on the faulty rank.

    Args:
        fault: ``"file too large"``: files are limited to 1 KiB; ``"killed"`` and ``"hung"``: the writer process kills
            or stops itself; ``"metadata"``: the disk is full when rank 0 writes the metadata.
    """
    originals = checkpoint_save.write_shard, checkpoint_save.write_metadata, hf_save.write_file

    def send_signal(number: int, *_: Any) -> None:
        os.kill(os.getpid(), number)

    def raise_disk_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fault == "file too large" and is_faulty_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    if fault in ("killed", "hung") and is_faulty_rank:
        number = signal.SIGKILL if fault == "killed" else signal.SIGSTOP
        checkpoint_save.write_shard = hf_save.write_file = partial(send_signal, number)
    if fault == "metadata":
        checkpoint_save.write_metadata = raise_disk_full
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        checkpoint_save.write_shard, checkpoint_save.write_metadata, hf_save.write_file = originals


def save_with_error(rank: int, world_size: int, port: int, config: Config, path: Path) -> CheckpointError | None:
    """Return the error of a save."""
    with started(rank, world_size, port, config) as actor:
        try:
            actor.save_checkpoint(path)
        except CheckpointError as error:
            return error
        return None


def save_slowly(rank: int, world_size: int, port: int, config: Config, batch: list[Sample], path: Path) -> str:
    """Save while the writers of rank 0 take longer than the timeout of a collective.

    Returns:
        The error of a collective that rank 0 reaches as late as that.
    """
    write_shard, write_file = checkpoint_save.write_shard, hf_save.write_file
    with started(rank, world_size, port, config) as actor:
        update(actor, batch)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_COLLECTIVE_TIMEOUT_S))
        if rank == 0:
            checkpoint_save.write_shard = partial(_call_late, write_shard)
            hf_save.write_file = partial(_call_late, write_file)
        try:
            actor.save_checkpoint(path / "checkpoint")
            actor.save_hf(path / "folder")
        finally:
            checkpoint_save.write_shard, hf_save.write_file = write_shard, write_file
        try:
            if rank == 0:
                time.sleep(SHORT_COLLECTIVE_TIMEOUT_S + 2)
            dist.barrier()
        except RuntimeError as error:
            return str(error)
        return ""


def _call_late(function: Any, *args: Any) -> Any:
    time.sleep(SHORT_COLLECTIVE_TIMEOUT_S + 2)
    return function(*args)


def save_hf(rank: int, world_size: int, port: int, config: Config, batch: list[Sample], path: Path) -> Tensor | None:
    """Run an update and save a Hugging Face folder; return the actor's logits after it."""
    with started(rank, world_size, port, config) as actor:
        update(actor, batch)
        actor.save_hf(path)
        return packed_logits(actor, without_empty(batch))


def save_hf_with_faults(rank: int, world_size: int, port: int, config: Config, path: Path) -> list[CheckpointError]:
    """Save a Hugging Face folder with two faults on rank 0, then without a fault; return the errors."""
    errors = []
    with started(rank, world_size, port, config) as actor:
        for fault, timeout_s in (("file too large", 60.0), ("hung", 3.0)):
            actor.writer.timeout_s = timeout_s
            with _faulty_writer(fault, rank == 0), pytest.raises(CheckpointError) as caught:
                actor.save_hf(path)
            errors.append(caught.value)
            assert not psutil.Process().children() and not path.exists()
        actor.writer.timeout_s = PATIENCE_S
        actor.save_hf(path)
    return errors
