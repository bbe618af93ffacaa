"""One optimizer step: micro-batches, gradient, checks for finite values, weights, metrics."""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from recipe_gkd.actor.forward_backward import LossFunction, run_micro_batches
from recipe_gkd.actor.loss_metrics import compute_loss_metrics, sum_names
from recipe_gkd.actor.loss_terms import GlobalDenominators
from recipe_gkd.actor.megatron_model import MegatronModel
from recipe_gkd.actor.microbatch import PackedBatch, micro_batches, pack
from recipe_gkd.actor.objective import Objective
from recipe_gkd.actor.optimizer import clip_and_step, gradient_norm, learning_rate, set_hyperparameters
from recipe_gkd.actor.padding_rows import keep_padding_rows
from recipe_gkd.actor.parallel import tensor_group
from recipe_gkd.config.objective import uses_custom_loss
from recipe_gkd.config.schema import ActorConfig, Config, GkdConfig
from recipe_gkd.config.teachers import names as teacher_names
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import DataError, SecondaryFailure, WorkerError

MAX_UIDS_IN_MESSAGE = 8


class Updater:
    """Optimizer steps on a model. All calls are collective.

    Args:
        model: Model in training.
        config: Configuration of the run.
        n_token_ids: Number of token ids. Larger ids are padding of the output layer and belong to no distribution.

    Attributes:
        config: Options of the update.
        loss: Function that computes the losses of one micro-batch.
    """

    def __init__(self, model: MegatronModel, config: Config, n_token_ids: int) -> None:
        self._model, self._gkd, self._n_token_ids = model, config.gkd, n_token_ids
        self._teachers = teacher_names(config.actor_rollout_ref.teacher)
        self.config: ActorConfig = config.actor_rollout_ref.actor
        self.loss: LossFunction = Objective(
            gkd=config.gkd,
            vocab_size=n_token_ids,
            tp_group=tensor_group(model.layout),
            n_teachers=len(self._teachers),
        )

    def update(self, samples: Sequence[Sample], step: int, total_steps: int) -> dict[str, float]:
        """Run one optimizer step; see :meth:`~recipe_gkd.actor.megatron_actor.MegatronActor.update`.

        Args:
            samples: Shard of this data-parallel rank.
            step: Optimizer step, counted from 0.
            total_steps: Step at which the decay of the learning rate ends.
        """
        model, optim = self._model, self.config.optim
        lr = learning_rate(step, total_steps, optim)
        batches, denominators = plan_micro_batches(model, self.config, samples, step)
        for chunk in model.wrapped:
            chunk.zero_grad_buffer()
        model.optimizer.zero_grad()
        reports = run_micro_batches(model, batches, self.loss, denominators=denominators, gkd=self._gkd)
        sums, peak_bytes = self._sum_over_ranks(reports)
        if not math.isfinite(sums["loss"]):
            uids = [uid for report in reports for uid in report["uids_T"][_is_not_finite(report["loss_T"])]]
            raise self._not_finite_error(f"update {step}: the loss is not finite in the samples with uid", uids)
        norm = gradient_norm(model.optimizer)
        if not math.isfinite(norm):
            uids = [sample.prompt.uid for sample in samples]
            problem = f"update {step}: the gradient is not finite in the batch with the sample uids"
            raise self._not_finite_error(problem, uids)
        if sums["n_tokens"]:
            set_hyperparameters(model.optimizer, lr, optim)
            with keep_padding_rows(model, self._n_token_ids):
                clip_and_step(model.optimizer, norm, optim.clip_grad)
        return compute_loss_metrics(self._gkd, self._teachers, sums) | {
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "actor/micro_batches": float(len(batches)),
            "perf/max_memory_allocated_gb": peak_bytes / 2**30,
        }

    def _sum_over_ranks(self, reports: Sequence[dict[str, Any]]) -> tuple[dict[str, float], float]:
        """Return the sums over the global batch and the largest peak memory of a rank in bytes, equal on all ranks."""
        layout, device = self._model.layout, self._model.device
        names = sum_names(self._gkd, self._teachers)
        sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        if layout.counts_tokens:
            for report in reports:
                sums += torch.stack([report["sums"][name] for name in names])
        peaks = torch.zeros(layout.world_size, dtype=torch.float64, device=device)
        peaks[layout.rank] = _peak_memory_bytes(device)
        reduced = torch.cat([sums, peaks])  # one entry per rank, so that a single all-reduce also yields the maximum
        dist.all_reduce(reduced)
        return dict(zip(names, reduced.tolist(), strict=False)), reduced[len(names) :].max().item()

    def _not_finite_error(self, problem: str, uids: Sequence[int]) -> WorkerError:
        """Return the same error on every rank, with the uids of all ranks. Collective."""
        layout, device = self._model.layout, self._model.device
        padded_uids = torch.full((MAX_UIDS_IN_MESSAGE,), -1, device=device)
        own_uids = sorted(set(map(int, uids)))[:MAX_UIDS_IN_MESSAGE]
        padded_uids[: len(own_uids)] = torch.tensor(own_uids, dtype=padded_uids.dtype, device=device)
        gathered = [torch.empty_like(padded_uids) for _ in range(layout.world_size)]
        dist.all_gather(gathered, padded_uids)
        all_uids = sorted({uid for rank_uids in gathered for uid in rank_uids.tolist() if uid >= 0})
        ellipsis = ", ..." if len(all_uids) > MAX_UIDS_IN_MESSAGE else ""
        return WorkerError(
            f"{problem} {', '.join(map(str, all_uids[:MAX_UIDS_IN_MESSAGE]))}{ellipsis}; the weights are unchanged. "
            f"{not_finite_advice(self._gkd)}"
        )


