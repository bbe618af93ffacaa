"""Growth of memory, files and threads of processes that may be replaced meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

MIN_DISTANCE_S = 60.0
"""Least distance of two samples whose difference counts."""
MIN_SPAN_S = 600.0
"""Least time of a process whose lowest values are compared."""


@dataclass(frozen=True)
class Measure:
    """A number that must not grow.

    Attributes:
        unit: Unit of the number.
        limit: Growth per hour that is tolerated.
        relative: Growth per hour that is tolerated, as a part of the first values of a process. The larger of both
            limits applies.
        of_lows: Compare the lowest values of the first and the last third of a process's time. Memory that an allocator
            keeps until it returns it at intervals is then not taken for a leak.
        warm_up_s: Age of a process before which samples do not count, in seconds, if it differs from the others'.
    """

    unit: str
    limit: float
    relative: float = 0.0
    of_lows: bool = False
    warm_up_s: float | None = None


@dataclass(frozen=True)
class Sample:
    """Value of a measure at a time.

    Attributes:
        role: Kind of process, or of a folder.
        source: Process. Two processes of one role are not compared with each other.
        at_s: Time since the start of the run, in seconds.
    """

    role: str
    measure: str
    source: str
    at_s: float
    value: float


@dataclass(frozen=True)
class Growth:
    """Growth of a measure of a role after the warm-up.

    Attributes:
        role: Kind of process, or of a folder.
        first: Median of the first values, of the sum over the processes of the role at one time.
        last: Median of the last values.
        per_hour: Growth per hour of a process: the median over all pairs of its samples (Theil-Sen estimator; Sen 1968,
            Estimates of the Regression Coefficient Based on Kendall's Tau), or with ``of_lows`` the median over the
            processes. None if no process lived long enough.
        limit: Growth per hour of a process that is tolerated.
    """

    role: str
    measure: str
    first: float
    last: float
    per_hour: float | None
    limit: float

    @property
    def is_within(self) -> bool:
        """True if the growth is tolerated, or unknown."""
        return self.per_hour is None or self.per_hour <= self.limit


def growths(samples: Sequence[Sample], measures: dict[str, Measure], warm_up_s: float) -> Iterator[Growth]:
    """Yield the growth of each measure of each role.

    Args:
        samples: All samples, in any order.
        measures: Measures by name. Where ``"ROLE NAME"`` is a key, it applies to that role.
        warm_up_s: Age of the run, and of each process, before which samples do not count: allocators and caches fill.
    """
    late = sorted((s for s in samples if s.at_s >= warm_up_s), key=lambda s: (s.role, s.measure, s.at_s))
    began: dict[str, float] = {}
    for sample in sorted(samples, key=lambda s: s.at_s):
        began.setdefault(sample.source, sample.at_s)
    for (role, name), group in groupby(late, key=lambda s: (s.role, s.measure)):
        found = list(group)
        totals = [sum(s.value for s in same) for _, same in groupby(found, key=lambda s: s.at_s)]
        measure = measures.get(f"{role} {name}", measures[name])
        least_age_s = warm_up_s if measure.warm_up_s is None else measure.warm_up_s
        aged = [s for s in found if s.at_s - began[s.source] >= least_age_s]
        slopes = list((_slopes_of_lows if measure.of_lows else _slopes)(aged))
        first, last = statistics.median(totals[:5]), statistics.median(totals[-5:])
        limit = max(measure.limit, measure.relative * statistics.median(s.value for s in found[:5]))
        yield Growth(role, name, first, last, 3600 * statistics.median(slopes) if slopes else None, limit)


def _slopes_of_lows(samples: Sequence[Sample]) -> Iterator[float]:
    """Yield the slope between the lowest values of the first and the last third of each process, per second."""
    for _, group in groupby(sorted(samples, key=lambda s: (s.source, s.at_s)), key=lambda s: s.source):
        of_one = list(group)
        start_s, span_s = of_one[0].at_s, of_one[-1].at_s - of_one[0].at_s
        if span_s >= MIN_SPAN_S:
            first = min(s.value for s in of_one if s.at_s <= start_s + span_s / 3)
            last = min(s.value for s in of_one if s.at_s >= start_s + span_s * 2 / 3)
            yield (last - first) / (span_s * 2 / 3)


def _slopes(samples: Sequence[Sample]) -> Iterator[float]:
    """Yield the slope of each pair of samples of the same process, per second."""
    by_source = sorted(samples, key=lambda s: (s.source, s.at_s))
    for _, group in groupby(by_source, key=lambda s: s.source):
        of_one = list(group)
        for i, early in enumerate(of_one):
            for late in of_one[i + 1 :]:
                if late.at_s - early.at_s >= MIN_DISTANCE_S:
                    yield (late.value - early.value) / (late.at_s - early.at_s)


def table(rows: Sequence[Growth], measures: dict[str, Measure]) -> str:
    """Return the growths as a Markdown table."""
    lines = [
        "| of | measure | after warm-up | at the end | growth per hour | limit | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        grown = "-" if row.per_hour is None else f"{row.per_hour:+.1f}"
        name = f"{row.measure} ({unit})" if (unit := measures[row.measure].unit) else row.measure
        verdict = "" if row.is_within else "GROWS"
        values = f"{row.first:.1f} | {row.last:.1f} | {grown} | {row.limit:.1f} | {verdict} |"
        lines.append(f"| {row.role} | {name} | {values}")
    return "\n".join(lines)
