"""Detection of damaged weight files from headers and sizes, before an engine is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from teacher.engines.checkpoint import read_checkpoint
from teacher.errors import TeacherError
from teacher.weight_files import find_damaged_weights


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


NOT_SAFETENSORS = r"is damaged: its \d+ bytes cannot be read as safetensors: .*; copy or download it again"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (truncate(0), r"is empty \(0 bytes\); copy or download it again"),
    "length cut": (truncate(5), NOT_SAFETENSORS),
    "header cut": (truncate(30), NOT_SAFETENSORS),
    "data cut": (truncate(-1), NOT_SAFETENSORS),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), NOT_SAFETENSORS),
    "text": (lambda path: path.write_text("<html>404 not found</html>"), NOT_SAFETENSORS),
    "no header": (lambda path: path.write_bytes(b"\x02" + bytes(7) + b"[]"), NOT_SAFETENSORS),
    "offsets": (swap_tensors, NOT_SAFETENSORS),
    "pointer": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n"),
        "is a Git LFS pointer .*git lfs pull",
    ),
    "missing": (Path.unlink, "is missing, but model.safetensors.index.json names it"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "is missing, but model.safetensors.index.json names it"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_find_damaged_weights_names_file(damage: str, sharded: Path) -> None:
    assert find_damaged_weights(sharded) is None
    apply, message = DAMAGES[damage]
    apply(sharded / "model-00002-of-00002.safetensors")
    with pytest.raises(TeacherError, match=rf"CKPT_PATH=.*model-00002-of-00002\.safetensors {message}"):
        read_checkpoint(sharded)


def test_find_damaged_weights_names_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{}")
    assert "index.json is damaged: expected JSON with a weight_map" in str(find_damaged_weights(sharded))


def test_find_damaged_weights_ignores_files_outside_index(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").touch()
    assert find_damaged_weights(sharded) is None


def test_find_damaged_weights_names_empty_bin_file(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert "pytorch_model.bin is empty" in str(find_damaged_weights(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert find_damaged_weights(tmp_path) is None
