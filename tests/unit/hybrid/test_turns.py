from __future__ import annotations

import asyncio

import pytest

from recipe_gkd.hybrid.turns import DevicePhase, Turns


class Recorder:
    """Switch that records its calls, and checks that no phase is in use meanwhile."""

    def __init__(self, n_failures: int = 0) -> None:
        self.calls: list[tuple[DevicePhase | None, DevicePhase]] = []
        self.in_use: list[DevicePhase] = []
        self._n_failures = n_failures

    async def switch(self, before: DevicePhase | None, phase: DevicePhase) -> None:
        assert not self.in_use
        self.calls.append((before, phase))
        await asyncio.sleep(0)
        if self._n_failures:
            self._n_failures -= 1
            raise ZeroDivisionError

    async def use(self, turns: Turns, phase: DevicePhase, n_waits: int) -> None:
        async with turns.turn(phase):
            assert set(self.in_use) <= {phase}
            self.in_use.append(phase)
            for _ in range(n_waits):
                await asyncio.sleep(0)
            self.in_use.remove(phase)


def test_phases_exclude_each_other_and_are_shared_by_their_users() -> None:
    async def scenario() -> Recorder:
        recorder = Recorder()
        turns = Turns(recorder.switch)
        async with asyncio.TaskGroup() as tasks:
            for n_waits in range(3, 8):
                for phase in ("generate", "score", "update", "sync"):
                    tasks.create_task(recorder.use(turns, phase, n_waits))
        return recorder

    recorder = asyncio.run(scenario())
    # All users of the phase that is in use join it, so there is one switch for each phase.
    assert [phase for _, phase in recorder.calls] == ["generate", "score", "update", "sync"]
    assert [before for before, _ in recorder.calls] == [None, "generate", "score", "update"]


def test_repeated_phase_needs_no_switch() -> None:
    async def scenario() -> Recorder:
        recorder = Recorder()
        turns = Turns(recorder.switch)
        for phase in ("sync", "generate", "generate", "update"):
            await recorder.use(turns, phase, 1)
        return recorder

    assert len(asyncio.run(scenario()).calls) == 3


def test_failed_switch_is_repeated_by_the_next_turn() -> None:
    async def scenario() -> Recorder:
        recorder = Recorder(n_failures=1)
        turns = Turns(recorder.switch)
        with pytest.raises(ZeroDivisionError):
            await recorder.use(turns, "update", 0)
        await recorder.use(turns, "update", 0)
        return recorder

    assert asyncio.run(scenario()).calls == [(None, "update"), (None, "update")]


def test_canceled_wait_and_canceled_body_leave_no_user() -> None:
    async def scenario() -> None:
        recorder = Recorder()
        turns = Turns(recorder.switch)
        generating = asyncio.create_task(recorder.use(turns, "generate", 10**6))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(recorder.use(turns, "update", 0))
        await asyncio.sleep(0.01)
        waiting.cancel()
        generating.cancel()
        await asyncio.gather(waiting, generating, return_exceptions=True)
        recorder.in_use.clear()
        async with asyncio.timeout(5):
            await recorder.use(turns, "sync", 0)

    asyncio.run(scenario())


def test_switch_that_has_begun_is_completed_although_its_user_is_canceled() -> None:
    """A stop may cancel a stage while the devices change. Half a change would leave them in an unknown state."""
    log: list[str] = []

    async def switch(before: DevicePhase | None, phase: DevicePhase) -> None:
        log.append(f"begin {phase}")
        await asyncio.sleep(0.05)
        log.append(f"end {phase}")

    async def scenario() -> None:
        turns = Turns(switch)

        async def use(phase: DevicePhase) -> None:
            async with turns.turn(phase):
                log.append(phase)

        generation = asyncio.ensure_future(use("generate"))
        await asyncio.sleep(0.01)
        generation.cancel()
        await use("update")
        with pytest.raises(asyncio.CancelledError):
            await generation

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert log == ["begin generate", "end generate", "begin update", "end update", "update"]
