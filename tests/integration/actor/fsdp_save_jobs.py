"""Checkpoint jobs of the FSDP backend for the worker pool. Each runs on every rank."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest import mock

import psutil
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from recipe_gkd.actor.fsdp import checkpoint_save
from recipe_gkd.actor.fsdp.checkpoint_state import sharded_state, trained_parameters
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import CheckpointError
from tests._support.tiny_models import started, update

State = dict[str, Tensor]


def train_and_save(
    rank: int, world_size: int, port: int, config: Config, first: list[Sample], second: list[Sample], path: Path
) -> tuple[State, dict[str, float], State]:
    """Run an update, save a checkpoint, and run another update before the save is complete.

    Returns:
        State at the save, and metrics and state of the second update.
    """
    with started(rank, world_size, port, config) as actor:
        update(actor, first, 0)
        state = complete_state(actor)
        actor.save_checkpoint(path)
        metrics = update(actor, second, 1)
        actor.finish_saves()
        return state, metrics, complete_state(actor)


def load_and_save(
    rank: int, world_size: int, port: int, config: Config, path: Path, batch: list[Sample], copy: Path
) -> tuple[int, State, dict[str, float], State]:
    """Load a checkpoint, save it to ``copy``, and run an update.

    Returns:
        The loaded step, the loaded state, and metrics and state of the update.
    """
    with started(rank, world_size, port, config) as actor:
        torch.manual_seed(rank)  # differs from the saved state
        actor.backend.model.module.unshard()  # as after a forward pass without a backward pass
        step = actor.load_checkpoint(path)
        state = complete_state(actor)
        actor.save_checkpoint(copy)
        metrics = update(actor, batch, 1)
        actor.finish_saves()
        return step, state, metrics, complete_state(actor)


def complete_state(actor: Any) -> State:
    """Return copies of the complete weights and moments, the step counts, and the state of the random generator."""
    model = actor.backend.model
    tensors = sharded_state(model, with_optimizer=True)
    state = {name: cast(DTensor, tensor).full_tensor().cpu().clone() for name, tensor in tensors.items()}
    for name, parameter in trained_parameters(model).items():
        state[f"step of {name}"] = model.optimizer.state[parameter]["step"].cpu().clone()
    return state | {"random": torch.get_rng_state()}


def save_with_faults(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], path: Path, faults: dict[str, int]
) -> list[CheckpointError]:
    """Save with each of ``faults`` on its rank, then save to ``path / "good"``; return the errors.

    The faults are ``"killed"`` (the writer process kills itself) and ``"metadata"`` (the disk is full when rank 0
    writes the metadata).
    """
    errors = []
    with started(rank, world_size, port, config) as actor:
        update(actor, batch, 0)
        for fault, faulty_rank in faults.items():
            with _faulty_writer(fault, rank == faulty_rank), pytest.raises(CheckpointError) as caught:
                actor.save_checkpoint(path / fault)
                actor.finish_saves()
            errors.append(caught.value)
            assert not psutil.Process().children(), "no writer process may remain"
        actor.save_checkpoint(path / "good")
        actor.finish_saves()
    return errors


@contextmanager
def _faulty_writer(fault: str, is_faulty_rank: bool) -> Iterator[None]:
    def kill_itself_while_writing(path: Path, *_: Any) -> None:
        (path / "__incomplete.distcp").write_bytes(bytes(100))
        os.kill(os.getpid(), signal.SIGKILL)

    disk_full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    replaced = {"killed": ("write_shard", kill_itself_while_writing), "metadata": ("write_metadata", disk_full)}
    with mock.patch.object(checkpoint_save, *replaced[fault]) if is_faulty_rank else nullcontext():
        yield
