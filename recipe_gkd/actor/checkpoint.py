"""Save the state of training with Megatron's ``dist_checkpointing``, and restore it in that layout or another."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import queue
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.storage import WriteResult

from recipe_gkd.actor.model_dims import ModelDims
from recipe_gkd.actor.parallel import Layout
from recipe_gkd.actor.parallel_write import FIRST_ROUND_S, LONGEST_ROUND_S, ParallelWrite, agree
from recipe_gkd.errors import CheckpointError, CheckpointMismatch
from recipe_gkd.runtime.durable_files import sync_file, sync_folder, write_durably

# The optimizer's default sharding cannot be saved (dist_checkpointing/mapping.py:134); this one moves to any layout.
OPTIMIZER_SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The parts of an actor that a checkpoint holds, apart from the number of the step."""

    chunks: Sequence[GPTModel]
    optimizer: MegatronOptimizer
    shape: ModelDims
    layout: Layout
    dtype: str
    device: torch.device

    @property
    def optimizer_kind(self) -> dict[str, Any]:
        distributed = isinstance(self.optimizer.chained_optimizers[0], DistributedOptimizer)
        return {"use_distributed_optimizer": distributed, "dtype": self.dtype}


class StateWriter:
    """Saves of an actor's state, one at a time, each by processes that write while the actor goes on training.

    A save has two stages: all ranks write their shards; then rank 0 writes the metadata, without which a folder is no
    checkpoint. All calls are collective.

    Lifecycle::

        writer = StateWriter(timeout_s)
        writer.save(path, state, step, contents)  # returns when the processes have started
        writer.finish_if_written()                # True once the checkpoint is complete
        writer.finish()                           # waits for that

    A save that fails on one rank (an error of the writer, its death, or ``timeout_s`` since its start) raises
    :class:`CheckpointError` on all ranks, once. The next save can start then. Its processes have been killed, and have
    ended, except those that wait for a hung disk.

    Args:
        timeout_s: Seconds that a save may take from its start.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._save: _Save | None = None

    def save(self, path: Path, state: TrainingState, step: int, contents: Sequence[str]) -> None:
        """Start to write a checkpoint to ``path``, whose content is removed first. No save may be in progress.

        Raises:
            CheckpointError: The folder cannot be made or is not the same one on all ranks' machines.
        """
        assert self._save is None, "the previous save must be finished first"
        self._save = _Save(path, state, step, contents, self._timeout_s)

    def finish_if_written(self) -> bool:
        """Return True if no save is in progress, after completing the one that all ranks have written."""
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


class _Save:
    """One save in progress."""

    def __init__(self, path: Path, state: TrainingState, step: int, contents: Sequence[str], timeout_s: float) -> None:
        self._what, self._path, self._timeout_s = f"the save of the checkpoint to {path}", path, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._layout, self._device = state.layout, state.device
        self._make_folder()
        sharded = _model_state(state)
        if "optimizer" in contents:
            sharded["optimizer"] = state.optimizer.sharded_state_dict(
                dict(sharded), is_loading=False, metadata=OPTIMIZER_SHARDING
            )
        if "extra" in contents:
            sharded |= {"step": step, "rng": _rng_state(state.layout)}
        sharded["about"] = _about(state, contents)
        sharded["content_metadata"] = OPTIMIZER_SHARDING
        own, common = save_preprocess(sharded)
        self._writer, self._metadata = _Planner("torch_dist", 1).async_save(own, path)
        self._is_last_stage = False
        functions: list[Callable[[], Any]] = []
        failure = None
        try:
            functions = self._shard_functions(common)
        except (OSError, RuntimeError, MemoryError) as error:  # the copy to host memory
            failure = f"{type(error).__name__}: {error}"
        self.write = self._start(functions, failure)

    def advance(self) -> bool:
        """Return True if the checkpoint is complete; start the second stage when the first is done. Collective."""
        if not self.write.poll():
            return False
        if self._is_last_stage:
            return True
        is_first_rank = self._layout.rank == 0
        own = [item for results in self.write.results() for item in results]
        of_ranks: list[Any] | None = [None] * self._layout.world_size if is_first_rank else None
        dist.gather_object(own, of_ranks)
        functions = [partial(_write_metadata, self._writer, self._metadata, of_ranks, self._path)]
        self.write = self._start(functions if is_first_rank else [])
        self._is_last_stage = True
        self.write.pause(LONGEST_ROUND_S)  # long enough for the metadata of most models
        return self.write.poll()

    def _start(self, functions: Sequence[Callable[[], Any]], failure: str | None = None) -> ParallelWrite:
        return ParallelWrite(
            self._what,
            functions,
            deadline=self._deadline,
            limit_s=self._timeout_s,
            device=self._device,
            failure=failure,
        )

    def _make_folder(self) -> None:
        failure = None
        try:
            if self._layout.rank == 0:
                if self._path.exists():
                    shutil.rmtree(self._path)
                self._path.mkdir(parents=True)
        except OSError as error:
            failure = f"{type(error).__name__}: {error}"
        agree(self._what, failure, self._device)
        if not os.access(self._path, os.W_OK):
            failure = (
                f"{self._path}, which rank 0 has made, is not there or not writable on this machine; "
                "trainer.default_local_dir must be shared by all nodes of the actor pool"
            )
        agree(self._what, failure, self._device)

    def _shard_functions(self, common: dict[str, Any]) -> list[Callable[[], Any]]:
        """Return the functions that write this rank's files, after copying tensors from a GPU."""
        functions: list[Callable[[], Any]] = []
        if self._writer.write_buckets:
            transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []
            buckets = self._writer.preload_tensors(self._writer.write_buckets)
            functions += [partial(write_shard, transforms, bucket) for bucket in buckets]
        if self._layout.rank == 0:
            content = io.BytesIO()
            torch.save(common, content)
            functions.append(partial(_write_common, content.getvalue(), self._path))
        return functions


