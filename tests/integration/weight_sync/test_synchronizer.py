"""Tests of the driver of a weight sync: retries, errors and repairs.

The workers are threads of this process with real ranks of a transport. Ray and the engine are replaced.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch

from recipe_gkd.errors import DeadlineError, GkdError, ResourceError, WeightSyncError, WorkerDied, find_timeout_error
from recipe_gkd.runtime.remote_group import OnResult, RemoteGroup
from recipe_gkd.weight_sync import connection as connection_module
from recipe_gkd.weight_sync import spec as spec_module
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.receiver import NamedTensors, receive_weights
from recipe_gkd.weight_sync.sender_api import WeightSenderApi
from recipe_gkd.weight_sync.spec import TransportAddress, WeightSyncSpec
from recipe_gkd.weight_sync.stats import ReceivedUpdate
from recipe_gkd.weight_sync.store import join_store
from recipe_gkd.weight_sync.synchronizer import WeightSynchronizer
from recipe_gkd.weight_sync.transport import Transport
from recipe_gkd.weight_sync.transport_factory import open_transport
from tests._support.errors import raises
from tests._support.waiting import FOREVER_S
from tests.integration.weight_sync.transport_pairs import CPU, META, make_weights, spawn


class FreezableWorker:
    """A worker that stops answering at its next call of the method ``freeze_in``."""

    freeze_in, frozen = "", False

    def answer(self, method: str, *args: Any) -> Any:
        self.frozen = self.frozen or method == self.freeze_in
        if self.frozen:
            threading.Event().wait()
        return getattr(self, method)(*args)


class Actor(FreezableWorker):
    """Actor rank 0. Its next ``n_failing_exports`` exports raise."""

    def __init__(self) -> None:
        self._weights = WeightSenderApi(self, rank=0, device=CPU, timeout_s=FOREVER_S)
        self.n_failing_exports, self.stores, self.transports = 0, set[int](), set[str]()

    def open_weight_store(self) -> tuple[str, int]:
        host, port = self._weights.open_store("127.0.0.1")
        self.stores.add(port)
        return host, port

    def connect_weight_transport(self, address: TransportAddress) -> None:
        self.transports.add(address.transport)
        self._weights.connect(address)

    def weights_meta(self) -> list[TensorMeta]:
        return META

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.n_failing_exports, fails = self.n_failing_exports - 1, self.n_failing_exports > 0
        for i, item in enumerate(make_weights().items()):
            if fails and i == 3:
                raise ArithmeticError(f"export {self.n_failing_exports} failed")
            yield item

    def send_weights(self, version: int, bucket_bytes: int) -> Any:
        return self._weights.send(version, bucket_bytes)


class Rollout(FreezableWorker):
    """Rollout worker that double-buffers updates."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.dead, self.dies = False, False
        self.inflight: bool | None = None
        self._transport: Transport | None = None

    def open_weight_transport(self, address: TransportAddress, first_rank: int) -> None:
        store = join_store(address.host, address.port, FOREVER_S)
        self._transport = open_transport(
            address.transport, store, rank=first_rank, labels=address.labels, device=CPU, timeout_s=FOREVER_S
        )

    def begin_weight_update(self, version: int, meta: list[TensorMeta], inflight: bool) -> None:
        self.inflight = inflight

    def receive_weights(self, version: int, meta: list[TensorMeta], bucket_bytes: int) -> ReceivedUpdate | None:
        self.dead = self.dies
        if self.dead:
            return None
        assert self._transport is not None
        self.buffered: NamedTensors = []
        stats = receive_weights(self._transport, version, meta, bucket_bytes, self.buffered.extend)
        return ReceivedUpdate(**asdict(stats), double_buffered=True)

    def commit_weights(self, version: int) -> None:
        self.version, self.weights = version, dict(self.buffered)

    def drop_weights(self) -> str | None:
        if self._transport is not None:
            self._transport.close()
        return None


class Group(RemoteGroup[Any]):
    """Workers in threads."""

    def __init__(self, name: str, members: list[Any]) -> None:
        self._name, self.members = name, members

    def __len__(self) -> int:
        return len(self.members)

    def label(self, rank: int) -> str:
        return f"{self._name} worker {rank} of {len(self)}"

    async def _call_ranks(
        self,
        method: str,
        args: Mapping[int, Sequence[object]],
        *,
        timeout_s: float,
        phase: str,
        on_result: OnResult | None = None,
    ) -> list[Any]:
        calls = (self._call_rank(rank, method, *own, timeout_s=timeout_s, phase=phase) for rank, own in args.items())
        return list(await asyncio.gather(*calls))

    async def _call_rank(self, rank: int, method: str, *args: Any, timeout_s: float, phase: str) -> Any:
        member = self.members[rank]
        if not getattr(member, "dead", False):
            call = asyncio.wrap_future(spawn(lambda: member.answer(method, *args)))
            if not (await asyncio.wait([call], timeout=timeout_s))[0]:
                silent = (self.label(rank),)
                raise DeadlineError("no answer", phase=phase, silent=silent, waited_s=timeout_s)
            result = call.result()
        if getattr(member, "dead", False):
            raise WorkerDied("its process died", phase=phase, worker=self.label(rank))
        return result


