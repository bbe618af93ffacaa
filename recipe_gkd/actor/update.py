"""One optimizer step: micro-batches, gradient, checks for finite values, weights, metrics."""

from __future__ import annotations

import gc
import logging
import math
import resource
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from recipe_gkd.actor.backend import Backend, LossFunction
from recipe_gkd.actor.batch.host_arrays import ArrayPool
from recipe_gkd.actor.batch.micro_batch_plan import MicroBatchPlan, plan_micro_batches
from recipe_gkd.actor.learning_rate import learning_rate
from recipe_gkd.actor.objective.loss_metrics import MAXIMA, ROUTING, compute_loss_metrics, sum_names
from recipe_gkd.actor.objective.objective import Objective
from recipe_gkd.actor.offload import state_sizes
from recipe_gkd.actor.replayed_experts import RoutingAgreement
from recipe_gkd.actor.token_limit import AttemptFailed, TokenLimit, Vote, next_limit
from recipe_gkd.config.conditions import uses_custom_loss
from recipe_gkd.config.keys import key_name
from recipe_gkd.config.schema import ActorConfig, Config, GkdConfig
from recipe_gkd.config.teachers import names as teacher_names
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import GkdError, SecondaryFailure, WorkerError
from recipe_gkd.runtime.out_of_memory import free_frames, out_of_memory_error
from teacher.common.out_of_memory import is_out_of_memory
from teacher.common.sizes import GIB

log = logging.getLogger(__name__)

MAX_TOKEN_LEN = key_name(lambda config: config.actor_rollout_ref.actor.max_token_len)
MAX_RESPONSE_LENGTH = key_name(lambda config: config.data.max_response_length)
OOM = key_name(lambda config: config.trainer.oom)
MAX_UIDS_IN_MESSAGE = 8


