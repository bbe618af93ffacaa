from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recipe_gkd.addition.task import (
    DATA_SOURCE,
    Problem,
    endless_batches,
    final_number,
    is_exact,
    make_splits,
    write_parquet,
)
from recipe_gkd.errors import DataError
from tests._support.errors import raises

SIZES = {"n_train": 3000, "n_held_out": 500, "n_dev": 200}


def test_make_splits_share_no_commuted_pair() -> None:
    splits = make_splits(0, **SIZES)
    pairs = [problem.pair for problem in splits.train + splits.held_out + splits.dev]
    assert len(pairs) == len(set(pairs)) == sum(SIZES.values())
    assert Problem(7, 9).pair == Problem(9, 7).pair


def test_make_splits_depend_only_on_the_seed() -> None:
    assert make_splits(5, **SIZES) == make_splits(5, **SIZES)
    assert make_splits(5, **SIZES).train != make_splits(6, **SIZES).train


def test_endless_batches_avoid_excluded_pairs() -> None:
    first = next(endless_batches(1, 64, excluded=[]))
    commuted = [Problem(p.b, p.a) for p in first[:32]]
    later = [p.pair for batch in islice(endless_batches(1, 64, excluded=commuted), 20) for p in batch]
    assert not set(later) & {p.pair for p in commuted}


def test_make_splits_too_many_problems_raises() -> None:
    with raises(DataError, column=""):
        make_splits(0, n_train=405_450, n_held_out=1, n_dev=1)


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [
        (123, 456, "3+6+0=09;2+5+0=07;1+4+0=05;0579"),
        (999, 999, "9+9+0=18;9+9+1=19;9+9+1=19;1998"),
        (105, 905, "5+5+0=10;0+0+1=01;1+9+0=10;1010"),
    ],
)
def test_answer_of_known_sums(a: int, b: int, answer: str) -> None:
    assert Problem(a, b).answer == answer


def test_answer_adds_up_and_parses() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        problem = Problem(rng.randint(100, 999), rng.randint(100, 999))
        *columns, result = problem.answer.split(";")
        carry, total = 0, 0
        for index, column in enumerate(columns):
            left, right = column.split("=")
            x, y, carry_in = map(int, left.split("+"))
            assert carry_in == carry
            assert x + y + carry_in == int(right)
            carry, total = int(right) // 10, total + int(right) % 10 * 10**index
        assert total + carry * 1000 == problem.a + problem.b == int(result) == final_number(problem.answer)


RIGHT = Problem(123, 456).answer


@pytest.mark.parametrize(
    "near_miss",
    [
        RIGHT[:-1],
        RIGHT[:-4] + "0578",
        RIGHT[:-4] + "579",
        RIGHT + " ",
        RIGHT + "\n",
        RIGHT + "0",
        " " + RIGHT,
        RIGHT.replace(";", ",", 1),
        RIGHT.split(";", 1)[1],
        RIGHT + ";0579",
        RIGHT[:-1] + "\N{ARABIC-INDIC DIGIT NINE}",
        "0579",
        "",
    ],
)
def test_is_exact_near_miss_returns_false(near_miss: str) -> None:
    assert is_exact(RIGHT, RIGHT)
    assert not is_exact(near_miss, RIGHT)


def test_is_exact_wrong_column_right_result_returns_true() -> None:
    assert is_exact("3+6+0=08;2+5+0=07;1+4+0=05;0579", RIGHT)


def test_is_exact_ground_truth_of_another_task_raises() -> None:
    with raises(DataError, column="answer"):
        is_exact(RIGHT, "579")


def test_write_parquet_has_chat_prompts_and_answers(tmp_path: Path) -> None:
    problems = [Problem(123, 456), Problem(999, 100)]
    write_parquet(problems, tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == [
        {
            "prompt": [{"role": "user", "content": p.question}],
            "prompt_with_solution": [{"role": "user", "content": f"{p.answer};{p.question}"}],
            "answer": p.answer,
            "data_source": DATA_SOURCE,
        }
        for p in problems
    ]
