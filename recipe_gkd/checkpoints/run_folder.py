"""Folder of a run. Its outputs are writable, one run owns it at a time, and a rejected start leaves no files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recipe_gkd.checkpoints.run_lock import LOCK, locked
from recipe_gkd.checkpoints.store import LINK
from recipe_gkd.config import Config
from recipe_gkd.config.schema import TrainerConfig
from recipe_gkd.errors import CheckpointError, ConfigError, DataError, ModelError, ResourceError, RewardError
from recipe_gkd.runtime.durable_files import write_durably
from teacher.errors import TeacherError

LOG, CONFIG, EVENTS = "run.log", "config.yaml", "events.jsonl"
# Errors that reject a start. Their message contains everything that the user must change.
REJECTIONS = (CheckpointError, ConfigError, DataError, ModelError, ResourceError, RewardError, TeacherError)


def folder_of(trainer: TrainerConfig) -> Path:
    """Return the run folder."""
    return Path(trainer.default_local_dir)


class RunFolder:
    """Run folder that this process has locked.

    Attributes:
        path: The folder, ``trainer.default_local_dir``.
        is_accepted: True once the workers have started.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.is_accepted = path, False
        self._new_config: str | None = None
        self._new_files = [path / name for name in (LOG, CONFIG, EVENTS) if not (path / name).exists()]

    def store_config(self, text: str) -> None:
        """Write the configuration of this start: at once, or in :meth:`begin_training` if the folder already has one.

        A start that trains nothing, for example because the workers refuse the checkpoint, leaves that of the run.
        """
        if (self.path / CONFIG).exists():
            self._new_config = text
        else:
            write_durably(self.path / CONFIG, text)

    def begin_training(self) -> None:
        """Write the configuration of this start if it is not written yet. Call it once the weights are loaded."""
        if self._new_config is not None:
            write_durably(self.path / CONFIG, self._new_config)
            self._new_config = None

    def accept(self) -> None:
        """Keep all files from now on. Call it once the workers have started."""
        self.is_accepted = True

    def remove_traces(self, error: BaseException) -> None:
        """Remove the files of this start if ``error`` rejects it before the workers have started.

        After the failure of a worker or an unexpected error, the files stay, because the log explains it.
        """
        if self.is_accepted or not isinstance(error, REJECTIONS):
            return
        for path in self._new_files:
            path.unlink(missing_ok=True)
        if [path.name for path in self.path.iterdir()] == [LOCK]:
            # The holder may remove the file: locked() checks that the file that it has locked still exists.
            (self.path / LOCK).unlink()


@contextmanager
def run_folder(config: Config) -> Iterator[RunFolder]:
    """Make the folders of all outputs, and hold the lock of the run folder during the body.

    Raises:
        ConfigError: An output cannot be written, or another run uses the folder. The folder is unchanged.
    """
    made: list[Path] = []
    try:
        check_outputs(config, made)
        path = folder_of(config.trainer)
        with locked(path):
            folder = RunFolder(path)
            try:
                yield folder
            except BaseException as error:
                with suppress(OSError):
                    folder.remove_traces(error)
                raise
    except BaseException:
        for path in reversed(made):
            with suppress(OSError):  # not empty
                path.rmdir()
        raise


def check_outputs(config: Config, made: list[Path] | None = None) -> None:
    """Check that all output files can be written, because the failure would otherwise come after hours.

    Args:
        made: List to which the folders that this call makes are appended, parents first.

    Raises:
        ConfigError: An output cannot be written.
    """
    outputs = {
        "trainer.default_local_dir": folder_of(config.trainer) / LOG,
        "trainer.trace_file": config.trainer.trace_file,
        "ray_init.timeline_json_file": config.ray_init.timeline_json_file,
    }
    for key, path in outputs.items():
        if path is None:
            continue
        file = Path(path)
        try:
            _make(file.parent, [] if made is None else made)
        except OSError as error:
            raise ConfigError(
                f"{key}: {file} cannot be written: {error}", remedy="choose another path", keys=(key,)
            ) from error
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ConfigError(
                f"{key}: {file} cannot be written: it is a folder or protected",
                remedy="choose another path",
                keys=(key,),
            )
    link = folder_of(config.trainer) / LINK
    if config.trainer.best_metric is not None and link.exists() and not link.is_symlink():
        raise ConfigError(
            f"trainer.best_metric={config.trainer.best_metric}: {link} is to be a link to the best checkpoint, but "
            "another file or folder has that name",
            remedy="rename it, or choose another trainer.default_local_dir",
            keys=("trainer.best_metric", "trainer.default_local_dir"),
        )


def _make(folder: Path, made: list[Path]) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        made.append(path)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
