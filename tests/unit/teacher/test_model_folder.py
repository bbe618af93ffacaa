"""Values read from the files of a checkpoint, and errors for unusable files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from teacher.engines.checkpoint import Checkpoint, read_checkpoint
from teacher.errors import TeacherError


def write(folder: Path, **files: object) -> Path:
    save_file({}, folder / "model.safetensors")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": [5, 4, 5]}, (4, 5)),
        ({"eos_token_id": 3}, {"temperature": 0.7}, (3,)),
        ({"eos_token_id": [0]}, None, (0,)),
        ({"text_config": {"eos_token_id": 6}}, None, (6,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
    ],
)
def test_read_checkpoint_eos_ids_come_from_generation_config_first(
    config: dict[str, object], generation_config: dict[str, object] | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, config={"vocab_size": 9, **config})
    if generation_config is not None:
        write(tmp_path, generation_config=generation_config)
    assert read_checkpoint(tmp_path) == Checkpoint(vocab_size=9, eos_token_ids=expected)


@pytest.mark.parametrize("eos_token_id", ["</s>", [1, "</s>"], True, -1, {"id": 1}])
def test_read_checkpoint_invalid_eos_token_id_raises(eos_token_id: object, tmp_path: Path) -> None:
    write(tmp_path, config={"vocab_size": 9}, generation_config={"eos_token_id": eos_token_id})
    with pytest.raises(TeacherError, match=r"eos_token_id=.*expected a token id or a list"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_read_checkpoint_damaged_file_raises_with_its_name(name: str, tmp_path: Path) -> None:
    write(tmp_path, config={"vocab_size": 9})
    (tmp_path / f"{name}.json").write_text('{"vocab_size"')
    with pytest.raises(TeacherError, match=rf"its {name}\.json cannot be read"):
        read_checkpoint(tmp_path)
