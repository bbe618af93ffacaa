"""Starts, restarts and ends of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from recipe_gkd.commands.report.series import duration
from recipe_gkd.commands.report.templates import render
from recipe_gkd.metrics.run_events import END, START

MAX_ROWS = 200
NO_END = "no end recorded"
_TITLES = {
    "rollout_restart": "rollout worker replaced",
    "actor_restart": "actor ranks started again",
    "scoring_restart": "scoring worker started again",
}

Row = tuple[str, str, str]


def history_section(events: Sequence[dict[str, Any]]) -> str:
    """Return the events as HTML, oldest first. Empty without events."""
    rows = list(history_rows(events))
    if not rows:
        return ""
    starts = sum(event["event"] == START for event in events)
    return render("history.html", starts=starts, omitted=max(0, len(rows) - MAX_ROWS), rows=rows[-MAX_ROWS:])


def history_rows(events: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Yield time, title and detail of each event. A start without an end has a row in place of its end."""
    started: dict[str, Any] | None = None
    for event in events:
        if event["event"] == START:
            if started is not None:
                yield "", NO_END, "the process was killed, or its machine was lost"
            started = event
        yield _time(event), *_row(event, started)
        if event["event"] == END:
            started = None
    if started is not None:
        yield "", NO_END, "the run is in progress, or its process was killed, or its machine was lost"


def _row(event: dict[str, Any], started: dict[str, Any] | None) -> tuple[str, str]:
    match event["event"]:
        case "start":
            return "start", f"host {event.get('host')}, process {event.get('pid')}"
        case "load":
            step = event.get("step")
            return ("resumed", f"from step {step}") if step else ("begun", "from the model folder, step 0")
        case "end":
            after = "" if started is None else f" after {duration(_seconds(started, event))}"
            reason = event.get("reason")
            return f"end: {event.get('status')}{after}", "" if reason is None else str(reason)
        case name:
            return _TITLES.get(name, name), str(event.get("message", ""))


def _time(event: dict[str, Any]) -> str:
    return datetime.fromisoformat(event["time"]).strftime("%Y-%m-%d %H:%M:%S")


def _seconds(first: dict[str, Any], last: dict[str, Any]) -> float:
    begin, end = (datetime.fromisoformat(event["time"]).timestamp() for event in (first, last))
    return max(0.0, end - begin)
