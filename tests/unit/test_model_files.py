"""Checks of the files in the student's model folder. The error names a missing or incomplete file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from recipe_gkd.config import load_config
from recipe_gkd.errors import ModelError
from recipe_gkd.preflight import read_student
from recipe_gkd.quickstart.tokenizer import build_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def read(folder: Path) -> None:
    overrides = ["data.train_files=x", "data.max_prompt_length=16", "data.max_response_length=16"]
    read_student(load_config("on_policy_distill_trainer", [*overrides, f"actor_rollout_ref.model.path={folder}"]))


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
