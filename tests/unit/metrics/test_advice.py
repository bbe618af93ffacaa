"""Advice: bottlenecks are named, and the expected effect of a change is confirmed by the schedule itself."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from pipeline_stages import BatchTimes, Pools, Stages, drive
from virtual_time import run

from recipe_gkd.config.staleness import MAX_STALENESS
from recipe_gkd.metrics.advice.advice import STEPS_BEFORE_ADVICE, STEPS_BEFORE_REPEAT, Advisor
from recipe_gkd.metrics.advice.measured_stages import stage_seconds
from recipe_gkd.metrics.advice.resource_layout import ResourceLayout
from recipe_gkd.metrics.advice.what_if import larger_buckets, more_devices, no_cost_changes, splits_of
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.ray_cluster.capacity import ClusterCapacity
from recipe_gkd.ray_cluster.pools import PoolSpec
from tests._support.base_config import base_config
from tests._support.repository import REPO

TEACHER = "actor_rollout_ref.teacher"
LAYOUT = ResourceLayout(staleness=1, actor=(1, 4), rollout=(1, 4), n_teachers=2)


def train(
    *stages_s: float,
    sync_s: float = 0.05,
    staleness: int = 1,
    n_teachers: int = 2,
    n_steps: int = 30,
    n_requests: int = 32,
) -> list[dict[str, float]]:
    """Return the metrics of a run.

    Args:
        *stages_s: Time of a batch in generation, teacher and update, in seconds.
        sync_s: Time of a weight sync, in seconds.
        staleness: Maximum policy lag.
        n_requests: Number of requests to the teacher per batch.
    """
    g, t, u = stages_s
    times = BatchTimes(responses=[g * (0.75 + i / 128) for i in range(32)], teacher=t, update=u, sync=sync_s)
    pipeline_config = PipelineConfig(max_staleness=staleness, n_replicas=2, capacity=32, requests_per_batch=n_requests)

    async def driven() -> list[dict[str, float]]:
        pools = Pools(n_replicas=2, n_slots=16, n_teachers=n_teachers)
        stages = Stages(lambda step: times, pools)
        return (await drive(stages, pipeline_config, n_steps)).metrics

    return run(driven())


def advice(layout: ResourceLayout, metrics: list[dict[str, float]]) -> list[tuple[int, str]]:
    advisor = Advisor(layout)
    reported = [(step, advisor.observe(each, step)) for step, each in enumerate(metrics, start=1)]
    return [(step, line) for step, line in reported if line is not None]


def with_weights(metrics: list[dict[str, float]], *, megabytes: float, transfer: float = 1.0) -> list[dict[str, float]]:
    """Add metrics of a sync with this size, of which the fraction ``transfer`` is the transfer itself."""
    name = "timing/sync_rollout_weights"
    return [
        each | ({"weights/megabytes": megabytes, f"{name}_transfer": transfer * each[name]} if each.get(name) else {})
        for each in metrics
    ]


def on_machine(n_cores: int, *, ray_cpus: int, layout: ResourceLayout) -> ResourceLayout:
    """Return the layout in a local cluster of ``ray_cpus`` slots on a machine of ``n_cores`` cores."""
    pools = tuple(
        PoolSpec(name, *size, "cpu", "") for name, size in (("actor", layout.actor), ("rollout", layout.rollout))
    )
    nodes = ({"CPU": float(min(n_cores, ray_cpus))},)
    capacity = ClusterCapacity((pools[0], pools[1]), nodes, float(n_cores))
    return replace(layout, grants=capacity.grants, cores=capacity.cores, teacher_shares_cores=True)


def steady_step_s(metrics: list[dict[str, float]]) -> float:
    return sum(each["timing/step"] for each in metrics[10:]) / len(metrics[10:])


def expected_s(line: str) -> float:
    found = re.search(r"would make it ([\d.]+) s", line)
    assert found, line
    return float(found[1])


def test_slow_teacher_is_reported_once_with_needed_workers() -> None:
    metrics = train(1.0, 3.0, 1.0)
    ((step, line),) = advice(LAYOUT, metrics)
    assert step >= STEPS_BEFORE_ADVICE
    assert line.startswith("the trainer waits ") and " for the teacher " in line
    proposed = re.search(r"n_server_workers=(\d+) and (\d+) more teacher workers", line)
    assert proposed and int(proposed[1]) == 2 + int(proposed[2])
    n = int(proposed[1])
    assert steady_step_s(train(1.0, 3.0 * 2 / n, 1.0, n_teachers=n)) == pytest.approx(expected_s(line), rel=0.07)


@pytest.mark.parametrize(("g", "u", "waits"), [(4.0, 1.0, "for responses"), (1.0, 4.0, "for the actor")])
def test_slow_pool_gets_devices_of_other_pool(g: float, u: float, waits: str) -> None:
    ((_, line),) = advice(LAYOUT, train(g, 0.2, u))
    assert waits in line
    proposed = re.search(r"trainer.n_gpus_per_node=(\d) rollout.n_gpus_per_node=(\d)", line)
    assert proposed
    actor, rollout = int(proposed[1]), int(proposed[2])
    assert actor + rollout == 8 and (actor > 4) == (u > g)
    assert steady_step_s(train(g * 4 / rollout, 0.2, u * 4 / actor)) == pytest.approx(expected_s(line), rel=0.07)


@pytest.mark.parametrize(("staleness", "scheduler"), [(0, "one_step_off"), (1, "two_step_off")])
def test_sequential_stages_are_advised_to_overlap(staleness: int, scheduler: str) -> None:
    """No pool is the bottleneck: each waits for the others."""
    layout = replace(LAYOUT, staleness=staleness, actor=(1, 1), rollout=(1, 1))
    ((_, line),) = advice(layout, train(1.0, 1.0, 1.0, staleness=staleness, n_requests=1))
    assert f"trainer.scheduler={scheduler}" in line
    after = steady_step_s(train(1.0, 1.0, 1.0, staleness=staleness + 1, n_requests=1))
    assert after == pytest.approx(expected_s(line), rel=0.07)


def test_long_sync_proposes_larger_buckets() -> None:
    layout = replace(LAYOUT, actor=(1, 1), rollout=(1, 1), inflight=True)
    ((_, line),) = advice(layout, with_weights(train(1.0, 0.2, 1.0, sync_s=2.0), megabytes=3000))
    assert "for the weight sync" in line or "for responses" in line
    assert "update_weights_bucket_megabytes=1024" in line and "at best" in line


@pytest.mark.parametrize(("megabytes", "transfer"), [(0.5, 1.0), (500, 1.0), (3000, 0.01)])
def test_larger_buckets_without_saving_are_not_proposed(megabytes: float, transfer: float) -> None:
    """The weights fit into one bucket, or a sync spends its time waiting for responses in flight."""
    layout = replace(LAYOUT, actor=(1, 1), rollout=(1, 1), inflight=True)
    metrics = with_weights(train(1.0, 0.2, 1.0, sync_s=2.0), megabytes=megabytes, transfer=transfer)
    assert not any("bucket" in line for _, line in advice(layout, metrics))
    assert not any("bucket" in line for _, line in advice(layout, train(1.0, 0.2, 1.0, sync_s=2.0)))  # size unknown


def test_more_devices_are_proposed_if_nothing_else_helps() -> None:
    layout = replace(LAYOUT, actor=(1, 1), rollout=(1, 1))
    ((_, line),) = advice(layout, train(4.0, 0.2, 0.5))
    assert "; rollout.n_gpus_per_node=2 would" in line
    shared = replace(layout, shared=True)
    ((_, line),) = advice(shared, train(4.0, 0.2, 0.5))
    assert line.endswith("no other split, schedule or number of workers would save 5% of it")


@pytest.mark.parametrize("ray_cpus", [2, 3])
def test_devices_beyond_the_machine_are_not_proposed(ray_cpus: int) -> None:
    """Two pools and a teacher share two cores. `ray_init.num_cpus=3` adds a slot, but no core."""
    one_each = replace(LAYOUT, actor=(1, 1), rollout=(1, 1), n_teachers=1)
    metrics = train(4.0, 0.5, 2.5, n_teachers=1)
    ((_, line),) = advice(one_each, metrics)
    assert "rollout.n_gpus_per_node=2" in line  # the cluster is unknown
    ((_, line),) = advice(on_machine(2, ray_cpus=ray_cpus, layout=one_each), metrics)
    assert "n_gpus_per_node" not in line and "n_server_workers" not in line and "would make it" not in line
    ((_, line),) = advice(on_machine(8, ray_cpus=8, layout=one_each), metrics)
    assert "rollout.n_gpus_per_node=2" in line


def test_promised_step_time_covers_work_of_all_cores() -> None:
    """A higher staleness overlaps stages, which does not help if all cores are busy already."""
    one_each = replace(LAYOUT, staleness=1, actor=(1, 1), rollout=(1, 1), n_teachers=1)
    metrics = train(1.0, 1.0, 1.0, n_teachers=1, n_requests=1)
    ((_, line),) = advice(one_each, metrics)
    assert "trainer.scheduler=two_step_off" in line
    ((_, line),) = advice(on_machine(2, ray_cpus=2, layout=one_each), metrics)
    assert line.endswith("all 2 cores are busy: only more or faster cores would make it shorter")
    assert "two_step_off" in advice(on_machine(4, ray_cpus=4, layout=one_each), metrics)[0][1]


def test_teacher_workers_without_cores_are_not_proposed() -> None:
    one_each = replace(LAYOUT, actor=(1, 1), rollout=(1, 1), n_teachers=1)
    metrics = train(0.5, 4.0, 0.5, n_teachers=1)
    ((_, line),) = advice(on_machine(8, ray_cpus=8, layout=one_each), metrics)
    assert "n_server_workers=" in line
    ((_, line),) = advice(on_machine(3, ray_cpus=3, layout=one_each), metrics)
    assert line.endswith("; no other split, schedule or number of workers would save 5% of it")


@pytest.mark.parametrize(
    ("backend", "is_service"),
    [
        (["zmq"], True),
        (["hf", f"{TEACHER}.model_path=x"], False),
        ([f"{REPO}/docs/examples/custom_teacher.py:UnigramTeacher"], False),
    ],
)
def test_workers_of_a_teacher_without_service_are_not_proposed(backend: list[str], is_service: bool) -> None:
    name, *more = backend
    layout = ResourceLayout.of(base_config("trainer.scheduler=one_step_off", f"{TEACHER}.backend={name}", *more))
    ((_, line),) = advice(layout, train(1.0, 3.0, 1.0, n_teachers=1))
    assert " for the teacher " in line and ("n_server_workers" in line) == is_service


def test_split_that_fits_no_node_is_not_proposed() -> None:
    layout = replace(LAYOUT, actor=(1, 4), rollout=(1, 4))
    pools = PoolSpec("actor", 1, 4, "cuda", ""), PoolSpec("rollout", 1, 4, "cuda", "")
    four_each = ClusterCapacity(pools, ({"CPU": 8.0, "GPU": 4.0},) * 2, None)
    assert list(splits_of(layout)) and not list(splits_of(replace(layout, grants=four_each.grants)))
    stages = stage_seconds(train(4.0, 0.2, 0.5)[10:25])
    assert list(more_devices(layout, stages)) and not list(
        more_devices(replace(layout, grants=four_each.grants), stages)
    )


def test_balanced_run_gets_no_advice() -> None:
    assert advice(LAYOUT, train(1.0, 0.2, 1.0)) == []


def test_advice_repeats_late_and_at_once_for_new_bottleneck() -> None:
    slow_teacher, slow_generation = train(1.0, 3.0, 1.0, n_steps=200), train(4.0, 0.2, 1.0, n_steps=40)
    reported = advice(LAYOUT, slow_teacher[:150] + slow_generation[20:])
    steps = [step for step, _ in reported]
    assert [" for the teacher" in line for _, line in reported] == [True, True, False]
    assert steps[1] == steps[0] + STEPS_BEFORE_REPEAT
    assert 150 + STEPS_BEFORE_ADVICE <= steps[2] <= 150 + 2 * STEPS_BEFORE_ADVICE


def test_single_slow_step_and_incomplete_steps_are_ignored() -> None:
    metrics = train(1.0, 0.2, 1.0)
    metrics[20] |= {"timing/step": 500.0, "timing/wait_prev_gen": 499.0}
    assert advice(LAYOUT, metrics) == []
    assert advice(LAYOUT, [{"timing/step": 1.0}] * 50) == []


def test_stage_seconds_match_stage_times_of_run() -> None:
    stages = stage_seconds(train(1.0, 0.5, 2.0, sync_s=0.1)[10:25])
    assert stages.update == pytest.approx(2.0, rel=0.01)
    assert stages.sync == pytest.approx(0.1)
    assert stages.teacher == pytest.approx(0.5, rel=0.1)
    assert stages.generate == pytest.approx(1.0, rel=0.05)
    assert stages.latency == pytest.approx(1.0, rel=0.05)
    assert stages.head_start == pytest.approx(0.25, rel=0.05)
    assert stages.tail == pytest.approx(0.25, rel=0.1)


def test_splits_of_respects_parallel_layout() -> None:
    layout = replace(LAYOUT, actor=(1, 4), rollout=(1, 4), actor_divisor=2, rollout_divisor=3)
    assert [text for text, _, _ in splits_of(layout)] == ["trainer.n_gpus_per_node=2 rollout.n_gpus_per_node=6"]
    nodes = replace(LAYOUT, actor=(2, 8), rollout=(1, 8))
    assert list(splits_of(nodes)) == [("trainer.nnodes=1 rollout.nnodes=2", 2.0, 0.5)]
    assert not list(splits_of(replace(LAYOUT, actor=(2, 8), rollout=(1, 4))))
    assert not list(splits_of(replace(LAYOUT, shared=True)))


SHARED = {"actor_rollout_ref.hybrid_engine": "true", "trainer.scheduler": "sync"}


@pytest.mark.parametrize(
    "layout",
    [
        *({"trainer.scheduler": name} for name in MAX_STALENESS),
        *({"trainer.scheduler": "n_step_off", "trainer.max_staleness": lag} for lag in (0, 1, 2, 3)),
        {"trainer.scheduler": "sync", f"{TEACHER}.sleep_between_batches": "true"},
        SHARED | {"trainer.n_gpus_per_node": 2},
        {"trainer.n_gpus_per_node": 6, "rollout.n_gpus_per_node": 6, "megatron.tensor_model_parallel_size": 2}
        | {"megatron.expert_model_parallel_size": 3, "megatron.expert_tensor_parallel_size": 1},
        {"trainer.nnodes": 3, "trainer.n_gpus_per_node": 4, "megatron.tensor_model_parallel_size": 6}
        | {"rollout.nnodes": 2, "rollout.n_gpus_per_node": 4, "rollout.tensor_model_parallel_size": 4},
    ],
)
def test_every_proposal_is_a_valid_configuration(layout: dict[str, str | int]) -> None:
    long_names = {
        "megatron": "actor_rollout_ref.actor.megatron",
        "rollout.tensor_model_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    }

    def full(name: str) -> str:
        short = next((short for short in long_names if name.startswith(short)), "")
        return long_names.get(short, "") + name[len(short) :]

    overrides = [f"{full(name)}={value}" for name, value in layout.items()]
    resources = ResourceLayout.of(base_config(*overrides))
    steps = with_weights(train(3.0, 1.0, 3.0, n_steps=5), megabytes=3000)
    stages = stage_seconds(steps)
    changes = [
        *no_cost_changes(resources, stages),
        *larger_buckets(resources, stages, steps),
        *more_devices(resources, stages),
    ]
    proposed = [re.findall(r"[\w.]+=\w+", change.text) for change in changes]
    proposed += [text.split() for text, _, _ in splits_of(resources)]
    for keys in proposed:
        base_config(*overrides, *keys)
    assert len(changes) >= (2 if resources.takes_turns else 4)
    assert any("trainer.scheduler" in str(keys) or "max_staleness" in str(keys) for keys in proposed) == (
        not resources.takes_turns
    )


def test_resource_layout_of_config() -> None:
    config = base_config(
        "trainer.scheduler=n_step_off",
        "trainer.max_staleness=3",
        "trainer.n_gpus_per_node=8",
        "rollout.n_gpus_per_node=4",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.context_parallel_size=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.teacher.n_server_workers=5",
    )
    layout = ResourceLayout.of(config)
    assert layout == ResourceLayout(
        staleness=3,
        is_n_step_off=True,
        actor=(1, 8),
        rollout=(1, 4),
        actor_divisor=8,
        rollout_divisor=2,
        n_teachers=5,
    )


@pytest.mark.parametrize(("fsdp_size", "divisor"), [(-1, 1), (2, 2)])
def test_layout_of_fsdp_divides_the_pool_by_the_size_of_a_copy(fsdp_size: int, divisor: int) -> None:
    actor = "actor_rollout_ref.actor"
    overrides = (f"{actor}.strategy=fsdp", f"{actor}.fsdp_config.fsdp_size={fsdp_size}", "trainer.n_gpus_per_node=4")
    assert ResourceLayout.of(base_config(*overrides)).actor_divisor == divisor
