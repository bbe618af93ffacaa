"""The engine's thread, around an engine that fails on command: nobody may be left waiting."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_gkd.data.samples import Response
from recipe_gkd.errors import GkdError, ModelError, WeightSyncError, WorkerDied, WorkerError
from recipe_gkd.rollout import engine as module
from recipe_gkd.rollout.device_loss import is_device_loss
from recipe_gkd.rollout.engine import EngineOptions, RolloutEngine
from recipe_gkd.rollout.weight_updates import WeightUpdates
from tests.integration.rollout.small_models import prompts

pytestmark = pytest.mark.timeout(30)

OPTIONS = EngineOptions(
    model_path="/no/such/folder", device="cpu", dtype="float32", tensor_parallel_size=1, max_num_seqs=4,
    max_model_len=64, kv_cache_bytes=None, gpu_memory_utilization=0.5, enforce_eager=True, trust_remote_code=False,
)  # fmt: skip


class FailingEngine:
    """Accepts requests, and raises from the step after ``fail`` is set."""

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
    monkeypatch.setattr(module, "_build", lambda _: inner)
    monkeypatch.setattr(module, "_describe", lambda _: {})
    monkeypatch.setattr(module, "_watch_ranks", lambda *_: None)
    monkeypatch.setattr(module, "_add_request", lambda engine, request_id, *_: engine.requests.append(request_id))
    engine = RolloutEngine(OPTIONS)
    engine.start().result(5)
    return engine, inner


def test_an_exception_of_the_engine_ends_every_request_and_every_later_command(
    failing: tuple[RolloutEngine, FailingEngine],
) -> None:
    engine, inner = failing
    got: list[list[Response] | GkdError] = []
    for first in (0, 2):
        _, accepted = engine.submit(prompts(2, first), [{}, {}], lambda result: got.append(result))
        accepted.result(5)
    inner.fail.set()
    assert inner.closed.wait(5)
    assert len(got) == 2 and all("the device fell off" in str(result) for result in got)
    assert all(isinstance(result, WorkerDied) for result in got)
    with pytest.raises(WorkerDied, match="the rollout engine failed: RuntimeError: the device fell off"):
        engine.run(lambda _: None).result(5)
    engine.close()


def test_a_command_that_finds_the_device_lost_ends_the_engine_as_a_failed_step_does(
    failing: tuple[RolloutEngine, FailingEngine],
) -> None:
    engine, inner = failing
    got: list[Any] = []
    engine.submit(prompts(2), [{}, {}], got.append)[1].result(5)

    def load(_: Any) -> None:
        raise RuntimeError("CUDA error: the device fell off")

    with pytest.raises(WorkerDied, match="the rollout engine failed: RuntimeError: CUDA error"):
        engine.run(load).result(5)
    assert inner.closed.wait(5) and isinstance(got[0], WorkerDied)
    engine.close()


def test_only_the_engine_whose_own_device_is_lost_ends_and_not_those_that_are_told_of_it(
    failing: tuple[RolloutEngine, FailingEngine],
) -> None:
    """A weight channel repeats the reason of one worker in the errors of all others."""
    engine, inner = failing
    told = "WeightSyncError: weight channel, bucket 2: rollout worker 1 failed: CUDA error: the device fell off"

    def receive(device_is_lost: bool) -> None:
        outcome = {"error": told, "device_is_lost": device_is_lost, "dirty": False}
        ranks = SimpleNamespace(collective_rpc=lambda *_, **__: [outcome])
        engine.run(lambda _: WeightUpdates("rollout worker 0").receive(ranks, 1, [], 1, None)).result(5)

    with pytest.raises(WeightSyncError, match="CUDA error"):
        receive(device_is_lost=False)
    assert engine.run(lambda _: 7).result(5) == 7
    with pytest.raises(WorkerDied, match=r"^the rollout engine failed: rollout worker 0: WeightSyncError: .*CUDA"):
        receive(device_is_lost=True)
    assert inner.closed.wait(5)
    engine.close()


def test_an_error_is_a_device_loss_by_what_this_process_raised() -> None:
    own = WeightSyncError("weight channel: rollout worker 1 failed: CUDA error: the device fell off")
    assert not is_device_loss(own) and not is_device_loss(ValueError("no such weight"))
    own.__cause__ = RuntimeError("CUDA error: the device fell off")
    assert is_device_loss(own)


def test_a_command_that_raises_harms_only_who_gave_it(failing: tuple[RolloutEngine, FailingEngine]) -> None:
    engine, inner = failing
    with pytest.raises(ZeroDivisionError):
        engine.run(lambda _: 1 // 0).result(5)
    assert engine.run(lambda inside: inside is inner).result(5)
    engine.close()
    with pytest.raises(WorkerError, match="closed"):
        engine.run(lambda _: None).result(5)


def test_the_death_of_a_tensor_rank_is_told_even_while_the_engines_thread_hangs(
    failing: tuple[RolloutEngine, FailingEngine],
) -> None:
    engine, _ = failing
    got: list[Any] = []
    engine.submit(prompts(2), [{}, {}], got.append)[1].result(5)
    hangs, released = threading.Event(), threading.Event()

    def load(_: Any) -> None:
        hangs.set()
        released.wait(20)

    command, later = engine.run(load), engine.run(lambda _: None)
    assert hangs.wait(5)
    engine._rank_died("VllmWorker-1")
    for waiting in (command, later, engine.run(lambda _: None)):
        with pytest.raises(WorkerDied, match="its process VllmWorker-1 died"):
            waiting.result(5)
    assert len(got) == 1 and isinstance(got[0], WorkerDied)
    released.set()
    engine.close()


def test_an_engine_that_cannot_be_described_fails_its_start_and_is_shut_down(
    failing: tuple[RolloutEngine, FailingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, inner = failing
    inner.closed.clear()

    def describe(_: Any) -> dict[str, Any]:
        raise AttributeError("no such field of vLLM")

    monkeypatch.setattr(module, "_describe", describe)
    engine = RolloutEngine(OPTIONS)
    with pytest.raises(WorkerDied, match="the rollout engine failed: AttributeError: no such field of vLLM"):
        engine.start().result(5)
    assert inner.closed.wait(5)
    engine.close()


def test_close_of_a_failed_engine_does_not_wait_for_its_hung_thread(
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


def test_a_command_that_fails_because_a_tensor_rank_died_is_a_death_though_the_failure_is_noticed_first(
    failing: tuple[RolloutEngine, FailingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = failing
    engine.options = replace(OPTIONS, tensor_parallel_size=2)
    monkeypatch.setattr(module, "_NOTICE_S", 20.0)
    failed = threading.Event()

    def load(_: Any) -> None:
        failed.set()
        raise ConnectionError("connection closed by peer")

    command = engine.run(load)
    assert failed.wait(5)
    engine._rank_died("VllmWorker-1")
    with pytest.raises(WorkerDied, match="its process VllmWorker-1 died"):
        command.result(5)
    engine.close()


def test_aborted_requests_leave_the_engine_and_the_others_stay(failing: tuple[RolloutEngine, FailingEngine]) -> None:
    engine, inner = failing
    got: list[Any] = []
    ids, accepted = engine.submit(prompts(3), [{}] * 3, got.append)
    accepted.result(5)
    engine.abort(ids[:1]).result(5)
    assert inner.requests == ids[1:]
    engine.abort(ids).result(5)  # one of them for the second time
    assert not inner.requests and not got
    engine.close()


def test_a_folder_without_a_model_is_named() -> None:
    with pytest.raises(ModelError, match=r"/no/such/folder has no config.json; actor_rollout_ref.model.path must be"):
        RolloutEngine(OPTIONS).start().result(5)