class Updater:
    """Optimizer steps on a model. All calls are collective.

    Args:
        backend: Model in training.
        n_token_ids: Number of token ids. Larger ids are padding of the output layer and belong to no distribution.

    Attributes:
        config: Options of the update.
        loss: Function that computes the losses of one micro-batch.
    """

    def __init__(self, backend: Backend, config: Config, n_token_ids: int) -> None:
        self._backend, self._gkd, self._n_token_ids = backend, config.gkd, n_token_ids
        self._teachers = teacher_names(config.actor_rollout_ref.teacher)
        self._pool, self._limit = ArrayPool(), TokenLimit()
        self._splits = config.trainer.oom == "split"
        self.config: ActorConfig = config.actor_rollout_ref.actor
        self.loss: LossFunction = Objective(
            gkd=config.gkd,
            vocab_size=n_token_ids,
            tp_group=backend.tp_group,
            cp_group=backend.cp_group,
            teachers=self._teachers,
        )

    def update(self, samples: Sequence[Sample], step: int, total_steps: int) -> dict[str, float]:
        """Run one optimizer step; see :meth:`~recipe_gkd.actor.student_actor.StudentActor.update`.

        Args:
            samples: Shard of this data-parallel rank.
            step: Optimizer step, counted from 0.
            total_steps: Step at which the decay of the learning rate ends.
        """
        lr, work = learning_rate(step, total_steps, self.config.optim), f"update {step}"
        backend, optim = self._backend, self.config.optim
        try:
            plan, reports = self._attempts(samples, step, partial(backend.accumulate, loss=self.loss), work)
            sums, maxima = self._reduce_over_ranks(reports, plan.agreement)
            if not math.isfinite(sums["actor/loss"]):
                uids = [uid for report in reports for uid in report["uids_T"][_is_not_finite(report["loss_T"])]]
                raise self._not_finite_error(step, "the loss is not finite in the samples with uid", uids)
            norm = backend.gradient_norm()
            if not math.isfinite(norm):
                uids = [sample.prompt.uid for sample in samples]
                raise self._not_finite_error(step, "the gradient is not finite in the batch with the sample uids", uids)
            if sums["n_tokens"]:
                backend.step(norm, lr=lr, optim=optim, n_token_ids=self._n_token_ids)
        except Exception as error:  # noqa: BLE001 - raised again, unless memory ran out
            failure = self._as_memory_error(error, work)
            free_frames(error)
        else:
            return self._metrics(sums, maxima, norm=norm, lr=lr, n_micro_batches=plan.count)
        self._free_memory()  # outside of the handler, so that nothing refers to the error and its tensors
        raise failure

    def _metrics(
        self, sums: dict[str, float], maxima: dict[str, float], *, norm: float, lr: float, n_micro_batches: int
    ) -> dict[str, float]:
        metrics = compute_loss_metrics(self._gkd, self._teachers, sums, maxima) | {
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "actor/micro_batches": float(n_micro_batches),
        }
        if self._splits:
            metrics["actor/oom_splits"] = float(self._limit.n_splits)
            metrics["actor/max_token_len"] = float(self._limit.applied_to(self.config).max_token_len)
        return metrics

    def evaluate(self, samples: Sequence[Sample], step: int, measure: LossFunction) -> list[dict[str, Any]]:
        """Return the reports of a pass without a gradient, in micro-batches of the same limit as updates. Collective.

        Args:
            samples: Shard of this data-parallel rank.
            step: Number of optimizer steps of the weights, for messages.
            measure: Function that computes the report of one micro-batch.

        Returns:
            Reports of the tokens that this rank counts.
        """
        work = f"pass after step {step}"
        try:
            _, reports = self._attempts(samples, step, partial(self._backend.evaluate, loss=measure), work)
        except Exception as error:  # noqa: BLE001 - raised again, unless memory ran out
            failure = self._as_memory_error(error, work)
            free_frames(error)
        else:
            return reports if self._backend.layout.counts_tokens else []
        self._free_memory()
        raise failure

    def _as_memory_error(self, error: Exception, work: str) -> WorkerError:
        """Return the error for the user if memory ran out; raise any other error again."""
        if isinstance(error, GkdError) or not is_out_of_memory(error):
            raise error
        failure = self._out_of_memory_error(error, work)
        if self._splits:
            return failure
        split = "or set trainer.oom=split, which repeats it with smaller micro-batches"
        return failure.replaced(remedy=f"{failure.remedy}; {split}", keys=(*failure.keys, OOM))

    def _attempts(
        self,
        samples: Sequence[Sample],
        step: int,
        compute: Callable[[MicroBatchPlan], list[dict[str, Any]]],
        work: str,
    ) -> tuple[MicroBatchPlan, list[dict[str, Any]]]:
        """Compute micro-batches, with smaller ones after running out of memory. Collective.

        Args:
            samples: Shard of this data-parallel rank.
            step: Optimizer step, for messages.
            compute: Function that computes the micro-batches.
            work: Name of the work, for messages.

        Returns:
            The micro-batches, and the report of each.

        Raises:
            WorkerError: With ``trainer.oom=split``, a micro-batch of one sample needs more memory than this rank has.
            SecondaryFailure: It is a micro-batch of another rank.
        """
        before = self._limit
        while True:
            config = self._limit.applied_to(self.config)
            vote = Vote(self._backend.layout, self._backend.device, config.max_token_len) if self._splits else None
            plan = plan_micro_batches(
                self._backend,
                config,
                samples,
                step,
                loss_agg_mode=self._gkd.loss_agg_mode,
                allocate=self._pool.empty,
                before_reduction=vote.succeed if vote else None,
            )
            failure: WorkerError | None = None
            try:
                reports = compute(plan)
                if vote is not None and not vote.is_done:  # without a gradient, nothing is reduced
                    vote.succeed()
                return plan, reports
            except Exception as error:
                if vote is None or not (isinstance(error, AttemptFailed) or _can_repeat(error, vote)):
                    raise
                if not isinstance(error, AttemptFailed):
                    failure = self._out_of_memory_error(error, work)
                free_frames(error)
            # Outside of the handler, so that nothing refers to the error and its tensors.
            self._free_memory()
            if failure is not None:
                vote.fail(next_limit(plan.groups, config.max_token_len))
            self._limit = self._lowered(before, vote, config.max_token_len, work, failure)

    def _lowered(
        self, before: TokenLimit, vote: Vote, limit: int, work: str, failure: WorkerError | None
    ) -> TokenLimit:
        """Return the limit of the next attempt.

        Args:
            before: Limit of the first attempt, which is kept if the update fails.
            vote: Result of the attempt that failed.
            limit: Tokens per micro-batch of this attempt.
            work: Name of the work, for messages.
            failure: Error of this rank; None if it did not fail.

        Raises:
            WorkerError, SecondaryFailure: See :meth:`_attempts`.
        """
        if not vote.limit:
            self._limit = before
            if failure is not None:
                unsplittable = (
                    "Each micro-batch of this rank has one sample, so trainer.oom=split cannot make it smaller. The "
                    "weights are unchanged."
                )
                raise failure.replaced(
                    details=(*failure.details, unsplittable),
                    remedy=f"{failure.remedy}, or lower {MAX_RESPONSE_LENGTH}",
                    keys=(*failure.keys, MAX_RESPONSE_LENGTH),
                )
            origin = f"actor rank {vote.failed_rank}"
            raise SecondaryFailure(
                f"{origin} ran out of memory with one sample per micro-batch",
                remedy="see the error of that rank",
                phase=work,
                origin=origin,
            )
        if failure is not None and vote.failed_rank == self._backend.layout.rank:
            log.warning(
                f"{failure.replaced(remedy='')}\nNothing was applied. This is repeated, and {MAX_TOKEN_LEN} is lowered "
                f"from {limit} to {vote.limit} for the rest of the run. Set {MAX_TOKEN_LEN}={vote.limit} in the next "
                "run, because each failed attempt costs time"
            )
        return TokenLimit(lowered=vote.limit, n_splits=self._limit.n_splits + 1)

    def _out_of_memory_error(self, error: Exception, work: str) -> WorkerError:
        """Return the out-of-memory error. Call it before anything is freed."""
        backend, limit = self._backend, self._limit.applied_to(self.config).max_token_len
        sizes = state_sizes(backend.state_tensors, backend.device)
        if self.config.use_dynamic_bsz and not self._gkd.fuse_lm_head:
            n_bytes = limit * backend.vocab_size * backend.logits_dtype.itemsize // backend.layout.tp_size
            sizes[f"logits of a full micro-batch ({limit} tokens x {backend.vocab_size} ids)"] = n_bytes
        label = f"actor rank {backend.layout.rank}"
        failure = out_of_memory_error(error, WorkerError, pool="actor", phase="update", worker=label, sizes=sizes)
        return failure.replaced(phase=work)

    def _free_memory(self) -> None:
        """Free what an attempt left: buffers, reference cycles, and the cache of the allocator.

        The next attempt, or the end of the update, frees the gradient.
        """
        self._pool = ArrayPool()
        gc.collect()
        if self._backend.device.type == "cuda":
            torch.cuda.empty_cache()

    def _reduce_over_ranks(
        self, reports: Sequence[dict[str, Any]], agreement: RoutingAgreement
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return sums over the global batch and maxima over it and over the ranks, equal on all ranks. Collective."""
        layout, device = self._backend.layout, self._backend.device
        names = sum_names(self._gkd, self._teachers)
        sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        if layout.counts_tokens:
            for report in reports:
                sums += torch.stack([report["sums"][name] for name in names])
        # Each rank has other choices: of other tokens, or in other layers.
        names, sums = [*names, *ROUTING], torch.cat([sums, agreement.sums(device)])
        own_maxima = {"perf/max_memory_allocated_gb": torch.tensor(_peak_memory_bytes(device) / GIB)}
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

    def _not_finite_error(self, step: int, problem: str, uids: Sequence[int]) -> WorkerError:
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
            f"{problem} {', '.join(map(str, all_uids[:MAX_UIDS_IN_MESSAGE]))}{ellipsis}; the weights are unchanged",
            remedy=not_finite_advice(self._gkd),
            phase=f"update {step}",
            uids=tuple(all_uids),
            keys=("actor_rollout_ref.actor.optim.lr",),
        )


def not_finite_advice(gkd: GkdConfig) -> str:
    """Return what to check after an update whose loss or gradient is not finite."""
    custom_loss = ""
    if uses_custom_loss(gkd):
        custom_loss = f"the gradient of the custom loss {gkd.custom_loss.name} of {gkd.custom_loss.path}, and "
    return (
        f"check {custom_loss}the teacher's log-probabilities of these samples, or lower "
        "actor_rollout_ref.actor.optim.lr"
    )


def _can_repeat(error: Exception, vote: Vote) -> bool:
    """Return True if memory ran out before the ranks voted."""
    return not vote.is_done and not isinstance(error, GkdError) and is_out_of_memory(error)


def _is_not_finite(loss_T: Tensor) -> np.ndarray:
    return (~loss_T.isfinite()).cpu().numpy()


def _peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of PyTorch's allocations on a GPU, or of the process's memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
