"""Checkpoints on disk, as the driver sees them; what is inside ``actor/`` is the actor's own business.

::

    <default_local_dir>/
        latest_checkpointed_iteration.txt     the number of the last complete one
        global_step_40/
            actor/                            Megatron's distributed checkpoint
            huggingface/                      if checkpoint.save_contents has hf_model
            trainer.json                      step, position in the data, and what they are counted in
        best.json                             by trainer.best_metric, each that was the best so far; the last still is
        best -> global_step_40                that one; what removes checkpoints must spare it

A checkpoint is written under a temporary name and renamed when it is complete, so a folder that is there is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from recipe_gkd.config import Config
from recipe_gkd.errors import CheckpointError

LATEST = "latest_checkpointed_iteration.txt"
BEST, LINK = "best.json", "best"


@dataclass(frozen=True)
class Progress:
    """Where a run stands, and the quantities without which ``prompts_trained`` would mean something else."""

    step: int
    """Updates done: the weights' version."""
    prompts_trained: int
    """Position in the stream of prompts; prompts generated but not trained on are not in it, and come again."""
    n_prompts: int
    """Prompts of the data set, after filtering."""
    data_seed: int
    shuffle: bool
    skipped_samples: int = 0
    """Of those trained on: samples without the answer of their teacher (``teacher.on_failure=skip_samples``)."""


@dataclass(frozen=True)
class Best:
    """A checkpoint that was the best when it was made."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    progress: Progress
    checkpoint: Path | None = None
    """That its weights come from; None: those of the model."""
    best: Best | None = None
    """Of the run up to there."""

    def is_of(self, root: Path) -> bool:
        """Whether its weights are those of a checkpoint that a run with this folder made itself."""
        own = _folder(root, self.progress.step)
        return self.checkpoint is not None and self.checkpoint.resolve() == own.resolve()


class CheckpointWriter:
    """``folder`` is there to be written into; then ``complete`` it, perhaps much later, or ``discard`` it.

    Raises :class:`CheckpointError` where the disk refuses.
    """

    def __init__(self, root: Path, progress: Progress, best: Best | None = None) -> None:
        """``best``: this checkpoint is the best of the run."""
        self.root, self.progress, self.best = root, progress, best
        self.folder = root / f".writing_global_step_{progress.step}"
        self.discard()
        with _writing(self.folder):
            self.folder.mkdir(parents=True)

    def complete(self) -> Path:
        """Everything is written: give the folder its name, and make it the latest, and perhaps the best."""
        final = _folder(self.root, self.progress.step)
        try:
            with _writing(final):
                (self.folder / "trainer.json").write_text(json.dumps(asdict(self.progress), indent=2) + "\n")
                shutil.rmtree(final, ignore_errors=True)
                self.folder.rename(final)
                if self.best is not None:
                    keep_best(self.root, self.best)
                _write(self.root / LATEST, f"{self.progress.step}\n")
        finally:
            self.discard()  # nothing, once it has its name
        return final

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def keep_best(root: Path, best: Best) -> None:
    """Name a complete checkpoint the best. ``best.json`` decides; the link, if a crash kept it back, follows later."""
    _write_bests(root, [*(other for other in _read_bests(root) if other.step < best.step), best])


def read_best(root: Path, metric: str | None, *, until: int) -> Best | None:
    """The best checkpoint of the run up to a step; None for ``metric``: by whichever.

    Those of later steps, or by another metric, count no more: a run that starts before them makes these steps anew.
    They stay as checkpoints, but are not called the best.
    """
    bests = _read_bests(root)
    kept = [
        best
        for best in bests
        if best.step <= until
        and metric in (None, best.metric)
        and (_folder(root, best.step) / "trainer.json").is_file()
    ]
    if bests:
        _write_bests(root, kept)
    return kept[-1] if kept else None


def _read_bests(root: Path) -> list[Best]:
    try:
        return [Best(**best) for best in json.loads((root / BEST).read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{root / BEST} cannot be read: {error}; remove it, and the best checkpoint is sought from here on"
        ) from error


def _write_bests(root: Path, bests: list[Best]) -> None:
    with _writing(root / LINK):
        _write(root / BEST, json.dumps([asdict(best) for best in bests], indent=2) + "\n")
        if not bests:
            (root / LINK).unlink(missing_ok=True)
            return
        draft = root / f".{LINK}.new"
        draft.unlink(missing_ok=True)
        draft.symlink_to(_folder(root, bests[-1].step).name)
        draft.replace(root / LINK)


def _folder(root: Path, step: int) -> Path:
    return root / f"global_step_{step}"


@contextmanager
def _writing(what: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what} cannot be written: {error}; see to it that {what.parent} can be written to, has space left, and "
            "has nothing else of that name; with trainer.resume_mode=auto the run then goes on from the last checkpoint"
        ) from error


def _write(path: Path, text: str) -> None:
    """All of it or nothing."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(text)
    draft.replace(path)


def find_checkpoint(config: Config) -> Path | None:
    """The checkpoint to resume from by ``trainer.resume_mode``, or None to start afresh."""
    trainer = config.trainer
    root = Path(trainer.default_local_dir).expanduser()
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "resume_path":
        folder = Path(trainer.resume_from_path or "").expanduser()
    elif not (root / LATEST).is_file():
        return None
    else:
        folder = root / f"global_step_{(root / LATEST).read_text().strip()}"
    if not (folder / "trainer.json").is_file():
        raise CheckpointError(
            f"{folder} is no complete checkpoint (it has no trainer.json); choose another with "
            "trainer.resume_mode=resume_path trainer.resume_from_path=.../global_step_N, or start "
            "afresh with trainer.resume_mode=disable"
        )
    return folder


def read_progress(folder: Path, *, expected: Progress) -> Progress:
    """Where the checkpoint's run stood; raises if its position means another place in this run's data."""
    try:
        found = Progress(**json.loads((folder / "trainer.json").read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / 'trainer.json'} cannot be read: {error}") from error
    for name in ("n_prompts", "data_seed", "shuffle"):
        if (was := getattr(found, name)) != (now := getattr(expected, name)):
            raise CheckpointError(
                f"{folder} was made with {name}={was}, this run has {name}={now}: its position in the "
                "data would be another one. Restore the setting, or use trainer.resume_mode=disable"
            )
    return found