class Cluster:
    """An actor, rollout workers, and their synchronizer."""

    def __init__(
        self, n_rollouts: int = 2, *, transport: str = "collective", restarts: Any = None, **options: Any
    ) -> None:
        self.actor, self.rollouts = Actor(), [Rollout() for _ in range(n_rollouts)]
        self.spec = WeightSyncSpec(
            tensor_parallel_size=1, bucket_bytes=3000, timeout_s=FOREVER_S, transport=transport, **options
        )
        self.sync = WeightSynchronizer(
            Group("actor", [self.actor]), Group("rollout", self.rollouts), self.spec, restarts=restarts
        )

    def shorten_deadline(self, timeout_s: float) -> None:
        """Set a shorter deadline after all ranks are connected."""
        object.__setattr__(self.spec, "timeout_s", timeout_s)
        workers: list[Any] = [self.actor._weights, *self.rollouts]
        for worker in workers:
            worker._transport.peers.timeout_s = timeout_s

    def has(self, version: int) -> bool:
        """Return True if every rollout worker has all weights as ``version``."""
        sent = make_weights()
        return all(
            rollout.version == version and all(torch.equal(rollout.weights[name], sent[name]) for name in sent)
            for rollout in self.rollouts
        )


@pytest.mark.parametrize("transport", ["collective", "ipc"])
def test_sync_failed_attempt_is_retried_once_on_new_transport(transport: str) -> None:
    cluster = Cluster(transport=transport, inflight=True)
    assert asyncio.run(cluster.sync.sync(1))["weights/retries"] == 0
    cluster.actor.n_failing_exports = 1
    assert asyncio.run(cluster.sync.sync(2))["weights/retries"] == 1
    assert cluster.has(2) and len(cluster.actor.stores) == 2
    assert asyncio.run(cluster.sync.sync(3))["weights/retries"] == 0
    assert cluster.has(3) and len(cluster.actor.stores) == 2
    assert cluster.actor.transports == {transport} and all(rollout.inflight for rollout in cluster.rollouts)


def test_sync_logs_its_first_and_its_repeated_transfers_on_the_console(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="recipe_gkd")
    cluster = Cluster()
    for version in range(1, 6):
        cluster.actor.n_failing_exports = int(version == 4)
        asyncio.run(cluster.sync.sync(version))
    lines = [record for record in caplog.records if " MB in " in record.getMessage()]
    assert len(lines) == 5
    on_console = [record.getMessage() for record in lines if not hasattr(record, "file_only")]
    assert [line.split(":")[0] for line in on_console] == ["weight sync v1", "weight sync v4"]


def test_sync_two_failures_raise_one_error_with_both() -> None:
    cluster = Cluster()
    cluster.actor.n_failing_exports = 2
    with raises(WeightSyncError) as caught:
        asyncio.run(cluster.sync.sync(1))
    first = caught.value.first_attempt
    assert first is not None and first.first_attempt is None
    for attempt, n in ((caught.value, 0), (first, 1)):
        assert f"export {n} failed" in attempt.failures[0].what
    assert [rollout.version for rollout in cluster.rollouts] == [None, None]
    asyncio.run(cluster.sync.sync(2))
    assert cluster.has(2)


class Replacement:
    """Replacement of rollout worker 1, which counts as the only worker that can be replaced."""

    def __init__(self, error: GkdError | None = None) -> None:
        self.cluster: Cluster | None = None
        self.error = error

    def can_replace(self, error: BaseException) -> bool:
        late = find_timeout_error(error)
        return late is not None and list(late.silent) == ["rollout worker 1 of 2"]

    async def replace_dead(self, death: GkdError | None = None) -> None:
        if self.error is not None:
            raise self.error
        assert self.cluster is not None
        self.cluster.rollouts[1] = Rollout()


def test_sync_dead_worker_is_replaced_before_retry() -> None:
    replacement = Replacement()
    replacement.cluster = cluster = Cluster(restarts=replacement)
    cluster.rollouts[1].dies = True
    assert asyncio.run(cluster.sync.sync(1))["weights/retries"] == 1
    assert cluster.has(1)


