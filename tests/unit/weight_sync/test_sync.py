"""The driver's side of a sync: what is tried again, on what, and what is said when it was in vain.

The workers are threads of this process with real ends of a channel; only Ray and the engine are left out.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from recipe_gkd.errors import DeadlineError, WeightSyncError, WorkerDied, find_timeout_error
from recipe_gkd.weight_sync import synchronizer
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.receiver import NamedTensors, receive_weights
from recipe_gkd.weight_sync.sender_api import WeightSenderApi
from recipe_gkd.weight_sync.synchronizer import WeightSynchronizer
from recipe_gkd.weight_sync.transport import Transport, join_store
from recipe_gkd.weight_sync.transport_factory import connect
from tests.unit.weight_sync.ends import CPU, META, Timer, spawn, weights

pytestmark = pytest.mark.timeout(60)
TIMEOUT_S = 10.0


class Freezer:
    """A worker that stops answering, for ever, at its next call of ``freeze_in``."""

    freeze_in, frozen = "", False

    def response(self, method: str, *args: Any) -> Any:
        self.frozen = self.frozen or method == self.freeze_in
        if self.frozen:
            threading.Event().wait()
        return getattr(self, method)(*args)


class Actor(Freezer):
    """Rank 0; breaks as many exports as it was told to."""

    def __init__(self) -> None:
        self._weights = WeightSenderApi(self, rank=0, device=CPU, timeout_s=TIMEOUT_S)
        self.to_break, self.stores, self.transports = 0, set[int](), set[str]()

    def open_weight_store(self) -> tuple[str, int]:
        host, port = self._weights.open_store("127.0.0.1")
        self.stores.add(port)
        return host, port

    def connect_weight_channel(self, labels: list[str], transport: str) -> None:
        self.transports.add(transport)
        self._weights.connect(labels, transport)

    def weights_meta(self) -> list[TensorMeta]:
        return META

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.to_break, broken = self.to_break - 1, self.to_break > 0
        for i, item in enumerate(weights().items()):
            if broken and i == 3:
                raise ArithmeticError(f"export {self.to_break} broke")
            yield item

    def send_weights(self, version: int, bucket_bytes: int) -> Any:
        return self._weights.send(version, bucket_bytes)


class Rollout(Freezer):
    """Stages what it receives."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.dead, self.dies = False, False
        self.inflight: bool | None = None
        self._channel: Transport | None = None

    def open_weight_channel(self, host: str, port: int, first_rank: int, labels: list[str], transport: str) -> None:
        store = join_store(host, port, TIMEOUT_S)
        self._channel = connect(transport, store, rank=first_rank, labels=labels, device=CPU, timeout_s=TIMEOUT_S)

    def begin_weight_update(self, version: int, meta: list[TensorMeta], inflight: bool) -> None:
        self.inflight = inflight

    def receive_weights(self, version: int, meta: list[TensorMeta], bucket_bytes: int) -> dict[str, bool]:
        self.dead = self.dies
        if not self.dead:
            assert self._channel is not None
            self.staged: NamedTensors = []
            receive_weights(self._channel, version, meta, bucket_bytes, self.staged.extend)
        return {"staged": True}

    def commit_weights(self, version: int) -> None:
        self.version, self.weights = version, dict(self.staged)

    def drop_weights(self) -> str | None:
        if self._channel is not None:
            self._channel.close()
        return None


class Group:
    def __init__(self, name: str, members: list[Any]) -> None:
        self._name, self.members = name, members

    def __len__(self) -> int:
        return len(self.members)

    def label(self, rank: int) -> str:
        return f"{self._name} worker {rank} of {len(self)}"

    async def call(self, method: str, *args: Any, timeout_s: float, phase: str) -> list[Any]:
        return await self.call_each(method, [args] * len(self), timeout_s=timeout_s, phase=phase)

    async def call_each(self, method: str, args: Sequence[Sequence[Any]], *, timeout_s: float, phase: str) -> list[Any]:
        calls = [self.call_one(rank, method, *own, timeout_s=timeout_s, phase=phase) for rank, own in enumerate(args)]
        return list(await asyncio.gather(*calls))

    async def call_one(self, rank: int, method: str, *args: Any, timeout_s: float, phase: str) -> Any:
        member = self.members[rank]
        if not getattr(member, "dead", False):
            call = asyncio.wrap_future(spawn(lambda: member.response(method, *args)))
            if not (await asyncio.wait([call], timeout=timeout_s))[0]:
                error = DeadlineError(f"{phase}: {self.label(rank)} did not answer")
                error.phase, error.silent, error.waited_s = phase, [self.label(rank)], timeout_s
                raise error
            result = call.result()
        if getattr(member, "dead", False):
            raise WorkerDied(f"{phase}: {self.label(rank)} died")
        return result


class Parties:
    def __init__(self, n_rollouts: int = 2, *, transport: str = "collective", **options: Any) -> None:
        self.actor, self.rollouts = Actor(), [Rollout() for _ in range(n_rollouts)]
        self.sync = WeightSynchronizer(
            Group("actor", [self.actor]), Group("rollout", self.rollouts), tensor_parallel_size=1, bucket_bytes=3000,
            timeout_s=TIMEOUT_S, transport=transport, **options,
        )  # fmt: skip

    def hurry(self, timeout_s: float) -> None:
        """A shorter deadline from now on, when all are connected."""
        self.sync._timeout_s = timeout_s
        ends: list[Any] = [self.actor._weights, *self.rollouts]
        for end in ends:
            end._channel.timeout_s = timeout_s

    def have(self, version: int) -> bool:
        sent = weights()
        return all(
            rollout.version == version and all(torch.equal(rollout.weights[name], sent[name]) for name in sent)
            for rollout in self.rollouts
        )


