"""The advice names what the trainer waits for, and a change that then helps as the schedule itself shows."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from pipeline_stages import BatchTimes, Pools, Stages, drive
from virtual_time import run

from recipe_gkd.config import load_config
from recipe_gkd.metrics.advice import LASTS, REPEAT, Advisor
from recipe_gkd.metrics.changes import ResourceLayout, more_devices, no_cost_changes, splits_of, stage_seconds
from recipe_gkd.pipeline.interface import PipelineConfig
from recipe_gkd.ray_cluster.capacity import ClusterCapacity
from recipe_gkd.ray_cluster.pools import PoolSpec

SETUP = ResourceLayout(staleness=1, actor=(1, 4), rollout=(1, 4), n_teachers=2)


def train(
    g: float,
    t: float,
    u: float,
    w: float = 0.05,
    *,
    staleness: int = 1,
    n_teachers: int = 2,
    n_steps: int = 30,
    n_requests: int = 32,
) -> list[dict[str, float]]:
    """The metrics of a run whose batches take this long in each stage."""
    times = BatchTimes(responses=[g * (0.75 + i / 128) for i in range(32)], teacher=t, update=u, sync=w)
    pipeline_config = PipelineConfig(max_staleness=staleness, n_replicas=2, capacity=32, requests_per_batch=n_requests)

    async def driven() -> list[dict[str, float]]:
        pools = Pools(n_replicas=2, n_slots=16, n_teachers=n_teachers)
        stages = Stages(lambda step: times, pools)
        return (await drive(stages, pipeline_config, n_steps)).metrics

    return run(driven())


def advice(setup: ResourceLayout, metrics: list[dict[str, float]]) -> list[tuple[int, str]]:
    advisor = Advisor(setup)
    said = [(step, advisor.observe(each, step)) for step, each in enumerate(metrics, start=1)]
    return [(step, line) for step, line in said if line is not None]


def with_weights(metrics: list[dict[str, float]], *, megabytes: float, transfer: float = 1.0) -> list[dict[str, float]]:
    """Add what a sync tells of itself; ``transfer``: the share of it that sends."""
    name = "timing/sync_rollout_weights"
    return [
        each | ({"weights/megabytes": megabytes, f"{name}_transfer": transfer * each[name]} if each.get(name) else {})
        for each in metrics
    ]


def on_a_machine(n_cores: int, *, ray_cpus: int, setup: ResourceLayout) -> ResourceLayout:
    """The setup in a local cluster of so many slots, on a machine of so many cores."""
    pools = tuple(
        PoolSpec(name, *size, "cpu", "") for name, size in (("actor", setup.actor), ("rollout", setup.rollout))
    )
    nodes = ({"CPU": float(min(n_cores, ray_cpus))},)
    capacity = ClusterCapacity((pools[0], pools[1]), nodes, float(n_cores))
    return replace(setup, grants=capacity.grants, cores=capacity.cores, teacher_shares_cores=True)


def steady(metrics: list[dict[str, float]]) -> float:
    return sum(each["timing/step"] for each in metrics[10:]) / len(metrics[10:])


def expected(line: str) -> float:
    found = re.search(r"would make it ([\d.]+) s", line)
    assert found, line
    return float(found[1])


def test_a_slow_teacher_is_told_once_with_the_workers_that_are_missing() -> None:
    metrics = train(1.0, 3.0, 1.0)
    ((step, line),) = advice(SETUP, metrics)
    assert step >= LASTS
    assert line.startswith("the trainer waits ") and " for the teacher " in line
    asked = re.search(r"n_server_workers=(\d+) and (\d+) more teacher workers", line)
    assert asked and int(asked[1]) == 2 + int(asked[2])
    n = int(asked[1])
    assert steady(train(1.0, 3.0 * 2 / n, 1.0, n_teachers=n)) == pytest.approx(expected(line), rel=0.07)


@pytest.mark.parametrize(("g", "u", "waits"), [(4.0, 1.0, "for answers"), (1.0, 4.0, "for the actor")])
def test_a_slow_pool_gets_devices_of_the_other(g: float, u: float, waits: str) -> None:
    ((_, line),) = advice(SETUP, train(g, 0.2, u))
    assert waits in line
    asked = re.search(r"trainer.n_gpus_per_node=(\d) rollout.n_gpus_per_node=(\d)", line)
    assert asked
    actor, rollout = int(asked[1]), int(asked[2])
    assert actor + rollout == 8 and (actor > 4) == (u > g)
    assert steady(train(g * 4 / rollout, 0.2, u * 4 / actor)) == pytest.approx(expected(line), rel=0.07)


@pytest.mark.parametrize(("staleness", "scheduler"), [(0, "one_step_off"), (1, "two_step_off")])
def test_stages_that_are_one_after_the_other_may_overlap(staleness: int, scheduler: str) -> None:
    """No pool is to blame: each waits for the others."""
    setup = replace(SETUP, staleness=staleness, actor=(1, 1), rollout=(1, 1))
    ((_, line),) = advice(setup, train(1.0, 1.0, 1.0, staleness=staleness, n_requests=1))
    assert f"trainer.scheduler={scheduler}" in line
    after = steady(train(1.0, 1.0, 1.0, staleness=staleness + 1, n_requests=1))
    assert after == pytest.approx(expected(line), rel=0.07)


def test_a_sync_that_takes_long_asks_for_larger_buckets() -> None:
    setup = replace(SETUP, actor=(1, 1), rollout=(1, 1), inflight=True)
    ((_, line),) = advice(setup, with_weights(train(1.0, 0.2, 1.0, w=2.0), megabytes=3000))
    assert "for weights to be sent" in line or "for answers" in line
    assert "update_weights_bucket_megabytes=1024" in line and "at best" in line


@pytest.mark.parametrize(("megabytes", "transfer"), [(0.5, 1.0), (500, 1.0), (3000, 0.01)])
def test_larger_buckets_are_not_asked_for_where_they_save_nothing(megabytes: float, transfer: float) -> None:
    """The weights fit into one bucket, or a sync hardly transfers: it waits for the answers under way."""
    setup = replace(SETUP, actor=(1, 1), rollout=(1, 1), inflight=True)
    metrics = with_weights(train(1.0, 0.2, 1.0, w=2.0), megabytes=megabytes, transfer=transfer)
    assert not any("bucket" in line for _, line in advice(setup, metrics))
    assert not any("bucket" in line for _, line in advice(setup, train(1.0, 0.2, 1.0, w=2.0)))  # size unknown


def test_where_nothing_free_helps_more_devices_do() -> None:
    setup = replace(SETUP, actor=(1, 1), rollout=(1, 1))
    ((_, line),) = advice(setup, train(4.0, 0.2, 0.5))
    assert "; rollout.n_gpus_per_node=2 would" in line
    shared = replace(setup, shared=True)
    ((_, line),) = advice(shared, train(4.0, 0.2, 0.5))
    assert line.endswith("no other split, schedule or number of workers would save 5% of it")


@pytest.mark.parametrize("ray_cpus", [2, 3])
def test_devices_that_the_machine_does_not_have_are_not_advised(ray_cpus: int) -> None:
    """Two pools and a teacher on two cores; `ray_init.num_cpus=3` adds a slot, and no core."""
    one_each = replace(SETUP, actor=(1, 1), rollout=(1, 1), n_teachers=1)
    metrics = train(4.0, 0.5, 2.5, n_teachers=1)
    ((_, line),) = advice(one_each, metrics)
    assert "rollout.n_gpus_per_node=2" in line  # of a cluster that is not known
    ((_, line),) = advice(on_a_machine(2, ray_cpus=ray_cpus, setup=one_each), metrics)
    assert "n_gpus_per_node" not in line and "n_server_workers" not in line and "would make it" not in line
    ((_, line),) = advice(on_a_machine(8, ray_cpus=8, setup=one_each), metrics)
    assert "rollout.n_gpus_per_node=2" in line


def test_a_step_is_never_promised_in_less_than_the_work_of_all_its_processes_takes() -> None:
    """A further step of staleness overlaps stages, which does not help where all cores are at work already."""
    one_each = replace(SETUP, staleness=1, actor=(1, 1), rollout=(1, 1), n_teachers=1)
    metrics = train(1.0, 1.0, 1.0, n_teachers=1, n_requests=1)
    ((_, line),) = advice(one_each, metrics)
    assert "trainer.scheduler=two_step_off" in line
    ((_, line),) = advice(on_a_machine(2, ray_cpus=2, setup=one_each), metrics)
    assert line.endswith("all 2 cores are at work: only more or faster ones would make it shorter")
    assert "two_step_off" in advice(on_a_machine(4, ray_cpus=4, setup=one_each), metrics)[0][1]


def test_teacher_workers_for_which_the_machine_has_no_core_are_not_advised() -> None:
    one_each = replace(SETUP, actor=(1, 1), rollout=(1, 1), n_teachers=1)
    metrics = train(0.5, 4.0, 0.5, n_teachers=1)
    ((_, line),) = advice(on_a_machine(8, ray_cpus=8, setup=one_each), metrics)
    assert "n_server_workers=" in line
    ((_, line),) = advice(on_a_machine(3, ray_cpus=3, setup=one_each), metrics)
    assert line.endswith("; no other split, schedule or number of workers would save 5% of it")


def test_a_split_that_no_node_can_hold_is_not_advised() -> None:
    setup = replace(SETUP, actor=(1, 4), rollout=(1, 4))
    pools = PoolSpec("actor", 1, 4, "cuda", ""), PoolSpec("rollout", 1, 4, "cuda", "")
    four_each = ClusterCapacity(pools, ({"CPU": 8.0, "GPU": 4.0},) * 2, None)
    assert list(splits_of(setup)) and not list(splits_of(replace(setup, grants=four_each.grants)))
    stages = stage_seconds(train(4.0, 0.2, 0.5)[10:25])
    assert list(more_devices(setup, stages)) and not list(more_devices(replace(setup, grants=four_each.grants), stages))


def test_a_run_in_balance_is_left_alone() -> None:
    assert advice(SETUP, train(1.0, 0.2, 1.0)) == []


def test_it_is_said_again_after_long_and_at_once_when_the_bottleneck_changes() -> None:
    slow_teacher, slow_generation = train(1.0, 3.0, 1.0, n_steps=200), train(4.0, 0.2, 1.0, n_steps=40)
    said = advice(SETUP, slow_teacher[:150] + slow_generation[20:])
    steps = [step for step, _ in said]
    assert [" for the teacher" in line for _, line in said] == [True, True, False]
    assert steps[1] == steps[0] + REPEAT and 150 + LASTS <= steps[2] <= 150 + 2 * LASTS


def test_one_slow_step_is_no_bottleneck_and_steps_without_the_numbers_are_passed_over() -> None:
    metrics = train(1.0, 0.2, 1.0)
    metrics[20] |= {"timing/step": 500.0, "timing/wait_prev_gen": 499.0}
    assert advice(SETUP, metrics) == []
    assert advice(SETUP, [{"timing/step": 1.0}] * 50) == []


def test_the_stages_of_a_run_are_read_from_its_metrics() -> None:
    stages = stage_seconds(train(1.0, 0.5, 2.0, 0.1)[10:25])
    assert stages.update == pytest.approx(2.0, rel=0.01)
    assert stages.sync == pytest.approx(0.1)
    assert stages.teacher == pytest.approx(0.5, rel=0.1)
    assert stages.generate == pytest.approx(1.0, rel=0.05)
    assert stages.latency == pytest.approx(1.0, rel=0.05)
    assert stages.head_start == pytest.approx(0.25, rel=0.05)
    assert stages.tail == pytest.approx(0.25, rel=0.1)


def test_splits_keep_to_the_layout() -> None:
    setup = replace(SETUP, actor=(1, 4), rollout=(1, 4), actor_divisor=2, rollout_divisor=3)
    assert [text for text, _, _ in splits_of(setup)] == ["trainer.n_gpus_per_node=2 rollout.n_gpus_per_node=6"]
    nodes = replace(SETUP, actor=(2, 8), rollout=(1, 8))
    assert list(splits_of(nodes)) == [("trainer.nnodes=1 rollout.nnodes=2", 2.0, 0.5)]
    assert not list(splits_of(replace(SETUP, actor=(2, 8), rollout=(1, 4))))
    assert not list(splits_of(replace(SETUP, shared=True)))


@pytest.mark.parametrize(
    "layout",
    [
        {"trainer.n_gpus_per_node": 6, "rollout.n_gpus_per_node": 6, "megatron.tensor_model_parallel_size": 2}
        | {"megatron.expert_model_parallel_size": 3, "megatron.expert_tensor_parallel_size": 1},
        {"trainer.nnodes": 3, "trainer.n_gpus_per_node": 4, "megatron.tensor_model_parallel_size": 6}
        | {"rollout.nnodes": 2, "rollout.n_gpus_per_node": 4, "rollout.tensor_model_parallel_size": 4},
    ],
)
def test_whatever_is_advised_is_a_configuration_that_loads(layout: dict[str, int]) -> None:
    long_names = {
        "megatron": "actor_rollout_ref.actor.megatron",
        "rollout.tensor_model_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    }

    def full(name: str) -> str:
        short = next((short for short in long_names if name.startswith(short)), "")
        return long_names.get(short, "") + name[len(short) :]

    overrides = ["data.train_files=x", "actor_rollout_ref.model.path=x"]
    overrides += [f"{full(name)}={value}" for name, value in layout.items()]
    setup = ResourceLayout.of(load_config("on_policy_distill_trainer", overrides))
    stages = stage_seconds(train(3.0, 1.0, 3.0, n_steps=5))
    changes = [*no_cost_changes(setup, stages), *more_devices(setup, stages)]
    advised = [re.findall(r"[\w.]+=\w+", change.text) for change in changes]
    advised += [text.split() for text, _, _ in splits_of(setup)]
    for keys in advised:
        load_config("on_policy_distill_trainer", [*overrides, *keys])
    assert len(changes) >= 4


def test_a_configuration_says_what_the_model_needs() -> None:
    config = load_config(
        "on_policy_distill_trainer",
        [
            "data.train_files=x",
            "actor_rollout_ref.model.path=x",
            "trainer.scheduler=n_step_off",
            "trainer.max_staleness=3",
            "trainer.n_gpus_per_node=8",
            "rollout.n_gpus_per_node=4",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "actor_rollout_ref.teacher.n_server_workers=5",
        ],
    )
    setup = ResourceLayout.of(config)
    assert setup == ResourceLayout(staleness=3, actor=(1, 8), rollout=(1, 4), actor_divisor=4, rollout_divisor=2, n_teachers=5)
