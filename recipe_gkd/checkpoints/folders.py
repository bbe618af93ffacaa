"""Names and renames of checkpoint folders. A folder with a final name is complete at every moment.

==============================  ==================================================  ==================================
name                            state                                               next name
==============================  ==================================================  ==================================
``.writing_global_step_40``     incomplete without a trainer.json, else complete    ``global_step_40``
``global_step_40``              complete                                            ``.replaced_...`` if saved again
``.replaced_global_step_40``    complete, replaced by a new checkpoint of the step  ``.removing_...``
``.removing_global_step_40.0``  being deleted
==============================  ==================================================  ==================================

A process may be killed between any two operations. :func:`recover` then restores the invariant.
"""

from __future__ import annotations

import itertools
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from recipe_gkd.runtime.durable_files import sync_folder, write_durably

log = logging.getLogger(__name__)

TRAINER, ACTOR_METADATA = "trainer.json", "actor/metadata.json"
LATEST = "latest_checkpointed_iteration.txt"
PROBE = ".shared_with_workers"  # prefix of a file that tests if workers have access to the driver's run folder
_FINAL = re.compile(r"global_step_(\d+)")
_WRITING, _REPLACED, _REMOVING = ".writing_", ".replaced_", ".removing_"


def final_folder(root: Path, step: int) -> Path:
    """Return the folder of the complete checkpoint of ``step``."""
    return root / f"global_step_{step}"


def writing_folder(root: Path, step: int) -> Path:
    """Return the temporary folder of a checkpoint of ``step`` that is being written."""
    return root / f"{_WRITING}global_step_{step}"


@dataclass(frozen=True)
class Damage:
    """Reason why a folder is not a complete checkpoint.

    Attributes:
        path: The file that is missing, empty or unreadable. The folder if it does not exist.
        reason: Clause about the folder, such as ``it has no trainer.json``.
    """

    path: Path
    reason: str


def damage(folder: Path) -> Damage | None:
    """Return the reason why ``folder`` is not a complete checkpoint, or None. The shards are not read."""
    for name in (TRAINER, ACTOR_METADATA):
        path = folder / name
        try:
            if path.stat().st_size == 0:
                return Damage(path, f"its {name} is empty")
        except FileNotFoundError:
            return Damage(path, f"it has no {name}") if folder.is_dir() else Damage(folder, "it does not exist")
        except OSError as error:
            return Damage(path, str(error))
    return None


def read_latest(root: Path) -> int | None:
    """Return the step of the latest checkpoint, or None if the file that names it is missing or damaged."""
    try:
        return int((root / LATEST).read_text())
    except (OSError, ValueError):
        return None


def write_latest(root: Path, step: int) -> None:
    """Record ``step`` as the step of the latest checkpoint."""
    write_durably(root / LATEST, f"{step}\n")


def steps_of(root: Path) -> list[int]:
    """Return the steps of all folders with a final name, complete or damaged, ascending."""
    return _steps_with(root, "")


def put_in_place(root: Path, step: int) -> None:
    """Rename the complete folder ``.writing_*`` of ``step``, and an older checkpoint of ``step`` to ``.replaced_*``.

    Raises:
        OSError: A rename failed. The new folder keeps its temporary name, and the older one its final name.
    """
    final, old = final_folder(root, step), _replaced_folder(root, step)
    if final.exists():
        if old.exists():
            remove_folder(old)
        final.rename(old)
    try:
        writing_folder(root, step).rename(final)
    except OSError:
        if old.exists() and not final.exists():
            old.rename(final)
        raise
    sync_folder(root)


def remove_replaced(root: Path, step: int) -> None:
    """Delete the older checkpoint that :func:`put_in_place` renamed, if there is one."""
    remove_folder(_replaced_folder(root, step))


def remove_folder(folder: Path) -> None:
    """Rename ``folder``, so that workers can no longer write into it, and delete it. Never raises.

    Files that cannot be deleted keep a name that :func:`recover` removes. A folder that cannot be renamed stays.
    """
    name = folder.name.removeprefix(_WRITING).removeprefix(_REPLACED)
    candidates = (folder.with_name(f"{_REMOVING}{name}.{number}") for number in itertools.count())
    try:
        if not folder.exists():
            return
        renamed = next(path for path in candidates if not path.exists())
        folder.rename(renamed)
    except OSError as error:
        log.warning("%s cannot be removed: %s; remove it yourself", folder, error)
        return
    shutil.rmtree(renamed, ignore_errors=True)


def recover(root: Path) -> None:
    """Repair the run folder ``root`` after a process was killed. The caller must hold the lock of the run.

    A complete new checkpoint gets its final name, and a replaced one without a successor gets its name back. All other
    temporary folders are deleted. A complete folder replaces a damaged one with the final name.

    Raises:
        OSError: ``root`` cannot be read.
    """
    for step in _steps_with(root, _WRITING):
        if damage(writing_folder(root, step)) is None and damage(final_folder(root, step)) is not None:
            _finish(root, step)
        else:
            found = damage(writing_folder(root, step))
            reason = found.reason if found else "there is an older complete checkpoint of this step"
            log.warning("removing the unfinished checkpoint %s: %s", writing_folder(root, step), reason)
            remove_folder(writing_folder(root, step))
    for step in _steps_with(root, _REPLACED):
        final, replaced = final_folder(root, step), _replaced_folder(root, step)
        if damage(final) is None or (final.exists() and damage(replaced) is not None):
            remove_replaced(root, step)
            continue
        with _reporting(replaced):
            remove_folder(final)
            replaced.rename(final)
            log.warning("%s was being replaced when the run ended; it is restored", final)
    for leftover in root.glob(f"{_REMOVING}global_step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in root.glob(f"{PROBE}*"):
        with suppress(OSError):
            leftover.unlink()


def _finish(root: Path, step: int) -> None:
    with _reporting(writing_folder(root, step)):
        put_in_place(root, step)
        log.warning("%s was complete but not renamed when the run ended; it is renamed now", final_folder(root, step))
        if (latest := read_latest(root)) is None or latest < step:
            write_latest(root, step)


@contextmanager
def _reporting(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("%s is a complete checkpoint, but cannot be renamed: %s; rename it yourself", folder, error)


def _replaced_folder(root: Path, step: int) -> Path:
    return root / f"{_REPLACED}global_step_{step}"


def _steps_with(root: Path, prefix: str) -> list[int]:
    found = (_FINAL.fullmatch(path.name.removeprefix(prefix)) for path in root.glob(f"{prefix}global_step_*"))
    return sorted(int(match[1]) for match in found if match)
