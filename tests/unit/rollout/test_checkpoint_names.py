"""Tests of the comparison between announced weights and the rollout model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recipe_gkd.errors import ModelError, WeightSyncError
from recipe_gkd.model_files import check_weight_files
from recipe_gkd.rollout.checkpoint_names import check_announced, folder_shapes
from tests._support.errors import raises

SHAPES = {"model.embed_tokens.weight": (8, 4), "model.layers.0.mlp.up_proj.weight": (6, 4), "model.norm.weight": (4,)}
MISSING = "model.layers.0.mlp.up_proj.weight"
META = [(name, shape, "float32") for name, shape in SHAPES.items()]


def make_folder(tmp_path: Path, extra: dict[str, tuple[int, ...]] | None = None, *, tied: bool = True) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied, "num_hidden_layers": 1}))
    names = SHAPES | (extra or {})
    for i, (name, shape) in enumerate(names.items()):
        save_file({name: torch.zeros(shape)}, tmp_path / f"model-{i}.safetensors")
    return str(tmp_path)


class TestFolderShapes:
    def test_folder_shapes_reads_all_shards(self, tmp_path: Path) -> None:
        assert folder_shapes(make_folder(tmp_path)) == SHAPES

    @pytest.mark.parametrize(
        ("content", "message"),
        [(b"\xff" * 100, "is damaged: its 100 bytes cannot be read as safetensors"), (b"", "is empty")],
    )
    def test_folder_shapes_damaged_shard_is_named(self, tmp_path: Path, content: bytes, message: str) -> None:
        (Path(make_folder(tmp_path)) / "model-9.safetensors").write_bytes(content)
        with raises(ModelError, path=tmp_path) as caught:
            folder_shapes(str(tmp_path))
        assert f"model-9.safetensors {message}" in caught.value.what

    def test_folder_shapes_ignores_files_outside_index(self, tmp_path: Path) -> None:
        """Mixtral's folder also has ``consolidated.safetensors``, with other tensor names, and possibly incomplete."""
        weight_map = {name: f"model-{i}.safetensors" for i, name in enumerate(SHAPES)}
        (Path(make_folder(tmp_path)) / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )
        stray = tmp_path / "consolidated.safetensors"
        for write in (stray.touch, lambda: save_file({"tok_embeddings.weight": torch.zeros(8, 4)}, stray)):
            write()
            check_weight_files(tmp_path)
            assert folder_shapes(str(tmp_path)) == SHAPES
        (tmp_path / "model-1.safetensors").unlink()
        with raises(ModelError, path=tmp_path) as caught:
            folder_shapes(str(tmp_path))
        assert "model-1.safetensors is missing, but model.safetensors.index.json names it" in caught.value.what


class TestCheckAnnounced:
    @pytest.mark.parametrize(
        "extra",
        [
            {"lm_head.weight": (8, 4)},
            {"model.layers.1.mlp.up_proj.weight": (6, 4)},
            {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)},
            {"h.0.attn.bias": (1, 1, 4, 4), "h.0.attn.masked_bias": ()},
            {"gpt_neox.layers.0.attention.bias": (1, 1, 4, 4)},
        ],
        ids=["tied head", "layer after the last", "rotary embedding", "mask of GPT-2", "mask of GPT-NeoX"],
    )
    def test_check_announced_untrained_weights_may_be_missing(
        self, tmp_path: Path, extra: dict[str, tuple[int, ...]]
    ) -> None:
        path = make_folder(tmp_path, extra)
        check_announced(META, path, folder_shapes(path))

    def test_check_announced_only_untied_head_is_required(self, tmp_path: Path) -> None:
        path = make_folder(tmp_path)
        check_announced([*META, ("lm_head.weight", (8, 4), "float32")], path, folder_shapes(path))
        path = make_folder(tmp_path, {"lm_head.weight": (8, 4)}, tied=False)
        with raises(WeightSyncError, tensors=("lm_head.weight",)):
            check_announced(META, path, folder_shapes(path))

    def test_check_announced_head_without_tie_word_embeddings_may_be_missing(self, tmp_path: Path) -> None:
        """OPT and GPT-2 tie it, and their published ``config.json`` does not state it."""
        path = make_folder(tmp_path, {"lm_head.weight": (8, 4), "h.0.attn.c_attn.bias": (4,)})
        (tmp_path / "config.json").write_text("{}")
        with raises(WeightSyncError, tensors=("h.0.attn.c_attn.bias",)):
            check_announced(META, f"{path}/", folder_shapes(path))

    def test_check_announced_names_all_problems(self, tmp_path: Path) -> None:
        path = make_folder(tmp_path)
        announced = [META[0], ("model.norm.weight", (5,), "float32"), ("model.bias", (4,), "float32")]
        with raises(WeightSyncError, tensors=(MISSING, "model.bias", "model.norm.weight")):
            check_announced(announced, path, folder_shapes(path))

    def test_check_announced_without_safetensors_checks_nothing(self, tmp_path: Path) -> None:
        check_announced(META, str(tmp_path), folder_shapes(str(tmp_path)))
