"""Tests of the private process group, with a fake of NCCL's class."""

from __future__ import annotations

import functools
import os
import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from recipe_gkd.weight_sync import private_group
from recipe_gkd.weight_sync.private_group import PrivateGroup

HANDLING, DUMP_WAIT = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"


class FakeNccl:
    """Stand-in for ``ProcessGroupNCCL``. It records the variables that the constructor would read."""

    created: ClassVar[list[FakeNccl]] = []

    class Options:
        _timeout: Any = None

    def __init__(self, store: dist.Store, rank: int, world: int, options: Options) -> None:
        self.environment, self.rank, self.world = dict(os.environ), rank, world
        self.timeout_s, self.aborted = options._timeout.total_seconds(), threading.Event()
        FakeNccl.created.append(self)
        if rank < 0:
            raise RuntimeError("no GPUs found")

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeNccl]:
    FakeNccl.created = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    return FakeNccl


def make_group(rank: int = 1) -> PrivateGroup:
    cuda = torch.device("cuda", 0)
    store: Any = dist.HashStore()
    return PrivateGroup(store, rank=rank, world=3, device=cuda, timeout_s=100, stop=threading.Event())


class TestNcclGroup:
    @pytest.mark.parametrize("before", [None, "3"])
    def test_errors_do_not_end_the_process(
        self, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch, before: str | None
    ) -> None:
        for name in (HANDLING, DUMP_WAIT):
            if before is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, before)
        make_group()
        [group] = nccl.created
        assert group.environment[HANDLING] == "0" and int(group.environment[DUMP_WAIT]) * 4 < 1000
        assert (group.rank, group.world) == (1, 3) and group.timeout_s > 200
        assert [os.environ.get(name) for name in (HANDLING, DUMP_WAIT)] == [before, before]  # other groups as before

    def test_failed_construction_restores_environment(
        self, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(HANDLING, raising=False)
        with pytest.raises(RuntimeError, match="no GPUs found"):
            make_group(rank=-1)
        assert HANDLING not in os.environ

    def test_end_aborts_once(self, nccl: type[FakeNccl]) -> None:
        group = make_group()
        group.end()
        group.end()
        assert nccl.created[0].aborted.is_set()

    def test_end_returns_although_abort_hangs(
        self, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(private_group, "_ABORT_TIMEOUT_S", 0.05)
        monkeypatch.setattr(FakeNccl, "abort", lambda _: threading.Event().wait())
        make_group().end()
        assert "did not close" in caplog.text


class TestGlooGroup:
    def test_uses_the_interface_of_the_user(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stop, store = threading.Event(), dist.TCPStore("127.0.0.1", 0, is_master=True)
        make = functools.partial(PrivateGroup, rank=0, world=1, device=torch.device("cpu"), timeout_s=5, stop=stop)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7, lo")
        with pytest.raises(RuntimeError, match="none7"):
            make(store)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo, lo")
        group = make(store)
        group.probe()
        group.end()


class FakeWork:
    """A broadcast that never completes, or that has failed."""

    def __init__(self, is_completed: bool) -> None:
        self._is_completed = is_completed

    def is_completed(self) -> bool:
        return self._is_completed

    def wait(self) -> None:
        raise RuntimeError("ncclRemoteError")


class TestProbe:
    def probe(self, monkeypatch: pytest.MonkeyPatch, work: FakeWork, stop: threading.Event) -> None:
        fake = SimpleNamespace(broadcast=lambda buffers, options: work)
        monkeypatch.setattr(private_group, "_gloo_group", lambda *_, **__: fake)
        store: Any = SimpleNamespace(host="127.0.0.1")
        PrivateGroup(store, rank=0, world=2, device=torch.device("cpu"), timeout_s=100, stop=stop).probe()

    def test_failed_broadcast_is_raised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(RuntimeError, match="ncclRemoteError"):
            self.probe(monkeypatch, FakeWork(is_completed=True), threading.Event())

    def test_stop_ends_the_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stop = threading.Event()
        stop.set()
        with pytest.raises(RuntimeError, match="given up"):
            self.probe(monkeypatch, FakeWork(is_completed=False), stop)


def test_store_wait_ends_when_stopped() -> None:
    stop = threading.Event()
    store: Any = dist.HashStore()
    waiting = private_group._InterruptibleStore(store, 100, stop)
    waiting.set("a", b"\x00\x01")
    assert waiting.get("a") == b"\x00\x01" and not waiting.check(["b"])
    stop.set()
    with pytest.raises(RuntimeError, match="no b in the store"):
        waiting.get("b")
