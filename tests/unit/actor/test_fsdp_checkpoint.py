"""Checks of the files of a checkpoint, and the writer of the FSDP backend, in one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME
from torch.distributed import checkpoint as dist_checkpoint
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter

from recipe_gkd.actor.checkpoint.files import (
    BACKEND,
    DESCRIPTION,
    check_backend,
    check_contents,
    check_file_sizes,
    read_description,
)
from recipe_gkd.actor.fsdp.checkpoint_load import check_same_model
from recipe_gkd.actor.fsdp.checkpoint_save import write_metadata, write_shard
from recipe_gkd.checkpoints.folders import ACTOR_METADATA
from recipe_gkd.errors import CheckpointError, CheckpointMismatch
from tests._support.errors import raises

STEP = Path("step_8")
SAVED: dict[str, Any] = {
    "model": {"model_type": "gpt2", "hidden_size": 8},
    "weights": {"a": (2, 8), "b": (8,), "c": (), "d": ()},
}


class TestCheckpointFiles:
    def test_description_has_name_that_megatron_and_driver_require(self) -> None:
        assert DESCRIPTION == CONFIG_FNAME == Path(ACTOR_METADATA).name

    def test_description_of_megatron_names_its_backend(self, tmp_path: Path) -> None:
        (tmp_path / DESCRIPTION).write_text('{"sharded_backend": "torch_dist"}')
        assert read_description(tmp_path)[BACKEND] == "megatron"

    @pytest.mark.parametrize("content", ["", "{", "3"])
    def test_damaged_description_raises(self, content: str, tmp_path: Path) -> None:
        (tmp_path / DESCRIPTION).write_text(content)
        with raises(CheckpointError, path=tmp_path / DESCRIPTION):
            read_description(tmp_path)

    def test_short_file_raises(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(bytes(9))
        entries = [SimpleNamespace(relative_path="a", offset=offset, length=5) for offset in (0, 4)]
        check_file_sizes(tmp_path, entries)
        with raises(CheckpointError, path=tmp_path / "a"):
            check_file_sizes(tmp_path, [*entries, SimpleNamespace(relative_path="a", offset=5, length=5)])

    def test_other_backend_raises(self) -> None:
        check_backend(STEP, "fsdp", "fsdp")
        with raises(CheckpointMismatch, differing=("actor_rollout_ref.actor.strategy",), path=STEP):
            check_backend(STEP, "fsdp", "megatron")

    def test_missing_part_raises(self) -> None:
        check_contents(STEP, ["model", "extra"], ["model"])
        with raises(CheckpointMismatch, differing=("optimizer",), path=STEP):
            check_contents(STEP, ["model", "extra"], ["model", "optimizer"])


class TestCheckSameModel:
    def test_same_model_passes(self) -> None:
        check_same_model(STEP, SAVED, SAVED["model"], SAVED["weights"])

    def test_other_dimension_raises(self) -> None:
        with raises(CheckpointMismatch, differing=("hidden_size",), path=STEP):
            check_same_model(STEP, SAVED, {"model_type": "gpt2", "hidden_size": 4}, SAVED["weights"])

    def test_other_weights_raise_with_limited_list(self) -> None:
        own = {"a": (2, 8), "b": (9,), "new": (3,)}
        with raises(CheckpointMismatch, differing=("b", "c", "d", "new")) as caught:
            check_same_model(STEP, SAVED, SAVED["model"], own)
        assert (
            "(weight b: [8] there, [9] here; weight c: [] there, not trained here; weight d: [] there, not trained "
            "here; 1 more weights differ)"
        ) in caught.value.what


def test_written_shard_is_read_again_and_uses_no_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([7], dtype=torch.uint8)}
    planner, writer = (
        DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        FileSystemWriter(tmp_path),
    )
    planner.set_up_planner(state, is_coordinator=True)
    [plan], metadata = planner.create_global_plan([planner.create_local_plan()])
    [plan] = writer.prepare_global_plan([plan])
    tensors = {item.index: state[item.index.fqn] for item in plan.items}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a CUDA call would then fail on this machine
    results = write_shard(tmp_path, plan, tensors)
    monkeypatch.undo()
    write_metadata(tmp_path, metadata, [results], {BACKEND: "fsdp"})
    assert read_description(tmp_path) == {BACKEND: "fsdp"}
    read = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dist_checkpoint.load(read, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())