@pytest.mark.parametrize(
    ("freeze", "phase", "silent", "answered"),
    [
        ("actor", "send", ["actor worker 0 of 1"], []),
        ("rollout", "transfer", ["rollout worker 1 of 2"], ["rollout worker 0 of 2"]),
    ],
)
def test_sync_frozen_worker_is_named_without_retry(
    monkeypatch: pytest.MonkeyPatch, freeze: str, phase: str, silent: list[str], answered: list[str]
) -> None:
    cluster = Cluster()
    asyncio.run(cluster.sync.sync(1))
    cluster.shorten_deadline(1.0)
    monkeypatch.setattr(spec_module, "SYNC_RPC_MARGIN_S", 0.5)
    if freeze == "actor":
        cluster.actor.freeze_in = "send_weights"
    else:
        cluster.rollouts[1].freeze_in = "receive_weights"
    with raises(WeightSyncError) as caught:
        asyncio.run(cluster.sync.sync(2))
    late = find_timeout_error(caught.value)
    assert late is not None and late.phase == f"weight sync v2, {phase}"
    assert (list(late.silent), list(late.answered)) == (silent, answered)
    assert late.waited_s >= 1.0 and len(cluster.actor.stores) == 1


@pytest.mark.parametrize("freeze_in", ["begin_weight_update", "receive_weights", "commit_weights"])
def test_sync_that_a_silent_worker_stopped_is_retried_with_another_one(
    monkeypatch: pytest.MonkeyPatch, freeze_in: str
) -> None:
    replacement = Replacement()
    replacement.cluster = cluster = Cluster(restarts=replacement)
    asyncio.run(cluster.sync.sync(1))
    cluster.shorten_deadline(1.0)
    monkeypatch.setattr(spec_module, "SYNC_RPC_MARGIN_S", 0.5)
    cluster.rollouts[1].freeze_in = freeze_in
    assert asyncio.run(cluster.sync.sync(2))["weights/retries"] == 1
    assert cluster.has(2)


def test_sync_with_silent_actor_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(restarts=Replacement())
    asyncio.run(cluster.sync.sync(1))
    cluster.shorten_deadline(1.0)
    monkeypatch.setattr(spec_module, "SYNC_RPC_MARGIN_S", 0.5)
    cluster.actor.freeze_in = "send_weights"
    with raises(WeightSyncError, first_attempt=None) as caught:
        asyncio.run(cluster.sync.sync(2))
    late = find_timeout_error(caught.value)
    assert late is not None and late.silent == ("actor worker 0 of 1",)


def test_sync_failed_replacement_raises_both_errors() -> None:
    cluster = Cluster(restarts=Replacement(WorkerDied("no more restarts")))
    cluster.rollouts[1].dies = True
    with raises(WeightSyncError, what="no more restarts") as caught:
        asyncio.run(cluster.sync.sync(1))
    first = caught.value.first_attempt
    assert first is not None and any(failure.worker == "rollout worker 1 of 2" for failure in first.failures)


def test_forget_next_sync_connects_again() -> None:
    cluster = Cluster()
    asyncio.run(cluster.sync.sync(1))
    cluster.rollouts[0] = Rollout()
    cluster.sync.forget()
    assert asyncio.run(cluster.sync.sync(2))["weights/retries"] == 0
    assert cluster.has(2) and len(cluster.actor.stores) == 2


@pytest.mark.parametrize(("engine", "is_logged"), [("bfloat16", True), ("float32", True), (None, False)])
def test_sync_dtype_conversion_is_logged_once(
    engine: str | None, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(n_rollouts=1, engine_dtype=engine)  # sent: float32, and a bfloat16 bias
    asyncio.run(cluster.sync.sync(1))
    cluster.sync.forget()
    asyncio.run(cluster.sync.sync(2))
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    other = {"bfloat16": "float32", "float32": "bfloat16", None: ""}[engine]
    assert [f"weights in {other}, which the rollout engine converts to {engine}" in text for text in warnings] == (
        [True] if is_logged else []
    )


def test_sync_failure_of_both_pools_does_not_wait_for_the_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It blocks if the process of the store is stopped."""
    ended = threading.Event()
    monkeypatch.setattr(connection_module, "interrupt", lambda *_: ended.wait(FOREVER_S))

    async def fail(after_s: float) -> None:
        await asyncio.sleep(after_s)
        raise WorkerDied(f"failed after {after_s} s")

    call_both = Cluster().sync._connection.call_both
    with raises(WeightSyncError, phase="transfer") as caught:
        asyncio.run(call_both("transfer", fail(0.1), fail(0.2)))
    ended.set()
    assert [failure.what for failure in caught.value.failures] == ["failed after 0.1 s", "failed after 0.2 s"]


def test_sync_unknown_transport_error_lists_known_ones() -> None:
    with pytest.raises(WeightSyncError):
        asyncio.run(Cluster(transport="rdma").sync.sync(1))


def test_sync_that_does_not_fit_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Rollout, version: int, meta: list[TensorMeta], inflight: bool) -> None:
        raise ResourceError("a weight update does not fit into the memory", worker="rollout worker 0")

    monkeypatch.setattr(Rollout, "begin_weight_update", refuse)
    cluster = Cluster()
    with raises(WeightSyncError, worker="rollout worker 0", first_attempt=None) as caught:
        asyncio.run(cluster.sync.sync(1))
    assert isinstance(caught.value.failures[0], ResourceError) and len(cluster.actor.stores) == 1
