"""Pipeline benchmark: results reach the targets, and a replay predicts the step time of another layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pipeline
import pytest
from omegaconf import OmegaConf
from pipeline_replay import curve
from pipeline_stages import BatchTimes, Pools, Stages, drive
from virtual_time import run

from recipe_gkd.config.compose import compose_config
from recipe_gkd.pipeline.config import PipelineConfig
from tests._support.base_config import CONFIG_NAME, REQUIRED


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("benchmark") / "pipeline.json"
    pipeline.main(["--clock", "virtual", "--steps", "6", "--json", str(path)])
    return json.loads(path.read_text())


def test_every_schedule_is_within_5_percent_of_bound(results: dict[str, float]) -> None:
    ratios = {name: value for name, value in results.items() if name.endswith("step_over_bound")}
    assert len(ratios) == 2 * 3 * len(pipeline.SHAPES)
    assert {name: value for name, value in ratios.items() if value > 1.05} == {}
    equal = [value for name, value in ratios.items() if "batchwise" in name and name.startswith("balanced_equal")]
    assert len(equal) == 3 and min(equal) > 1 - 1e-6  # with stragglers it can be less


def test_overlap_shortens_steps(results: dict[str, float]) -> None:
    for shape in ("balanced", "balanced_equal", "long_tailed"):
        assert results[f"{shape}/sync/batchwise/speedup_over_sync"] == pytest.approx(1.0)
        assert results[f"{shape}/one_step_off/speedup_over_sync"] >= 1.9
        assert results[f"{shape}/two_step_off/speedup_over_sync"] >= 2.8


def record(folder: Path, *, g: float, t: float, u: float, staleness: int, n_steps: int = 25) -> tuple[Path, float]:
    """Write the metrics.jsonl of a run, and return its path and the step time in seconds."""
    times = BatchTimes(responses=[g * (0.5 + i / 31 / 2) for i in range(32)], teacher=t, update=u, sync=0.05)
    pipeline_config = PipelineConfig(max_staleness=staleness, n_replicas=2, capacity=32, requests_per_batch=8)

    async def driven() -> list[dict[str, float]]:
        stages = Stages(lambda step: times, Pools(n_replicas=2, n_slots=16, n_teachers=1))
        return (await drive(stages, pipeline_config, n_steps)).metrics

    metrics = run(driven())
    lengths = {"response_seq_len/min": 50.0, "response_seq_len/average": 75.0, "response_seq_len/max": 100.0}
    path = folder / "metrics.jsonl"
    lines = [
        {"training/global_step": i, **each, **lengths, "training/staleness_max": staleness}
        for i, each in enumerate(metrics)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path, sum(each["timing/step"] for each in metrics[5:]) / len(metrics[5:])


def refusal(*arguments: str) -> str:
    """Return what the command prints when it refuses its arguments."""
    with pytest.raises(SystemExit) as caught:
        pipeline.main(list(arguments))
    return str(caught.value)


def test_replay_predicts_run_and_other_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, seconds = record(tmp_path, g=3.0, t=0.5, u=1.0, staleness=1)
    pipeline.main(["--replay", str(path), "--actor", "2", "--rollout", "2", "--teacher", "1"])
    report = capsys.readouterr().out
    found = re.search(r"measured ([\d.]+) s a step, replayed ([\d.]+) s", report)
    assert found
    assert float(found[2]) == pytest.approx(seconds, rel=0.05)
    row = re.search(r"one_step_off +trainer.n_gpus_per_node=1 rollout.n_gpus_per_node=3 +1 +([\d.]+)", report)
    assert row
    other = tmp_path / "other"
    other.mkdir()
    _, after = record(other, g=2.0, t=0.5, u=2.0, staleness=1)
    assert float(row[1]) == pytest.approx(after, rel=0.05)
    assert "rollout.n_gpus_per_node=3" in report.split("of the best")[1]
    assert "<- the run" in report
    config = compose_config(CONFIG_NAME, REQUIRED)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(config))
    assert "--rollout was given, but " in refusal("--replay", str(path), "--rollout", "2")


def test_replay_names_missing_input(tmp_path: Path) -> None:
    path, _ = record(tmp_path, g=1.0, t=0.5, u=1.0, staleness=1, n_steps=8)
    assert "give --actor, --rollout (devices) and --teacher" in refusal("--replay", str(path))
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    del steps[2]["timing/teacher_tail"]
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert "has steps without timing/teacher_tail" in refusal("--replay", str(path))
    assert "is not the metrics.jsonl of a run" in refusal("--replay", str(tmp_path / "nothing.jsonl"))


@pytest.mark.parametrize(("least", "mean", "most"), [(1.0, 2.0, 9.0), (1.0, 5.0, 6.0), (0.0, 0.5, 1.0)])
def test_curve_matches_least_mean_and_most(least: float, mean: float, most: float) -> None:
    values = curve(16, least, mean, most)
    assert values == sorted(values, reverse=True)
    assert (values[0], values[-1]) == (most, least)
    assert sum(values) / 16 == pytest.approx(mean, rel=1e-6)
    assert curve(3, 2.0, 2.0, 2.0) == [2.0] * 3 and curve(1, 2.0, 2.0, 2.0) == [2.0]
