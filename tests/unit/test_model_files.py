"""Checks of the files in the student's model folder. The error names a missing or incomplete file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.errors import ModelError
from recipe_gkd.preflight import read_student
from tests._support.base_config import base_config
from tests._support.errors import raises
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
        ("names", "missing"),
        [
            (["tokenizer.json"], ("tokenizer.json",)),
            (["tokenizer.json", "tokenizer_config.json"], ("tokenizer_config.json", "tokenizer.json")),
            (["tokenizer_config.json"], ("tokenizer_config.json",)),
            (["model.safetensors"], ("model.safetensors", "model.safetensors.index.json")),
        ],
    )
    def test_missing_file_named(self, folder: Path, names: list[str], missing: tuple[str, ...]) -> None:
        read(folder)
        for name in names:
            (folder / name).unlink()
        with raises(ModelError, path=folder, names=missing):
            read(folder)

    def test_vocabulary_without_merges_refused(self, folder: Path) -> None:
        (folder / "tokenizer.json").rename(folder / "vocab.json")
        with raises(ModelError, path=folder, names=("merges.txt",)):
            read(folder)

    @pytest.mark.parametrize("in_two_files", [False, True])
    def test_tied_model_with_another_output_layer_refused(self, folder: Path, in_two_files: bool) -> None:
        """An engine of vLLM would generate with the stored layer, and the actor trains the tied one."""
        weights = load_file(folder / "model.safetensors")
        head = weights["model.embed_tokens.weight"].clone()
        if in_two_files:
            weight_map = dict.fromkeys(weights, "model.safetensors") | {"lm_head.weight": "head.safetensors"}
            index = {"metadata": {}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))

        def store(head: torch.Tensor) -> None:
            name, others = ("head.safetensors", {}) if in_two_files else ("model.safetensors", weights)
            save_file(others | {"lm_head.weight": head}, folder / name)

        store(head)  # many tools store an equal one
        read(folder)
        head[-1, -1] += 1
        store(head)
        with raises(ModelError, path=folder, names=("lm_head.weight", "model.embed_tokens.weight")):
            read(folder)

    @pytest.mark.parametrize("n_bytes", [0, 100])
    def test_damaged_weight_file_refused(self, folder: Path, n_bytes: int) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:n_bytes])
        with raises(ModelError, path=folder, names=()):
            read(folder)
