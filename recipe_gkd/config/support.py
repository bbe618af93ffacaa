"""Ids of a position at which student and teacher are compared: ``actor_rollout_ref.teacher.support``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe_gkd.config.conditions import distills_references, uses_teacher

if TYPE_CHECKING:
    from recipe_gkd.config.schema import Config


@dataclass(frozen=True)
class Support:
    """Ids of a position that the divergence compares one by one. All other ids are the tail.

    Attributes:
        n_student_ids: Number of the student's likeliest ids, as of the weights that sampled the response. 0: none.
        with_top_k: True if it contains the teacher's top k. A response that the student has not sampled has these only.
        scores_references: True if teachers score such responses, the reference responses of the data.
    """

    n_student_ids: int = 0
    with_top_k: bool = True
    scores_references: bool = False

    @classmethod
    def of(cls, config: Config) -> Support:
        """Return the support of a configuration."""
        teacher, gkd = config.actor_rollout_ref.teacher, config.gkd
        if teacher.support == "teacher" or not uses_teacher(gkd):
            return cls()
        return cls(
            teacher.student_top_k,
            with_top_k=teacher.support == "union",
            scores_references=distills_references(gkd),
        )

    def sizes(self, top_k: int) -> set[int]:
        """Return the numbers of ids of a position: of sampled responses, and of the references that teachers score.

        Args:
            top_k: Size of the teacher's top k.
        """
        sampled = self.n_student_ids + (top_k if self.with_top_k else 0)
        return {sampled, top_k} if self.scores_references else {sampled}

    def max_ids(self, top_k: int) -> int:
        """Return the largest number of ids of a position; see :meth:`sizes`."""
        return max(self.sizes(top_k))
