"""Values read from the files of a checkpoint, and errors for unusable files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import save_file

from teacher.common.checkpoint import Checkpoint, read_checkpoint
from teacher.engines.vllm_engine import _dtypes
from teacher.errors import TeacherSetupError
from tests._support.errors import raises


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


@pytest.mark.parametrize("section", [None, "text_config"])
def test_tp_size_that_does_not_divide_the_heads_is_refused_with_those_that_do(
    section: str | None, tmp_path: Path
) -> None:
    heads = {"num_attention_heads": 6, "dtype": "float32"}
    write(tmp_path, config={"vocab_size": 9, **(heads if section is None else {section: heads})})
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.dtype == "float32"
    for tp_size in (1, 2, 3, 6):
        checkpoint.check_tp_size(tp_size)
    with raises(TeacherSetupError, options=("TP_SIZE",)) as refused:
        checkpoint.check_tp_size(4)
    assert refused.value.remedy.endswith(" 1, 2, 3, 6")
    Checkpoint(vocab_size=9, eos_token_ids=()).check_tp_size(4)  # unknown: vLLM decides


@pytest.mark.parametrize(
    ("head_dtype", "stored", "shown"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "", "bfloat16"),
        ("bfloat16", "float32", "bfloat16 (checkpoint float32)"),
        ("float32", "float32", "bfloat16 (logits float32, checkpoint float32)"),
    ],
)
def test_served_data_type_is_shown_with_that_of_the_checkpoint(head_dtype: str, stored: str, shown: str) -> None:
    model_config = SimpleNamespace(dtype="torch.bfloat16", head_dtype=f"torch.{head_dtype}")
    assert _dtypes(model_config, stored) == shown


@pytest.mark.parametrize("eos_token_id", ["</s>", [1, "</s>"], True, -1, {"id": 1}])
def test_read_checkpoint_invalid_eos_token_id_raises(eos_token_id: object, tmp_path: Path) -> None:
    write(tmp_path, config={"vocab_size": 9}, generation_config={"eos_token_id": eos_token_id})
    with raises(TeacherSetupError, path=tmp_path, options=("CKPT_PATH",)):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_read_checkpoint_damaged_file_raises_with_its_name(name: str, tmp_path: Path) -> None:
    write(tmp_path, config={"vocab_size": 9})
    (tmp_path / f"{name}.json").write_text('{"vocab_size"')
    with raises(TeacherSetupError, path=tmp_path / f"{name}.json"):
        read_checkpoint(tmp_path)
