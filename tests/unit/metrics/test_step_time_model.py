"""Step time model: its bounds, and its agreement with the real schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_stages import BatchTimes, Pools, Stages, drive
from virtual_time import run

from recipe_gkd.metrics.advice.step_time_model import StageSeconds, step_bound, step_seconds, step_time_bounds
from recipe_gkd.pipeline.config import PipelineConfig

seconds = st.sampled_from([0.1, 0.5, 1.0, 2.0])


@pytest.mark.parametrize(
    ("stages", "staleness", "bound"),
    [((1, 1, 1, 0), 0, 3), ((1, 1, 1, 0), 1, 1.5), ((1, 1, 1, 0), 2, 1), ((1, 5, 1, 0), 1, 5), ((1, 1, 1, 1), 0, 4)],
)
def test_step_bound_is_slowest_stage_or_batch(
    stages: tuple[float, float, float, float], staleness: int, bound: float
) -> None:
    assert step_bound(*stages, staleness) == bound


def test_step_time_bounds_by_cause() -> None:
    stages = StageSeconds(generate=1.0, latency=1.4, teacher=1.2, tail=0.2, update=2.0, sync=0.4)
    assert step_time_bounds(stages, 1) == pytest.approx(
        {"rollout": 1.8, "actor": 2.4, "teacher": 1.2, "staleness": 2.0}
    )
    assert step_time_bounds(stages, 2)["rollout"] == pytest.approx(1.6)  # a sync serves two batches
    assert step_time_bounds(stages, 1, inflight=True)["rollout"] == pytest.approx(
        1.4
    )  # it does not wait for stragglers
    assert step_seconds(stages, 0) == pytest.approx(4.0)
    assert step_seconds(stages.scaled(actor=2.0, rollout=0.5), 1) == pytest.approx(3.2)


@settings(max_examples=40, deadline=None)
@given(g=seconds, t=seconds, u=seconds, w=st.sampled_from([0.0, 0.02, 0.2]), staleness=st.integers(0, 3))
def test_schedule_matches_model(g: float, t: float, u: float, w: float, staleness: int) -> None:
    """Whole batches of equally long responses: without stragglers and streaming."""
    times = BatchTimes(responses=[g] * 8, teacher=t, update=u, sync=w)

    async def steady() -> float:
        stages = Stages(lambda step: times, Pools(n_replicas=2, n_slots=4), whole_batches=True)
        pipeline_config = PipelineConfig(max_staleness=staleness, n_replicas=2, capacity=8)
        ended = (await drive(stages, pipeline_config, 40)).ended_at
        return (ended[36] - ended[12]) / 24

    stages = StageSeconds(generate=g, latency=g, teacher=t, tail=t, update=u, sync=w)
    step = run(steady())
    assert step >= step_bound(g, t, u, w, staleness) - 1e-6
    assert step <= 1.05 * step_seconds(stages, staleness) + w
