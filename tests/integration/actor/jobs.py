"""Jobs for the pool: each runs on every rank of one layout, and returns what the tests compare."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recipe_gkd.actor import checkpoint, hf_save
from recipe_gkd.actor.padding_rows import padding_rows
from recipe_gkd.actor.parallel import leave_parallel
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Sample, TeacherTopK
from recipe_gkd.errors import CheckpointError, GkdError
from tests._support.tiny_models import exported, packed_logits, started, transformers_logits, update


def train(
    rank: int, world_size: int, port: int, config: Config, batches: list[list[Sample]]
) -> tuple[Tensor | None, list[dict[str, float]], dict[str, Tensor], list[Any]]:
    """Logits before, metrics of an update on each batch, weights after, and the announced names and shapes."""
    with started(rank, world_size, port, config) as actor:
        logits = packed_logits(actor, [s for s in batches[0] if len(s.response.ids)]) if batches else None
        metrics = [update(actor, batch, step) for step, batch in enumerate(batches)]
        return logits, metrics, exported(actor), actor.weights_meta()


def export_and_train(
    rank: int, world_size: int, port: int, config: Config, batches: list[list[Sample]]
) -> tuple[dict[str, Tensor], Tensor | None, list[dict[str, float]], dict[str, Tensor], list[Any]]:
    """The weights as they were loaded; then what :func:`train` returns."""
    with started(rank, world_size, port, config) as actor:
        loaded = exported(actor)
        logits = packed_logits(actor, [s for s in batches[0] if len(s.response.ids)])
        metrics = [update(actor, batch, step) for step, batch in enumerate(batches)]
        return loaded, logits, metrics, exported(actor), actor.weights_meta()


def train_a_padded_student(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], n_tokens: int
) -> tuple[dict[str, float], float, dict[str, Tensor]]:
    """Metrics of an update, the sum of the gradient's sizes in this rank's rows of padding, and the weights."""
    with started(rank, world_size, port, config, n_tokens=n_tokens) as actor:
        metrics = update(actor, batch)
        weight = actor._chunks[-1].output_layer.weight
        first = max(0, n_tokens - actor.layout.tp_rank * len(weight))
        assert weight.main_grad[:first].any() == (first > 0)
        return metrics, float(weight.main_grad[first:].abs().sum()), exported(actor)


def train_and_save(
    rank: int, world_size: int, port: int, config: Config, first: list[Sample], second: list[Sample], path: Path
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Update, save; then a second update, whose result a resumed run must repeat."""
    with started(rank, world_size, port, config) as actor:
        update(actor, first, 0)
        actor.save_checkpoint(path)
        metrics = update(actor, second, 1)
        actor.finish_saves()
        return metrics, exported(actor)


def resume_and_train(
    rank: int, world_size: int, port: int, config: Config, path: Path, batch: list[Sample]
) -> tuple[int, dict[str, float], dict[str, Tensor]]:
    with started(rank, world_size, port, config) as actor:
        step = actor.load_checkpoint(path)
        return step, update(actor, batch, 1), exported(actor)


def logits_of_a_loss(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample]
) -> tuple[int, int, torch.dtype]:
    """What the loss is given in one update: rows of all micro-batches together, columns, dtype."""
    seen: list[Tensor] = []

    def watch(loss: Any, student: Any, batch: Any) -> Any:
        seen.append(student.logits_TW.detach())
        return loss(student, batch)

    with started(rank, world_size, port, config) as actor:
        actor._loss = partial(watch, actor._loss)
        update(actor, batch)
        return sum(map(len, seen)), seen[0].size(1), seen[0].dtype


POISONED_TOKEN = 95


def refused(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], poison: str
) -> tuple[str, bool, bool]:
    """The error of an update that must fail, whether the weights stayed, and whether a good update works after it."""
    good = [sample for sample in batch if sample.prompt.uid < 100]
    with started(rank, world_size, port, config) as actor:
        kept_loss = actor._loss
        if poison == "gradient":
            actor._loss = partial(_overflow_backwards, kept_loss)
        if poison == "weights" and actor.layout.pp_rank == 0:
            actor._chunks[0].embedding.word_embeddings.weight.data[POISONED_TOKEN] = torch.inf
        before = [p.detach().clone() for chunk in actor._chunks for p in chunk.parameters()]
        try:
            update(actor, batch, 3)
            message = ""
        except GkdError as error:
            message = f"{type(error).__name__}: {error}"
        actor._loss = kept_loss
        after = [p for chunk in actor._chunks for p in chunk.parameters()]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return message, same, 0 < update(actor, good, 3)["actor/kl_loss"] < 10


