"""Which teacher a prompt is for: a column of the data says so, where there is more than one."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from recipe_gkd.config.schema import TeacherConfig
from recipe_gkd.config.teachers import TEACHER, names
from recipe_gkd.data.prompts import column_at, column_path
from recipe_gkd.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Routes:
    """Teachers have numbers: their places in ``names``."""

    names: tuple[str, ...]
    numbers_R: np.ndarray | None = None
    """int64, of each row of the data; None: all are for the first."""

    def number_of(self, row: int) -> int:
        return 0 if self.numbers_R is None else int(self.numbers_R[row])

    @property
    def used(self) -> list[str]:
        """Those that some row is for."""
        numbers = [0] if self.numbers_R is None else np.unique(self.numbers_R).tolist()
        return [self.names[number] for number in numbers]


def read_routes(table: pa.Table, teacher: TeacherConfig) -> Routes:
    """Raise :class:`DataError` if the data has no ``route_key``, or a row in it that names no teacher.

    A teacher that no row names is said in the log.
    """
    known = names(teacher)
    if teacher.route_key is None:
        return Routes(known)
    setting = f"{TEACHER}.route_key"
    path = column_path(table, teacher.route_key, setting=setting, is_for="that names each prompt's teacher")
    numbers = {name: number for number, name in enumerate(known)}
    named = column_at(table, path).to_pylist()
    for row, value in enumerate(named):
        if not isinstance(value, str) or value not in numbers:
            raise DataError(
                f"row {row} of the training data has {value!r:.100} in the column {setting}={teacher.route_key}; "
                f"expected one of the teachers {', '.join(known)}. Correct the row, add its teacher to "
                f"{TEACHER}.teachers, or write teachers' names into a column of their own"
            )
    routes = Routes(known, np.array([numbers[value] for value in named]))
    if idle := [name for name in known if name not in routes.used]:
        log.warning("no row of the training data is for teacher %s, which is not asked at all", ", ".join(idle))
    return routes
