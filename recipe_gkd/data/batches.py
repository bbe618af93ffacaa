"""Batches before generation and after scoring."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from recipe_gkd.data.samples import Prompt, Sample, StoredTopK


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one training step.

    Attributes:
        step: Index of the step, starting at 0. The step takes the weights from version ``step`` to ``step + 1``.
        epoch: Number of passes over the data, as a fraction, when this batch has been trained on.
        prompts: Each prompt ``rollout.n`` times with different uids, or once with its reference response.
    """

    step: int
    epoch: float
    prompts: list[Prompt]


@dataclass
class ReadyBatch:
    """A batch that is ready for training. Times are in seconds on the clock of the event loop.

    Attributes:
        step: Index of the step, starting at 0.
        epoch: Number of passes over the data, as a fraction, when this batch has been trained on.
        dispatched_at: Time at which its prompts were sent to the rollout replicas.
        generated_at: Time of its last response.
        scored_at: Time at which the teacher had scored its last sample.
        samples: Samples in the order of their uids.
    """

    step: int
    epoch: float
    dispatched_at: float
    generated_at: float = 0.0
    scored_at: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def drop_rows(self) -> None:
        """Drop the references to rows in object stores, so that they can be freed while the batch is logged."""
        self.samples = [
            replace(sample, teacher=replace(sample.teacher, block=None))
            if isinstance(sample.teacher, StoredTopK)
            else sample
            for sample in self.samples
        ]

    @property
    def staleness(self) -> list[int]:
        """Policy lag of each sample in optimizer steps, by the oldest weights that sampled a token of it."""
        return [self.step - sample.response.weights_version for sample in self.samples]
