"""Jobs about states that leave the device. Each runs on every rank and returns the values to compare."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import pytest
import torch
from torch import Tensor

from recipe_gkd.actor.offload import distinct_storages
from recipe_gkd.commands.gpu_smoke.tiny_actor import exported
from recipe_gkd.config import Config
from recipe_gkd.config.schema.actor import ActorState
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import WorkerError
from tests._support.tiny_models import started, update

STATES: tuple[ActorState, ...] = ("params", "grads", "optimizer")


class Result(NamedTuple):
    """Result of a training.

    Attributes:
        metrics: Metrics of each update that the memory does not change.
        weights: Exported weights after each update; empty on other ranks than 0.
        states: Weights and optimizer state of this rank after the training.
    """

    metrics: list[dict[str, float]]
    weights: list[dict[str, Tensor]]
    states: list[Tensor]


def train(
    rank: int, world_size: int, port: int, config: Config, batches: Sequence[Sequence[Sample]], path: Path | None
) -> Result:
    """Run an update on each batch, export the weights after each, and save a checkpoint after the second."""
    with started(rank, world_size, port, config) as actor:
        _assert_offloaded(actor)
        metrics, weights = [], []
        for step, batch in enumerate(batches):
            metrics.append(_comparable(update(actor, batch, step)))
            _assert_offloaded(actor)
            weights.append(exported(actor))
            _assert_offloaded(actor)
            if path is not None and step == 1:
                actor.save_checkpoint(path)
                _assert_offloaded(actor)
        actor.finish_saves()
        return Result(metrics, weights, _states(actor))


def resume(rank: int, world_size: int, port: int, config: Config, path: Path, batch: list[Sample]) -> Result:
    """Load a checkpoint of the second update, and run the third."""
    with started(rank, world_size, port, config) as actor:
        assert actor.load_checkpoint(path) == 2
        _assert_offloaded(actor)
        metrics = [_comparable(update(actor, batch, 2))]
        return Result(metrics, [exported(actor)], _states(actor))


def save_before_update(rank: int, world_size: int, port: int, config: Config, folder: Path) -> list[dict[str, Tensor]]:
    """Save a checkpoint and a Hugging Face folder before the first update, and load the checkpoint."""
    with started(rank, world_size, port, config) as actor:
        actor.save_checkpoint(folder / "checkpoint")
        actor.save_hf(folder / "hf")
        before = exported(actor)
        actor.load_checkpoint(folder / "checkpoint")
        _assert_offloaded(actor)
        return [before, exported(actor)]


def train_with_faults(
    rank: int, world_size: int, port: int, config: Config, batches: list[list[Sample]]
) -> tuple[list[WorkerError], Result]:
    """Run an update on each batch, after an update that fails.

    The failures: the loss is not finite; the optimizer state cannot return; the host copy cannot be written, after the
    second step.

    Returns:
        Errors of the failures, and the result.
    """
    with started(rank, world_size, port, config) as actor:
        errors = []
        with patch.object(actor.updater, "loss", _not_finite(actor.updater.loss)):
            errors.append(_error(actor, batches[0], 0))
        _assert_offloaded(actor)
        metrics = [_comparable(update(actor, batches[0], 0))]
        copy = actor.backend.states.host_copy("optimizer")
        with patch.object(copy, "read", side_effect=torch.OutOfMemoryError("out of memory")):
            errors.append(_error(actor, batches[1], 1))
        _assert_offloaded(actor)
        with _small_files():
            errors.append(_error(actor, batches[1], 1))
        metrics.append(_comparable(update(actor, batches[2], 2)))
        _assert_offloaded(actor)
        return errors, Result(metrics, [exported(actor)], _states(actor))


def _error(actor: Any, batch: list[Sample], step: int) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        update(actor, batch, step)
    return caught.value


def _not_finite(loss: Any) -> Any:
    def compute(student: Any, batch: Any) -> Any:
        losses = loss(student, batch)
        infinite = losses.sums["actor/loss"] + torch.inf
        return replace(losses, loss_T=losses.loss_T * torch.nan, sums=losses.sums | {"actor/loss": infinite})

    return compute


@contextmanager
def _small_files() -> Iterator[None]:
    """Limit the size of files to 1 KiB, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def measure_memory(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample]
) -> dict[ActorState, tuple[int, int]]:
    """Return the bytes of each state, and by how many bytes the process's resident memory drops when it leaves."""
    with started(rank, world_size, port, config) as actor:
        update(actor, batch, 0)
        drops = {}
        for state in STATES:
            with actor.backend.states.on_device(state, read_only=True):
                n_bytes, before = n_bytes_on_device(actor, state), _resident_bytes()
            drops[state] = n_bytes, before - _resident_bytes()
        return drops


def measure_gpu_memory(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample]
) -> dict[ActorState, tuple[int, int, bool]]:
    """Return the bytes of each state, by how many bytes the allocated memory drops, and if its copy is pinned."""
    with started(rank, world_size, port, config) as actor:
        update(actor, batch, 0)
        drops = {}
        for state in filter(actor.backend.states.is_offloaded, STATES):
            with actor.backend.states.on_device(state, read_only=True):
                n_bytes, before = n_bytes_on_device(actor, state), torch.cuda.memory_allocated()
            copy = actor.backend.states.host_copy(state)
            is_pinned = copy is None or all(block.is_pinned() for block in copy.blocks)
            drops[state] = n_bytes, before - torch.cuda.memory_allocated(), is_pinned
        return drops


def log_probs(
    rank: int, world_size: int, port: int, config: Config, sequences: list[list[int]], n_token_ids: int | None
) -> list[list[float]]:
    """Return the log-probabilities of each sequence."""
    with started(rank, world_size, port, config, n_token_ids=n_token_ids) as actor:
        result = actor.log_probs([(ids[:1], ids[1:]) for ids in sequences])
        _assert_offloaded(actor)
        return result


def n_bytes_on_device(actor: Any, state: ActorState) -> int:
    """Return the bytes of a state that are in the memory of the device."""
    return sum(n_bytes for _, n_bytes in distinct_storages(actor.backend.state_tensors(state), actor.device))


def _assert_offloaded(actor: Any) -> None:
    """Check that exactly the offloaded states are away. Optimizer state and gradients may not exist yet."""
    for state in STATES:
        is_there = bool(n_bytes_on_device(actor, state))
        assert not (is_there and actor.backend.states.is_offloaded(state)), f"{state} did not leave"
        assert is_there or state != "params" or actor.backend.states.is_offloaded(state), f"{state} left"


def _states(actor: Any) -> list[Tensor]:
    backend = actor.backend
    with backend.states.on_device("params", "optimizer", read_only=True):
        return [tensor.clone().cpu() for state in ("params", "optimizer") for tensor in backend.state_tensors(state)]


def _comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
