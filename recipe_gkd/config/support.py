"""Ids of a position at which student and teacher are compared: ``actor_rollout_ref.teacher.support``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe_gkd.config.conditions import uses_teacher

if TYPE_CHECKING:
    from recipe_gkd.config.schema import Config


@dataclass(frozen=True)
class Support:
    """Ids of a position that the divergence compares one by one. All other ids are the tail.

    Attributes:
        n_student_ids: Number of the student's likeliest ids, as of the weights that sampled the response. 0: none.
        with_top_k: True if it contains the teacher's top k. A response that the student has not sampled has these only.
    """

    n_student_ids: int = 0
    with_top_k: bool = True

    @classmethod
    def of(cls, config: Config) -> Support:
        """Return the support of a configuration."""
        teacher = config.actor_rollout_ref.teacher
        if teacher.support == "teacher" or not uses_teacher(config.gkd):
            return cls()
        return cls(teacher.student_top_k, with_top_k=teacher.support == "union")

    def n_ids(self, top_k: int) -> int:
        """Return the number of ids of a position.

        Args:
            top_k: Size of the teacher's top k.
        """
        return self.n_student_ids + (top_k if self.with_top_k else 0)
