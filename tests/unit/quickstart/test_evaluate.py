from __future__ import annotations

from pathlib import Path

import pytest

from recipe_gkd.errors import DataError, ModelError
from recipe_gkd.quickstart.evaluate import (
    generate_greedy,
    main,
    read_problems,
    render,
    score,
    with_given_solution,
)
from recipe_gkd.quickstart.task import Problem, write_parquet
from tests._support.errors import raises


def test_score_counts_exact_responses_and_render_shows_them(tmp_path: Path) -> None:
    problems = [Problem(123, 456), Problem(500, 500)]
    write_parquet(problems, tmp_path / "a.parquet")
    rows = read_problems(tmp_path / "a.parquet", None)
    evaluation = score(rows, [problems[0].answer, problems[1].answer + "..."], model="m", data="d", seconds=1.0)
    assert (evaluation.n, evaluation.n_exact, evaluation.accuracy) == (2, 1, 0.5)
    assert "1 of 2 answers exact (50.0%)" in render(evaluation)
    assert "wrong, expected 1000" in render(evaluation)


def test_given_solution_is_before_the_question(tmp_path: Path) -> None:
    problem = Problem(123, 456)
    write_parquet([problem], tmp_path / "a.parquet")
    [row] = read_problems(tmp_path / "a.parquet", None)
    assert with_given_solution(row) == [{"role": "user", "content": f"{problem.answer};123+456="}]


def test_read_problems_missing_file_raises(tmp_path: Path) -> None:
    with raises(DataError, file=tmp_path / "nowhere.parquet"):
        read_problems(tmp_path / "nowhere.parquet", None)


def test_generate_greedy_without_a_model_raises(tmp_path: Path) -> None:
    with raises(ModelError, path=tmp_path / "config.json"):
        generate_greedy(tmp_path, [])


def test_command_missing_data_names_the_command_that_creates_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tmp_path), "--data", str(tmp_path / "nowhere.parquet")]) == 1
    assert "recipe_gkd.quickstart.prepare" in capsys.readouterr().err
