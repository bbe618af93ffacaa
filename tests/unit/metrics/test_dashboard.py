"""The Grafana dashboard: every query names a metric that the trainer or the teacher serves."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.registry import Collector

from recipe_gkd.metrics.loggers.logger_interface import RunInfo
from recipe_gkd.metrics.loggers.prometheus_logger import StepCollector
from teacher.proxy.metrics import StatusCollector
from tests._support.documented_metrics import documented_names, is_documented
from tests._support.repository import REPO
from tests._support.teacher_status import STATUS

DASHBOARD: dict[str, Any] = json.loads((REPO / "docs/dashboards/recipe_gkd.json").read_text())


def sample_names(collector: Collector) -> set[str]:
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    return {sample.name for family in registry.collect() for sample in family.samples}


@pytest.fixture(scope="module")
def served() -> set[str]:
    run = RunInfo(REPO, "project", "experiment", completed_steps=0, last_step=1)
    trainer = StepCollector(run)
    trainer.observe(dict.fromkeys(documented_names(), 1.0))
    return sample_names(trainer) | sample_names(StatusCollector(lambda: (STATUS, 0.5)))


def queries() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return panels + [var["query"]["query"] for var in DASHBOARD["templating"]["list"] if var["type"] == "query"]


class TestDashboard:
    def test_queries_name_served_metrics(self, served: set[str]) -> None:
        names = {name for query in queries() for name in re.findall(r"\b(?:recipe_gkd|teacher)_\w+", query)}
        assert len(names) > 40 and not names - served
        assert not [query for query in queries() if "(" in query and query.count("(") != query.count(")")]

    def test_panels_have_unique_ids_and_do_not_overlap(self) -> None:
        panels = DASHBOARD["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        cells = [
            (x, y)
            for position in (panel["gridPos"] for panel in panels)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        ]
        assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


class TestDocumentedNames:
    def test_placeholders_and_short_forms_are_expanded(self) -> None:
        logged = [
            "actor/kl_loss_at/512",
            "timing/generate_sequences_min",
            "response_seq_len/max",
            "teacher/math/token_share",
            "val/gsm8k/compute_score/best@4",
            "perf/memory_gb/update",
            "training/global_step",
            "rollout/restarts",
        ]
        assert [name for name in logged if not is_documented(name)] == []
        assert not is_documented("actor/kl_los") and not is_documented("actor/kl_loss_at/first")
