"""Assignment of prompts to teachers. With several teachers, a column of the data names the teacher of each row."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from recipe_gkd.config import Config
from recipe_gkd.config.conditions import uses_teacher
from recipe_gkd.config.keys import TEACHER
from recipe_gkd.config.teachers import names
from recipe_gkd.data.rows import DataSet
from recipe_gkd.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Routes:
    """Teacher of each row of the training data.

    Attributes:
        names: Names of the teachers. A teacher's number is its index here. Empty for a run without a teacher.
        numbers_R: Teacher number of each row, int64 [R]. None assigns all rows to teacher 0.
    """

    names: tuple[str, ...]
    numbers_R: np.ndarray | None = None

    def number_of(self, row: int) -> int:
        """Return the teacher number of a row."""
        return 0 if self.numbers_R is None else int(self.numbers_R[row])

    @property
    def used(self) -> list[str]:
        """Names of the teachers that have at least one row."""
        numbers = range(min(1, len(self.names))) if self.numbers_R is None else np.unique(self.numbers_R).tolist()
        return [self.names[number] for number in numbers]


def read_routes(data_set: DataSet, config: Config) -> Routes:
    """Return the teacher of each row, and log a warning for each teacher without rows.

    A run without a teacher has empty routes.

    Args:
        config: Configuration with the teachers and ``route_key``.

    Raises:
        DataError: The data has no column ``route_key``, or a row names an unknown teacher.
    """
    if not uses_teacher(config.gkd):
        return Routes(())
    teacher = config.actor_rollout_ref.teacher
    known = names(teacher)
    if teacher.route_key is None:
        return Routes(known)
    setting = f"{TEACHER}.route_key"
    path = data_set.find(teacher.route_key, setting=setting, purpose="that names each prompt's teacher")
    numbers = {name: number for number, name in enumerate(known)}
    numbers_of_rows = []
    for row, value in enumerate(data_set.values_at(path)):
        if not isinstance(value, str) or value not in numbers:
            raise DataError(
                f"{data_set[row].where} has {value!r:.100} in the column {setting}={teacher.route_key}, "
                f"expected one of the teachers {', '.join(known)}",
                row=row,
                column=teacher.route_key,
                remedy=f"correct the row, add its teacher to {TEACHER}.teachers, or write teachers' names into a "
                "separate column",
            )
        numbers_of_rows.append(numbers[value])
    routes = Routes(known, np.array(numbers_of_rows))
    if unused := [name for name in known if name not in routes.used]:
        log.warning("no row of %s is for teacher %s, which gets no requests", data_set.name, ", ".join(unused))
    return routes
