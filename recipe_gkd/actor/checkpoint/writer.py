"""Saving of a checkpoint of the actor in the background, by any backend.

Stages of a save. :meth:`CheckpointWriter.finish_if_written` moves it to the next stage:

==============  =============================================  ======================================================
Stage           Work                                           Next
==============  =============================================  ======================================================
SHARDS          Processes of all ranks write their shards.     METADATA when all ranks have written.
METADATA        A process of rank 0 writes the metadata.       COMPLETE when it has written.
COMPLETE        ``metadata.json`` marks a complete folder.     The next save may start.
==============  =============================================  ======================================================

An error, the death of a process, or the deadline ends a save in any stage: all its processes are killed, and every rank
raises :class:`CheckpointError`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recipe_gkd.actor.backend import Backend
from recipe_gkd.actor.checkpoint.parallel_write import FIRST_ROUND_S, LONGEST_ROUND_S, ParallelWrite, agree
from recipe_gkd.errors import CheckpointError


class CheckpointWriter:
    """Saves of an actor's state, one at a time, by processes that write while the actor continues to train.

    All calls are collective.

    Lifecycle::

        writer = CheckpointWriter(timeout_s)
        writer.save(path, model, step, contents)  # returns when the processes have started
        writer.finish_if_written()                # True once the checkpoint is complete
        writer.finish()                           # waits for it

    Raises:
        CheckpointError: A save failed on one rank: error or death of a process, or ``timeout_s`` since the start of the
            save. Raised on all ranks, once; then the next save can start. The processes of the failed save have been
            killed, and have ended, except those that wait for a hung disk.

    Args:
        timeout_s: Deadline of a save, in seconds from its start.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._save: _Save | None = None

    def save(self, path: Path, backend: Backend, step: int, contents: Sequence[str]) -> None:
        """Start to write a checkpoint. No save may be in progress.

        Args:
            path: Folder of the checkpoint. Its content is removed first.
            backend: Model in training.
            step: Number of completed updates.
            contents: Parts to write: ``model``, ``optimizer``, ``extra``.

        Raises:
            CheckpointError: The folder cannot be created, or is not the same folder on the machines of all ranks.
        """
        assert self._save is None, "the previous save must be finished first"
        self._save = _Save(path, backend, step, contents, self.timeout_s)

    def finish_if_written(self) -> bool:
        """Complete the save in progress if all ranks have written. Return True if no save is in progress any more."""
        save, self._save = self._save, None  # a save that raises is over
        if save is None or save.advance():
            return True
        self._save = save
        return False

    def finish(self) -> None:
        """Wait until the save in progress, if any, is complete."""
        round_s = FIRST_ROUND_S
        while not self.finish_if_written():
            assert self._save is not None
            self._save.write.pause(round_s)
            round_s = min(2 * round_s, LONGEST_ROUND_S)


class _Stage(Enum):
    SHARDS = auto()
    METADATA = auto()
    COMPLETE = auto()


class _Save:
    """A save in progress; see the table of stages."""

    def __init__(self, path: Path, backend: Backend, step: int, contents: Sequence[str], timeout_s: float) -> None:
        self._name, self._path, self._timeout_s = f"the save of the checkpoint to {path}", path, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._layout, self._device = backend.layout, backend.device
        self._make_folder()
        self._files = backend.plan_save(path, step, contents)
        functions: list[Callable[[], Any]] = []
        failure: CheckpointError | None = None
        try:
            functions = self._files.shard_functions()
        except (OSError, RuntimeError, MemoryError) as error:  # from the copy to host memory
            failure = CheckpointError(f"{type(error).__name__}: {error}")
        self._stage = _Stage.SHARDS
        self.write = self._start(functions, failure)

    def advance(self) -> bool:
        """Move to the next stage if this one is done. Return True if the save is complete. Collective."""
        if self._stage is _Stage.SHARDS and self.write.poll():
            self.write = self._start(self._metadata_functions())
            self._stage = _Stage.METADATA
            self.write.pause(LONGEST_ROUND_S)  # long enough to write the metadata of most models
        if self._stage is _Stage.METADATA and self.write.poll():
            self._stage = _Stage.COMPLETE
        return self._stage is _Stage.COMPLETE

    def _start(self, functions: Sequence[Callable[[], Any]], failure: CheckpointError | None = None) -> ParallelWrite:
        return ParallelWrite(
            self._name,
            functions,
            path=self._path,
            deadline=self._deadline,
            limit_s=self._timeout_s,
            device=self._device,
            failure=failure,
        )

    def _make_folder(self) -> None:
        failure: CheckpointError | None = None
        try:
            if self._layout.rank == 0:
                if self._path.exists():
                    shutil.rmtree(self._path)
                self._path.mkdir(parents=True)
        except OSError as error:
            failure = CheckpointError(f"{type(error).__name__}: {error}")
        agree(self._name, failure, self._device, path=self._path)
        if not os.access(self._path, os.W_OK):
            failure = CheckpointError(
                f"{self._path}, which rank 0 has created, does not exist or is not writable on this machine",
                remedy="trainer.default_local_dir must be shared by all nodes of the actor pool",
            )
        agree(self._name, failure, self._device, path=self._path)

    def _metadata_functions(self) -> list[Callable[[], Any]]:
        """Collect the write results of all ranks, and return the function of rank 0 that writes them. Collective."""
        is_first_rank = self._layout.rank == 0
        local_results = [item for results in self.write.results() for item in results]
        all_results: list[Any] | None = [None] * self._layout.world_size if is_first_rank else None
        dist.gather_object(local_results, all_results)
        if not is_first_rank:
            return []
        return [self._files.metadata_function(all_results or [])]
