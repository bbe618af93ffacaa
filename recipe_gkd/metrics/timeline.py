"""Timeline of a run: spans and counters of all stages and workers on one clock.

A *track* is a row of the timeline: ``actor``, ``rollout 0``, ``rollout 1``, ..., ``teacher``, ``trainer``. The spans of
a track may overlap. The timeline stores only the times of spans; their names and arguments go to the *sink*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol


class Sink(Protocol):
    """Receiver of every span and counter. All times are in seconds of the timeline's clock."""

    def begin(self, track: str, name: str, since: float, args: dict[str, object]) -> Any:
        """Open a span. The result is passed to :meth:`end`."""

    def end(self, span: Any, until: float) -> None:
        """Close a span that :meth:`begin` opened."""

    def record(self, track: str, name: str, since: float, until: float, args: dict[str, object]) -> None:
        """Add a span that has already ended."""

    def count(self, track: str, name: str, at: float, value: float) -> None:
        """Set the value of a counter from time ``at`` on."""


@dataclass
class _Track:
    """Spans of one track.

    Attributes:
        closed: Start and end of each closed span.
        opened: Start of each open span, by its number.
    """

    closed: list[tuple[float, float]] = field(default_factory=list)
    opened: dict[int, float] = field(default_factory=dict)


class Timeline:
    """Spans of all tracks, and the busy time of each.

    Example::

        with timeline.span("rollout 0", "generate", step=3, samples=64):
            ... await ...
        busy_s = timeline.busy("rollout 0", since, until)

    Memory use is two numbers per span until :meth:`forget`.
    """

    def __init__(self, clock: Callable[[], float], sink: Sink | None = None) -> None:
        """Create an empty timeline.

        Args:
            clock: Function that returns the time in seconds.
            sink: Receiver of all spans and counters.
        """
        self._clock, self._sink = clock, sink
        self._tracks: defaultdict[str, _Track] = defaultdict(_Track)
        self._n_spans = 0

    @contextmanager
    def span(self, track: str, name: str, **args: object) -> Iterator[None]:
        """Record a span for the duration of the body, even if the body raises.

        Args:
            name: Name of the span, for the sink.
            **args: Properties of the span, for the sink.
        """
        own_track, since = self._tracks[track], self._clock()
        self._n_spans += 1
        number = self._n_spans
        own_track.opened[number] = since
        sink_span = self._sink.begin(track, name, since, args) if self._sink else None
        try:
            yield
        finally:
            until = self._clock()
            del own_track.opened[number]
            own_track.closed.append((since, until))
            if self._sink:
                self._sink.end(sink_span, until)

    def record(self, track: str, name: str, since: float, until: float, **args: object) -> None:
        """Add a span that has already ended."""
        self._tracks[track].closed.append((since, until))
        if self._sink:
            self._sink.record(track, name, since, until, args)

    def count(self, track: str, name: str, value: float) -> None:
        """Pass a new value of a counter to the sink, such as the number of responses in flight."""
        if self._sink:
            self._sink.count(track, name, self._clock(), value)

    def busy(self, track: str, since: float, until: float, width: int = 1) -> float:
        """Return the time between ``since`` and ``until`` in which a track had an open span, in seconds.

        An open span counts until now.

        Args:
            track: Name of the track. A track without spans was not busy.
            since: Start of the interval.
            until: End of the interval.
            width: Number of workers of the track, each of which serves one span at a time. The result is their mean.
        """
        if track not in self._tracks:
            return 0.0
        own_track, now = self._tracks[track], self._clock()
        spans = [*own_track.closed, *((opened, now) for opened in own_track.opened.values())]
        edges = sorted(
            (min(max(at, since), until), change)
            for span in spans
            if span[0] < until and span[1] > since
            for at, change in zip(span, (1, -1), strict=True)
        )
        total, n_open, before = 0.0, 0, since
        for at, change in edges:
            total += (at - before) * min(n_open, width)
            n_open, before = n_open + change, at
        return total / width

    def idle(self, tracks: Sequence[str], since: float, until: float, width: int = 1) -> float:
        """Return the idle fraction of the interval from ``since`` to ``until``, as the mean over ``tracks``."""
        busy = sum(self.busy(track, since, until, width) for track in tracks) / len(tracks)
        return 1 - busy / (until - since)

    def forget(self, before: float) -> None:
        """Drop the spans that ended before this time. Intervals that start earlier are no longer valid arguments."""
        for track in self._tracks.values():
            track.closed = [span for span in track.closed if span[1] > before]
