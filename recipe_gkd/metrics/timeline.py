"""What every stage and worker did, and when: spans and counters on one clock.

A *track* is a row of the timeline: ``actor``, ``rollout 0``, ``rollout 1``, ..., ``teacher``, ``trainer``; its spans
may overlap. The timeline itself keeps only when spans were open; what they were goes to the *sink*, if there is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol


class Sink(Protocol):
    """Gets every span and counter; all times are seconds of the timeline's clock."""

    def begin(self, track: str, name: str, since: float, args: dict[str, Any]) -> Any:
        """A span opens; what is returned is given to :meth:`end`."""

    def end(self, span: Any, until: float) -> None: ...

    def record(self, track: str, name: str, since: float, until: float, args: dict[str, Any]) -> None:
        """A span that is over already."""

    def count(self, track: str, name: str, at: float, value: float) -> None: ...


@dataclass
class _Track:
    """When its spans were open; those that are open now, by a number of their own."""

    closed: list[tuple[float, float]] = field(default_factory=list)
    opened: dict[int, float] = field(default_factory=dict)


class Timeline:
    """::

        with timeline.span("rollout 0", "generate", step=3, samples=64):
            ... await ...
        timeline.busy("rollout 0", since, until)      # seconds

    Memory: two numbers a span, until :meth:`forget`.
    """

    def __init__(self, clock: Callable[[], float], sink: Sink | None = None) -> None:
        self._clock, self._sink = clock, sink
        self._tracks: defaultdict[str, _Track] = defaultdict(_Track)
        self._n_spans = 0

    @contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """Open while the body runs, also if it raises."""
        mine, since = self._tracks[track], self._clock()
        self._n_spans += 1
        number = self._n_spans
        mine.opened[number] = since
        shown = self._sink.begin(track, name, since, args) if self._sink else None
        try:
            yield
        finally:
            until = self._clock()
            del mine.opened[number]
            mine.closed.append((since, until))
            if self._sink:
                self._sink.end(shown, until)

    def record(self, track: str, name: str, since: float, until: float, **args: Any) -> None:
        """A span that was noticed only when it was over."""
        self._tracks[track].closed.append((since, until))
        if self._sink:
            self._sink.record(track, name, since, until, args)

    def count(self, track: str, name: str, value: float) -> None:
        """A number that is this from now on, such as the answers under way. Only the sink has a use for it."""
        if self._sink:
            self._sink.count(track, name, self._clock(), value)

    def busy(self, track: str, since: float, until: float, width: int = 1) -> float:
        """Seconds between the two in which at least one span of the track was open; one that still is counts till now.

        With ``width`` workers behind the track, each of which serves one span at a time: their mean.
        """
        if track not in self._tracks:
            return 0.0
        mine, now = self._tracks[track], self._clock()
        spans = [*mine.closed, *((opened, now) for opened in mine.opened.values())]
        edges = sorted(
            (min(max(at, since), until), step)
            for span in spans
            if span[0] < until and span[1] > since
            for at, step in zip(span, (1, -1), strict=True)
        )
        total, n_open, before = 0.0, 0, since
        for at, step in edges:
            total += (at - before) * min(n_open, width)
            n_open, before = n_open + step, at
        return total / width

    def idle(self, tracks: Sequence[str], since: float, until: float, width: int = 1) -> float:
        """The share of the time between the two in which these had nothing to do; of several tracks, the mean."""
        busy = sum(self.busy(track, since, until, width) for track in tracks) / len(tracks)
        return 1 - busy / (until - since)

    def forget(self, before: float) -> None:
        """Nothing earlier than this will be asked for."""
        for track in self._tracks.values():
            track.closed = [span for span in track.closed if span[1] > before]
