"""Prometheus metrics of a service's status, named ``teacher_*``. Counters count from the start of the proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from teacher.status import ServiceStatus

StatusSource = Callable[[], tuple[ServiceStatus, float]]
"""Function that returns the latest status and its age in seconds."""

_MAX_LABEL_CHARS = 100

# Name and help text of the metric of each field. prometheus_client appends _total to the names of counters.
_SERVICE = {
    "uptime_s": ("uptime_seconds", "Time since the start of the proxy."),
    "draining": ("draining", "1 while the proxy finishes the requests in flight before it ends, else 0."),
    "queue_requests": ("queue_requests", "Requests that are not assigned to a worker."),
    "queue_tokens": ("queue_tokens", "Tokens of the requests that are not assigned to a worker."),
    "queue_oldest_s": ("queue_oldest_seconds", "Age of the oldest request that is not assigned to a worker."),
    "max_queue_tokens": ("queue_limit_tokens", "Queue size in tokens above which requests are sent back."),
    "tokens_per_second": ("tokens_per_second", "Tokens scored per second by all workers, over the last 30 s."),
}
_WORKER = {
    "joined_s": ("age_seconds", "Time since the registration of the worker."),
    "since_last_message_s": ("since_last_message_seconds", "Time since the last message of the worker."),
    "requests": ("requests", "Requests in flight at the worker."),
    "tokens": ("tokens", "Tokens in flight at the worker."),
    "capacity_tokens": ("capacity_tokens", "Tokens that the worker accepts at a time."),
    "tokens_per_second": ("tokens_per_second", "Tokens scored per second, over the last 30 s."),
    "busy_share": ("busy_ratio", "Share of the last 30 s spent in engine steps, 0 to 1."),
}
_WORKER_COUNTS = {
    "scored_sequences": ("scored_sequences", "Sequences scored since the worker started."),
    "scored_tokens": ("scored_tokens", "Tokens scored since the worker started."),
}
_CLIENT = {
    "waiting_requests": ("waiting_requests", "Requests of the client that are not assigned to a worker."),
    "waiting_tokens": ("waiting_tokens", "Tokens of the requests that are not assigned to a worker."),
    "running_requests": ("running_requests", "Requests of the client that are assigned to a worker."),
    "oldest_s": ("oldest_seconds", "Age of the client's oldest open request, 0 without one."),
}
_CLIENT_COUNTS = {"scored_tokens": ("scored_tokens", "Tokens of scored requests.")}
_OUTCOMES = ("scored", "refused", "expired", "rejected_after_losses", "canceled")
_TOTALS = {
    "scored_sequences": ("scored_sequences", "Sequences of scored requests."),
    "scored_tokens": ("scored_tokens", "Tokens of scored requests, prompts and responses."),
    "reply_bytes": ("reply_bytes", "Bytes of the replies to scored requests."),
    "retried_later": ("retried_later", "Requests sent back to the client because the queue was full."),
    "requeued": ("requeued", "Requests that were requeued because their worker was removed."),
    "workers_lost": ("workers_lost", "Workers that died, hung or were silent, without workers that signed off."),
    "invalid_messages": ("invalid_messages", "Messages that violate the protocol."),
    "queue_s": ("queue_seconds", "Time of scored requests in the queue."),
    "worker_s": ("worker_seconds", "Time of scored requests at a worker."),
}


class StatusCollector(Collector):
    """Collector that turns the latest status into metrics."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        status, age_s = self._source()
        yield _single(GaugeMetricFamily, "status_age_seconds", "Age of the status that these metrics show.", age_s)
        info = GaugeMetricFamily(
            "teacher_info", "Served model; the value is 1.", labels=["model_name", "n_logprobs", "protocol_version"]
        )
        info.add_metric([status.model_name, str(status.n_logprobs), str(status.protocol_version)], 1)
        yield info
        yield _single(GaugeMetricFamily, "workers", "Registered workers.", len(status.workers))
        for field, (name, text) in _SERVICE.items():
            yield _single(GaugeMetricFamily, name, text, getattr(status, field))
        asleep = status.state not in ("awake", "waking")
        yield _single(GaugeMetricFamily, "asleep", "1 while the service sleeps and refuses requests, else 0.", asleep)
        n_asleep = sum(worker.state == "asleep" for worker in status.workers)
        yield _single(GaugeMetricFamily, "workers_asleep", "Workers that have released their devices.", n_asleep)
        yield from _labeled(GaugeMetricFamily, "worker", _WORKER, status.workers)
        yield from _labeled(CounterMetricFamily, "worker", _WORKER_COUNTS, status.workers)
        yield from _labeled(GaugeMetricFamily, "client", _CLIENT, status.clients)
        yield from _labeled(CounterMetricFamily, "client", _CLIENT_COUNTS, status.clients)
        requests = CounterMetricFamily("teacher_requests", "Closed requests by outcome.", labels=["outcome"])
        for outcome in _OUTCOMES:
            requests.add_metric([outcome], getattr(status.totals, outcome))
        yield requests
        for field, (name, text) in _TOTALS.items():
            yield _single(CounterMetricFamily, name, text, getattr(status.totals, field))


def _single(family: type[Any], name: str, text: str, value: float) -> Metric:
    metric: Metric = family(f"teacher_{name}", text, value=float(value))
    return metric


def _labeled(
    family: type[Any], label_name: str, metrics: dict[str, tuple[str, str]], records: Sequence[Any]
) -> Iterator[Metric]:
    """Yield one metric per field, with one series per worker or client."""
    labels = _unique_labels(record.name for record in records)
    for field, (name, text) in metrics.items():
        metric = family(f"teacher_{label_name}_{name}", text, labels=[label_name])
        for label, record in zip(labels, records, strict=True):
            metric.add_metric([label], float(getattr(record, field)))
        yield metric


def _unique_labels(names: Iterable[str]) -> list[str]:
    """Return short, distinct labels. Prometheus refuses a page with two equal series."""
    labels: dict[str, None] = {}
    for name in names:
        label, n = name[:_MAX_LABEL_CHARS], 1
        while label in labels:
            n += 1
            label = f"{name[:_MAX_LABEL_CHARS]} #{n}"
        labels[label] = None
    return list(labels)