def _overflow_backwards(loss: Any, student: Any, batch: Any) -> Any:
    """The same loss, with a gradient beyond float32."""
    losses, logits_TW = loss(student, batch), student.logits_TW
    return replace(losses, loss_T=losses.loss_T + ((logits_TW - logits_TW.detach()) * 3e38).sum(1))


def fails_to_start(rank: int, world_size: int, port: int, config: Config, of_ranks: int) -> str:
    """The error of rank 0 of ``of_ranks``, which it must find before it waits for the others."""
    try:
        with started(rank, of_ranks, port, config):
            return ""
    except GkdError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        leave_parallel()


def resume_fails(rank: int, world_size: int, port: int, config: Config, path: Path) -> str:
    with started(rank, world_size, port, config) as actor:
        try:
            actor.load_checkpoint(path)
        except GkdError as error:
            return f"{type(error).__name__}: {error}"
        return ""


def keep_padding(
    rank: int, world_size: int, port: int, config: Config, batches: list[list[Sample]], n_tokens: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """The weights before and after some updates, and whether all copies of the padding rows on this rank are equal."""
    with started(rank, world_size, port, config, n_tokens=n_tokens) as actor:
        place = (actor._chunks, actor._optimizer, actor.layout.tp_rank, n_tokens)
        before, rows_before = exported(actor), [rows.clone() for rows in padding_rows(*place)]
        for step, batch in enumerate(batches):
            update(actor, batch, step)
        unchanged = [torch.equal(*pair) for pair in zip(rows_before, padding_rows(*place), strict=True)]
        return before, exported(actor), all(unchanged)


def change_settings(
    rank: int, world_size: int, port: int, config: Config, then: Config, first: list[Sample], second: list[Sample]
) -> dict[str, Tensor]:
    """The weights after an update with each of two configurations, without a checkpoint between them."""
    with started(rank, world_size, port, config) as actor:
        update(actor, first, 0)
        actor._actor = then.actor_rollout_ref.actor
        update(actor, second, 1)
        return exported(actor)


def logits_of(rank: int, world_size: int, port: int, config: Config, batch: list[Sample]) -> Tensor | None:
    with started(rank, world_size, port, config) as actor:
        return packed_logits(actor, batch)


def fail_to_save(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], path: Path, faults: list[str], bad: int
) -> list[str]:
    """The error of a save with each fault of the writer on rank ``bad``; then a good save to ``path / "good"``."""
    messages = []
    with started(rank, world_size, port, config) as actor:
        update(actor, batch, 0)
        for fault in faults:
            message = ""
            actor._writer._timeout_s = 3.0 if fault == "hung" else 60.0
            with _faulty_writer(fault, rank == bad):
                try:
                    actor.save_checkpoint(path / fault)
                    while not actor.finish_saves(wait=False):
                        pass
                except CheckpointError as error:
                    message = str(error)
            messages.append(message)
            assert not psutil.Process().children(), "no writer may be left"
            assert actor.finish_saves()
        actor._writer._timeout_s = 60.0
        actor.save_checkpoint(path / "good")
        actor.finish_saves()
        return messages


@contextmanager
def _faulty_writer(fault: str, is_here: bool) -> Iterator[None]:
    """A disk of 1 KB, or writers that end or stop, or that cannot write the metadata (which rank 0 does)."""
    shard, metadata, weights = checkpoint.write_shard, checkpoint._write_metadata, hf_save._write_file

    def signaled(number: int, *_: Any) -> None:
        os.kill(os.getpid(), number)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fault == "file too large" and is_here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    if fault in ("killed", "hung") and is_here:
        number = signal.SIGKILL if fault == "killed" else signal.SIGSTOP
        checkpoint.write_shard = hf_save._write_file = partial(signaled, number)
    if fault == "metadata":
        checkpoint._write_metadata = full
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        checkpoint.write_shard, checkpoint._write_metadata, hf_save._write_file = shard, metadata, weights


def save_fails(rank: int, world_size: int, port: int, config: Config, path: Path) -> str:
    with started(rank, world_size, port, config) as actor:
        try:
            actor.save_checkpoint(path)
        except CheckpointError as error:
            return str(error)
        return ""


