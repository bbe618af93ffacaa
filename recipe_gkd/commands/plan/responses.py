"""Numbers of sampled, reference and scored responses of a step."""

from __future__ import annotations

from dataclasses import dataclass

from recipe_gkd.config.conditions import has_recorded_references, uses_teacher
from recipe_gkd.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class ResponseCounts:
    """Numbers of responses of a step, after ``gkd.warmup_steps``.

    Attributes:
        sampled: Responses that the rollout engines sample.
        references: Reference responses of the data.
        scored: Responses that the teacher scores.
        recorded: Reference responses whose scores are read from a recording.
    """

    sampled: int
    references: int
    scored: int
    recorded: int

    @classmethod
    def of(cls, config: Config) -> ResponseCounts:
        """Return the numbers of a configuration."""
        gkd, size = config.gkd, config.data.train_batch_size
        references = round(gkd.sft_share * size)
        sampled = (size - references) * config.actor_rollout_ref.rollout.n
        is_distilled = uses_teacher(gkd) and gkd.sft_target == "teacher"
        is_recorded = config.actor_rollout_ref.teacher.backend == "recorded" or has_recorded_references(config)
        recorded = references if is_distilled and is_recorded else 0
        distilled = references if is_distilled else 0
        return cls(
            sampled=sampled,
            references=references,
            scored=(sampled if uses_teacher(gkd) else 0) + distilled - recorded,
            recorded=recorded,
        )
