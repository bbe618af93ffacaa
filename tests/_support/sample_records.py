"""Checks of the record of samples, ``training/samples.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipe_gkd.metrics.sample_record import FILE


def record_of(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run folder's record."""
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines(keepends=True) if line.endswith("\n")]


def check_exactly_once(folder: Path, n_steps: int, per_step: int, max_staleness: int) -> None:
    """Check that each sample was trained on once after the checkpoint that a start resumed from."""
    record = record_of(folder)
    assert [line["training/global_step"] for line in record] == list(range(1, n_steps + 1))
    assert all(line["resumed_from"] < line["training/global_step"] for line in record)
    assert [line["resumed_from"] for line in record] == sorted(line["resumed_from"] for line in record)
    uids = [uid for line in record for first, last in line["uids"] for uid in range(first, last + 1)]
    assert len(uids) == len(set(uids)) == n_steps * per_step
    assert all(0 <= low <= high <= max_staleness for low, high in (line["staleness"] for line in record))
