"""Timeline: busy time of tracks with overlapping spans; and the virtual clock of the tests."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import Deadlock, run

from recipe_gkd.metrics.timeline import Timeline

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@given(
    spans=spans, since=st.integers(0, 40), length=st.integers(1, 20), width=st.integers(1, 3), ends=st.integers(0, 45)
)
def test_busy_equals_time_with_open_spans(
    spans: list[tuple[int, int]], since: int, length: int, width: int, ends: int
) -> None:
    """The reference counts second by second. Some spans are still open at ``ends``."""
    clock = Clock()
    timeline = Timeline(clock)
    contexts = [timeline.span("teacher", "score") for _ in spans]
    events = sorted(
        (at, i) for i, (start, seconds) in enumerate(spans) for at in (start, start + seconds) if at <= ends
    )
    opened = set()
    for at, i in events:
        clock.now = at
        if i in opened:
            contexts[i].__exit__(None, None, None)
        else:
            contexts[i].__enter__()
            opened.add(i)
    clock.now = ends

    def n_open(second: int) -> int:
        return sum(start <= second < min(start + seconds, ends) for start, seconds in spans)

    expected = sum(min(n_open(second), width) for second in range(since, since + length)) / width
    assert timeline.busy("teacher", since, since + length, width) == pytest.approx(expected)
    timeline.forget(since)
    assert timeline.busy("teacher", since, since + length, width) == pytest.approx(expected)


def test_span_closes_on_error_and_tracks_are_separate() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    with pytest.raises(LookupError), timeline.span("rollout 0", "generate"):
        clock.now = 2.0
        raise LookupError
    timeline.record("rollout 1", "sync", 1.0, 1.5)
    clock.now = 9.0
    assert [timeline.busy(track, 0.0, 9.0) for track in ("rollout 0", "rollout 1", "absent")] == [2.0, 0.5, 0.0]


def test_forget_drops_closed_spans() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    with timeline.span("actor", "update"):
        for step in range(1000):
            timeline.record("teacher", "score", step, step + 1)
            timeline.forget(step)
        clock.now = 1000.0
        assert len(timeline._tracks["teacher"].closed) <= 2
        assert timeline.busy("actor", 990.0, 1000.0) == 10.0


def test_virtual_time_skips_waits_and_detects_deadlock() -> None:
    async def sleep() -> float:
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(10))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(sleep()) == pytest.approx(3605.0)

    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(wait())
