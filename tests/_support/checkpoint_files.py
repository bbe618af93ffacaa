"""Checkpoints on disk with tiny files in place of the actors' shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from recipe_gkd.checkpoints.folders import final_folder
from recipe_gkd.checkpoints.state import Best, Progress
from recipe_gkd.checkpoints.store import CheckpointFolderWriter

PROGRESS = Progress(step=4, prompts_trained=256, n_prompts=1000, data_seed=1, shuffle=True)


def begin_checkpoint(root: Path, step: int = 4, content: str = "", best: Best | None = None) -> CheckpointFolderWriter:
    """Start a checkpoint and write the files of the actors. ``content``: of the shard; empty: the step."""
    writer = CheckpointFolderWriter(root, replace(PROGRESS, step=step), best)
    (writer.folder / "actor").mkdir()
    (writer.folder / "actor" / "metadata.json").write_text("{}")
    (writer.folder / "actor" / "weights").write_text(content or str(step))
    return writer


def write_checkpoints(root: Path, *steps: int, best: Best | None = None) -> None:
    """Write a complete checkpoint of each step, by default of step 4."""
    for step in steps or (4,):
        begin_checkpoint(root, step, best=best).complete()


def read_shard(root: Path, step: int) -> str:
    """Return the content of the shard of a complete checkpoint."""
    return (final_folder(root, step) / "actor" / "weights").read_text()


def list_names(root: Path) -> list[str]:
    """Return the names of all files and folders in ``root``, sorted."""
    return sorted(path.name for path in root.iterdir())
