"""State that a run resumes from, and the record of its best checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipe_gkd.checkpoints.folders import final_folder


@dataclass(frozen=True)
class Progress:
    """Position of a run, and the properties of its data that give the position its meaning."""

    step: int
    """Updates done: the weights' version."""
    prompts_trained: int
    """Position in the stream of prompts; prompts generated but not trained on are not in it, and come again."""
    n_prompts: int
    """Prompts of the data set, after filtering."""
    data_seed: int
    shuffle: bool
    skipped_samples: int = 0
    """Samples trained on without the response of their teacher (``teacher.on_failure=skip_samples``)."""
    data_fingerprint: str = ""
    """Hash of all prompts, in the order of the data; empty in checkpoints of older versions."""
    answers_fingerprint: str = ""
    """Hash of their reference responses; empty as long as the run has trained on none (``gkd.sft_share=0``)."""



@dataclass(frozen=True)
class Best:
    """The highest value of a metric so far, and the step of its weights.

    Attributes:
        has_checkpoint: False if these are the weights that the run started from, evaluated before its first step, and
            the run has no checkpoint of them. A later checkpoint is the best only if its value is higher.
    """

    metric: str
    value: float
    step: int
    has_checkpoint: bool = True



@dataclass(frozen=True)
class ResumeState:
    """Starting point of a run."""

    progress: Progress
    checkpoint: Path | None = None
    """Source of the weights; None: the model folder."""
    best: Best | None = None
    """Best of the run up to this point."""

    def belongs_to_run(self, root: Path) -> bool:
        """Return True if its weights come from a checkpoint in the run folder ``root``."""
        own = final_folder(root, self.progress.step)
        return self.checkpoint is not None and self.checkpoint.resolve() == own.resolve()
