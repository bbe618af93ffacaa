"""A service's status as Prometheus metrics, `teacher_*`. Counters count since the proxy started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from teacher.status import ServiceStatus

StatusSource = Callable[[], tuple[ServiceStatus, float]]
"""The latest status, and its age in seconds."""

# field of the record: what it is. A counter's name gets _total.
_SERVICE = {
    "uptime_s": ("uptime_seconds", "Since the proxy started."),
    "draining": ("draining", "1 while the proxy finishes what is in flight before it ends."),
    "queue_requests": ("queue_requests", "Requests that no worker has yet."),
    "queue_tokens": ("queue_tokens", "Their tokens, prompts and responses."),
    "queue_oldest_s": ("queue_oldest_seconds", "How long the first of them has waited."),
    "max_queue_tokens": ("queue_limit_tokens", "Beyond, clients are told to keep their requests for now."),
    "tokens_per_second": ("tokens_per_second", "Scored by all workers over the last half minute."),
}
_WORKER = {
    "joined_s": ("age_seconds", "How long the worker has been here."),
    "heard_s": ("heard_seconds", "Since its last message."),
    "requests": ("requests", "Requests that it has."),
    "tokens": ("tokens", "Their tokens."),
    "capacity_tokens": ("capacity_tokens", "Tokens that it is given at once."),
    "tokens_per_second": ("tokens_per_second", "Scored over the last half minute."),
    "busy_share": ("busy_ratio", "Share of that time spent in engine steps, 0 to 1."),
}
_WORKER_COUNTS = {
    "scored_sequences": ("scored_sequences", "Sequences scored since the worker started."),
    "scored_tokens": ("scored_tokens", "Tokens scored since the worker started."),
}
_CLIENT = {
    "waiting_requests": ("waiting_requests", "Requests that no worker has yet."),
    "waiting_tokens": ("waiting_tokens", "Their tokens."),
    "running_requests": ("running_requests", "Requests that a worker has."),
    "oldest_s": ("oldest_seconds", "Age of its oldest request; 0 without one."),
}
_CLIENT_COUNTS = {"answered_tokens": ("answered_tokens", "Tokens of answered requests.")}
_OUTCOMES = ("answered", "refused", "expired", "given_up", "cancelled")
_TOTALS = {
    "answered_sequences": ("answered_sequences", "Sequences of answered requests."),
    "answered_tokens": ("answered_tokens", "Tokens of answered requests, prompts and responses."),
    "answered_bytes": ("answered_bytes", "Bytes of answers."),
    "put_off": ("put_off", "Requests sent back to the client because the queue was full."),
    "repeated": ("repeated", "Requests given to a worker once more, because the one that had it was lost."),
    "workers_lost": ("workers_lost", "Workers that died, hung or were silent; not those that left."),
    "invalid_messages": ("invalid_messages", "Messages that do not keep to the protocol."),
    "waited_seconds": ("waited_seconds", "Of answered requests, from the proxy to a worker."),
    "scored_seconds": ("scored_seconds", "Of answered requests, from the worker's getting them to its answer."),
}


class StatusCollector(Collector):
    def __init__(self, source: StatusSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        status, age_s = self._source()
        yield _one(GaugeMetricFamily, "status_age_seconds", "Since the proxy's loop last came round.", age_s)
        info = GaugeMetricFamily(
            "teacher_info", "What is served; always 1.", labels=["model_name", "n_logprobs", "protocol_version"]
        )
        info.add_metric([status.model_name, str(status.n_logprobs), str(status.protocol_version)], 1)
        yield info
        yield _one(GaugeMetricFamily, "workers", "Workers that are registered.", len(status.workers))
        for field, (name, text) in _SERVICE.items():
            yield _one(GaugeMetricFamily, name, text, getattr(status, field))
        yield from _each(GaugeMetricFamily, "worker", _WORKER, status.workers)
        yield from _each(CounterMetricFamily, "worker", _WORKER_COUNTS, status.workers)
        yield from _each(GaugeMetricFamily, "client", _CLIENT, status.clients)
        yield from _each(CounterMetricFamily, "client", _CLIENT_COUNTS, status.clients)
        requests = CounterMetricFamily("teacher_requests", "Requests, by what became of them.", labels=["outcome"])
        for outcome in _OUTCOMES:
            requests.add_metric([outcome], getattr(status.totals, outcome))
        yield requests
        for field, (name, text) in _TOTALS.items():
            yield _one(CounterMetricFamily, name, text, getattr(status.totals, field))


def _one(family: type[Any], name: str, text: str, value: float) -> Metric:
    metric: Metric = family(f"teacher_{name}", text, value=float(value))
    return metric


def _each(family: type[Any], who: str, metrics: dict[str, tuple[str, str]], records: Sequence[Any]) -> Iterator[Metric]:
    """One metric a field, one series a worker or client."""
    labels = _labels(record.name for record in records)
    for field, (name, text) in metrics.items():
        metric = family(f"teacher_{who}_{name}", text, labels=[who])
        for label, record in zip(labels, records, strict=True):
            metric.add_metric([label], float(getattr(record, field)))
        yield metric


def _labels(names: Iterable[str]) -> list[str]:
    """Short, and each its own: two equal series would make the whole page invalid."""
    labels: dict[str, None] = {}
    for name in names:
        label, n = name[:100], 1
        while label in labels:
            n += 1
            label = f"{name[:100]} #{n}"
        labels[label] = None
    return list(labels)
