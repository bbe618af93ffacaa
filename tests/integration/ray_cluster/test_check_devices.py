from __future__ import annotations

import asyncio

import pytest

from recipe_gkd import cluster_start
from recipe_gkd.commands import check_devices as command
from recipe_gkd.errors import ResourceError
from recipe_gkd.ray_cluster.placement import DeviceReport
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.worker_reports import worker_report


class WorkerOnGpu0:
    """A worker on the same GPU as all others. Its engine fails to start."""

    def __init__(self, **_: object) -> None:
        pass

    def device_report(self) -> DeviceReport:
        return worker_report(["0"])

    def rendezvous(self) -> None:
        raise MemoryError

    def setup(self) -> None:
        raise MemoryError

    def shutdown(self) -> None:
        pass


@pytest.mark.usefixtures("ray_session")
def test_start_cluster_on_one_gpu_names_them_before_engines_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster_start, "ActorWorker", WorkerOnGpu0)
    monkeypatch.setattr(cluster_start, "RolloutWorker", WorkerOnGpu0)
    config = base_config()

    async def start() -> None:
        async with cluster_start.start_cluster(config, "cpu", total_steps=1, stop_token_ids=(), n_tokens=None):
            pass

    with (
        caplog.at_level("INFO", "recipe_gkd.cluster_start"),
        raises(ResourceError, workers=("actor worker 0 of 1", "rollout worker 0 of 1")),
    ):
        asyncio.run(start())
    assert caplog.text.count("H200 GPU-0") == 2


def test_check_devices_command_rejects_an_unknown_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["trainer.n_gpu_per_node=2"]) == 1
    assert "did you mean trainer.n_gpus_per_node" in capsys.readouterr().err
