"""Detection of damaged weight files from headers and sizes, before an engine is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from teacher.common.checkpoint import read_checkpoint
from teacher.common.weight_files import find_damaged_weights
from teacher.errors import TeacherSetupError
from tests._support.errors import raises


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder with two shards and their index."""
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, name in enumerate(names):
        save_file({f"w{i}": np.ones((3, 5), np.float32)}, tmp_path / name, {"format": "pt"})
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    index = {"metadata": {}, "weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def truncate(n_bytes: int) -> Callable[[Path], object]:
    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:n_bytes])

    return cut


def swap_tensors(path: Path) -> None:
    """Write two tensors whose offsets have the sizes of each other. The file length agrees with the header."""
    save_file({"a": np.ones(3, np.float32), "b": np.ones(5, np.float32)}, path)
    raw = path.read_bytes()
    assert b"[0,12]" in raw and b"[12,32]" in raw
    path.write_bytes(raw.replace(b"[0,12]", b"[0,20]").replace(b"[12,32]", b"[20,32]"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": truncate(0),
    "length cut": truncate(5),
    "header cut": truncate(30),
    "data cut": truncate(-1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "text": lambda path: path.write_text("<html>404 not found</html>"),
    "no header": lambda path: path.write_bytes(b"\x02" + bytes(7) + b"[]"),
    "offsets": swap_tensors,
    "pointer": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n"),
    "missing": Path.unlink,
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_find_damaged_weights_names_file(damage: str, sharded: Path) -> None:
    assert find_damaged_weights(sharded) is None
    path = sharded / "model-00002-of-00002.safetensors"
    DAMAGES[damage](path)
    with raises(TeacherSetupError, options=("CKPT_PATH",), path=path):
        read_checkpoint(sharded)


def test_find_damaged_weights_names_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{}")
    damage = find_damaged_weights(sharded)
    assert damage is not None and damage.path == sharded / "model.safetensors.index.json"


def test_find_damaged_weights_ignores_files_outside_index(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").touch()
    assert find_damaged_weights(sharded) is None


def test_find_damaged_weights_names_empty_bin_file(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    damage = find_damaged_weights(tmp_path)
    assert damage is not None and damage.path == tmp_path / "pytorch_model.bin"
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert find_damaged_weights(tmp_path) is None
