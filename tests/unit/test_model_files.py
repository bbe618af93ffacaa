"""A student's folder that lacks a file, or has half of one, is refused by the file's name."""

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


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["tokenizer.json"], "has no tokenizer.json; copy the tokenizer"),
        (["tokenizer.json", "tokenizer_config.json"], "has no tokenizer_config.json, tokenizer.json; copy"),
        (["tokenizer_config.json"], "has no tokenizer_config.json; copy"),
        (["model.safetensors"], "has neither model.safetensors nor model.safetensors.index.json; save"),
    ],
)
def test_files_that_are_missing_are_named(folder: Path, names: list[str], says: str) -> None:
    read(folder)
    for name in names:
        (folder / name).unlink()
    with pytest.raises(ModelError, match=says):
        read(folder)


def test_a_vocabulary_without_its_merges_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(ModelError, match=r"has no merges\.txt; copy"):
        read(folder)


@pytest.mark.parametrize(("n_bytes", "says"), [(0, "is empty"), (100, "cannot be read as safetensors")])
def test_a_weight_file_that_is_not_whole_is_named(folder: Path, n_bytes: int, says: str) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:n_bytes])
    with pytest.raises(ModelError, match=rf"actor_rollout_ref\.model\.path: .*model\.safetensors .*{says}"):
        read(folder)
