"""Identity of a model folder, by its content."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe_gkd.checkpoints import model_identity
from recipe_gkd.checkpoints.model_identity import Difference, describe_differences, differences, identify_model
from recipe_gkd.errors import ModelError
from tests._support.errors import raises

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tiny_qwen2: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_qwen2, tmp_path / "model")


def identify(folder: Path) -> dict[str, str]:
    return identify_model(folder, "sha256:1")


def set_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def split_weights(folder: Path) -> None:
    """Write the same tensors into two files with an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for part in set(weight_map.values()):
        save_file({name: tensors[name] for name, file in weight_map.items() if file == part}, folder / part)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def change_weight(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {name: change(tensors[name]).contiguous()}, folder / WEIGHTS)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: None,
        split_weights,
        lambda folder: set_config(folder, _name_or_path="/elsewhere", transformers_version="9", dtype="float32"),
        lambda folder: set_config(folder, eos_token_id=[1, 2]),
        lambda folder: (folder / "README.md").write_text("text"),
    ],
    ids=["copy", "other shards", "origin and version", "ids that end a turn", "another file"],
)
def test_identify_model_same_content_is_the_same_model(model: Path, change: Callable[[Path], object]) -> None:
    copied = shutil.copytree(model, model.parent / "copied")
    change(copied)
    assert differences(identify(model), identify(copied)) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda folder: set_config(folder, rms_norm_eps=0.5), {"config.json: rms_norm_eps": ("1e-06", "0.5")}),
        (lambda folder: set_config(folder, new={"a": 1}), {"config.json: new.a": ("not set", "1")}),
        (
            lambda folder: change_weight(folder, "model.norm.weight", lambda weight: weight * 2),
            {"values of the weights": None},
        ),
        (
            lambda folder: change_weight(folder, "model.embed_tokens.weight", lambda weight: weight.bfloat16()),
            {"names, types and shapes of the weights": None, "values of the weights": None},
        ),
    ],
    ids=["config", "nested config", "one tensor", "data type"],
)
def test_identify_model_other_content_is_named(
    model: Path, change: Callable[[Path], object], expected: dict[str, tuple[str, str] | None]
) -> None:
    """Expected are the names of the properties, with both values if they are not hashes."""
    before = identify(model)
    change(model)
    found = {each.name: (each.before, each.now) for each in differences(before, identify(model))}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if values is None:
            assert all(re.fullmatch(r"\w{32}", value) for value in found[name]) and len(set(found[name])) == 2
        else:
            assert found[name] == values


def test_identify_model_other_tokenizer_is_named(model: Path) -> None:
    found = differences(identify(model), identify_model(model, "sha256:2"))
    assert found == [Difference("tokenizer", "sha256:1", "sha256:2")]


def test_identify_model_reads_samples_only(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights outside the samples are not read, so that the size of the files does not count."""

    def change_ends(weight: torch.Tensor) -> torch.Tensor:
        weight[0], weight[-1] = 1, 1
        return weight

    monkeypatch.setattr(model_identity, "SAMPLE_BYTES", 8)
    before = identify(model)
    change_weight(model, "model.embed_tokens.weight", change_ends)
    assert identify(model) == before


def test_description_lists_five_differences() -> None:
    before = {f"key{i}": "a" for i in range(7)}
    text = describe_differences(differences(before, dict.fromkeys(before, "b")))
    assert text.count("->") == 5 and text.endswith("; and 2 more")
    assert describe_differences([]) == "" and describe_differences([Difference("a", "1", "2")]) == "a: 1 -> 2"


def test_identify_model_unreadable_folder_is_a_model_error(model: Path) -> None:
    (model / "config.json").write_text("{")
    with raises(ModelError, path=model):
        identify(model)
