"""Content of a checkpoint in the format of Megatron's ``dist_checkpointing``."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import queue
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from recipe_gkd.actor.megatron.checkpoint_state import OPTIMIZER_SHARDING, describe, rng_state, sharded_state
from recipe_gkd.actor.megatron.megatron_model import MegatronModel
from recipe_gkd.runtime.durable_files import sync_file, sync_folder, write_durably


class MegatronSave:
    """Files of one checkpoint; see :class:`~recipe_gkd.actor.backend.ShardedSave`. The constructor is collective.

    Args:
        path: Folder of the checkpoint, empty.
        step: Number of completed updates.
        contents: Parts to write: ``model``, ``optimizer``, ``extra``.
    """

    def __init__(self, model: MegatronModel, path: Path, step: int, contents: Sequence[str]) -> None:
        self._path, self._is_first_rank = path, model.layout.rank == 0
        state = sharded_state(model, with_optimizer="optimizer" in contents, is_loading=False)
        if "extra" in contents:
            state |= {"step": step, "rng": rng_state(model.layout)}
        state |= {"about": describe(model, contents), "content_metadata": OPTIMIZER_SHARDING}
        local_state, self._common = save_preprocess(state)
        self._writer, self._metadata = _Planner("torch_dist", 1, thread_count=2).async_save(
            local_state, path, **_planner_options()
        )

    def shard_functions(self) -> list[Callable[[], list[WriteResult]]]:
        """Copy tensors from a GPU to the host, and return the functions that write this rank's files."""
        functions: list[Callable[[], list[WriteResult]]] = []
        if self._writer.write_buckets:
            transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []
            # To pageable memory: a forked process has no copy of pinned memory, which the next update would overwrite,
            # and torch keeps pinned blocks, rounded up to powers of two, for the rest of the run.
            buckets = self._writer.preload_tensors(self._writer.write_buckets, non_blocking=False)
            functions += [partial(write_shard, transforms, bucket) for bucket in buckets]
        if self._is_first_rank:
            content = io.BytesIO()
            torch.save(self._common, content)
            functions.append(partial(_write_common, content.getvalue(), self._path))
        return functions

    def metadata_function(self, results: Sequence[Sequence[WriteResult]]) -> Callable[[], None]:
        """Return the function of rank 0 that completes the checkpoint."""
        return partial(write_metadata, self._writer, self._metadata, list(results), self._path)


class _Planner(TorchDistSaveShardedStrategy):
    """Megatron's collective plan of a save, without its execution.

    Megatron executes a plan in processes whose death it does not detect, and waits for them in collectives
    (dist_checkpointing/strategies/filesystem_async.py ``count_queue.join()``, async_utils.py ``execute_sync``).
    """

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: tuple[object, Metadata], *_: object
    ) -> tuple[FileSystemWriterAsync, Metadata]:
        """Return the writer with its plan, and the metadata (on rank 0), as the result of ``async_save``."""
        return writer, save_state_dict_ret[1]


def _planner_options() -> dict[str, str]:
    """Return the option that selects Megatron's writer. Megatron 0.16 has no other and no such option."""
    parameters = inspect.signature(TorchDistSaveShardedStrategy.async_save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in parameters else {}


def write_shard(transforms: list[Any], bucket: WriteBucket) -> list[WriteResult]:
    """Write one file of tensors and synchronize it to the disk. Called in a writer process.

    Args:
        transforms: Transformations of torch's storage writer.
        bucket: Megatron's bucket with the file name and the tensors.

    Returns:
        Position of each tensor in the file.
    """
    results: queue.Queue[tuple[int, Any]] = queue.Queue()
    tasks: queue.Queue[int] = queue.Queue()
    tasks.put(0)
    FileSystemWriterAsync.write_preloaded_data(transforms, 0, bucket, results, tasks, use_fsync=True)
    _, outcome = results.get_nowait()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _write_common(content: bytes, path: Path) -> list[WriteResult]:
    file = path / COMMON_STATE_FNAME
    file.write_bytes(content)
    sync_file(file)
    return []


def write_metadata(
    writer: FileSystemWriterAsync, metadata: Metadata, results: list[Sequence[WriteResult]], path: Path
) -> None:
    """Complete a checkpoint. ``metadata.json`` is written last, after all other files are on the disk."""
    writer.finish(metadata, results)
    sync_folder(path)
    write_durably(path / CONFIG_FNAME, json.dumps(dataclasses.asdict(CheckpointingConfig("torch_dist", 1))))
