"""State that a run resumes from, and the record of its best checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from recipe_gkd.checkpoints.folders import final_folder


@dataclass(frozen=True)
class Progress:
    """Position of a run, the properties of its data that give the position its meaning, and the identity of its model.

    ``trainer.json`` of a checkpoint contains these attributes under these names.

    Attributes:
        step: Number of optimizer steps, which is also the weights version.
        prompts_trained: Position in the stream of prompts. Prompts that were generated but not trained on are not
            counted, and are generated again after a resume.
        n_prompts: Number of prompts of the data set after filtering.
        data_seed: ``data.seed``.
        shuffle: ``data.shuffle``.
        skipped_samples: Number of samples that were trained on without a teacher score
            (``teacher.on_failure=skip_samples``).
        data_fingerprint: Hash of all prompts in the order of the data, with the chat template. Empty in checkpoints of
            older versions.
        references_fingerprint: Hash of the reference responses. Empty if the run has trained on none of them.
        teacher_prompts_fingerprint: Hash of the teachers' own prompts. Empty if they have always seen the student's.
        model: Identity of the model folder; see :mod:`recipe_gkd.checkpoints.model_identity`. Empty in checkpoints of
            older versions.
        stop_token_ids: Ids at which sampled responses end: of the model folder and of the teachers, ascending. Empty in
            checkpoints of older versions.
    """

    step: int
    prompts_trained: int
    n_prompts: int
    data_seed: int
    shuffle: bool
    skipped_samples: int = 0
    data_fingerprint: str = ""
    references_fingerprint: str = ""
    teacher_prompts_fingerprint: str = ""
    model: Mapping[str, str] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Best:
    """Record of the highest value of a metric so far.

    ``best.json`` of a run contains these attributes under these names.

    Attributes:
        metric: Name of the metric, ``trainer.best_metric``.
        value: Highest value.
        step: Step of the weights with this value.
        has_checkpoint: False for weights that were evaluated before the first step of a run without a checkpoint of
            them. A later checkpoint is the best one only if its value is higher.
    """

    metric: str
    value: float
    step: int
    has_checkpoint: bool = True


@dataclass(frozen=True)
class ResumeState:
    """Starting point of a run.

    Attributes:
        progress: Progress at the start.
        checkpoint: Checkpoint folder with the weights. None: the weights of the model folder.
        best: Best record of the run so far.
    """

    progress: Progress
    checkpoint: Path | None = None
    best: Best | None = None

    def belongs_to_run(self, root: Path) -> bool:
        """Return True if the weights come from a checkpoint in the run folder ``root``."""
        folder = final_folder(root, self.progress.step)
        return self.checkpoint is not None and self.checkpoint.resolve() == folder.resolve()
