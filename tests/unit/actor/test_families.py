"""Descriptions of model families: complete, equal to the folders of transformers, and the same for any sharding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from recipe_gkd.actor.megatron.families import FAMILIES
from recipe_gkd.actor.megatron.families.reading import field_lists, read_model_dims
from recipe_gkd.actor.megatron.hf_layout import join_shards, read_shard, shard_size
from recipe_gkd.actor.megatron.hf_names import weights
from recipe_gkd.actor.megatron.model import check_overrides
from recipe_gkd.errors import ConfigError, ModelError
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.families import BY_TYPE, make_family_folder
from tests._support.layouts import OVERRIDE

KINDS = sorted(FAMILIES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of tiny models, by ``model_type``."""
    base = tmp_path_factory.mktemp("families")
    return {kind: make_family_folder(base / kind, BY_TYPE[kind]) for kind in KINDS}


def write_config(path: Path, folder: Path, changes: dict[str, Any]) -> Path:
    content = json.loads((folder / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | changes))
    return path


def test_every_family_has_a_row_in_the_table_and_every_other_row_a_reason() -> None:
    assert {row.model_type for row in BY_TYPE.values() if not row.megatron} == set(FAMILIES)


@pytest.mark.parametrize("kind", KINDS)
def test_fields_of_a_configuration_are_read_or_have_one_value_or_no_effect(kind: str, folders: dict[str, Path]) -> None:
    lists = field_lists(folders[kind])
    assert not lists.ignored
    assert not lists.read & lists.without_effect, "a field that is read has an effect"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_tensors_of_the_folder(kind: str, folders: dict[str, Path]) -> None:
    dims = read_model_dims(folders[kind])
    in_file = load_file(folders[kind] / "model.safetensors")
    found = [pair for weight in weights(dims) for pair in weight.new_tensors]
    assert len(found) == len(dict(found)), "no tensor belongs to two parameters"
    assert dict(found) == {name: tuple(tensor.shape) for name, tensor in in_file.items()}


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_all_ranks_are_the_tensors(kind: str, n_ranks: int, folders: dict[str, Path]) -> None:
    dims, in_file = read_model_dims(folders[kind]), load_file(folders[kind] / "model.safetensors")

    def read(name: str, index: tuple[slice, ...]) -> Tensor:
        return in_file[name][index or ...]

    for weight in weights(dims):
        shards = [read_shard(weight, dims, read, rank, n_ranks) for rank in range(n_ranks)]
        assert {tuple(shard.shape) for shard in shards} == {shard_size(weight, dims, n_ranks)}
        for (name, _), tensor in zip(weight.hf, join_shards(weight, dims, shards), strict=True):
            want = in_file[name] if weight.stack is None else in_file[name][weight.expert]
            assert torch.equal(tensor, want), name


@pytest.mark.parametrize("kind", KINDS)
def test_unsupported_values_are_refused_by_name(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    for name, values in field_lists(folders[kind]).required.items():
        kind_of_value = {bool: not values[0], str: "gelu"}
        changes = {name: kind_of_value.get(type(values[0]), 0.5)}
        with raises(ModelError, path=tmp_path, names=(name,)):
            read_model_dims(write_config(tmp_path, folders[kind], changes))


def test_a_field_that_nothing_reads_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version of transformers may have a field with an unknown effect."""
    smollm = FAMILIES["smollm3"]
    monkeypatch.setattr("recipe_gkd.actor.megatron.families.reading.FAMILIES", {"smollm3": without_windows(smollm)})
    read_model_dims(folders["smollm3"])
    with raises(ModelError, path=tmp_path, names=("no_rope_layer_interval",)):
        read_model_dims(write_config(tmp_path, folders["smollm3"], {"no_rope_layer_interval": 7}))


def without_windows(family: Any) -> Any:
    from dataclasses import replace

    return replace(family, without_effect=family.without_effect - {"no_rope_layer_interval"})


@pytest.mark.parametrize(
    ("kind", "changes", "names"),
    [
        ("deepseek_v2", {"topk_group": 1}, ("num_experts_per_tok", "topk_group")),
        ("deepseek_v3", {"num_experts_per_tok": 3}, ("num_experts_per_tok", "topk_group")),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, ("layer_types",)),
        ("glm4_moe", {"num_experts_per_tok": 1}, ("num_experts_per_tok",)),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, ("num_experts_per_tok",)),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            ("rope_parameters",),
        ),
        ("ministral3", {}, ("model_type",)),
    ],
)
def test_routing_and_positions_that_megatron_or_vllm_computes_differently_are_refused(
    kind: str, changes: dict[str, Any], names: tuple[str, ...], folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders.get(kind) or make_family_folder(tmp_path / "model", BY_TYPE[kind])
    with raises(ModelError, path=tmp_path, names=names):
        read_model_dims(write_config(tmp_path, folder, changes))


def test_fused_router_of_corrected_softmax_scores_is_refused(folders: dict[str, Path]) -> None:
    """It would choose the experts without the corrections."""
    dims = read_model_dims(folders["ernie4_5_moe"])
    megatron = base_config(f"{OVERRIDE}.moe_router_fusion=true").actor_rollout_ref.actor.megatron
    with raises(ConfigError, keys=("actor_rollout_ref.actor.megatron.override_transformer_config",)) as caught:
        check_overrides(dims, megatron, "auto")
    assert "softmax scores" in str(caught.value)
