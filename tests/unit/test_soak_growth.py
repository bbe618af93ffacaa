"""Evaluation of the soak test, with synthetic series."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from tests._support.growth import Growth, Measure, Sample, growths, table

MEASURES = {"memory": Measure("MB", limit=20.0, relative=0.05)}


def series(slope_per_hour: float, source: str = "1", start_s: int = 0, end_s: int = 3600) -> list[Sample]:
    """Return samples of a process every 10 s: a warm-up, noise, and a linear growth."""
    rng = random.Random(source)
    return [
        Sample(
            "driver", "memory", source, at, 200 + min(at - start_s, 100) + slope_per_hour * at / 3600 + rng.gauss(0, 3)
        )
        for at in range(start_s, end_s, 10)
    ]


def growth_of(samples: list[Sample]) -> Growth:
    [found] = growths(samples, MEASURES, warm_up_s=600)
    return found


def test_noise_and_warm_up_are_no_growth() -> None:
    found = growth_of(series(0.0))
    assert found.is_within and found.per_hour is not None and abs(found.per_hour) < 3
    assert 290 < found.first < 310 and found.limit == 20.0


def test_slow_leak_is_found() -> None:
    found = growth_of(series(40.0))
    assert not found.is_within and found.per_hour is not None and 35 < found.per_hour < 45
    assert "GROWS" in table([found], MEASURES)


def test_limit_is_of_one_process() -> None:
    measures = {"memory": replace(MEASURES["memory"], relative=0.1)}
    [one] = growths(series(0.0), measures, warm_up_s=600)
    [two] = growths(series(0.0) + series(0.0, "2"), measures, warm_up_s=600)
    assert 1.9 < two.first / one.first < 2.1 and 0.9 < two.limit / one.limit < 1.1


def sawtooth(slope_per_hour: float, extra_per_hour: float) -> list[Sample]:
    """Return a process that frees memory each minute. What it had taken until then also grows."""
    return [
        Sample(s.role, s.measure, s.source, s.at_s, s.value + s.at_s % 60 / 60 * extra_per_hour * s.at_s / 3600)
        for s in series(slope_per_hour)
    ]


def test_only_lows_count() -> None:
    lows = {"memory": replace(MEASURES["memory"], of_lows=True)}
    assert not growth_of(sawtooth(0.0, 150.0)).is_within
    [steady] = growths(sawtooth(0.0, 150.0), lows, warm_up_s=600)
    [leak] = growths(sawtooth(40.0, 150.0), lows, warm_up_s=600)
    assert steady.is_within and not leak.is_within


def test_a_longer_warm_up_of_one_role_is_no_growth() -> None:
    samples = [Sample(s.role, s.measure, s.source, s.at_s, s.value + min(s.at_s, 1500) / 10) for s in series(0.0)]
    measure = replace(MEASURES["memory"], of_lows=True)
    [short] = growths(samples, {"memory": measure}, warm_up_s=600)
    [long] = growths(samples, {"memory": measure, "driver memory": replace(measure, warm_up_s=1500.0)}, warm_up_s=600)
    assert not short.is_within and long.is_within


def test_leak_is_found_in_processes_that_are_replaced() -> None:
    """Each replacement begins at the lowest value, so the value of the role does not grow."""
    starts = [*range(0, 3601, 900)]
    leaking = [sample for start, end in pairwise(starts) for sample in series(240.0, str(start), start, end)]
    steady = [sample for start, end in pairwise(starts) for sample in series(0.0, str(start), start, end)]
    leak = [Sample(s.role, s.measure, s.source, s.at_s, s.value - 240 * int(s.source) / 3600) for s in leaking]
    assert not growth_of(leak).is_within and growth_of(steady).is_within


def test_growth_of_short_lived_processes_is_unknown() -> None:
    starts = [*range(600, 1201, 60)]
    samples = [sample for start, end in pairwise(starts) for sample in series(0.0, str(start), start, end)]
    assert growth_of(samples).per_hour is None
