from __future__ import annotations

import asyncio
from typing import cast

import pytest
import ray

from recipe_gkd.errors import ConfigError, ResourceError
from recipe_gkd.ray_cluster.placement import (
    DeviceReport,
    check_devices,
    check_transport,
    device_report,
    environments_of_guests,
    placement_table,
)
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from tests._support.errors import raises
from tests._support.worker_reports import worker_report


class TestPlacementTable:
    def test_columns_are_aligned_with_one_row_per_worker(self) -> None:
        reports = {
            f"actor worker {rank} of 62": worker_report([str(rank % 8)], node="abcdefgh"[rank // 8])
            for rank in range(62)
        }
        reports |= {f"rollout worker {rank} of 2": worker_report(["6", "7"], node="i") for rank in range(2)}
        lines = placement_table(reports).splitlines()
        assert len(lines) == 65
        assert lines[0].split() == ["pool", "worker", "node", "device", "memory"]
        expected = {
            "worker": "0 of 2",
            "node": "i 10.0.0.1 (iiiiiiii)",
            "device": "H200 GPU-6, H200 GPU-7",
            "memory": "282.0 GiB GPU, 512.0 GiB host",
        }
        for title, cell in expected.items():
            assert lines[63].index(cell) == lines[0].index(title)


def test_shared_memory_is_refused_between_nodes() -> None:
    actor, near, far = worker_report(["1"]), worker_report(["2"]), worker_report(["1"], node="b")
    check_transport({"actor worker 0": actor, "rollout worker 0": near}, "ipc")
    check_transport({"actor worker 0": actor, "rollout worker 0": far}, "collective")
    with raises(ConfigError, keys=("actor_rollout_ref.rollout.weight_transport",)):
        check_transport({"actor worker 0": actor, "rollout worker 0": far}, "ipc")


class TestCheckDevices:
    def test_two_workers_on_one_gpu_are_both_named(self) -> None:
        with raises(ResourceError, workers=("actor worker 0", "rollout worker 0")):
            check_devices({"actor worker 0": worker_report(["1"]), "rollout worker 0": worker_report(["1"])})

    def test_same_gpu_id_on_two_nodes_passes(self) -> None:
        check_devices({"actor worker 0": worker_report(["1"]), "rollout worker 0": worker_report(["1"], node="b")})

    def test_cpu_workers_on_one_node_pass(self) -> None:
        check_devices({"actor worker 0": worker_report([]), "rollout worker 0": worker_report([])})

    def test_shared_gpu_has_one_actor_and_one_rollout_worker(self) -> None:
        one, two = worker_report(["1"]), worker_report(["2"])
        check_devices({"actor worker 0": one, "rollout worker 0": one}, is_hybrid=True)
        with raises(ResourceError, workers=("actor worker 0", "actor worker 1")):
            check_devices({"actor worker 0": one, "actor worker 1": one}, is_hybrid=True)
        with raises(ResourceError, workers=("actor worker 0",)):
            check_devices({"actor worker 0": one, "rollout worker 0": two}, is_hybrid=True)

    @pytest.mark.parametrize(
        "report",
        [
            pytest.param(worker_report(["0", "1"], assigned=["1"]), id="more"),
            pytest.param(worker_report(["0"], assigned=["1"], visible=["0"]), id="another"),
            pytest.param(worker_report(["0"], assigned=["0", "1"]), id="fewer"),
            pytest.param(worker_report(["0"], assigned=[], visible=["0"]), id="unassigned"),
        ],
    )
    def test_visible_gpus_differ_from_assigned_gpus_raises(self, report: DeviceReport) -> None:
        with raises(ResourceError, worker="actor worker 0", node="a 10.0.0.1 (aaaaaaaa)"):
            check_devices({"actor worker 0": report})


def test_device_report_without_ray_describes_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test of this process may have started Ray
    report = device_report("cpu")
    assert report.device == "cpu" and report.host_memory > 0 and report.assigned is None
    check_devices({"worker": report})


def test_engine_of_two_gpus_sees_those_of_its_two_actor_ranks() -> None:
    class Actors:
        async def call(self, method: object, *, timeout_s: float, phase: str) -> list[DeviceReport]:
            return [worker_report([gpu]) for gpu in ("2", "0", "3", "1")]

    found = asyncio.run(environments_of_guests(cast(WorkerGroup, Actors()), n_guests=2, timeout_s=1))
    assert found == {0: {"CUDA_VISIBLE_DEVICES": "2,0"}, 1: {"CUDA_VISIBLE_DEVICES": "3,1"}}
