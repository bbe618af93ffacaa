"""``/metrics`` of the trainer: names and values that Prometheus reads, and the port."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from recipe_gkd.errors import ConfigError
from recipe_gkd.metrics.loggers.logger_interface import RunInfo
from recipe_gkd.metrics.loggers.loggers import Loggers
from recipe_gkd.metrics.loggers.prometheus_logger import PrometheusLogger, check_metrics_port
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.ports import free_port

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
STEP = {"timing/step": 2.0, "training/samples": 8.0, "perf/total_num_tokens": 100.0, "rollout/restarts": 1.0}


def scrape(port: int) -> dict[str, float]:
    # Prometheus prefers this format, whose parser also refuses two metrics of one name.
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": OPEN_METRICS})
    with urllib.request.urlopen(request, timeout=10) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    return {sample.name: sample.value for family in families for sample in family.samples}


def run_info(folder: Path) -> RunInfo:
    return RunInfo(folder, "recipe_gkd", "test", completed_steps=0, last_step=10)


class TestPage:
    def test_gauges_are_of_the_last_step_and_counters_of_the_run(self, tmp_path: Path) -> None:
        logger = PrometheusLogger(0, run_info(tmp_path))
        try:
            before = scrape(logger.port)
            logger.log(0, {"val/math/f/best@2": 0.5, "timing/validate": 1.0})
            logger.log(1, STEP | {"actor/kl_loss": 0.5, "teacher/skipped_samples": 2.0})
            logger.log(2, STEP | {"actor/kl_loss_at/32": 0.25, "actor/entropy": float("nan")})
            page = scrape(logger.port)
        finally:
            logger.close()
        assert before["recipe_gkd_steps_total"] == before["recipe_gkd_logged_timestamp_seconds"] == 0
        assert before["recipe_gkd_last_step"] == 10
        expected = {
            "recipe_gkd_steps_total": 2,
            "recipe_gkd_samples_total": 16,
            "recipe_gkd_tokens_total": 200,
            "recipe_gkd_skipped_samples_total": 2,
            "recipe_gkd_rollout_restarts_total": 1,
            "recipe_gkd_timing_step": 2,
            "recipe_gkd_actor_kl_loss_at_32": 0.25,
            "recipe_gkd_val_math_f_best_2": 0.5,
        }
        assert {name: page.get(name) for name in expected} == expected
        assert not {"recipe_gkd_actor_kl_loss", "recipe_gkd_actor_entropy", "recipe_gkd_timing_validate"} & set(page)
        assert page["process_resident_memory_bytes"] > 0 and page["recipe_gkd_logged_timestamp_seconds"] > 1e9


class TestPort:
    def test_used_port_is_refused_before_and_at_the_start(self, tmp_path: Path) -> None:
        with socket.socket() as other:
            other.bind(("0.0.0.0", 0))
            other.listen()
            port = other.getsockname()[1]
            with raises(ConfigError, keys=("trainer.metrics_port",)):
                check_metrics_port(port)
            with raises(ConfigError, keys=("trainer.metrics_port",)):
                PrometheusLogger(port, run_info(tmp_path))
        check_metrics_port(None)
        check_metrics_port(0)

    def test_loggers_serve_while_they_are_open(self, tmp_path: Path) -> None:
        port = free_port()
        overrides = ["trainer.logger=[]", f"trainer.metrics_port={port}", f"trainer.default_local_dir={tmp_path}"]
        trainer = base_config(*overrides).trainer

        async def scenario() -> None:
            async with Loggers(trainer, completed_steps=0, last_step=2) as loggers:
                loggers.log(2, STEP)
                page = await asyncio.to_thread(scrape, port)
                assert page["recipe_gkd_training_global_step"] == 2

        asyncio.run(scenario())
        check_metrics_port(port)
