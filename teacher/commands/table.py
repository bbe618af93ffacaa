"""Status of a service as a text table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import count

from teacher.common.display_text import count_columns, make_visible, pad_left, pad_right, shorten
from teacher.status import ClientStatus, ServiceStatus, ServiceTotals, WorkerStatus


def format_status(status: ServiceStatus, address: str) -> str:
    """Return the status as lines for a terminal."""
    lines = [*_head(status, address), ""]
    if status.workers:
        lines += _table(_WORKER_HEAD, map(_worker, status.workers))
    else:
        lines += [
            f"no worker (last removal: {_plain(status.last_removal, 200)}): requests wait until their deadline; add "
            "one with teacher/join_server.sh"
        ]
    # A client that only requested the status, like this command, is not shown.
    clients = [client for client in status.clients if client.oldest_s or client.scored_tokens]
    if clients:
        lines += ["", *_table(_CLIENT_HEAD, map(_client, clients))]
    if totals := _totals(status.totals):
        lines += ["", *totals]
    return "\n".join(lines)


def _head(status: ServiceStatus, address: str) -> list[str]:
    model = f"{status.model_name}, top {status.n_logprobs}" if status.model_name else "no model yet"
    state = "; STOPPING: accepts no new requests" if status.draining else _SLEEP.get(status.state, "")
    queue = f"{status.queue_requests:,} requests, {status.queue_tokens:,} of {status.max_queue_tokens:,} tokens"
    oldest = f", oldest {duration(status.queue_oldest_s)}" if status.queue_requests else ""
    return [
        f"{address}  {model}; up {duration(status.uptime_s)}{state}",
        f"queue     {queue}{oldest}",
        f"speed     {status.tokens_per_second:,.0f} tokens/s",
    ]


_SLEEP = {
    "finishing": "; FALLS ASLEEP after the open requests",
    "falling asleep": "; FALLS ASLEEP",
    "asleep": "; SLEEPS: refuses requests until `python -m teacher wake`",
    "waking": "; WAKES UP",
}
_WORKER_HEAD = ("worker", "state", "age", "last message", "requests", "tokens in flight", "tokens/s", "busy", "scored")


def _worker(worker: WorkerStatus) -> tuple[str, ...]:
    return (
        worker.name,
        worker.state,
        duration(worker.joined_s),
        duration(worker.since_last_message_s),
        f"{worker.requests:,}",
        f"{worker.tokens:,} of {worker.capacity_tokens:,}",
        f"{worker.tokens_per_second:,.0f}",
        f"{worker.busy_share:.0%}",
        f"{worker.scored_tokens:,}",
    )


_CLIENT_HEAD = ("client", "waiting", "tokens", "running", "oldest", "scored")


def _client(client: ClientStatus) -> tuple[str, ...]:
    oldest = duration(client.oldest_s) if client.waiting_requests or client.running_requests else "-"
    return (
        client.name,
        f"{client.waiting_requests:,}",
        f"{client.waiting_tokens:,}",
        f"{client.running_requests:,}",
        oldest,
        f"{client.scored_tokens:,}",
    )


def _totals(totals: ServiceTotals) -> list[str]:
    """Return the totals that are not zero. Sums of seconds are shown as the mean per request."""
    shown = [
        f"{field.name.replace('_', ' ')} {value:,}"
        for field in fields(totals)
        if (value := getattr(totals, field.name)) and not field.name.endswith("_s")
    ]
    lines = [f"since the start: {', '.join(shown)}"] if shown else []
    if totals.scored:
        queue_s, worker_s = totals.queue_s / totals.scored, totals.worker_s / totals.scored
        lines += [f"a request, on average: {queue_s:.3f} s in the queue, {worker_s:.3f} s at a worker"]
    return lines


def duration(seconds: float) -> str:
    """Return a duration with at most two units: 0.4s, 12s, 3m05s, 2h10m, 5d03h."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f}s"
    whole = round(seconds)
    for size, unit, part_size, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part_size:02d}{part}"
    return f"{whole}s"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return aligned rows. Control characters in names of clients are shown as escapes."""
    cells = [head, *([_plain(cell) for cell in row] for row in rows)]
    widths = [max(count_columns(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(map(_pad, row, widths, count())).rstrip() for row in cells]


def _pad(cell: str, width: int, column: int) -> str:
    return pad_right(cell, width) if column == 0 else pad_left(cell, width)


def _plain(text: str, max_chars: int = 60) -> str:
    return make_visible(text if len(text) <= max_chars else shorten(text, max_chars - 3))
