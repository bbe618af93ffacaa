"""Numbers of sampled, reference and scored responses of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from recipe_gkd.config.conditions import has_recorded_references, max_sequences, uses_teacher
from recipe_gkd.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class ResponseCounts:
    """Numbers of responses of a step.

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

    @property
    def trained(self) -> int:
        """Responses that the actor trains on."""
        return self.sampled + self.references

    @classmethod
    def of(cls, config: Config) -> ResponseCounts:
        """Return the mean numbers of a configuration, after ``gkd.warmup_steps``."""
        return cls._with(config, round(config.gkd.sft_share * config.data.train_batch_size))

    @classmethod
    def most(cls, config: Config) -> ResponseCounts:
        """Return the numbers of sequences of the step with the most sequences.

        References are spread evenly over the prompts, so a batch has the mean number of them, rounded down or up. A
        sampled conversation counts as :func:`~recipe_gkd.config.conditions.max_sequences`.
        """
        fewest = math.floor(config.gkd.sft_share * config.data.train_batch_size)
        return cls._with(config, fewest, max_sequences(config))

    @classmethod
    def _with(cls, config: Config, references: int, n_sequences: int = 1) -> ResponseCounts:
        gkd = config.gkd
        sampled = (config.data.train_batch_size - references) * config.actor_rollout_ref.rollout.n * n_sequences
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
