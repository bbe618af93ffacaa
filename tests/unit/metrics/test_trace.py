"""Trace file: nested rows as Perfetto requires, exact times, and a valid file after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from pipeline_stages import BatchTimes, Pools, Stages
from virtual_time import run

from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.metrics.trace import TraceFile
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.pipeline.pipeline import Pipeline
from recipe_gkd.runtime.clock import now


class RecordingSink:
    """Sink that writes a trace file and keeps all spans."""

    def __init__(self, trace: TraceFile) -> None:
        self.trace = trace
        self.spans: list[tuple[str, str, float, float]] = []

    def begin(self, track: str, name: str, since: float, args: dict[str, Any]) -> Any:
        return self.trace.begin(track, name, since, args), track, name, since

    def end(self, span: Any, until: float) -> None:
        trace_span, track, name, since = span
        self.trace.end(trace_span, until)
        self.spans.append((track, name, since, until))

    def record(self, track: str, name: str, since: float, until: float, args: dict[str, Any]) -> None:
        self.trace.record(track, name, since, until, args)
        self.spans.append((track, name, since, until))

    def count(self, track: str, name: str, at: float, value: float) -> None:
        self.trace.count(track, name, at, value)


def spans_in(events: list[dict[str, Any]]) -> list[tuple[str, str, float, float]]:
    """Return (track, name, since, until) of each span in seconds. The spans of a row must not overlap."""
    names = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    rows = defaultdict(list)
    spans = []
    for event in events:
        if event["ph"] in "BEX":
            rows[event["tid"]].append(event)
    for thread, row in rows.items():
        at, open_ = 0.0, None
        for event in row:
            assert event["ts"] >= at
            at = event["ts"] + event.get("dur", 0.0)
            if event["ph"] == "E":
                assert open_ is not None
                spans.append((names[thread].split(" (")[0], open_["name"].split()[0], open_["ts"] / 1e6, at / 1e6))
                open_ = None
            else:
                assert open_ is None
                open_ = event if event["ph"] == "B" else None
                if event["ph"] == "X":
                    spans.append((names[thread].split(" (")[0], event["name"].split()[0], event["ts"] / 1e6, at / 1e6))
        assert open_ is None
    return spans


def test_file_contains_all_spans_of_run(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "trace.json"
    sink = RecordingSink(TraceFile(path))

    async def train() -> None:
        times = BatchTimes(responses=[0.5 + 0.1 * i for i in range(8)], teacher=2.0, update=1.0, sync=0.1)
        stages = Stages(lambda step: times, Pools(n_slots=4))
        pipeline_config = PipelineConfig(max_staleness=2, n_replicas=2, capacity=8, requests_per_batch=4)
        timeline = Timeline(now, sink)
        batches = [stages.batch(step) for step in range(6)]
        pipeline = Pipeline(batches, pipeline_config, stages.callables, timeline=timeline)
        async with pipeline:
            async for batch in pipeline:
                async with pipeline.actor_update(batch):
                    await stages.update(batch.step)
                timeline.count("rollout", "staleness", max(batch.staleness))

    run(train())
    sink.trace.close()
    events = json.loads(path.read_text())
    by_time = sorted(spans_in(events))
    assert len(by_time) == len(sink.spans)
    for written, real in zip(by_time, sorted(sink.spans), strict=True):
        assert written[:2] == real[:2]
        assert written[2:] == pytest.approx(real[2:], abs=1e-8)
    pools = {event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert pools == {"actor", "rollout", "teacher", "trainer"}
    workers = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert {"rollout 0", "rollout 1", "teacher", "teacher (2)"} <= workers
    titles = {event.get("name") for event in events}
    assert {"generate 0", "score 5", "update 3"} <= titles
    counted = [event["args"]["staleness"] for event in events if event.get("name") == "staleness"]
    assert counted[0] == 0 and max(counted) <= 2


def test_file_of_killed_process_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    program = (
        "import os, signal, sys, time\n"
        "from recipe_gkd.metrics.timeline import Timeline\n"
        "from recipe_gkd.metrics.trace import TraceFile\n"
        "timeline = Timeline(time.monotonic, TraceFile(sys.argv[1]))\n"
        "with timeline.span('actor', 'update', step=7), timeline.span('rollout 0', 'generate', step=8):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60, check=False)
    assert died.returncode < 0
    text = path.read_text()
    assert text.endswith(",\n")
    events = json.loads(text.rstrip(",\n") + "]")  # the viewers do the same
    assert [event["name"] for event in events if event["ph"] == "B"] == ["update 7", "generate 8"]


def test_earlier_trace_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[\ntrace of the failed run")
    TraceFile(path).close()
    assert len(json.loads(path.read_text())) == 1
    assert (tmp_path / "trace.previous.json").read_text() == "[\ntrace of the failed run"
    path.write_text("[\nof the second start")
    TraceFile(path).close()
    path.write_text("[\nof the third start")
    TraceFile(path).close()
    names = ("trace.previous.json", "trace.previous2.json", "trace.previous3.json")
    parts = ["[\ntrace of the failed run", "[\nof the second start", "[\nof the third start"]
    assert [(tmp_path / name).read_text() for name in names] == parts


def test_unwritable_path_and_full_disk_end_only_the_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with Timeline(lambda: 0.0, unwritable := TraceFile(tmp_path / "file" / "trace.json")).span("actor", "update"):
        pass
    unwritable.close()
    assert "there is no trace: trainer.trace_file=" in caplog.text
    caplog.clear()
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    trace = TraceFile("/dev/full")
    timeline = Timeline(lambda: 0.0, trace)
    with timeline.span("actor", "update"):
        timeline.count("actor", "version", 1)
    trace.close()
    assert [record.message.split(":")[0] for record in caplog.records] == ["the trace ends here"]