class _Planner(TorchDistSaveShardedStrategy):
    """Megatron's collective plan of a save, without its way to execute it.

    Megatron executes a plan by processes whose death it does not notice, and waits for them in collectives
    (dist_checkpointing/strategies/filesystem_async.py ``count_queue.join()``, async_utils.py ``execute_sync``).
    """

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        """Return the writer with its plan, and the metadata (on rank 0), as the result of ``async_save``."""
        return writer, save_state_dict_ret[1]


def write_shard(transforms: list[Any], bucket: Any) -> list[WriteResult]:
    """Write one file of tensors, with fsync, and return where each of them is. Called in a writer process."""
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


def _write_metadata(writer: FileSystemWriterAsync, metadata: Any, results: Any, path: Path) -> None:
    """Complete a checkpoint: ``metadata.json`` comes last, when all other files are on the disk."""
    writer.finish(metadata, results)
    sync_folder(path)
    write_durably(path / CONFIG_FNAME, json.dumps(dataclasses.asdict(CheckpointingConfig("torch_dist", 1))))


def check(path: Path, state: TrainingState, contents: Sequence[str]) -> dict[str, Any]:
    """Return the common part of a checkpoint that :func:`load` can load. Collective; changes nothing.

    Raises:
        CheckpointError: It is missing, incomplete or damaged. Raised on all ranks.
        CheckpointMismatch: It is of another model, or lacks one of ``contents``. Raised on all ranks.
    """
    common: dict[str, Any] = {}
    failure = None
    try:
        common = _read_common(path)
    except CheckpointError as error:
        failure = str(error)
    agree(f"loading the checkpoint {path}", failure, state.device)
    _check_fits(path, common["about"], state, contents)  # has the same outcome on all ranks
    return common


def _read_common(path: Path) -> dict[str, Any]:
    """Read what describes a checkpoint, and compare the sizes of its files with it. Not collective."""
    if not (path / CONFIG_FNAME).is_file():
        raise CheckpointError(f"{path} is no complete checkpoint of the actor (it has no {CONFIG_FNAME}); take another")
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
        metadata = FileSystemReader(path).read_metadata()
        if "about" not in common or metadata.storage_data is None:
            raise CheckpointError(f"{path} is no checkpoint of this program; take another")
        sizes: dict[str, int] = {}
        for place in metadata.storage_data.values():
            sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
        for name, size in sizes.items():
            found = (path / name).stat().st_size
            if found < size:
                raise CheckpointError(f"{path} is damaged: {name} has {found} bytes, expected {size}; take another")
    except CheckpointError:
        raise
    except Exception as error:  # unpickling damaged bytes raises anything
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}); take another") from error
    return common


