"""Checks of the files of an actor checkpoint, for all backends.

A checkpoint folder has torch's ``.metadata``, one or more ``*.distcp`` files per rank, files of the backend, and
``metadata.json``, which is written last and marks a complete checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from recipe_gkd.actor.checkpoint.parallel_write import agree
from recipe_gkd.config.keys import STRATEGY
from recipe_gkd.errors import CheckpointError, CheckpointMismatch

DESCRIPTION = "metadata.json"
"""Name of the file that marks a complete checkpoint. Megatron-core requires this name, and its own fields in it."""
USE_ANOTHER = "use another checkpoint"
BACKEND = "backend"
"""Field of ``metadata.json`` with the value of ``actor.strategy`` that saved it. Checkpoints of Megatron lack it."""


def read_description(path: Path) -> dict[str, Any]:
    """Return the content of ``metadata.json``, with the field :data:`BACKEND`. Not collective.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    if not (path / DESCRIPTION).is_file():
        raise CheckpointError(
            f"{path} is not a complete checkpoint of the actor (it has no {DESCRIPTION})",
            remedy=USE_ANOTHER,
            path=path / DESCRIPTION,
        )
    with damage_as_error(path / DESCRIPTION):
        return {BACKEND: "megatron"} | json.loads((path / DESCRIPTION).read_text())


@contextmanager
def damage_as_error(path: Path) -> Iterator[None]:
    """Raise any exception as a :class:`CheckpointError`, because unpickling damaged bytes may raise any exception.

    Args:
        path: Folder of the checkpoint, or the file that is read.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        file = error.filename if isinstance(error, OSError) else None
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error})", remedy=USE_ANOTHER, path=Path(file or path)
        ) from error


def check_file_sizes(path: Path, entries: Iterable[Any]) -> None:
    """Check that every file has the bytes that the metadata describes.

    Args:
        path: Folder of the checkpoint.
        entries: Values of ``Metadata.storage_data`` of ``torch.distributed.checkpoint``.

    Raises:
        CheckpointError: A file is too short.
        OSError: A file is missing.
    """
    sizes: dict[str, int] = {}
    for entry in entries:
        sizes[entry.relative_path] = max(sizes.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, size in sizes.items():
        found = (path / name).stat().st_size
        if found < size:
            raise CheckpointError(
                f"{path} is damaged: {name} has {found} bytes, expected {size}", remedy=USE_ANOTHER, path=path / name
            )


def read_on_all_ranks(path: Path, read: Callable[[Path], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """Return ``read(path)``. Collective.

    Args:
        path: Folder of the checkpoint.
        read: Reads a part of the checkpoint.
        device: Device of the default group's collectives.

    Raises:
        CheckpointError: ``read`` raised one on a rank. Raised on all ranks.
    """
    common: dict[str, Any] = {}
    failure: CheckpointError | None = None
    try:
        common = read(path)
    except CheckpointError as error:
        failure = error
    agree(f"loading the checkpoint {path}", failure, device, path=path)
    return common


def check_backend(path: Path, saved: str, own: str) -> None:
    """Check that the checkpoint was saved by the backend that loads it.

    Args:
        path: Folder of the checkpoint.
        saved: ``actor.strategy`` of the run that saved it.
        own: ``actor.strategy`` of this run.

    Raises:
        CheckpointMismatch: They differ.
    """
    if saved != own:
        raise CheckpointMismatch(
            f"{path} was saved with {STRATEGY}={saved}, and cannot be loaded with {own}",
            remedy=f"set strategy={saved}, or start a new run from its weights: set actor_rollout_ref.model.path to "
            "the folder huggingface of a checkpoint, which is written if checkpoint.save_contents has hf_model, and "
            "trainer.default_local_dir to another folder",
            path=path,
            differing=(STRATEGY,),
        )


def check_contents(path: Path, saved: Sequence[str], wanted: Sequence[str]) -> None:
    """Check that the checkpoint has the parts to load.

    Raises:
        CheckpointMismatch: A part is missing.
    """
    if missing := [part for part in wanted if part not in saved]:
        raise CheckpointMismatch(
            f"{path} has no {', '.join(missing)}, only {', '.join(saved)}",
            remedy="change actor_rollout_ref.actor.checkpoint.load_contents",
            path=path,
            differing=tuple(missing),
        )
