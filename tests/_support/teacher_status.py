"""Status of a teacher service, with a different value in almost every field."""

from __future__ import annotations

from dataclasses import fields

from teacher.status import ClientStatus, ServiceStatus, ServiceTotals, WorkerStatus


def worker_status(name: str) -> WorkerStatus:
    """Return the status of a worker."""
    return WorkerStatus(
        name=name,
        state="awake",
        joined_s=100.5,
        since_last_message_s=0.25,
        requests=3,
        tokens=300,
        capacity_tokens=1000,
        tokens_per_second=50.0,
        busy_share=0.75,
        scored_sequences=7,
        scored_tokens=7000,
    )


CLIENT = ClientStatus(
    name='a "client"\n', waiting_requests=1, waiting_tokens=10, running_requests=2, oldest_s=1.5, scored_tokens=5
)
STATUS = ServiceStatus(
    model_name="tiny",
    n_logprobs=4,
    protocol_version=4,
    uptime_s=1000.0,
    draining=False,
    state="awake",
    queue_requests=11,
    queue_tokens=1100,
    queue_oldest_s=2.5,
    max_queue_tokens=9999,
    tokens_per_second=100.0,
    last_removal="no worker was removed",
    workers=(worker_status("host:1"), worker_status("host:1")),
    clients=(CLIENT,),
    totals=ServiceTotals(**{field.name: i + 2001 for i, field in enumerate(fields(ServiceTotals))}),
)