@pytest.mark.parametrize("transport", ["collective", "ipc"])
def test_a_failed_attempt_is_repeated_once_on_a_new_channel(transport: str) -> None:
    parties = Parties(transport=transport, inflight=True)
    assert asyncio.run(parties.sync.sync(1))["weights/retries"] == 0
    parties.actor.to_break = 1
    assert asyncio.run(parties.sync.sync(2))["weights/retries"] == 1
    assert parties.have(2) and len(parties.actor.stores) == 2
    assert asyncio.run(parties.sync.sync(3))["weights/retries"] == 0
    assert parties.have(3) and len(parties.actor.stores) == 2
    assert parties.actor.transports == {transport} and all(rollout.inflight for rollout in parties.rollouts)


def test_two_failures_are_one_error_that_tells_of_both() -> None:
    parties = Parties()
    parties.actor.to_break = 2
    with pytest.raises(WeightSyncError, match=r"export 0 broke.*; the first attempt.*export 1 broke") as caught:
        asyncio.run(parties.sync.sync(1))
    assert "export 0 broke" in str(caught.value.__cause__) and "export 1" not in str(caught.value.__cause__)
    assert [rollout.version for rollout in parties.rollouts] == [None, None]
    asyncio.run(parties.sync.sync(2))
    assert parties.have(2)


def test_a_worker_that_dies_in_the_transfer_is_noticed_at_once_and_its_successor_gets_the_weights() -> None:
    async def replace() -> None:
        parties.rollouts[1] = Rollout()

    parties = Parties(repair=replace)
    parties.rollouts[1].dies = True
    with Timer() as timer:
        assert asyncio.run(parties.sync.sync(1))["weights/retries"] == 1
    assert parties.have(1) and timer.seconds < TIMEOUT_S


@pytest.mark.parametrize(
    ("freeze", "phase", "silent", "answered"),
    [
        ("actor", "send", ["actor worker 0 of 1"], []),
        ("rollout", "transfer", ["rollout worker 1 of 2"], ["rollout worker 0 of 2"]),
    ],
)
def test_a_frozen_worker_is_named_with_the_phase_in_which_it_froze_and_is_not_waited_for_again(
    monkeypatch: pytest.MonkeyPatch, freeze: str, phase: str, silent: list[str], answered: list[str]
) -> None:
    parties = Parties()
    asyncio.run(parties.sync.sync(1))
    parties.hurry(1.0)
    monkeypatch.setattr(synchronizer, "_MARGIN_S", 0.5)
    if freeze == "actor":
        parties.actor.freeze_in = "send_weights"
    else:
        parties.rollouts[1].freeze_in = "receive_weights"
    with Timer() as timer, pytest.raises(WeightSyncError, match=silent[0]) as caught:
        asyncio.run(parties.sync.sync(2))
    late = find_timeout_error(caught.value)
    assert late is not None and late.phase == f"weight sync v2, {phase}"
    assert (list(late.silent), list(late.answered)) == (silent, answered)
    assert 1.0 <= late.waited_s <= timer.seconds + 0.1 and timer.seconds < 5 and len(parties.actor.stores) == 1


def test_what_the_repair_says_is_raised_together_with_what_it_was_to_repair() -> None:
    async def refuse() -> None:
        raise WorkerDied("no more restarts")

    parties = Parties(repair=refuse)
    parties.rollouts[1].dies = True
    with pytest.raises(WeightSyncError, match=r"no more restarts; the first attempt.*rollout worker 1 of 2 died"):
        asyncio.run(parties.sync.sync(1))


def test_a_forgotten_channel_is_built_anew() -> None:
    parties = Parties()
    asyncio.run(parties.sync.sync(1))
    parties.rollouts[0] = Rollout()
    parties.sync.forget()
    assert asyncio.run(parties.sync.sync(2))["weights/retries"] == 0
    assert parties.have(2) and len(parties.actor.stores) == 2


@pytest.mark.parametrize(("engine", "told"), [("bfloat16", True), ("float32", True), (None, False)])
def test_a_conversion_in_the_engine_is_said_once(
    engine: str | None, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    parties = Parties(n_rollouts=1, engine_dtype=engine)  # what is sent: float32, and a bfloat16 bias
    asyncio.run(parties.sync.sync(1))
    parties.sync.forget()
    asyncio.run(parties.sync.sync(2))
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    other = {"bfloat16": "float32", "float32": "bfloat16", None: ""}[engine]
    assert [f"weights in {other}, which the rollout engine converts to {engine}" in text for text in warnings] == (
        [True] if told else []
    )


def test_an_unknown_transport_is_refused_with_those_that_there_are() -> None:
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="weight_transport is 'rdma'; expected one of collective, ipc"):
        asyncio.run(Parties(transport="rdma").sync.sync(1))
    assert time.monotonic() - started < TIMEOUT_S
