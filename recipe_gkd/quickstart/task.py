"""Addition of two 3-digit numbers, worked out digit by digit.

The question ``123+456=`` has one right answer, ``3+6+0=09;2+5+0=07;1+4+0=05;0579``: for each column, from the right,
the two digits, the carry that comes in and their two-digit sum; then the four digits of the result. All questions have
one length and so have all answers. An answer counts as exact if it has this form and its last four digits are the sum.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recipe_gkd.errors import DataError

DIGITS = 3
LOWEST, HIGHEST = 10 ** (DIGITS - 1), 10**DIGITS - 1
ALPHABET = "0123456789+=;"
DATA_SOURCE = "quickstart/addition"
_COLUMN = r"\d\+\d\+\d=\d\d;"
_ANSWER = re.compile(rf"(?:{_COLUMN}){{{DIGITS}}}(\d{{{DIGITS + 1}}})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Problem:
    """Two numbers from LOWEST to HIGHEST."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        columns, carry = [], 0
        for place in range(DIGITS):
            x, y = self.a // 10**place % 10, self.b // 10**place % 10
            total = x + y + carry
            columns.append(f"{x}+{y}+{carry}={total:02d};")
            carry = total // 10
        return "".join(columns) + f"{self.a + self.b:0{DIGITS + 1}d}"

    @property
    def pair(self) -> tuple[int, int]:
        """The same for a+b and b+a."""
        return min(self.a, self.b), max(self.a, self.b)

    def messages(self) -> list[dict[str, str]]:
        """The chat prompt: one user message."""
        return [{"role": "user", "content": self.question}]


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Three sets of problems without a common pair, commuted or not."""

    train: list[Problem]
    """Prompts of the distillation."""
    held_out: list[Problem]
    """Read by the final evaluations only."""
    dev: list[Problem]
    """Decides when the making of the two models stops."""


def final_number(text: str) -> int | None:
    """The result that an answer states; None if the answer does not have the form of the task, to the character."""
    match = _ANSWER.fullmatch(text)
    return int(match.group(1)) if match else None


def is_exact(text: str, expected: str) -> bool:
    """Whether `text` is a well-formed answer with the result of `expected`.

    Raises DataError if `expected` itself is not an answer of this task.
    """
    want = final_number(expected)
    if want is None:
        raise DataError(
            f"got the expected answer {expected!r}, which is not of the form 3+6+0=09;2+5+0=07;1+4+0=05;0579: "
            "this file was not made by recipe_gkd.quickstart.prepare, or by another version; run it with --fresh"
        )
    return final_number(text) == want


def make_splits(seed: int, *, n_train: int, n_held_out: int, n_dev: int) -> Splits:
    """Draw all problems at once, without repetition, so that no two splits can share one.

    Raises DataError if more problems are asked for than there are.
    """
    n_numbers = HIGHEST - LOWEST + 1
    n_pairs = n_numbers * (n_numbers + 1) // 2
    wanted = n_train + n_held_out + n_dev
    if min(n_train, n_held_out, n_dev) < 1 or wanted > n_pairs:
        raise DataError(
            f"got {n_train} + {n_held_out} + {n_dev} problems, expected at least 1 each and {n_pairs} in all"
        )
    rng = random.Random(seed)
    problems: dict[tuple[int, int], Problem] = {}
    while len(problems) < wanted:
        problem = _draw(rng)
        problems.setdefault(problem.pair, problem)
    drawn = list(problems.values())
    return Splits(
        held_out=drawn[:n_held_out], dev=drawn[n_held_out : n_held_out + n_dev], train=drawn[n_held_out + n_dev :]
    )


def endless_batches(seed: int, batch_size: int, excluded: list[Problem]) -> Iterator[list[Problem]]:
    """Random problems for supervised training, none of which is a+b or b+a of an excluded one."""
    rng = random.Random(seed)
    forbidden = {problem.pair for problem in excluded}
    while True:
        batch: list[Problem] = []
        while len(batch) < batch_size:
            problem = _draw(rng)
            if problem.pair not in forbidden:
                batch.append(problem)
        yield batch


def write_parquet(problems: list[Problem], path: Path) -> None:
    """Columns: `prompt` (list of {role, content}), `answer` (the whole right answer), `data_source`."""
    table = pa.table(
        {
            "prompt": [problem.messages() for problem in problems],
            "answer": [problem.answer for problem in problems],
            "data_source": [DATA_SOURCE] * len(problems),
        }
    )
    pq.write_table(table, path)


def _draw(rng: random.Random) -> Problem:
    return Problem(rng.randint(LOWEST, HIGHEST), rng.randint(LOWEST, HIGHEST))
