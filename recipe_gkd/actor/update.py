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

from recipe_gkd.actor.backend import Backend, LossFunction
from recipe_gkd.actor.host_arrays import ArrayPool
from recipe_gkd.actor.learning_rate import learning_rate
from recipe_gkd.actor.loss_metrics import MAXIMA, compute_loss_metrics, sum_names
from recipe_gkd.actor.micro_batch_plan import plan_micro_batches
from recipe_gkd.actor.objective import Objective
from recipe_gkd.config.objective import uses_custom_loss
from recipe_gkd.config.schema import ActorConfig, Config, GkdConfig
from recipe_gkd.config.teachers import names as teacher_names
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import WorkerError

MAX_UIDS_IN_MESSAGE = 8


class Updater:
    """Optimizer steps on a model. All calls are collective.

    Args:
        backend: Model in training.
        config: Configuration of the run.
        n_token_ids: Number of token ids. Larger ids are padding of the output layer and belong to no distribution.

    Attributes:
        config: Options of the update.
        loss: Function that computes the losses of one micro-batch.
    """

    def __init__(self, backend: Backend, config: Config, n_token_ids: int) -> None:
        self._backend, self._gkd, self._n_token_ids = backend, config.gkd, n_token_ids
        self._teachers = teacher_names(config.actor_rollout_ref.teacher)
        self._pool = ArrayPool()
        self.config: ActorConfig = config.actor_rollout_ref.actor
        self.loss: LossFunction = Objective(
            gkd=config.gkd,
            vocab_size=n_token_ids,
            tp_group=backend.tp_group,
            cp_group=backend.cp_group,
            n_teachers=len(self._teachers),
        )

    def update(self, samples: Sequence[Sample], step: int, total_steps: int) -> dict[str, float]:
        """Run one optimizer step; see :meth:`~recipe_gkd.actor.student_actor.StudentActor.update`.

        Args:
            samples: Shard of this data-parallel rank.
            step: Optimizer step, counted from 0.
            total_steps: Step at which the decay of the learning rate ends.
        """
        backend, optim = self._backend, self.config.optim
        lr = learning_rate(step, total_steps, optim)
        plan = plan_micro_batches(
            backend,
            self.config,
            samples,
            step,
            loss_agg_mode=self._gkd.loss_agg_mode,
            allocate=self._pool.empty,
        )
        backend.zero_grad()
        reports = backend.accumulate(plan, self.loss)
        sums, maxima = self._reduce_over_ranks(reports)
        if not math.isfinite(sums["loss"]):
            uids = [uid for report in reports for uid in report["uids_T"][_is_not_finite(report["loss_T"])]]
            raise self._not_finite_error(f"update {step}: the loss is not finite in the samples with uid", uids)
        norm = backend.gradient_norm()
        if not math.isfinite(norm):
            uids = [sample.prompt.uid for sample in samples]
            problem = f"update {step}: the gradient is not finite in the batch with the sample uids"
            raise self._not_finite_error(problem, uids)
        if sums["n_tokens"]:
            backend.step(norm, lr=lr, optim=optim, n_token_ids=self._n_token_ids)
        return compute_loss_metrics(self._gkd, self._teachers, sums, maxima) | {
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "actor/micro_batches": float(plan.count),
        }

    def _reduce_over_ranks(self, reports: Sequence[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
        """Return sums over the global batch and maxima over it and over the ranks, equal on all ranks. Collective."""
        layout, device = self._backend.layout, self._backend.device
        names = sum_names(self._gkd, self._teachers)
        sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        if layout.counts_tokens:
            for report in reports:
                sums += torch.stack([report["sums"][name] for name in names])
        own_maxima = {"perf/max_memory_allocated_gb": torch.tensor(_peak_memory_bytes(device) / 2**30)}
        zero = sums.new_zeros(())
        own_maxima |= {
            name: torch.stack([zero, *(report["maxima"][name] for report in reports)]).max() for name in MAXIMA
        }
        # One column per rank, so that a single all-reduce also yields the maxima.
        maxima = torch.zeros(len(own_maxima), layout.world_size, dtype=torch.float64, device=device)
        maxima[:, layout.rank] = torch.stack([value.to(sums) for value in own_maxima.values()])
        reduced = torch.cat([sums, maxima.flatten()])
        dist.all_reduce(reduced)
        maxima = reduced[len(names) :].view_as(maxima).amax(1)
        return (
            dict(zip(names, reduced.tolist(), strict=False)),
            dict(zip(own_maxima, maxima.tolist(), strict=True)),
        )

    def _not_finite_error(self, problem: str, uids: Sequence[int]) -> WorkerError:
        """Return the same error on every rank, with the uids of all ranks. Collective."""
        layout, device = self._backend.layout, self._backend.device
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


def _is_not_finite(loss_T: Tensor) -> np.ndarray:
    return (~loss_T.isfinite()).cpu().numpy()


def _peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of PyTorch's allocations on a GPU, or of the process's memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
