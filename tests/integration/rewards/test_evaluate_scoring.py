"""Scoring of the command ``evaluate``: failed calls, and the file of responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipe_gkd.commands.evaluate.command import _record_writer, score_and_save
from recipe_gkd.errors import RewardError
from recipe_gkd.rewards import RewardScorer
from tests._support.errors import raises
from tests._support.reward_files import item, reward_file, settings

ITEMS = [item(0, "1"), item(1, "no number"), item(2, "3")]


def score(path: Path, on_failure: str, output: Path) -> None:
    records: list[dict[str, Any]] = [{"response": one.response, "reward": None} for one in ITEMS]
    with output.open("w") as file, RewardScorer(settings(path, on_failure=on_failure)) as scorer:
        file.write("a line of another model\n")
        score_and_save(records, ITEMS, scorer, _record_writer(file))


def test_skip_scores_the_other_responses(tmp_path: Path) -> None:
    output = tmp_path / "responses.jsonl"
    score(reward_file(tmp_path, "return float(response)"), "skip", output)
    first, *lines = output.read_text().splitlines()
    assert first == "a line of another model"
    assert [json.loads(line)["reward"] for line in lines] == [1.0, None, 3.0]


def test_failed_scoring_keeps_the_responses(tmp_path: Path) -> None:
    output = tmp_path / "responses.jsonl"
    with raises(RewardError, uid=1, kind="exception"):
        score(reward_file(tmp_path, "return float(response)"), "fail", output)
    assert [json.loads(line)["response"] for line in output.read_text().splitlines()[1:]] == ["1", "no number", "3"]
