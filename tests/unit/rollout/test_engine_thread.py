"""Tests of the engine's thread with an engine that fails on request: every future and request must end."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe_gkd.data.samples import Response
from recipe_gkd.errors import GkdError, ModelError, WeightSyncError, WorkerDied, WorkerError
from recipe_gkd.rollout import engine as module
from recipe_gkd.rollout.engine import RolloutEngine
from recipe_gkd.rollout.engine_factory import build_engine
from recipe_gkd.rollout.engine_options import EngineOptions
from recipe_gkd.rollout.update_outcome import UpdateOutcome
from recipe_gkd.rollout.vllm.device_loss import is_device_loss
from recipe_gkd.rollout.weight_updates import WeightUpdates
from recipe_gkd.runtime.out_of_memory import ADVICE, MemoryPhase
from tests._support.errors import raises
from tests._support.rollout_models import prompts

OPTIONS = EngineOptions(
    model_path="/no/such/folder", device="cpu", dtype="float32", tensor_parallel_size=1, max_num_seqs=4,
    max_model_len=64, kv_cache_bytes=None, gpu_memory_utilization=0.5, enforce_eager=True, trust_remote_code=False,
)  # fmt: skip


class FailingEngine:
    """An engine that accepts requests, and whose step raises after ``fail`` is set."""

    def __init__(self) -> None:
        self.fail = threading.Event()
        self.requests: list[str] = []
        self.closed = threading.Event()
        self.engine_core = SimpleNamespace(shutdown=self.closed.set)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        if self.fail.wait(0.01):
            raise RuntimeError("the device fell off")
        return []

    def abort_request(self, ids: list[str]) -> None:
        self.requests = [request for request in self.requests if request not in ids]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> tuple[RolloutEngine, FailingEngine]:
    inner = FailingEngine()
    monkeypatch.setattr(module, "build_engine", lambda _: inner)
    monkeypatch.setattr(module, "describe_engine", lambda _: {})
    monkeypatch.setattr(module, "watch_ranks", lambda *_: None)
    monkeypatch.setattr(module, "add_request", lambda engine, request_id, *_: engine.requests.append(request_id))
    engine = RolloutEngine(OPTIONS)
    engine.start().result(5)
    return engine, inner


def test_step_raises_fails_all_requests_and_later_commands(
    failing: tuple[RolloutEngine, FailingEngine],
) -> None:
    engine, inner = failing
    results: list[list[Response] | GkdError] = []
    for first in (0, 2):
        _, accepted = engine.submit(prompts(2, first), [{}, {}], lambda result: results.append(result))
        accepted.result(5)
    inner.fail.set()
    assert inner.closed.wait(5)
    with raises(WorkerDied) as caught:
        engine.run(lambda _: None).result(5)
    errors = [caught.value, *results]
    # Copies, because each caller adds its own place.
    assert len(results) == 2 and len(set(map(id, errors))) == 3
    for error in errors:
        assert isinstance(error, WorkerDied) and "RuntimeError: the device fell off" in error.what
    engine.close()


def test_run_device_loss_ends_engine(
    failing: tuple[RolloutEngine, FailingEngine],
) -> None:
    engine, inner = failing
    results: list[Any] = []
    engine.submit(prompts(2), [{}, {}], results.append)[1].result(5)

    def load(_: Any) -> None:
        raise RuntimeError("CUDA error: the device fell off")

    with raises(WorkerDied, process="", keys=()):
        engine.run(load).result(5)
    assert inner.closed.wait(5) and isinstance(results[0], WorkerDied)
    engine.close()


@pytest.mark.parametrize(("fails_in", "phase"), [("step", "generate"), ("command", "weight sync")])
def test_lack_of_memory_names_phase_and_keys(
    fails_in: str, phase: MemoryPhase, failing: tuple[RolloutEngine, FailingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, inner = failing

    def fail(*_: Any) -> list[Any]:
        raise torch.AcceleratorError("CUDA error: out of memory")

    if fails_in == "step":
        monkeypatch.setattr(inner, "step", fail)
        engine.submit(prompts(1), [{}], lambda _: None)
        assert inner.closed.wait(5)
    with raises(WorkerDied, phase=phase, keys=ADVICE["rollout", phase].keys) as caught:
        engine.run(fail).result(5)
    [memory] = caught.value.details
    assert memory.startswith("memory: resident")
    engine.close()


def test_receive_device_loss_of_other_worker_keeps_engine(
    failing: tuple[RolloutEngine, FailingEngine],
) -> None:
    """A weight transport repeats the reason of one worker in the errors of all others."""
    engine, inner = failing
    error = WeightSyncError("rollout worker 1 failed: CUDA error: the device fell off", phase="weight transport")

    def receive(is_unusable: bool) -> None:
        outcome = UpdateOutcome(error=error, is_unusable=is_unusable)
        ranks = SimpleNamespace(collective_rpc=lambda *_, **__: [outcome])
        engine.run(lambda _: WeightUpdates("rollout worker 0").receive(ranks, 1, [], 1, None)).result(5)

    with raises(WeightSyncError, phase="weight transport", worker="rollout worker 0"):
        receive(is_unusable=False)
    assert engine.run(lambda _: 7).result(5) == 7
    with raises(WorkerDied, phase="weight transport", worker="rollout worker 0"):
        receive(is_unusable=True)
    assert inner.closed.wait(5)
    engine.close()


def test_is_device_loss_ignores_reports_of_other_processes() -> None:
    own = WeightSyncError("weight transport: rollout worker 1 failed: CUDA error: the device fell off")
    assert not is_device_loss(own) and not is_device_loss(ValueError("no such weight"))
    own.__cause__ = RuntimeError("CUDA error: the device fell off")
    assert is_device_loss(own)


def test_run_command_raises_only_its_future_fails(failing: tuple[RolloutEngine, FailingEngine]) -> None:
    engine, inner = failing
    with pytest.raises(ZeroDivisionError):
        engine.run(lambda _: 1 // 0).result(5)
    assert engine.run(lambda inside: inside is inner).result(5)
    engine.close()
    with raises(WorkerError) as caught:
        engine.run(lambda _: None).result(5)
    assert not isinstance(caught.value, WorkerDied)


def test_rank_died_ends_all_while_thread_hangs(
    failing: tuple[RolloutEngine, FailingEngine],
) -> None:
    engine, _ = failing
    results: list[Any] = []
    engine.submit(prompts(2), [{}, {}], results.append)[1].result(5)
    hangs, released = threading.Event(), threading.Event()

    def load(_: Any) -> None:
        hangs.set()
        released.wait(20)

    command, later = engine.run(load), engine.run(lambda _: None)
    assert hangs.wait(5)
    engine._rank_died("VllmWorker-1")
    for waiting in (command, later, engine.run(lambda _: None)):
        with raises(WorkerDied, process="VllmWorker-1"):
            waiting.result(5)
    assert len(results) == 1 and isinstance(results[0], WorkerDied)
    released.set()
    engine.close()


def test_start_description_raises_shuts_engine_down(
    failing: tuple[RolloutEngine, FailingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, inner = failing
    inner.closed.clear()

    def describe(_: Any) -> dict[str, Any]:
        raise AttributeError("no such field of vLLM")

    monkeypatch.setattr(module, "describe_engine", describe)
    engine = RolloutEngine(OPTIONS)
    with raises(WorkerDied, process="", keys=()):
        engine.start().result(5)
    assert inner.closed.wait(5)
    engine.close()


def test_close_failed_engine_does_not_wait_for_hung_thread(
    failing: tuple[RolloutEngine, FailingEngine],
) -> None:
    engine, _ = failing
    hangs, released, closed = threading.Event(), threading.Event(), threading.Event()

    def load(_: Any) -> None:
        hangs.set()
        released.wait(25)

    engine.run(load)
    assert hangs.wait(5)
    engine._rank_died("VllmWorker-1")
    threading.Thread(target=lambda: (engine.close(), closed.set()), daemon=True).start()
    assert closed.wait(15)
    released.set()


def test_run_command_fails_before_rank_death_is_noticed(
    failing: tuple[RolloutEngine, FailingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = failing
    engine.options = replace(OPTIONS, tensor_parallel_size=2)
    monkeypatch.setattr(module, "_RANK_DEATH_NOTICE_S", 20.0)
    failed = threading.Event()

    def load(_: Any) -> None:
        failed.set()
        raise ConnectionError("connection closed by peer")

    command = engine.run(load)
    assert failed.wait(5)
    engine._rank_died("VllmWorker-1")
    with raises(WorkerDied, process="VllmWorker-1"):
        command.result(5)
    engine.close()


def test_abort_removes_only_given_requests(failing: tuple[RolloutEngine, FailingEngine]) -> None:
    engine, inner = failing
    results: list[Any] = []
    ids, accepted = engine.submit(prompts(3), [{}] * 3, results.append)
    accepted.result(5)
    engine.abort(ids[:1]).result(5)
    assert inner.requests == ids[1:]
    engine.abort(ids).result(5)  # the first id for the second time
    assert not inner.requests and not results
    engine.close()


def test_start_folder_without_model_is_named() -> None:
    with raises(ModelError, path=Path("/no/such/folder/config.json")):
        RolloutEngine(OPTIONS).start().result(5)


def test_start_unreadable_folder_is_worker_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError("no access")

    monkeypatch.setattr(Path, "is_file", refuse)
    with raises(WorkerError, keys=("actor_rollout_ref.rollout",), details=()) as caught:
        build_engine(replace(OPTIONS, model_path="/secret"))
    assert isinstance(caught.value.__cause__, PermissionError)


@pytest.mark.parametrize(
    ("error", "key"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "max_num_seqs"),
        (ValueError("No available memory for the cache blocks."), "kv_cache_memory_megabytes"),
        (
            ValueError("Free memory on device cuda:0 is less than desired GPU memory utilization"),
            "gpu_memory_utilization",
        ),
    ],
    ids=str,
)
def test_start_without_enough_memory_names_memory_and_keys(
    error: Exception, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bool:
        raise error

    monkeypatch.setattr(Path, "is_file", refuse)
    with raises(WorkerError) as caught:
        build_engine(replace(OPTIONS, model_path="/secret"))
    assert f"actor_rollout_ref.rollout.{key}" in caught.value.keys and caught.value.__cause__ is error
    [memory] = caught.value.details
    assert "resident memory" in memory
