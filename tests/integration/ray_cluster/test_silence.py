"""Waits for a stopped process (SIGSTOP) are logged in each phase, with deadline, key and worker."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from recipe_gkd.actor.objective.token_kl import TokenKl
from recipe_gkd.checkpoints.saver import CheckpointSaver
from recipe_gkd.checkpoints.state import Progress
from recipe_gkd.cluster import Cluster
from recipe_gkd.cluster_start import SHUTDOWN_S
from recipe_gkd.config.startup import startup_timeout_s
from recipe_gkd.config.timeouts import SYNC_TIMEOUT, timeout_of
from recipe_gkd.data.samples import Prompt
from recipe_gkd.errors import DeadlineError, GkdError, WorkerDied
from recipe_gkd.ray_cluster.placement import DeviceReport, collect_device_reports
from recipe_gkd.ray_cluster.worker_group import _KILL_TIMEOUT_S, WorkerGroup
from recipe_gkd.runtime import wait_log
from recipe_gkd.runtime.keyed_timeout import KeyedTimeout
from recipe_gkd.runtime.wait_log import FIRST_LINE_S, WaitLog
from recipe_gkd.trainer import Trainer
from recipe_gkd.weight_sync.spec import WeightSyncSpec
from recipe_gkd.weight_sync.synchronizer import WeightSynchronizer
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.waiting import PATIENCE_S, wait_until_async

pytestmark = pytest.mark.usefixtures("ray_session")

CONFIG = base_config(
    "actor_rollout_ref.actor.timeout_s=300", "actor_rollout_ref.rollout.timeout_s=400",
    "actor_rollout_ref.nccl_timeout=500", "trainer.startup_timeout_s=600",
)  # fmt: skip
PROMPTS = [Prompt(uid=uid, ids=np.arange(3, dtype=np.int32), row=uid) for uid in range(5)]


class Rank:
    """Worker with the methods of both pools that these phases reach before the stopped process."""

    def pid(self) -> int:
        return os.getpid()

    def open_weight_store(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def connect_weight_transport(self, *_: Any) -> None:
        pass

    def open_weight_transport(self, *_: Any) -> None:
        pass

    def weights_meta(self) -> list[Any]:
        return []

    def drop_weights(self) -> None:
        pass

    def device_report(self) -> DeviceReport:
        return DeviceReport(node="", host_memory=0)

    def begin_weight_update(self, *_: Any) -> None:
        pass

    def update(self, *_: Any) -> dict[str, float]:
        return {}

    def token_kl(self, *_: Any) -> TokenKl:
        return TokenKl(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 2), np.float32))

    def save_checkpoint(self, _: str) -> None:
        pass

    def save_hf(self, *_: Any) -> None:
        pass

    async def generate(self, prompts: list[Prompt], *_: Any) -> AsyncIterator[list[Prompt]]:
        yield prompts[:2]
        await asyncio.sleep(3600)

    def shutdown(self) -> None:
        pass


@dataclass
class Pools:
    """Two actor ranks and two rollout workers; rank 1 of each can be stopped."""

    actors: WorkerGroup
    rollouts: WorkerGroup
    pids: list[int]

    def cluster(self) -> Cluster:
        sharding: Any = SimpleNamespace(divide=lambda samples: [samples, samples])
        restarts: Any = SimpleNamespace(can_replace=lambda _: False)
        weights: Any = None
        actors: Any = self.actors
        rollouts: Any = self.rollouts
        return Cluster(CONFIG, actors, rollouts, weights, [0, 1], sharding, restarts, restarts)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    def start(name: str) -> WorkerGroup:
        return WorkerGroup(name, [ray.remote(num_cpus=0)(Rank).remote() for _ in range(2)])

    pools = Pools(start("actor"), start("rollout"), [])
    for group in (pools.actors, pools.rollouts):
        pools.pids.append(ray.get(group.handles[1].pid.remote(), timeout=PATIENCE_S))
    yield pools
    for group in (pools.actors, pools.rollouts):
        asyncio.run(group.stop(timeout_s=2))


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(wait_log, "_waits", WaitLog(first_line_s=0.2, repeat_s=0.2))
    caplog.set_level(logging.INFO, logger="recipe_gkd")


async def start(pools: Pools, _: Path) -> object:
    return await collect_device_reports([pools.actors, pools.rollouts], timeout_s=startup_timeout_s(CONFIG, "cpu"))


async def sync(pools: Pools, _: Path) -> object:
    spec = WeightSyncSpec(
        tensor_parallel_size=1, bucket_bytes=1, timeout_s=timeout_of(CONFIG, SYNC_TIMEOUT), transport="collective"
    )
    weights = WeightSynchronizer(pools.actors, pools.rollouts, spec)
    weights._connection.meta = []  # connected
    return await weights.sync(4)


async def generate(pools: Pools, _: Path) -> object:
    data: Any = None
    return [_ async for _ in pools.cluster().generate(data, 1, PROMPTS, 4)]


async def validate(pools: Pools, _: Path) -> object:
    data: Any = None
    timeout_s = KeyedTimeout(800, "actor_rollout_ref.rollout.timeout_s")
    return [_ async for _ in pools.cluster().generate_for_validation(data, timeout_s, 1, PROMPTS, 4)]


async def update(pools: Pools, _: Path) -> object:
    batch: Any = SimpleNamespace(samples=[], step=4)
    return await pools.cluster().update(batch)


async def validation_kl(pools: Pools, _: Path) -> object:
    return await pools.cluster().token_kl([], 4)


async def save(pools: Pools, folder: Path) -> object:
    progress = Progress(step=4, prompts_trained=1, n_prompts=1, data_seed=0, shuffle=False, data_fingerprint="")
    trainer: Any = SimpleNamespace(
        config=CONFIG, progress=progress, cluster=pools.cluster(), _turn_for_save=nullcontext
    )  # fmt: skip

    async def call_actors(method: Any, *args: object, timeout_s: float | None = None) -> list[Any]:
        return await Trainer.call_actors(trainer, method, *args, timeout_s=timeout_s)

    return await CheckpointSaver(CONFIG, folder, call_actors, best=None).save(progress, None)


async def stop(pools: Pools, _: Path) -> object:
    return await pools.actors.call(Rank.shutdown, timeout_s=SHUTDOWN_S, phase="shutdown")


@pytest.mark.parametrize(
    ("phase", "line"),
    [
        pytest.param(
            start, r"start, read device reports: waits \d+ of 600 s \(trainer.startup_timeout_s\) for actor worker 1",
            marks=pytest.mark.slow,
        ),
        (start, r"start, read device reports: waits \d+ of 600 s .* for .*rollout worker 1"),
        (sync, r"weight sync v4, begin: waits \d+ of 500 s \(actor_rollout_ref.nccl_timeout\) for rollout worker 1$"),
        (generate, r"generate, step 4: waits \d+ of 400 s \(.*rollout.timeout_s\) for 5 responses of rollout worker 1"),
        (update, r"update, step 4: waits \d+ of 300 s \(.*actor.timeout_s\) for actor worker 1$"),
        (save, r"save_\w+, step 4: waits \d+ of 300 s \(.*actor.timeout_s\) for actor worker 1$"),
        (validate, r"validate after step 4: waits \d+ of 800 s \(.*rollout.timeout_s\) for 5 responses of rollout"),
        (validation_kl, r"KL divergence after step 4: waits \d+ of 300 s \(.*actor.timeout_s\) for actor worker 1$"),
        (stop, r"shutdown: waits \d+ of 10 s for actor worker 1$"),
    ],
)  # fmt: skip
def test_wait_for_a_stopped_process_is_logged_repeatedly(
    phase: Callable[[Pools, Path], Awaitable[object]],
    line: str,
    pools: Pools,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        waiting = asyncio.ensure_future(phase(pools, tmp_path))
        with suppress(TimeoutError):
            await wait_until_async(lambda: len(re.findall(line, caplog.text, re.MULTILINE)) >= 2 or waiting.done())
        waiting.cancel()
        with suppress(asyncio.CancelledError, GkdError):
            await waiting

    for pid in pools.pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        asyncio.run(body())
    finally:
        for pid in pools.pids:
            os.kill(pid, signal.SIGCONT)
    assert len(re.findall(line, caplog.text, re.MULTILINE)) >= 2, caplog.text


def test_wait_of_a_running_generation_counts_the_missing_responses(
    pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        data: Any = None
        stream = pools.cluster().generate(data, 0, PROMPTS, 5)
        assert len(await anext(stream)) == 2
        pending = asyncio.ensure_future(anext(stream))
        await wait_until_async(lambda: "for 3 responses of rollout worker 0" in caplog.text)
        pending.cancel()
        with suppress(asyncio.CancelledError):
            await pending

    asyncio.run(body())


def test_end_of_a_run_is_shorter_than_the_first_line() -> None:
    assert SHUTDOWN_S + _KILL_TIMEOUT_S < FIRST_LINE_S


def test_missed_deadline_names_its_key_and_the_log_folder_of_the_connected_cluster(pools: Pools) -> None:
    node: Any = ray._private.worker.global_worker.node
    os.kill(pools.pids[0], signal.SIGSTOP)
    try:
        with raises(DeadlineError, silent=("actor worker 1 of 2",), phase="start") as caught:
            call = pools.actors.call(Rank.pid, timeout_s=KeyedTimeout(0.5, "trainer.startup_timeout_s"), phase="start")
            asyncio.run(call)
    finally:
        os.kill(pools.pids[0], signal.SIGCONT)
    expected = f"read that worker's log in {node.address_info['session_dir']}/logs there, or raise trainer.startup_time"
    assert expected in caught.value.remedy


def test_death_names_the_log_folder_of_the_connected_cluster(pools: Pools) -> None:
    node: Any = ray._private.worker.global_worker.node
    group = WorkerGroup("actor", [ray.remote(num_cpus=0)(Rank).remote()])
    os.kill(ray.get(group.handles[0].pid.remote(), timeout=PATIENCE_S), signal.SIGKILL)
    with raises(WorkerDied, worker="actor worker 0 of 1") as caught:
        asyncio.run(group.call(Rank.pid, timeout_s=PATIENCE_S, phase="update"))
    assert f"{node.address_info['session_dir']}/logs" in caught.value.remedy
