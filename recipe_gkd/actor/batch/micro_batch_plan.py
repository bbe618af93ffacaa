"""Division of an update into micro-batches, from the lengths of the samples alone.

The arrays of a micro-batch are packed when it is about to be computed; see :mod:`~recipe_gkd.actor.batch.prefetch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from recipe_gkd.actor.attention_kernels import AttentionKernel
from recipe_gkd.actor.backend import Backend
from recipe_gkd.actor.batch.context_parallel import padded_lengths, shard_for_context
from recipe_gkd.actor.batch.packing import Allocate, input_length, micro_batches, pack, packed_lengths
from recipe_gkd.actor.batch.sample_checks import check_samples
from recipe_gkd.actor.batch.staging import StagedBatch, stage
from recipe_gkd.actor.objective.loss_terms import GlobalDenominators
from recipe_gkd.actor.ranks import Layout
from recipe_gkd.actor.replayed_experts import ReplayedExperts, RoutingAgreement
from recipe_gkd.config.schema import ActorConfig, AggregationMode
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import DataError, SecondaryFailure

SEE_ORIGIN = "see the error of that rank"


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """Micro-batches of one rank in one update.

    Attributes:
        groups: Samples of each micro-batch.
        count: Number of micro-batches, equal on all ranks. Those after ``groups`` are empty.
        denominators: Token counts of the global batch.
        loss_agg_mode: ``gkd.loss_agg_mode``.
        layout: Coordinates of this rank.
        row_multiple: The rows of a micro-batch are padded to a multiple of this.
        attention: Attention kernel. Only the row indices that it reads are prepared.
        version: Version of the actor's weights; see :func:`~recipe_gkd.actor.batch.packing.pack`.
        allocate: Allocates the large arrays.
        before_reduction: Called on each rank after the last backward pass and before any gradient is reduced, which
            then cannot overlap with the computation. No rank waits for another one before this call. It may raise an
            error, after which the backend can be used again. None: gradients are reduced as early as possible.
        agreement: Receives the engine's choices of experts that the actor would have made itself.
    """

    groups: Sequence[Sequence[Sample]]
    count: int
    denominators: GlobalDenominators
    loss_agg_mode: AggregationMode
    layout: Layout
    row_multiple: int
    device: torch.device
    attention: AttentionKernel
    version: int | None = None
    allocate: Allocate = np.empty
    before_reduction: Callable[[], None] | None = None
    agreement: RoutingAgreement = field(default_factory=RoutingAgreement)

    def row_length(self, index: int) -> int:
        """Return the number of rows of a micro-batch, [N] of its packed arrays, without packing it.

        It is equal on all ranks of one data-parallel rank, because they have the same samples.
        """
        lengths = packed_lengths([input_length(sample) for sample in self._group(index)], multiple_of=self.row_multiple)
        cp_size = self.layout.cp_size
        return int(padded_lengths(lengths, cp_size=cp_size, multiple_of=self.row_multiple).sum()) // cp_size

    def stage(self, index: int) -> StagedBatch:
        """Pack a micro-batch and prepare its copy to the device. Safe in any thread, one at a time."""
        layout, multiple_of = self.layout, self.row_multiple
        packed = pack(
            self._group(index),
            multiple_of=multiple_of,
            with_teacher=layout.is_last_stage,
            version=self.version,
            allocate=self.allocate,
        )
        packed, weights = shard_for_context(
            packed,
            self.denominators.weights(packed, self.loss_agg_mode),
            cp_rank=layout.cp_rank,
            cp_size=layout.cp_size,
            multiple_of=multiple_of,
            allocate=self.allocate,
        )
        return stage(packed, weights, self.device, attention=self.attention, allocate=self.allocate)

    def replayed(self, routed_experts_NX: Tensor | None) -> ReplayedExperts | None:
        """Return the experts of the tokens of the next micro-batch on this rank.

        Args:
            routed_experts_NX: Experts of the micro-batch; None if the actor chooses.
        """
        if routed_experts_NX is None:
            return None
        layout = self.layout
        # Mixtures of experts have sequence parallelism if they have tensor parallelism.
        ids = routed_experts_NX.chunk(layout.tp_size)[layout.tp_rank]
        return ReplayedExperts(ids=ids, number=self.agreement.next_number(), agreement=self.agreement)

    def _group(self, index: int) -> Sequence[Sample]:
        return self.groups[index] if index < len(self.groups) else []


def plan_micro_batches(
    backend: Backend,
    config: ActorConfig,
    samples: Sequence[Sample],
    step: int,
    *,
    loss_agg_mode: AggregationMode,
    allocate: Allocate = np.empty,
    before_reduction: Callable[[], None] | None = None,
) -> MicroBatchPlan:
    """Check this rank's samples, divide them into micro-batches and count the tokens of the global batch. Collective.

    All ranks get the same number of micro-batches. Ranks with fewer micro-batches get empty ones.

    Args:
        backend: Model in training.
        config: Size of the micro-batches.
        samples: Shard of this data-parallel rank.
        step: Optimizer step, which is the version of the actor's weights.
        loss_agg_mode: ``gkd.loss_agg_mode``.
        allocate: Allocates the large arrays of the micro-batches.
        before_reduction: See :class:`MicroBatchPlan`.

    Raises:
        DataError: A sample that this rank checks is invalid.
        SecondaryFailure: A sample that another rank checks is invalid.
    """
    layout, device = backend.layout, backend.device
    max_token_len = config.max_token_len if config.use_dynamic_bsz else None
    groups = micro_batches(samples, micro_batch_size=config.micro_batch_size, max_token_len=max_token_len)
    failure: DataError | None = None
    try:
        check_samples(_checked_here(samples, layout))
    except DataError as error:  # raised after the all-reduce: otherwise the other ranks would wait in the forward pass
        failure = error
    # One entry per rank for the number of micro-batches, so that a single all-reduce also yields the maximum.
    n_batches_of = [len(groups) if rank == layout.rank else 0 for rank in range(layout.world_size)]
    counts = [count * layout.counts_samples for count in GlobalDenominators.counts(samples)]
    reduced = torch.tensor([failure is not None, *n_batches_of, *counts], dtype=torch.float64, device=device)
    dist.all_reduce(reduced)
    n_failed, *sums = reduced.tolist()
    if failure is not None:
        raise failure
    if n_failed:
        raise SecondaryFailure("another rank rejected a sample", phase=f"update {step}", remedy=SEE_ORIGIN)
    n_batches = max(1, *map(int, sums[: layout.world_size]))
    return MicroBatchPlan(
        groups=groups,
        count=math.ceil(n_batches / backend.micro_batch_multiple) * backend.micro_batch_multiple,
        denominators=GlobalDenominators.of(sums[layout.world_size :]),
        loss_agg_mode=loss_agg_mode,
        layout=layout,
        row_multiple=backend.row_multiple,
        device=device,
        attention=backend.attention,
        version=step,
        allocate=allocate,
        before_reduction=before_reduction,
    )


def _checked_here(samples: Sequence[Sample], layout: Layout) -> Sequence[Sample]:
    """Return this rank's part of the samples to check.

    The ranks of one data-parallel rank have the same samples, but only the last pipeline stage has the teacher's rows.
    """
    if not layout.is_last_stage:
        return []
    return samples[layout.tp_rank + layout.tp_size * layout.cp_rank :: layout.tp_size * layout.cp_size]
