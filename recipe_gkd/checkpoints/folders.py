"""Names of checkpoint folders, and the renames that keep a folder with a final name complete at every moment.

::

    global_step_40                 complete
    .writing_global_step_40        incomplete until it has a trainer.json; then complete and about to be renamed
    .replaced_global_step_40       the checkpoint that a new one of the same step replaces; complete
    .removing_global_step_40.0     being deleted

A process may be killed between any two operations here; :func:`recover` then restores this invariant.
"""

from __future__ import annotations

import itertools
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recipe_gkd.runtime.durable_files import sync_folder, write_durably

log = logging.getLogger(__name__)

TRAINER, ACTOR_METADATA = "trainer.json", "actor/metadata.json"
LATEST = "latest_checkpointed_iteration.txt"
PROBE = ".shared_with_workers"
"""Prefix of the file by which workers are tested for seeing the driver's folder."""
_FINAL = re.compile(r"global_step_(\d+)")
_WRITING, _REPLACED, _REMOVING = ".writing_", ".replaced_", ".removing_"


def final_folder(root: Path, step: int) -> Path:
    return root / f"global_step_{step}"


def writing_folder(root: Path, step: int) -> Path:
    return root / f"{_WRITING}global_step_{step}"


def damage(folder: Path) -> str | None:
    """Return why ``folder`` is no complete checkpoint, or None if it looks complete. The shards are not read."""
    for name in (TRAINER, ACTOR_METADATA):
        try:
            if (folder / name).stat().st_size == 0:
                return f"its {name} is empty"
        except FileNotFoundError:
            return f"it has no {name}" if folder.is_dir() else "it is not there"
        except OSError as error:
            return str(error)
    return None


def read_latest(root: Path) -> int | None:
    """Return the step that the pointer to the latest checkpoint names, or None if there is none that can be read."""
    try:
        return int((root / LATEST).read_text())
    except (OSError, ValueError):
        return None


def write_latest(root: Path, step: int) -> None:
    write_durably(root / LATEST, f"{step}\n")


def steps_of(root: Path) -> list[int]:
    """Return the steps of all folders with a final name, complete or damaged, ascending."""
    return _steps_with(root, "")


def put_in_place(root: Path, step: int) -> None:
    """Give the complete folder ``.writing_*`` of ``step`` its final name. Sets an older checkpoint of ``step`` aside.

    Raises:
        OSError: A rename failed. The new folder keeps its temporary name, and the old one its final name.
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
    """Delete the checkpoint that :func:`put_in_place` has set aside, if there is one."""
    remove_folder(_replaced_folder(root, step))


def remove_folder(folder: Path) -> None:
    """Rename ``folder``, so that nothing is written into it by path any more, and delete it. Never raises.

    What cannot be deleted now keeps a name that :func:`recover` removes. A folder that cannot be renamed stays.
    """
    name = folder.name.removeprefix(_WRITING).removeprefix(_REPLACED)
    candidates = (folder.with_name(f"{_REMOVING}{name}.{number}") for number in itertools.count())
    try:
        if not folder.exists():
            return
        doomed = next(path for path in candidates if not path.exists())
        folder.rename(doomed)
    except OSError as error:
        log.warning("%s cannot be removed: %s; remove it by hand", folder, error)
        return
    shutil.rmtree(doomed, ignore_errors=True)


def recover(root: Path) -> None:
    """Finish or undo what a process left half done that was killed in ``root``. Only for the owner of the run's lock.

    A new checkpoint that was complete gets its name, a replaced one without a successor gets its name back, and all
    other temporary folders are deleted. A damaged folder with the final name counts as none if there is a complete one.

    Raises:
        OSError: The disk refuses to list ``root`` or to look into it.
    """
    for step in _steps_with(root, _WRITING):
        if damage(writing_folder(root, step)) is None and damage(final_folder(root, step)) is not None:
            _finish(root, step)
        else:
            why = damage(writing_folder(root, step)) or "there is an older complete checkpoint of this step"
            log.warning("removing %s, which was not put in place: %s", writing_folder(root, step), why)
            remove_folder(writing_folder(root, step))
    for step in _steps_with(root, _REPLACED):
        final, replaced = final_folder(root, step), _replaced_folder(root, step)
        if damage(final) is None or (final.exists() and damage(replaced) is not None):
            remove_replaced(root, step)
            continue
        with _reporting(replaced):
            remove_folder(final)
            replaced.rename(final)
            log.warning("%s was being replaced; restored", final)
    for leftover in root.glob(f"{_REMOVING}global_step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in root.glob(f"{PROBE}*"):
        with suppress(OSError):
            leftover.unlink()


def _finish(root: Path, step: int) -> None:
    with _reporting(writing_folder(root, step)):
        put_in_place(root, step)
        log.warning("%s was complete, but had no name yet; it has now", final_folder(root, step))
        if (latest := read_latest(root)) is None or latest < step:
            write_latest(root, step)


@contextmanager
def _reporting(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("%s is a complete checkpoint, but cannot be renamed: %s; rename it by hand", folder, error)


def _replaced_folder(root: Path, step: int) -> Path:
    return root / f"{_REPLACED}global_step_{step}"


def _steps_with(root: Path, prefix: str) -> list[int]:
    found = (_FINAL.fullmatch(path.name.removeprefix(prefix)) for path in root.glob(f"{prefix}global_step_*"))
    return sorted(int(match[1]) for match in found if match)
