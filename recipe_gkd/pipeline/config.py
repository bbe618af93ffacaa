"""Settings of the schedule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Settings of the schedule.

    Attributes:
        max_staleness: Maximum policy lag in optimizer steps: 0 for ``sync``, 1 for ``one_step_off``, 2 for
            ``two_step_off``.
        capacity: Number of responses that all replicas together generate at the same time. The next batch is dispatched
            when fewer responses are in flight.
        responses_per_prompt: Number of consecutive samples that share a prompt. They go to the same replica.
        requests_per_batch: Maximum number of teacher requests per batch. All requests have the same number of
            responses, except the last one, which may have fewer.
        inflight_update: If True, a weight sync may start while responses are in flight.
        on_request: If True, a batch is dispatched only when the trainer asks for it, after checkpoint and validation
            of the step before. Only for ``max_staleness`` 0. The stages then use the same devices in turn.
        max_row_bytes: Limit of the teachers' rows of all batches that are not trained on yet. The next batch is
            dispatched when they are below it. None: no limit.
    """

    max_staleness: int
    n_replicas: int = 1
    capacity: int = 1
    responses_per_prompt: int = 1
    requests_per_batch: int = 1
    inflight_update: bool = False
    on_request: bool = False
    max_row_bytes: int | None = None
