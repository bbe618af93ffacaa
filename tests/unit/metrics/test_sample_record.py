"""SampleRecord: one line per step, without the steps that a resumed run repeats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipe_gkd.data.samples import Sample
from recipe_gkd.metrics.sample_record import FILE, SampleRecord
from tests._support.tiny_models import make_samples


def batch(step: int, version: int) -> list[Sample]:
    """Return four samples of two prompts, the first with one response less than the second."""
    return [
        replace(
            sample,
            prompt=replace(sample.prompt, uid=4 * step + i, row=10 + i // 2),
            response=replace(sample.response, uid=4 * step + i, weights_version=version - (i == 3)),
        )
        for i, sample in enumerate(make_samples(4))
        if i != 1
    ]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_parts_of_a_conversation_are_one_sample(tmp_path: Path) -> None:
    samples = batch(1, version=1)
    with SampleRecord(tmp_path, 0, responses_per_prompt=2) as record:
        record.write(2, [samples[0], *samples, samples[-1]])
    assert lines(tmp_path)[0]["uids"] == [[4, 4], [6, 7]]


def test_line_has_uids_rows_and_staleness(tmp_path: Path) -> None:
    with SampleRecord(tmp_path, 0, responses_per_prompt=2) as record:
        record.write(2, batch(1, version=1))
        [line] = lines(tmp_path)  # written at once
    assert line == {
        "training/global_step": 2,
        "uids": [[4, 4], [6, 7]],
        "rows": [10, 11],
        "staleness": [0, 1],
        "resumed_from": 0,
    }


def test_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    with SampleRecord(tmp_path, 0, 2) as record:
        for step in range(1, 5):
            record.write(step, batch(step - 1, version=step - 1))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"training/global_st')  # killed while writing
    with SampleRecord(tmp_path, 2, 2) as record:
        record.write(3, batch(2, version=2))
    assert [(line["training/global_step"], line["resumed_from"]) for line in lines(tmp_path)] == [
        (1, 0),
        (2, 0),
        (3, 2),
    ]
