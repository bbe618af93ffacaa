"""Training jobs for the worker pool. Each runs on every rank of one layout and returns the values to compare."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from recipe_gkd.actor.megatron.padding_rows import padding_rows
from recipe_gkd.actor.megatron.parallel import destroy_parallel
from recipe_gkd.actor.objective.token_kl import TokenKl
from recipe_gkd.commands.gpu_smoke.tiny_actor import exported
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Sample, TeacherTopK
from recipe_gkd.errors import GkdError
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from tests._support.tiny_models import packed_logits, shard_of, started, update, without_empty

POISONED_TOKEN = 95
"""Token whose embedding a job sets to infinity."""


class Training(NamedTuple):
    """Result of a training.

    Attributes:
        logits: Logits of the first batch before the training, [N, V], on the last pipeline stage; None elsewhere.
        metrics: Metrics of each update.
        weights: Exported weights after the training; empty on other ranks than 0.
        meta: Announced name, shape and dtype of the exported weights.
    """

    logits: Tensor | None
    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    meta: list[TensorMeta]


def train(rank: int, world_size: int, port: int, config: Config, batches: list[list[Sample]]) -> Training:
    """Run an update on each batch."""
    with started(rank, world_size, port, config) as actor:
        return _train(actor, batches)


def export_and_train(
    rank: int, world_size: int, port: int, config: Config, batches: list[list[Sample]]
) -> tuple[dict[str, Tensor], Training]:
    """Export the loaded weights, then run an update on each batch."""
    with started(rank, world_size, port, config) as actor:
        return exported(actor), _train(actor, batches)


def token_kl_and_train(
    rank: int, world_size: int, port: int, config: Config, measured: list[Sample], batches: list[list[Sample]]
) -> tuple[TokenKl, Training]:
    """Compute the KL divergences of samples with the loaded weights, then run an update on each batch."""
    with started(rank, world_size, port, config) as actor:
        found = actor.token_kl(shard_of(actor, measured), 0)
        metrics = [update(actor, batch, step) for step, batch in enumerate(batches)]
        return found, Training(None, metrics, exported(actor), actor.weights_meta())


def _train(actor: Any, batches: list[list[Sample]]) -> Training:
    logits = packed_logits(actor, without_empty(batches[0])) if batches else None
    metrics = [update(actor, batch, step) for step, batch in enumerate(batches)]
    return Training(logits, metrics, exported(actor), actor.weights_meta())


def train_any(rank: int, world_size: int, port: int, config: Config, batches: list[list[Sample]]) -> Training:
    """Run an update on each batch, with any backend."""
    with started(rank, world_size, port, config) as actor:
        metrics = [update(actor, batch, step) for step, batch in enumerate(batches)]
        return Training(None, metrics, exported(actor), actor.weights_meta())


def count_all_reduces(rank: int, world_size: int, port: int, config: Config, batch: list[Sample]) -> tuple[float, int]:
    """Return the number of micro-batches of an update, and of the all-reduces of gradients in it."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    calls = 0
    original = _fsdp_collectives.dist.all_reduce

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    with started(rank, world_size, port, config) as actor:
        run = actor.backend.accumulate

        def counted(*args: Any, **options: Any) -> Any:
            with mock.patch.object(_fsdp_collectives.dist, "all_reduce", count):
                return run(*args, **options)

        with mock.patch.object(actor.backend, "accumulate", counted):
            metrics = update(actor, batch)
        return metrics["actor/micro_batches"], calls


def weights_around_updates(
    rank: int, world_size: int, port: int, config: Config, batches: list[list[Sample]], n_token_ids: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights before and after an update on each batch, with any backend."""
    with started(rank, world_size, port, config, n_token_ids=n_token_ids) as actor:
        before = exported(actor)
        for step, batch in enumerate(batches):
            update(actor, batch, step)
        return before, exported(actor)


def train_on_device(
    rank: int, world_size: int, port: int, config: Config, batches: list[list[Sample]]
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Run an update on each batch, on ``trainer.device``; return the metrics, and the weights on the CPU."""
    with started(rank, world_size, port, config) as actor:
        metrics = [update(actor, batch, step) for step, batch in enumerate(batches)]
        return metrics, {name: tensor.cpu() for name, tensor in exported(actor).items()}


def train_padded_model(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], n_token_ids: int
) -> tuple[dict[str, float], float, dict[str, Tensor]]:
    """Run an update; return its metrics, the L1 norm of the gradient in this rank's padding rows, and the weights."""
    with started(rank, world_size, port, config, n_token_ids=n_token_ids) as actor:
        metrics = update(actor, batch)
        weight = actor.backend.model.chunks[-1].output_layer.weight
        first = max(0, n_token_ids - actor.layout.tp_rank * len(weight))
        assert weight.main_grad[:first].any() == (first > 0)
        return metrics, float(weight.main_grad[first:].abs().sum()), exported(actor)


