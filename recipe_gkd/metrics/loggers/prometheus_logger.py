"""HTTP server with ``/metrics`` for Prometheus: the metrics of the last step, and counters since the start.

A metric ``actor/kl_loss`` is the gauge ``recipe_gkd_actor_kl_loss``. Values of ``val/*`` remain until the next
validation, the others until the next step.
"""

from __future__ import annotations

import logging
import math
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from recipe_gkd.errors import ConfigError
from recipe_gkd.metrics.loggers.logger_interface import RunInfo

log = logging.getLogger(__name__)

PREFIX = "recipe_gkd_"
ADDRESS = "0.0.0.0"
COUNTERS = {
    "samples": ("training/samples", "Samples trained on since the start."),
    "tokens": ("perf/total_num_tokens", "Prompt and response tokens trained on since the start."),
    "skipped_samples": ("teacher/skipped_samples", "Samples that a teacher failed to score since the start."),
}
"""Name of each counter, without prefix, the metric that it sums, and its help text."""
RESTARTS = "rollout/restarts"
_INVALID = re.compile(r"[^a-zA-Z0-9_]")


def gauge_name(metric: str) -> str:
    """Return the name of the gauge of a metric."""
    return PREFIX + _INVALID.sub("_", metric)


class StepCollector(Collector):
    """Collector of the latest metrics.

    Args:
        run: Properties of the run.
    """

    def __init__(self, run: RunInfo) -> None:
        self._info = {"project": run.project_name, "experiment": run.experiment_name}
        self._last_step = run.last_step
        # The server's threads read these. They are replaced, never changed.
        self._gauges: dict[str, float] = {}
        self._counters: dict[str, float] = {"steps": 0.0, "rollout_restarts": 0.0, **dict.fromkeys(COUNTERS, 0.0)}
        self._logged_at = 0.0

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step, or of a validation before the first one."""
        kept = {name: value for name, value in self._gauges.items() if name.startswith("val/")}
        counters = dict(self._counters)
        if "timing/step" in metrics:  # not the validation before the first step
            counters["steps"] += 1
            counters["rollout_restarts"] = metrics.get(RESTARTS, 0.0)
            for name, (metric, _) in COUNTERS.items():
                counters[name] += metrics.get(metric, 0.0)
        self._gauges, self._counters, self._logged_at = kept | dict(metrics), counters, time.time()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        info = InfoMetricFamily(f"{PREFIX}run", "Names of the run.")
        info.add_metric([], self._info)
        yield info
        yield GaugeMetricFamily(f"{PREFIX}last_step", "Step at which the run ends.", value=self._last_step)
        text = "Time at which the latest metrics were logged, in seconds since 1970. 0 before the first step."
        yield GaugeMetricFamily(f"{PREFIX}logged_timestamp_seconds", text, value=self._logged_at)
        texts = {name: text for name, (_, text) in COUNTERS.items()} | {
            "steps": "Optimizer steps since the start.",
            "rollout_restarts": "Rollout workers that were replaced since the start.",
        }
        for name, value in self._counters.items():
            yield CounterMetricFamily(PREFIX + name, texts[name], value=value)
        # Names are unique. The number of restarts is a counter above.
        gauges = {gauge_name(metric): (metric, value) for metric, value in self._gauges.items() if metric != RESTARTS}
        for name, (metric, value) in gauges.items():
            yield GaugeMetricFamily(name, f"Metric {metric} of the last step.", value=float(value))


class PrometheusLogger:
    """Logger that serves the latest metrics.

    Args:
        port: Port, 0 for a free one.
        run: Properties of the run.

    Attributes:
        port: Port on which it listens.

    Raises:
        ConfigError: The port cannot be bound.
    """

    def __init__(self, port: int, run: RunInfo) -> None:
        self._collector = StepCollector(run)
        registry = CollectorRegistry()
        registry.register(self._collector)
        ProcessCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(port, addr=ADDRESS, registry=registry)
        except OSError as error:
            raise _port_error(port, error) from error
        self.port = int(self._server.server_port)
        log.info("metrics for Prometheus: http://%s:%d/metrics", socket.gethostname(), self.port)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Serve these metrics from now on."""
        self._collector.observe({name: value for name, value in metrics.items() if not math.isnan(value)})

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def check_metrics_port(port: int | None) -> None:
    """Check that the port of ``/metrics`` is free, before the workers start.

    Raises:
        ConfigError: It is not.
    """
    if port is None:
        return
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            raise _port_error(port, error) from error


def _port_error(port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"trainer.metrics_port={port}: this port cannot be used for /metrics: {error.strerror or error}",
        remedy="choose another one, 0 for a free one, or null for none",
        keys=("trainer.metrics_port",),
    )
