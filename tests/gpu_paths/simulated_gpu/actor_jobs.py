"""Jobs for the ranks of an actor on the simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from recipe_gkd.config import Config
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import WorkerError
from tests._support.tiny_models import started, update
from tests.gpu_paths.simulated_gpu import cuda_module

UNLIMITED = 1 << 62


def refuse_waits(rank: int, world_size: int, port: int, config: Config, batch: list[Sample]) -> dict[str, float]:
    """Return the metrics of an update whose micro-batches must not wait for the GPU."""
    with started(rank, world_size, port, config) as actor:
        run: Callable[..., Any] = actor.backend.accumulate

        def accumulate(*args: Any, **named: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return run(*args, **named)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        update(actor, batch, 0)  # allocates and builds tables
        for chunk in getattr(actor.backend.model, "chunks", ()):
            _allow_waits_at_the_end(chunk.config)
        with mock.patch.object(actor.backend, "accumulate", accumulate):
            return update(actor, batch, 1)


def _allow_waits_at_the_end(config: Any) -> None:
    """Megatron reads the number of tokens once for each update, after the last micro-batch."""
    finish = config.finalize_model_grads_func

    def finish_with_waits(*arguments: Any, **options: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return finish(*arguments, **options)

    config.finalize_model_grads_func = finish_with_waits


def plant_host_tensor(rank: int, world_size: int, port: int, config: Config, batch: list[Sample]) -> str:
    """Add a tensor of the host to the losses of the tokens, and return the message of the error."""
    with started(rank, world_size, port, config) as actor:
        compute = actor.updater.loss

        def loss(student: Any, batch: Any) -> Any:
            losses = compute(student, batch)
            return replace(losses, loss_T=losses.loss_T + torch.zeros(len(losses.loss_T)))

        with mock.patch.object(actor.updater, "loss", loss), pytest.raises((RuntimeError, WorkerError)) as caught:
            update(actor, batch)
        return str(caught.value)


def update_with_memory(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], smaller: Config
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of an update, and of the same update by an actor with less memory than it needs.

    Args:
        smaller: The configuration with smaller micro-batches, for which the memory suffices.
    """
    gpu = cuda_module.Device()

    def measure(config: Config, n_bytes: int | None = None) -> tuple[dict[str, float], int]:
        """Return the metrics of an update that may allocate ``n_bytes``, and the bytes that it has allocated."""
        with started(rank, world_size, port, config) as actor:
            update(actor, batch[:1])  # the optimizer allocates its states
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            gpu.limit(UNLIMITED if n_bytes is None else before + n_bytes)
            try:
                metrics = update(actor, batch, 1)
            finally:
                gpu.limit(UNLIMITED)
            return metrics, torch.cuda.max_memory_allocated() - before

    more, needed = measure(config)
    _, sufficient = measure(smaller)
    less, _ = measure(config, (needed + sufficient) // 2)
    return more, less