def train_with_padding_rows(
    rank: int, world_size: int, port: int, config: Config, batches: list[list[Sample]], n_token_ids: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Run an update on each batch.

    Returns:
        Weights before and after, and True if no copy of a padding row on this rank has changed.
    """
    with started(rank, world_size, port, config, n_token_ids=n_token_ids) as actor:
        before = exported(actor)
        rows_before = [rows.clone() for rows in padding_rows(actor.backend.model, n_token_ids)]
        for step, batch in enumerate(batches):
            update(actor, batch, step)
        rows_after = padding_rows(actor.backend.model, n_token_ids)
        unchanged = [torch.equal(*pair) for pair in zip(rows_before, rows_after, strict=True)]
        return before, exported(actor), all(unchanged)


def train_with_changed_config(
    rank: int, world_size: int, port: int, config: Config, then: Config, first: list[Sample], second: list[Sample]
) -> dict[str, Tensor]:
    """Run one update with each of two configurations, without a checkpoint in between; return the weights."""
    with started(rank, world_size, port, config) as actor:
        update(actor, first, 0)
        actor.updater.config = then.actor_rollout_ref.actor
        update(actor, second, 1)
        return exported(actor)


def compute_logits(rank: int, world_size: int, port: int, config: Config, batch: list[Sample]) -> Tensor | None:
    """Return the logits of one packed row of all samples."""
    with started(rank, world_size, port, config) as actor:
        return packed_logits(actor, batch)


def record_loss_input(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample]
) -> tuple[int, int, torch.dtype]:
    """Return rows (of all micro-batches together), columns and dtype of the logits that the loss gets in one update."""
    with started(rank, world_size, port, config) as actor:
        students = _record_students(actor)
        update(actor, batch)
        logits = [student.logits_TW.detach() for student in students]
        return sum(map(len, logits)), logits[0].size(1), logits[0].dtype


def record_student_types(rank: int, world_size: int, port: int, config: Config, batch: list[Sample]) -> set[str]:
    """Return the type names of the student outputs that the loss gets in one update."""
    with started(rank, world_size, port, config) as actor:
        students = _record_students(actor)
        update(actor, batch)
        return {type(student).__name__ for student in students}


def _record_students(actor: Any) -> list[Any]:
    """Return a list to which each call of the actor's loss appends its input."""
    students: list[Any] = []

    def record(loss: Any, student: Any, batch: Any) -> Any:
        students.append(student)
        return loss(student, batch)

    actor.updater.loss = partial(record, actor.updater.loss)
    return students


def update_with_fault(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], fault: str
) -> tuple[GkdError | None, bool, bool]:
    """Run an update that must fail.

    ``fault`` is ``"gradient"`` (the gradient overflows), ``"weights"`` (one embedding is infinite), or ``""`` (the
    batch itself is invalid).

    Returns:
        The error, True if the weights are unchanged, and True if an update on valid samples succeeds afterwards.
    """
    valid = [sample for sample in batch if sample.prompt.uid < 100]
    with started(rank, world_size, port, config) as actor:
        chunks, loss = actor.backend.model.chunks, actor.updater.loss
        if fault == "gradient":
            actor.updater.loss = partial(_overflow_gradient, loss)
        if fault == "weights" and actor.layout.pp_rank == 0:
            chunks[0].embedding.word_embeddings.weight.data[POISONED_TOKEN] = torch.inf
        before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
        failure: GkdError | None = None
        try:
            update(actor, batch, 3)
        except GkdError as error:
            failure = error
        actor.updater.loss = loss
        after = [p for chunk in chunks for p in chunk.parameters()]
        unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return failure, unchanged, 0 < update(actor, valid, 3)["actor/kl_loss"] < 10


def _overflow_gradient(loss: Any, student: Any, batch: Any) -> Any:
    """Return the same loss with a gradient that overflows float32."""
    losses, logits_TW = loss(student, batch), student.logits_TW
    return replace(losses, loss_T=losses.loss_T + ((logits_TW - logits_TW.detach()) * 3e38).sum(1))


def start_with_error(rank: int, world_size: int, port: int, config: Config, actor_ranks: int) -> GkdError | None:
    """Return the error of rank 0 of ``actor_ranks``, which it must raise before it waits for other ranks."""
    try:
        with started(rank, actor_ranks, port, config):
            return None
    except GkdError as error:
        return error
    finally:
        destroy_parallel()


def train_on_own_top_k(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], k: int
) -> dict[str, float]:
    """Run an update toward the student's own top-k; return its metrics."""
    with started(rank, world_size, port, config) as actor:
        samples = without_empty(batch)
        logits_NV = packed_logits(actor, samples)
        assert logits_NV is not None
        logps_NV = logits_NV.log_softmax(1)
        taught, start = [], 0
        for sample in samples:
            logps_TV = logps_NV[start + len(sample.prompt.ids) - 1 : start + sample.n_tokens - 1]
            start += sample.n_tokens - 1
            top = logps_TV.topk(k, dim=1)
            own_T = logps_TV.gather(1, torch.as_tensor(sample.response.ids).long()[:, None])[:, 0].numpy()
            teacher = TeacherTopK(logps_TK=top.values.numpy(), ids_TK=top.indices.numpy(), sampled_logps_T=own_T)
            taught.append(replace(sample, response=replace(sample.response, logprobs=own_T), teacher=teacher))
        return update(actor, taught)
