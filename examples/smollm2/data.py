r"""Data of the example as JSON lines: instructions to train on, held-out ones, and questions about capitals.

Usage::

    python examples/smollm2/data.py outputs/smollm2
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from capitals import questions
from instructions import instructions

N_HELD_OUT = 200


def write(folder: Path) -> dict[str, int]:
    """Write ``train.jsonl``, ``val.jsonl`` and ``capitals.jsonl``, and return the number of rows of each."""
    folder.mkdir(parents=True, exist_ok=True)
    found = instructions()
    rows = {
        "train": [_row(text) for text in found[N_HELD_OUT:]],
        "val": [_row(text) for text in found[:N_HELD_OUT]],
        "capitals": [_row(question, data_source="capitals", ground_truth=name) for question, name in questions()],
    }
    for name, lines in rows.items():
        _write_lines(folder / f"{name}.jsonl", lines)
    return {name: len(lines) for name, lines in rows.items()}


def _row(text: str, data_source: str = "instructions", **others: str) -> dict[str, object]:
    return {"data_source": data_source, "prompt": [{"role": "user", "content": text}], **others}


def _write_lines(path: Path, rows: Iterable[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    for name, n in write(Path(sys.argv[1])).items():
        print(f"{sys.argv[1]}/{name}.jsonl: {n} prompts")
