"""Jobs for the pool: each runs on every rank of one layout, and returns what the tests compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipe_gkd.config import Config
from recipe_gkd.errors import GkdError
from recipe_gkd.samples import Sample
from tests.actor.tiny import exported, packed_logits, started, update


def train(
    rank: int, world_size: int, port: int, config: Config, batches: list[list[Sample]]
) -> tuple[Tensor | None, list[dict[str, float]], dict[str, Tensor], list[Any]]:
    """Logits before, metrics of an update on each batch, weights after, and the announced names and shapes."""
    with started(rank, world_size, port, config) as actor:
        logits = packed_logits(actor, [s for s in batches[0] if len(s.answer.ids)]) if batches else None
        metrics = [update(actor, batch) for batch in batches]
        return logits, metrics, exported(actor), actor.weights_meta()


def train_and_save(
    rank: int, world_size: int, port: int, config: Config, first: list[Sample], second: list[Sample], path: Path
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Update, save; then a second update, whose result a resumed run must repeat."""
    with started(rank, world_size, port, config) as actor:
        update(actor, first)
        actor.save_checkpoint(path)
        metrics = update(actor, second)
        actor.finish_saves()
        return metrics, exported(actor)


def resume_and_train(
    rank: int, world_size: int, port: int, config: Config, path: Path, batch: list[Sample]
) -> tuple[int, dict[str, float], dict[str, Tensor]]:
    with started(rank, world_size, port, config) as actor:
        actor.load_checkpoint(path)
        return actor.step, update(actor, batch), exported(actor)


def refused(rank: int, world_size: int, port: int, config: Config, batch: list[Sample]) -> tuple[str, bool, bool]:
    """The error of an update that must fail, whether the weights stayed, and whether a good update works after it."""
    good = [sample for sample in batch if sample.prompt.uid < 100]
    with started(rank, world_size, port, config) as actor:
        before = [p.detach().clone() for chunk in actor._chunks for p in chunk.parameters()]
        try:
            update(actor, batch)
            message = ""
        except GkdError as error:
            message = f"{type(error).__name__}: {error}"
        after = [p for chunk in actor._chunks for p in chunk.parameters()]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return message, same, update(actor, good)["actor/kl_loss"] > 0


def fails_to_start(rank: int, world_size: int, port: int, config: Config) -> str:
    try:
        with started(rank, world_size, port, config):
            return ""
    except GkdError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        from recipe_gkd.actor.parallel import leave_parallel

        leave_parallel()