def not_finite_advice(gkd: GkdConfig) -> str:
    """Return what to check after an update whose loss or gradient is not finite."""
    custom_loss = ""
    if uses_custom_loss(gkd):
        custom_loss = f"the gradient of the custom loss {gkd.custom_loss.name} of {gkd.custom_loss.path}, and "
    return (
        f"Check {custom_loss}the teacher's log-probabilities of these samples, or lower "
        "actor_rollout_ref.actor.optim.lr"
    )


def plan_micro_batches(
    model: MegatronModel, config: ActorConfig, samples: Sequence[Sample], step: int
) -> tuple[list[PackedBatch], GlobalDenominators]:
    """Pack this rank's samples into micro-batches and count the tokens of the global batch. Collective.

    All ranks get the same number of micro-batches. Ranks with fewer micro-batches get empty ones.

    Args:
        model: Model in training.
        config: Size of the micro-batches.
        samples: Shard of this data-parallel rank.
        step: Optimizer step, for messages.

    Returns:
        Micro-batches of this rank, and the denominators of the global batch.

    Raises:
        DataError: A sample of this rank is invalid.
        SecondaryFailure: A sample of another rank is invalid.
    """
    layout, device = model.layout, model.device
    multiple_of = layout.tp_size if config.megatron.sequence_parallel else 1
    max_token_len = config.max_token_len if config.use_dynamic_bsz else None
    groups = micro_batches(samples, micro_batch_size=config.micro_batch_size, max_token_len=max_token_len)
    failure: DataError | None = None
    batches: list[PackedBatch] = []
    try:
        batches = [pack(group, multiple_of=multiple_of) for group in groups]
    except DataError as error:  # raised after the all-reduce: otherwise the other ranks would wait in the forward pass
        failure = error
    counts = torch.tensor([len(batches), int(failure is not None)], device=device)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    n_batches, any_failed = counts.tolist()
    if failure is not None:
        raise failure
    if any_failed:
        raise SecondaryFailure(f"update {step}: another rank rejected a sample; see the error of that rank")
    own_counts = torch.tensor(GlobalDenominators.counts(batches), dtype=torch.float64, device=device)
    sums = own_counts * layout.counts_tokens
    dist.all_reduce(sums)
    n_batches = max(n_batches, 1)
    if config.megatron.virtual_pipeline_model_parallel_size is not None:
        # Interleaved stages process micro-batches in rounds of `pp_size`.
        n_batches = math.ceil(n_batches / layout.pp_size) * layout.pp_size
    empty = pack([], multiple_of=multiple_of)
    return batches + [empty] * (n_batches - len(batches)), GlobalDenominators.of(sums.tolist())


def _is_not_finite(loss_T: Tensor) -> np.ndarray:
    return (~loss_T.isfinite()).cpu().numpy()


def _peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of PyTorch's allocations on a GPU, or of the process's memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
