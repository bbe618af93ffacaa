"""Signals end a run gracefully, and a second one ends it without waiting."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from recipe_gkd.ray_cluster import worker_group
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.runtime import signals
from recipe_gkd.runtime.signals import Terminated, exit_as_termination, run_until_terminated


def ignore_background_error(*_: Any) -> None: ...


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)


def run_and_send(number: signal.Signals, closed: list[str]) -> None:
    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.1)
        finally:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)
            closed.append("in order")

    asyncio.run(run_until_terminated(work(), ignore_background_error))


class TestFirstSignal:
    def test_repeated_signal_closes_in_order(self, number: signal.Signals) -> None:
        signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
        closed: list[str] = []
        with pytest.raises(Terminated) as stop:
            run_and_send(number, closed)
        assert stop.value.number == number and closed == ["in order"]

    def test_ignored_signal_stays_ignored(self, number: signal.Signals) -> None:
        signal.signal(number, signal.SIG_IGN)
        closed: list[str] = []
        run_and_send(number, closed)
        assert closed == ["in order"]


class TestExitAsTermination:
    def test_exit_of_a_handler_is_a_termination(self) -> None:
        """Ray's handler of SIGTERM exits with the number of the signal while it starts."""
        with pytest.raises(Terminated) as stop, exit_as_termination():
            sys.exit(int(signal.SIGTERM))
        assert stop.value.number == signal.SIGTERM


class TestSecondSignal:
    @pytest.fixture(autouse=True)
    def default_handlers(self) -> Iterator[None]:
        """SIGTERM and SIGINT as in a shell, independent of the parent process of the tests."""
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL), signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Calls of the stuck workers, then the end of their processes. Every signal counts as a separate request."""
        calls: list[str] = []

        async def kill_workers(handles: Any, *, timeout_s: float) -> None:
            await asyncio.sleep(0.1)
            calls.append("killed")

        monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
        monkeypatch.setattr(worker_group, "kill_workers", kill_workers)
        return calls

    @pytest.mark.parametrize(
        ("first", "second", "raised"),
        [(signal.SIGTERM, signal.SIGTERM, Terminated), (signal.SIGINT, signal.SIGTERM, KeyboardInterrupt)],
    )
    def test_during_save_and_shutdown_ends_processes(
        self, calls: list[str], first: int, second: int, raised: type[BaseException]
    ) -> None:
        """The second signal ends the wait for a save, and a third one cuts the shutdown of the workers short."""

        class Stuck(WorkerGroup):
            async def _call_ranks(self, method: str, *args: Any, **_: Any) -> list[Any]:
                calls.append(method)
                return [await asyncio.sleep(3600)]

        async def fit() -> None:
            try:
                try:
                    os.kill(os.getpid(), first)
                    await asyncio.sleep(3600)
                finally:
                    asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), second)
                    asyncio.get_running_loop().call_later(0.25, os.kill, os.getpid(), second)
                    await asyncio.sleep(3600)  # a background checkpoint
            finally:
                await asyncio.wait_for(Stuck("actor", []).stop(timeout_s=1), 10)

        with pytest.raises(raised):
            asyncio.run(asyncio.wait_for(run_until_terminated(fit(), ignore_background_error), 30))
        assert calls == ["shutdown", "killed"]

    def test_during_shutdown_kills_workers(self, calls: list[str]) -> None:
        class Stuck(WorkerGroup):
            async def _call_ranks(self, method: str, *args: Any, **_: Any) -> list[Any]:
                asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
                return [await asyncio.sleep(3600)]

        async def train() -> None:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(3600)
            finally:
                await Stuck("actor", []).stop(timeout_s=100)

        with pytest.raises(Terminated):
            asyncio.run(asyncio.wait_for(run_until_terminated(train(), ignore_background_error), 30))
        assert calls == ["killed"]