def load(path: Path, state: TrainingState, contents: Sequence[str], common: dict[str, Any]) -> int:
    """Fill ``state`` from a checkpoint of any layout; return its step (0 without `extra` in ``contents``). Collective.

    Args:
        common: Result of :func:`check`.

    Raises:
        CheckpointError: Its content is damaged. Raised on all ranks. ``state`` is partly overwritten then.
    """
    about = common["about"]
    sharded = _model_state(state)
    if "optimizer" in contents:
        if state.optimizer_kind["use_distributed_optimizer"]:
            _allocate_adam_state(state.optimizer)
        sharded["optimizer"] = state.optimizer.sharded_state_dict(
            dict(sharded), is_loading=True, metadata=OPTIMIZER_SHARDING
        )
    same_layout = about["layout"] == str(state.layout)
    if "extra" in contents and same_layout:
        sharded["rng"] = _rng_state(state.layout)
    try:
        loaded = dist_checkpointing.load(sharded, str(path), get_default_load_sharded_strategy(str(path)))
    except (CheckpointException, CheckpointingException) as error:  # what each rank reads is compared collectively
        reasons = [f"{type(e).__name__}: {e}" for e, _ in getattr(error, "failures", {}).values()] or [str(error)]
        raise CheckpointError(
            f"{path} is damaged, or was saved by another version ({'; '.join(sorted(set(reasons)))}); take another"
        ) from error

    for number, chunk in enumerate(state.chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
    if "optimizer" in contents:
        state.optimizer.load_state_dict(loaded["optimizer"])
    else:
        state.optimizer.reload_model_params()  # its fp32 copies are still those of the weights before
    if "extra" in contents and same_layout:
        _restore_rng(loaded["rng"])
    return int(common["step"]) if "extra" in contents else 0


def _about(state: TrainingState, contents: Sequence[str]) -> dict[str, Any]:
    return {
        "model": dataclasses.asdict(state.shape),
        "layout": str(state.layout),
        "contents": list(contents),
        "optimizer_kind": state.optimizer_kind,
    }


def _check_fits(path: Path, about: dict[str, Any], state: TrainingState, contents: Sequence[str]) -> None:
    own = dataclasses.asdict(state.shape)
    if differing := [f"{k}: {v} there, {own[k]} here" for k, v in about["model"].items() if own[k] != v]:
        raise CheckpointMismatch(f"{path} is a checkpoint of another model ({'; '.join(differing)})")
    if missing := [part for part in contents if part not in about["contents"]]:
        raise CheckpointMismatch(
            f"{path} has no {', '.join(missing)}, only {', '.join(about['contents'])}; change "
            "actor_rollout_ref.actor.checkpoint.load_contents"
        )
    if "optimizer" in contents and about["optimizer_kind"] != state.optimizer_kind:
        raise CheckpointMismatch(
            f"{path}: its optimizer state was saved with {about['optimizer_kind']}, this run has "
            f"{state.optimizer_kind}; make them equal, or take optimizer out of "
            "actor_rollout_ref.actor.checkpoint.load_contents"
        )


def _model_state(state: TrainingState) -> dict[str, Any]:
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    return {
        f"model{number}": chunk.sharded_state_dict(metadata=OPTIMIZER_SHARDING | {"dp_cp_group": group})
        for number, chunk in enumerate(state.chunks)
    }


def _rng_state(layout: Layout) -> ShardedObject:
    """One entry for each rank: those that share experts draw differently."""
    states = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", states, (layout.world_size,), (layout.rank,))


def _restore_rng(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def _allocate_adam_state(optimizer: MegatronOptimizer) -> None:
    """Torch's AdamW makes its state at the first step, but DistributedOptimizer reads it before a load fills it."""
    for part in optimizer.chained_optimizers:
        adam = part.optimizer
        if not isinstance(adam, torch.optim.AdamW):
            continue  # Transformer Engine's and Apex's are allocated by Megatron
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
