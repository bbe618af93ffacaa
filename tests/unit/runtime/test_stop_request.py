"""Requests to save and end: by whom they are made, when they take effect, and what they cancel."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from recipe_gkd.runtime import signals
from recipe_gkd.runtime.signals import Terminated, run_until_terminated
from recipe_gkd.runtime.stop_request import StopRequest


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Handlers as in a shell, independent of the parent process of the tests."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


async def numbers(wait_s: float = 0.01, closed: list[str] | None = None) -> AsyncIterator[int]:
    try:
        for number in range(1, 1000):
            await asyncio.sleep(wait_s)
            yield number
    finally:
        if closed is not None:
            closed.append("closed")


class Training:
    """Loop that makes steps until a stop is requested, as the trainer does."""

    def __init__(self, wait_s: float, *sent: int, at_step: int = 2) -> None:
        self.stop, self.steps, self.saved = StopRequest(), list[int](), False
        self._wait_s, self._sent, self._at_step = wait_s, sent, at_step

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        with self.stop.accepted():
            async for step in self.stop.until_requested(numbers(self._wait_s)):
                if step == self._at_step:
                    for delay, number in enumerate(self._sent):
                        loop.call_later(0.005 * delay, os.kill, os.getpid(), number)
                    await asyncio.sleep(0.05)
                self.steps.append(step)
        self.saved = True

    def start(self) -> None:
        asyncio.run(run_until_terminated(self.run(), lambda *_: None, self.stop))


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
    def test_first_signal_ends_after_the_step(self, number: int) -> None:
        training = Training(0.001, number, number)  # sent twice at once, as wrapper scripts do
        training.start()
        assert training.steps == [1, 2] and training.saved
        assert training.stop.reason == signal.Signals(number).name

    def test_second_sigterm_ends_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
        training = Training(0.001, signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM)
        with pytest.raises(Terminated) as stop:
            training.start()
        assert stop.value.number == signal.SIGTERM
        assert training.steps == [1] and not training.saved

    @pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
    def test_without_training_loop_ends_at_once(self, number: int) -> None:
        async def start_workers() -> None:
            os.kill(os.getpid(), number)
            await asyncio.sleep(3600)

        with pytest.raises(Terminated) as stop:
            asyncio.run(run_until_terminated(start_workers(), lambda *_: None, StopRequest()))
        assert stop.value.number == number

    def test_repeated_hangup_is_one_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each process that is left in a closed session may pass it on."""
        monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
        training = Training(0.001, signal.SIGHUP, signal.SIGHUP, signal.SIGHUP)
        training.start()
        assert training.steps == [1, 2] and training.saved


class TestUntilRequested:
    def test_request_during_wait_interrupts_it(self) -> None:
        async def work() -> list[int]:
            stop, closed, items = StopRequest(), list[str](), list[int]()
            with stop.accepted():
                asyncio.get_running_loop().call_later(0.01, stop.request, "test")
                async for item in stop.until_requested(numbers(60, closed)):
                    items.append(item)
            assert closed == ["closed"]
            return items

        assert asyncio.run(asyncio.wait_for(work(), 10)) == []

    @pytest.mark.parametrize("fails", [True, False])
    def test_item_of_the_moment_of_the_request_is_dropped(self, fails: bool) -> None:
        """Whatever the request cancels may still return an item, or fail."""

        async def source() -> AsyncIterator[int]:
            yield 1
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if fails:
                    raise ArithmeticError("canceled") from None
                yield 2

        async def work() -> list[int]:
            stop = StopRequest()
            with stop.accepted():
                asyncio.get_running_loop().call_later(0.01, stop.request, "test")
                return [item async for item in stop.until_requested(source())]

        assert asyncio.run(asyncio.wait_for(work(), 10)) == [1]

    def test_request_calls_what_drops_the_work(self) -> None:
        async def work() -> list[str]:
            stop, calls = StopRequest(), list[str]()
            with stop.accepted(lambda: calls.append(stop.reason or "")):
                assert stop.request("first") and not stop.request("second")
            return calls

        assert asyncio.run(work()) == ["first"]

    def test_error_of_source_is_raised(self) -> None:
        async def failing() -> AsyncIterator[int]:
            yield 1
            raise ArithmeticError("source")

        async def work() -> None:
            stop = StopRequest()
            with stop.accepted():
                async for _ in stop.until_requested(failing()):
                    pass

        with pytest.raises(ArithmeticError) as caught:
            asyncio.run(work())
        assert caught.value.args == ("source",)

    def test_without_acceptance_all_items_are_yielded(self) -> None:
        async def work() -> int:
            stop = StopRequest(save_before_s=1)
            assert not stop.request("SIGTERM")
            return len([item async for item in stop.until_requested(numbers(0))])

        assert asyncio.run(work()) == 999


class TestUnlessRequested:
    """Work of 60 s that a request cancels, and work that ends by itself."""

    def test_request_cancels_the_work(self) -> None:
        async def work() -> bool:
            stop = StopRequest()
            with stop.accepted():
                asyncio.get_running_loop().call_later(0.01, stop.request, "test")
                await stop.unless_requested(task := asyncio.sleep(3600))
                await stop.unless_requested(later := asyncio.sleep(3600))
            return task.cr_frame is None and later.cr_frame is None

        assert asyncio.run(asyncio.wait_for(work(), 10))

    def test_error_of_canceled_work_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        async def failing() -> None:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                raise ArithmeticError("work") from None

        async def work() -> None:
            stop = StopRequest()
            with stop.accepted():
                asyncio.get_running_loop().call_later(0.01, stop.request, "test")
                assert await stop.unless_requested(failing()) is None

        asyncio.run(asyncio.wait_for(work(), 10))
        assert "work that was canceled (test) failed: work" in caplog.text

    def test_canceled_work_that_does_not_end_is_left_at_the_deadline(self, caplog: pytest.LogCaptureFixture) -> None:
        async def stubborn() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(3600)

        async def work() -> None:
            stop = StopRequest()
            with stop.accepted():
                asyncio.get_running_loop().call_later(0.01, stop.request, "test")
                assert await stop.unless_requested(stubborn(), timeout_s=0.05) is None

        asyncio.run(asyncio.wait_for(work(), 10))
        assert "has not ended within 0.05 s" in caplog.text

    def test_error_of_the_work_is_raised(self) -> None:
        async def failing() -> None:
            raise ArithmeticError("work")

        async def work() -> None:
            stop = StopRequest()
            with stop.accepted():
                await stop.unless_requested(failing())

        with pytest.raises(ArithmeticError) as caught:
            asyncio.run(work())
        assert caught.value.args == ("work",)

    def test_without_acceptance_the_work_is_completed(self) -> None:
        done: list[str] = []

        async def working() -> None:
            await asyncio.sleep(0.01)
            done.append("done")

        asyncio.run(StopRequest().unless_requested(working()))
        assert done == ["done"]


class TestSaveBefore:
    @pytest.mark.parametrize(("limit_s", "ends"), [(0.001, True), (1e6, False)])  # the process is older, or younger
    def test_age_of_the_process_makes_the_request(self, limit_s: float, ends: bool) -> None:
        async def work() -> str | None:
            stop = StopRequest(limit_s)
            with stop.accepted():
                await asyncio.sleep(0.01)
            return stop.reason

        assert asyncio.run(work()) == ("trainer.save_before" if ends else None)
