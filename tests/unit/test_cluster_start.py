"""Start and shutdown of both pools, with fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from recipe_gkd import cluster_start
from recipe_gkd.cluster_start import start_cluster
from recipe_gkd.config import Config
from recipe_gkd.data.sharding import token_cost
from recipe_gkd.errors import ConfigError, GkdError, ResourceError, UnexpectedError, WorkerError
from recipe_gkd.ray_cluster import rollout_restarts, worker_group
from recipe_gkd.ray_cluster.node_probe import ActorLocation
from recipe_gkd.runtime import process_trees
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.worker_reports import engine_report, rank_report, worker_report


@pytest.fixture(autouse=True)
def no_model_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake workers load no model, so the cost of a sample cannot be computed from its dimensions."""
    monkeypatch.setattr(cluster_start, "_sample_cost", lambda config: token_cost)


DEADLINE_S = 20.0


def answer(kind: str, method: str) -> Any:
    """Return the reply of a worker that starts without an error."""
    if method == "setup":
        return rank_report() if kind == "ActorWorker" else engine_report()
    return {"rendezvous": ("127.0.0.1", 1), "device_report": worker_report([], assigned=[])}.get(method)


class Handle:
    """A fake actor handle: ``handle.method.remote(...)`` calls the coroutine function ``reply(kind, method)``."""

    def __init__(self, kind: str, reply: Callable[[str, str], Any]) -> None:
        self._kind, self._reply = kind, reply
        self._actor_id = SimpleNamespace(hex=lambda: kind)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *_: self._reply(self._kind, method))


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kinds of the workers that were ended. Replaces all calls of Ray."""
    names: list[str] = []

    async def kill_workers(handles: list[Handle], *, timeout_s: float) -> None:
        names.extend(handle._kind for handle in handles)

    async def locate(handles: list[Handle]) -> list[ActorLocation]:
        return [ActorLocation(0, "", "", False, "") for _ in handles]

    async def run_on_node(*_: Any) -> list[Any]:
        return []

    async def check_nodes(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr(worker_group, "kill_workers", kill_workers)
    monkeypatch.setattr(worker_group, "locate", locate)
    monkeypatch.setattr(rollout_restarts, "locate", locate)
    monkeypatch.setattr(rollout_restarts, "run_on_node", run_on_node)
    monkeypatch.setattr("recipe_gkd.diagnostics.collect.locate", locate)
    monkeypatch.setattr(cluster_start, "check_nodes", check_nodes)
    monkeypatch.setattr(cluster_start, "check_budget", check_nodes)
    monkeypatch.setattr(cluster_start, "check_devices", lambda *_, **__: None)
    monkeypatch.setattr(cluster_start, "placement_table", lambda _: "")
    monkeypatch.setattr("recipe_gkd.ray_cluster.capacity.cluster_capacity", lambda _: None)
    return names


def make_config(folder: Path) -> Config:
    return base_config(f"data.train_files={folder}/x", "trainer.save_freq=-1", f"trainer.default_local_dir={folder}")


async def train(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    reply: Callable[[str, str], Any],
    body: Callable[[], Any],
    device: str = "cpu",
) -> None:
    async def create_pools(specs: Any, *, timeout_s: float) -> tuple[Any, ...]:
        def spawn(worker: type, *_: Any, **__: Any) -> Handle:
            return Handle(worker.__name__, reply)

        return tuple(SimpleNamespace(spec=spec, spawn=spawn, release=lambda: None) for spec in specs)

    monkeypatch.setattr(cluster_start, "create_pools", create_pools)
    async with start_cluster(make_config(folder), device, total_steps=1, stop_token_ids=(), n_tokens=None):
        await body()


class TestStartCluster:
    def test_pools_are_set_up_concurrently(
        self, ended: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The setup of each pool waits until that of the other has started."""
        started = {"ActorWorker": asyncio.Event(), "RolloutWorker": asyncio.Event()}
        trained: list[bool] = []

        async def reply(kind: str, method: str) -> Any:
            if method == "setup":
                started[kind].set()
                async with asyncio.timeout(DEADLINE_S):
                    await asyncio.gather(*(event.wait() for event in started.values()))
            return answer(kind, method)

        async def body() -> None:
            trained.append(True)

        asyncio.run(train(tmp_path, monkeypatch, reply, body))
        assert trained == [True] and sorted(ended) == ["ActorWorker", "RolloutWorker"]

    @pytest.mark.parametrize(
        ("error", "expected", "fields"),
        [
            (RuntimeError("gloo: connection reset"), UnexpectedError, {"phase": "training"}),
            (WorkerError("x", worker="actor worker 0 of 1"), WorkerError, {"worker": "actor worker 0 of 1"}),
        ],
    )
    def test_error_of_body_is_known_and_diagnosed(
        self,
        ended: list[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        error: Exception,
        expected: type[GkdError],
        fields: dict[str, str],
    ) -> None:
        async def reply(kind: str, method: str) -> Any:
            return answer(kind, method)

        async def body() -> None:
            raise error

        with raises(expected, **fields) as caught:
            asyncio.run(train(tmp_path, monkeypatch, reply, body))
        [folder] = (tmp_path / "diagnosis").iterdir()
        assert caught.value.diagnosis == folder and caught.value.what in (folder / "report.md").read_text()
        assert sorted(ended) == ["ActorWorker", "RolloutWorker"]

    def test_errors_of_advice_and_shutdown_are_logged(
        self, ended: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def no_capacity(_: Any) -> None:
            raise RaySystemError("the control service does not reply")

        async def refuse(handles: list[Handle], *, timeout_s: float) -> None:
            raise RaySystemError("cannot end them")

        async def reply(kind: str, method: str) -> Any:
            return answer(kind, method)

        async def body() -> None:
            trained.append(True)

        trained: list[bool] = []
        monkeypatch.setattr("recipe_gkd.ray_cluster.capacity.cluster_capacity", no_capacity)
        monkeypatch.setattr(worker_group, "kill_workers", refuse)
        asyncio.run(train(tmp_path, monkeypatch, reply, body))
        assert trained == [True]
        assert "no advice" in caplog.text and caplog.text.count("workers could not be stopped") == 2

    def test_repeated_cancellation_kills_processes(
        self, ended: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started, closing, n_ended = asyncio.Event(), asyncio.Event(), []

        async def reply(kind: str, method: str) -> Any:
            if method == "shutdown":
                closing.set()
                await asyncio.sleep(3600)
            return answer(kind, method)

        async def run_on_node(_: str, function: Any, *args: Any) -> list[Any]:
            await asyncio.sleep(0.1)  # a wait that is canceled would end here
            if function is process_trees.kill_trees:
                n_ended.append(args[0])
            return []

        async def body() -> None:
            started.set()
            await asyncio.sleep(3600)

        async def scenario() -> None:
            training = asyncio.ensure_future(train(tmp_path, monkeypatch, reply, body))
            await asyncio.wait_for(started.wait(), DEADLINE_S)
            training.cancel()
            await asyncio.wait_for(closing.wait(), DEADLINE_S)
            for _ in range(2):
                training.cancel()
                await asyncio.sleep(0.02)
            with pytest.raises(asyncio.CancelledError):
                await training

        monkeypatch.setattr(rollout_restarts, "run_on_node", run_on_node)
        asyncio.run(asyncio.wait_for(scenario(), cluster_start.SHUTDOWN_S - 2))
        assert sorted(ended) == ["ActorWorker", "RolloutWorker"] and len(n_ended) == 1

    def test_report_of_first_rank_is_logged_once(
        self, ended: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def reply(kind: str, method: str) -> Any:
            if (kind, method) == ("ActorWorker", "setup"):
                return rank_report(summary="layers: torch", warnings=("slow",))
            return answer(kind, method)

        with caplog.at_level("INFO", logger="recipe_gkd.cluster_start"):
            asyncio.run(train(tmp_path, monkeypatch, reply, lambda: asyncio.sleep(0)))
        logged = [(one.levelname, one.getMessage()) for one in caplog.records if one.getMessage().startswith("actor:")]
        assert logged == [("INFO", "actor: layers: torch"), ("WARNING", "actor: slow")]


class TestNodes:
    def test_workers_get_variables_of_driver_and_config(
        self, ended: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spawned: dict[str, dict[str, str]] = {}

        async def create_pools(specs: Any, *, timeout_s: float) -> tuple[Any, ...]:
            def spawn(worker: type, *_: Any, env: dict[str, str]) -> Handle:
                spawned[worker.__name__] = env
                return Handle(worker.__name__, reply)

            return tuple(SimpleNamespace(spec=spec, spawn=spawn, release=lambda: None) for spec in specs)

        async def reply(kind: str, method: str) -> Any:
            raise WorkerError("enough")

        async def start() -> None:
            config = base_config("+ray_init.env_vars.NCCL_DEBUG=INFO", f"trainer.default_local_dir={tmp_path}")
            async with start_cluster(config, "cpu", total_steps=1, stop_token_ids=(), n_tokens=None):
                pass

        monkeypatch.setattr(cluster_start, "create_pools", create_pools)
        monkeypatch.setenv("NCCL_DEBUG", "WARN")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
        with raises(WorkerError, what="enough"):
            asyncio.run(start())
        assert spawned.keys() == {"ActorWorker", "RolloutWorker"}
        for env in spawned.values():
            assert (env["NCCL_DEBUG"], env["GLOO_SOCKET_IFNAME"], env["CUDA_VISIBLE_DEVICES"]) == ("INFO", "eth7", "")

    def test_problem_of_a_node_precedes_the_setup_of_engines(
        self, ended: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        called: list[str] = []

        async def refuse(config: Config, device: str, pools: Any, *, timeout_s: float) -> None:
            assert device == "cpu" and len(pools) == 2 and timeout_s == 600
            raise ResourceError("node 1: no compiler")

        async def reply(kind: str, method: str) -> Any:
            called.append(method)

        monkeypatch.setattr(cluster_start, "check_nodes", refuse)
        with raises(ResourceError, what="node 1: no compiler"):
            asyncio.run(train(tmp_path, monkeypatch, reply, lambda: asyncio.sleep(0)))
        assert not {"setup", "device_report"} & {*called}

    @pytest.mark.parametrize(("is_hybrid", "device"), [("true", "cuda"), ("true", "cpu"), ("false", "cuda")])
    def test_engines_of_hybrid_engine_start_after_the_actors(
        self, ended: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_hybrid: str, device: str
    ) -> None:
        events: list[str] = []

        async def reply(kind: str, method: str) -> Any:
            if method == "setup":
                events.append(f"{kind} begins")
                await asyncio.sleep(0.05)
                events.append(f"{kind} ends")
            return worker_report([], assigned=["3"]) if method == "device_report" else answer(kind, method)

        def config_of(folder: Path) -> Config:
            keys = f"actor_rollout_ref.hybrid_engine={is_hybrid}", "trainer.scheduler=sync"
            return base_config("trainer.save_freq=-1", f"trainer.default_local_dir={folder}", *keys)

        monkeypatch.setattr("tests.unit.test_cluster_start.make_config", config_of)
        asyncio.run(train(tmp_path, monkeypatch, reply, lambda: asyncio.sleep(0), device))
        in_turn = ["ActorWorker begins", "ActorWorker ends", "RolloutWorker begins", "RolloutWorker ends"]
        assert (events == in_turn) is (is_hybrid == "true")

    def test_hybrid_engine_over_nccl_is_refused_before_any_worker(
        self, ended: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def refuse(specs: Any, *, timeout_s: float) -> None:
            raise AssertionError("pools were reserved")

        async def start() -> None:
            keys = "actor_rollout_ref.rollout.weight_transport=collective", "trainer.scheduler=sync"
            config = base_config("actor_rollout_ref.hybrid_engine=true", f"trainer.default_local_dir={tmp_path}", *keys)
            async with start_cluster(config, "cuda", total_steps=1, stop_token_ids=(), n_tokens=None):
                pass

        monkeypatch.setattr(cluster_start, "create_pools", refuse)
        with pytest.raises(ConfigError):
            asyncio.run(start())