def fail_to_save_hf(rank: int, world_size: int, port: int, config: Config, path: Path) -> list[str]:
    """The errors of a save to a disk of 1 KB and of one with a writer that stops, on rank 0; then a good save."""
    messages = []
    with started(rank, world_size, port, config) as actor:
        for fault, limit_s in (("file too large", 60.0), ("hung", 3.0)):
            actor._actor = replace(actor._actor, timeout_s=limit_s)
            with _faulty_writer(fault, rank == 0), pytest.raises(CheckpointError) as caught:
                actor.save_hf(path)
            messages.append(str(caught.value))
            assert not psutil.Process().children() and not path.exists()
        actor._actor = replace(actor._actor, timeout_s=60.0)
        actor.save_hf(path)
    return messages


def save_slowly(rank: int, world_size: int, port: int, config: Config, batch: list[Sample], path: Path) -> str:
    """Saves in which writers of rank 0 take longer than a collective may; then the error of one that takes as long."""
    shard, weights = checkpoint.write_shard, hf_save._write_file
    with started(rank, world_size, port, config) as actor:
        update(actor, batch)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S))
        if rank == 0:
            checkpoint.write_shard = partial(_slowly, shard)
            hf_save._write_file = partial(_slowly, weights)
        try:
            actor.save_checkpoint(path / "checkpoint")
            actor.save_hf(path / "folder")
        finally:
            checkpoint.write_shard, hf_save._write_file = shard, weights
        try:
            if rank == 0:
                time.sleep(SHORT_S + 2)
            dist.barrier()
        except RuntimeError as error:
            return str(error)
        return ""


SHORT_S = 3


def _slowly(function: Any, *args: Any) -> Any:
    time.sleep(SHORT_S + 2)
    return function(*args)


def resume_after_refusals(
    rank: int, world_size: int, port: int, config: Config, refused: list[Path], path: Path, batch: list[Sample]
) -> tuple[list[str], str, dict[str, float], dict[str, Tensor]]:
    """The errors of loading ``refused``, of an update after the last; then what a run resumed from ``path`` does."""
    with started(rank, world_size, port, config) as actor:
        messages = []
        for wrong in refused:
            with pytest.raises(GkdError) as caught:
                actor.load_checkpoint(wrong)
            messages.append(f"{type(caught.value).__name__}: {caught.value}")
        with pytest.raises(GkdError) as caught:
            update(actor, batch, 1)
        actor.load_checkpoint(path)
        return messages, f"{type(caught.value).__name__}: {caught.value}", update(actor, batch, 1), exported(actor)


def save_hf(rank: int, world_size: int, port: int, config: Config, batch: list[Sample], path: Path) -> Tensor | None:
    """Train, save a Hugging Face folder, and return the actor's own logits after that."""
    with started(rank, world_size, port, config) as actor:
        update(actor, batch)
        actor.save_hf(path)
        return packed_logits(actor, [sample for sample in batch if len(sample.response.ids)])


def transformers_rows(model: Any, batch: list[Sample]) -> Tensor:
    return transformers_logits(model, [sample for sample in batch if len(sample.response.ids)])


def student_of_a_loss(rank: int, world_size: int, port: int, config: Config, batch: list[Sample]) -> set[str]:
    """The kinds of output that the loss is given in one update."""
    seen: set[str] = set()

    def watch(loss: Any, student: Any, batch: Any) -> Any:
        seen.add(type(student).__name__)
        return loss(student, batch)

    with started(rank, world_size, port, config) as actor:
        actor._loss = partial(watch, actor._loss)
        update(actor, batch)
        return seen


def teach_itself(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], k: int
) -> dict[str, float]:
    """The metrics of an update toward the student's own top-k."""
    with started(rank, world_size, port, config) as actor:
        answered = [sample for sample in batch if len(sample.response.ids)]
        rows_NV = packed_logits(actor, answered)
        assert rows_NV is not None
        log_q_NV = rows_NV.log_softmax(1)
        taught, start = [], 0
        for sample in answered:
            rows = log_q_NV[start + len(sample.prompt.ids) - 1 : start + sample.n_tokens - 1]
            start += sample.n_tokens - 1
            top = rows.topk(k, dim=1)
            own = rows.gather(1, torch.as_tensor(sample.response.ids).long()[:, None])[:, 0].numpy()
            teacher = TeacherTopK(logps_TK=top.values.numpy(), ids_TK=top.indices.numpy(), sampled_logps_T=own)
            taught.append(replace(sample, response=replace(sample.response, logprobs=own), teacher=teacher))
        return update(actor, taught)
