"""Explanations of the quickstart's report."""

from __future__ import annotations

from recipe_gkd.quickstart.explanations import TIMINGS
from tests._support.documented_metrics import documented_names


def test_each_documented_time_has_an_explanation() -> None:
    documented = {name.removeprefix("timing/") for name in documented_names() if name.startswith("timing/")}
    assert documented == set(TIMINGS)
