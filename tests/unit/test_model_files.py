"""Checks of the files in the student's model folder. The error names a missing or incomplete file."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe_gkd.errors import ModelError
from recipe_gkd.preflight import read_student
from recipe_gkd.quickstart.tokenizer import build_tokenizer
from tests._support.base_config import base_config
from tests._support.tiny_models import make_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path, "qwen2")
    build_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def read(folder: Path) -> None:
    lengths = ["data.max_prompt_length=16", "data.max_response_length=16"]
    read_student(base_config(f"actor_rollout_ref.model.path={folder}", *lengths))


class TestReadStudent:
    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["tokenizer.json"], "has no tokenizer.json; save the student's"),
            (["tokenizer.json", "tokenizer_config.json"], "has no tokenizer_config.json, tokenizer.json; save"),
            (["tokenizer_config.json"], "has no tokenizer_config.json; save"),
            (["model.safetensors"], "has neither model.safetensors nor model.safetensors.index.json; save"),
        ],
    )
    def test_missing_file_named(self, folder: Path, names: list[str], message: str) -> None:
        read(folder)
        for name in names:
            (folder / name).unlink()
        with pytest.raises(ModelError, match=message):
            read(folder)

    def test_vocabulary_without_merges_refused(self, folder: Path) -> None:
        (folder / "tokenizer.json").rename(folder / "vocab.json")
        with pytest.raises(ModelError, match=r"has no merges\.txt; save"):
            read(folder)

    @pytest.mark.parametrize(("n_bytes", "message"), [(0, "is empty"), (100, "cannot be read as safetensors")])
    def test_damaged_weight_file_named(self, folder: Path, n_bytes: int, message: str) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:n_bytes])
        with pytest.raises(ModelError, match=rf"actor_rollout_ref\.model\.path: .*model\.safetensors .*{message}"):
            read(folder)
