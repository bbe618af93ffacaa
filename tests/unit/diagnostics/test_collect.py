from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from recipe_gkd.diagnostics import collect
from recipe_gkd.errors import DeadlineError
from recipe_gkd.ray_cluster.node_probe import ActorLocation
from recipe_gkd.ray_cluster.worker_group import WorkerGroup


def test_diagnose_slow_ray_and_full_disk_still_writes_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def locate(handles: list[str]) -> list[ActorLocation]:
        if handles == ["slow"]:
            await asyncio.sleep(3600)
        return [ActorLocation(0, "", "", False, "")]

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(collect, "locate", locate)
    monkeypatch.setattr(collect, "_write_files", fail)
    error = DeadlineError("update: actor worker 0 of 1 did not answer")
    error.phase, error.silent, error.waited_s = "update", ["actor worker 0 of 1"], 5.0
    groups = [WorkerGroup("actor", ["quick"]), WorkerGroup("rollout", ["slow"])]
    folder = asyncio.run(asyncio.wait_for(collect.diagnose(error, groups, tmp_path, timeout_s=0.7), 30))
    assert folder is not None
    report = (folder / "report.md").read_text()
    assert "did not answer within 5 s: actor worker 0 of 1" in report and "| actor worker 0 of 1 | silent" in report
