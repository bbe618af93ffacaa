"""Quickstart task: addition of two 3-digit numbers, digit by digit.

The question ``123+456=`` has one correct answer, ``3+6+0=09;2+5+0=07;1+4+0=05;0579``. For each column, from the right,
it contains the two digits, the incoming carry and their two-digit sum. The four digits of the result follow. All
questions have the same length, and so have all answers. A response is exact if it has this form and its last four
digits are the sum.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipe_gkd.errors import DataError

DIGITS = 3
LOWEST, HIGHEST = 10 ** (DIGITS - 1), 10**DIGITS - 1
ALPHABET = "0123456789+=;"
DATA_SOURCE = "quickstart/addition"
_COLUMN = r"\d\+\d\+\d=\d\d;"
_ANSWER = re.compile(rf"(?:{_COLUMN}){{{DIGITS}}}(\d{{{DIGITS + 1}}})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Problem:
    """The sum of two numbers.

    Attributes:
        a: First number, from LOWEST to HIGHEST.
        b: Second number, from LOWEST to HIGHEST.
    """

    a: int
    b: int

    @property
    def question(self) -> str:
        """Text of the user message."""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """The correct answer."""
        columns, carry = [], 0
        for column in range(DIGITS):
            x, y = self.a // 10**column % 10, self.b // 10**column % 10
            total = x + y + carry
            columns.append(f"{x}+{y}+{carry}={total:02d};")
            carry = total // 10
        return "".join(columns) + f"{self.a + self.b:0{DIGITS + 1}d}"

    @property
    def pair(self) -> tuple[int, int]:
        """The two numbers in ascending order, the same for a+b and b+a."""
        return min(self.a, self.b), max(self.a, self.b)

    def messages(self, *, with_solution: bool = False) -> list[dict[str, str]]:
        """Return the chat prompt, which is one user message.

        Args:
            with_solution: True to put the answer before the question, as the teacher's prompt template in
                ``config/quickstart_self.yaml`` does.
        """
        return [{"role": "user", "content": f"{self.answer};{self.question}" if with_solution else self.question}]


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Three sets of problems. No pair of numbers is in two of them, not even commuted.

    Attributes:
        train: Prompts of the distillation.
        held_out: Problems of the final evaluations.
        dev: Problems that decide when the training of the two models stops.
    """

    train: list[Problem]
    held_out: list[Problem]
    dev: list[Problem]


def final_number(text: str) -> int | None:
    """Return the result in an answer, or None if the answer does not have exactly the form of the task."""
    match = _ANSWER.fullmatch(text)
    return int(match.group(1)) if match else None


def is_exact(text: str, expected: str) -> bool:
    """Return True if ``text`` is a well-formed answer with the result of ``expected``.

    Raises:
        DataError: ``expected`` is not an answer of this task.
    """
    result = final_number(expected)
    if result is None:
        raise DataError(
            f"got the ground truth {expected!r}, expected the form 3+6+0=09;2+5+0=07;1+4+0=05;0579",
            remedy="run recipe_gkd.quickstart.prepare with --fresh, because another version has made the file",
            column="answer",
        )
    return final_number(text) == result


def make_splits(seed: int, *, n_train: int, n_held_out: int, n_dev: int) -> Splits:
    """Draw the problems of all splits without repetition.

    Args:
        seed: Seed of the random generator.
        n_train: Number of training problems.
        n_held_out: Number of held-out problems.
        n_dev: Number of dev problems.

    Raises:
        DataError: There are not enough different problems, or a number is below 1.
    """
    n_numbers = HIGHEST - LOWEST + 1
    n_pairs = n_numbers * (n_numbers + 1) // 2
    wanted = n_train + n_held_out + n_dev
    if min(n_train, n_held_out, n_dev) < 1 or wanted > n_pairs:
        raise DataError(
            f"got {n_train} + {n_held_out} + {n_dev} problems, expected at least 1 each and at most {n_pairs} in all"
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
    """Yield batches of random problems. Excluded problems and their commuted forms are left out."""
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
    """Write a parquet file.

    Its columns are ``prompt`` and ``prompt_with_solution`` (lists of {role, content}), ``answer`` and ``data_source``.
    """
    import pyarrow as pa  # not at the top: gpu_smoke uses the alphabet on machines without pyarrow
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "prompt": [problem.messages() for problem in problems],
            "prompt_with_solution": [problem.messages(with_solution=True) for problem in problems],
            "answer": [problem.answer for problem in problems],
            "data_source": [DATA_SOURCE] * len(problems),
        }
    )
    pq.write_table(table, path)


def _draw(rng: random.Random) -> Problem:
    return Problem(rng.randint(LOWEST, HIGHEST), rng.randint(LOWEST, HIGHEST))
