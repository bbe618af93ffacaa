"""Jobs of an FSDP actor for the worker pool. Each runs on every rank and returns the values to compare."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recipe_gkd.actor.fsdp.packing import RowStyle
from recipe_gkd.commands.export.source import Source
from recipe_gkd.commands.export.write import write_model
from recipe_gkd.commands.gpu_smoke.tiny_actor import exported
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Sample
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from tests._support.tiny_models import started, update

Batch = list[Sample]


class Training(NamedTuple):
    """Result of a training.

    Attributes:
        style: Form in which the model got the sequences.
        before: Exported weights before the training; empty on other ranks than 0.
        logits: Logits of the responses of this rank in the first update, [T, V] by uid.
        metrics: Metrics of each update.
        weights: Exported weights after the training; empty on other ranks than 0.
        meta: Announced name, shape and dtype of the exported weights.
    """

    style: RowStyle
    before: dict[str, Tensor]
    logits: dict[int, Tensor]
    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    meta: list[TensorMeta]


def train_and_save(
    rank: int, world_size: int, port: int, config: Config, batches: list[Batch], checkpoint: Path, folder: Path
) -> Training:
    """Run an update on each batch. Save a checkpoint after the first, and a Hugging Face folder after the last one."""
    with started(rank, world_size, port, config) as actor:
        before, logits = exported(actor), {}
        loss = actor.updater.loss
        actor.updater.loss = partial(_record_logits, loss, logits)
        metrics = [update(actor, batches[0], 0)]
        actor.updater.loss = loss
        actor.save_checkpoint(checkpoint)
        metrics += [update(actor, batch, step) for step, batch in enumerate(batches[1:], start=1)]
        actor.finish_saves()
        actor.save_hf(folder)
        return Training(actor.backend.model.style, before, logits, metrics, exported(actor), actor.weights_meta())


def resume_and_train(
    rank: int, world_size: int, port: int, config: Config, batches: list[Batch], checkpoint: Path
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Load a checkpoint and run an update on each batch; return metrics and weights."""
    with started(rank, world_size, port, config) as actor:
        first = actor.load_checkpoint(checkpoint)
        return [update(actor, batch, step) for step, batch in enumerate(batches, start=first)], exported(actor)


def update_and_save(
    rank: int, world_size: int, port: int, config: Config, batch: Batch, folder: Path
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Run an update and save a Hugging Face folder; return metrics and weights."""
    with started(rank, world_size, port, config) as actor:
        metrics = update(actor, batch, 0)
        actor.save_hf(folder)
        return metrics, exported(actor)


def export_checkpoint(
    rank: int, world_size: int, port: int, config: Config, checkpoint: Path, out: Path, dtype: str
) -> None:
    """Write the weights of a checkpoint in another data type, as the command ``export`` does."""
    source = Source(checkpoint=checkpoint, config=config, model=Path(config.actor_rollout_ref.model.path))
    write_model(source, out, dtype=dtype, max_shard_bytes=1 << 30)


def _record_logits(loss: Any, logits: dict[int, Tensor], student: Any, batch: Any) -> Any:
    """Return the loss, and store the logits of each response in the order of its tokens."""
    uids_T, positions_T = batch.uids_T.cpu().numpy(), batch.positions_T.cpu().numpy()
    logits_TV = student.logits_TW.detach().cpu()
    for uid in np.unique(uids_T):
        rows = np.flatnonzero(uids_T == uid)
        logits[int(uid)] = logits_TV[torch.as_tensor(rows[positions_T[rows].argsort()])]
    return loss(student, batch)
