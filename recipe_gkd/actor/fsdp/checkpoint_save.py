"""Content of a checkpoint of the FSDP backend, in the format of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dist_checkpoint
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from recipe_gkd.actor.checkpoint.files import DESCRIPTION
from recipe_gkd.actor.fsdp.checkpoint_state import describe, rng_state, sharded_state
from recipe_gkd.actor.fsdp.fsdp_model import FsdpModel
from recipe_gkd.errors import CheckpointError
from recipe_gkd.runtime.durable_files import sync_folder, write_durably


class FsdpSave:
    """Files of one checkpoint; see :class:`~recipe_gkd.actor.backend.ShardedSave`. The constructor is collective.

    Args:
        path: Folder of the checkpoint, empty.
        step: Number of completed updates.
        contents: Parts to write: ``model``, ``optimizer``, ``extra``.

    Raises:
        CheckpointError: A rank cannot plan its part. Raised on all ranks.
    """

    def __init__(self, model: FsdpModel, path: Path, step: int, contents: Sequence[str]) -> None:
        self._path = path
        state = sharded_state(model, with_optimizer="optimizer" in contents)
        if "extra" in contents:
            state |= rng_state(model)
        self._description = describe(model, step, contents)
        self._recorder = _PlanRecorder(path)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            dist_checkpoint.save(state, storage_writer=self._recorder, planner=planner)
        except CheckpointException as error:  # torch raises it on all ranks; it is a BaseException
            raise CheckpointError(
                f"the save of the checkpoint to {path} cannot be planned: {error}", path=path
            ) from error

    def shard_functions(self) -> list[Callable[[], list[WriteResult]]]:
        """Copy tensors from a GPU to the host, and return the function that writes this rank's file."""
        plan, planner = self._recorder.plan, self._recorder.planner
        del self._recorder.planner  # it refers to the model's tensors, whose memory may be freed during the save
        if not plan.items:
            return []
        tensors_by_index = {item.index: _host_tensor(planner, item) for item in plan.items}
        return [partial(write_shard, self._path, plan, tensors_by_index)]

    def metadata_function(self, results: Sequence[Sequence[WriteResult]]) -> Callable[[], None]:
        """Return the function of rank 0 that completes the checkpoint."""
        return partial(write_metadata, self._path, self._recorder.metadata, list(results), self._description)


def _host_tensor(planner: SavePlanner, item: WriteItem) -> Tensor:
    """Return a tensor of the state on the host. A tensor that is there is not copied: the fork has its own snapshot."""
    data = planner.resolve_data(item)
    assert isinstance(data, Tensor), "the state contains only tensors"
    return data.detach().cpu()


class _PlanRecorder(FileSystemWriter):
    """Storage writer that records torch's collective plan of a save, and writes nothing.

    Attributes:
        plan: Tensors that this rank writes.
        planner: Planner that returns them.
        metadata: Description of all tensors. Only on rank 0.
    """

    plan: SavePlan
    planner: SavePlanner
    metadata: Metadata

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Record the plan of this rank."""
        self.plan, self.planner = plan, planner
        nothing_written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        nothing_written.set_result([])
        return nothing_written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Record the common metadata."""
        self.metadata = metadata


class _HostTensors(DefaultSavePlanner):
    """Planner that returns tensors that are on the host, for torch's writer."""

    def __init__(self, tensors_by_index: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._tensors_by_index = tensors_by_index

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor of an item of the plan."""
        return self._tensors_by_index[write_item.index]


def write_shard(path: Path, plan: SavePlan, tensors_by_index: Mapping[MetadataIndex, Tensor]) -> list[WriteResult]:
    """Write one file of tensors and synchronize it to the disk. Called in a writer process.

    Args:
        path: Folder of the checkpoint.
        plan: Tensors to write.
        tensors_by_index: Their data, on the host.

    Returns:
        Position of each tensor in the file.
    """
    # With copy-ahead, torch's writer uses a CUDA stream if there is a GPU. A fork cannot use CUDA.
    writer = FileSystemWriter(path, thread_count=1, per_thread_copy_ahead=0)
    return writer.write_data(plan, _HostTensors(tensors_by_index)).wait()


def write_metadata(
    path: Path, metadata: Metadata, results: list[Sequence[WriteResult]], description: Mapping[str, Any]
) -> None:
    """Complete a checkpoint. ``metadata.json`` is written last, after all other files are on the disk.

    Called in a writer process.

    Args:
        path: Folder of the checkpoint.
        metadata: Description of all tensors.
        results: Positions of the tensors of each rank.
        description: Content of ``metadata.json``.
    """
    FileSystemWriter(path).finish(metadata, [list(written) for written in results])
    sync_folder(path)
    write_durably(path / DESCRIPTION, json.dumps(description, indent=2) + "\n")
