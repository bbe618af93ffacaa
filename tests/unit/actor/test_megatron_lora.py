"""Adapters of the Megatron backend without process groups: table, initial values, merged shards, refused settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from recipe_gkd.actor.fsdp.lora import adapted_layers, add_adapters, initialize_adapters, target_layers
from recipe_gkd.actor.lora import initial_factor
from recipe_gkd.actor.megatron.checkpoint_load import check_same_adapters
from recipe_gkd.actor.megatron.families import FAMILIES
from recipe_gkd.actor.megatron.families.reading import read_model_dims
from recipe_gkd.actor.megatron.hf_layout import join_shards, read_shard
from recipe_gkd.actor.megatron.hf_names import weights
from recipe_gkd.actor.megatron.lora_layers import Adapter, adapter_class
from recipe_gkd.actor.megatron.lora_table import AdaptedWeight, adapted_weights
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.megatron.transformer_impl import impl_setting
from recipe_gkd.actor.peft_patches import empty_model
from recipe_gkd.actor.ranks import Layout
from recipe_gkd.config.schema import LoraConfig
from recipe_gkd.errors import CheckpointMismatch, ConfigError
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.families import BY_TYPE, make_family_folder
from tests._support.tiny_models import ACTOR, MEGATRON, make_folder

KINDS = ("qwen2", "qwen3", "llama", "qwen3_moe", "qwen2_moe", "mixtral")
JOINED = {"phi3": ["qkv_proj", "down_proj"], "glm4": ["v_proj", "gate_up_proj"]}
"""Families with layers that join several projections, each with names of some of its layers."""
LORA = f"{ACTOR}.lora"
RANK = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    joined = {kind: make_family_folder(base / kind, BY_TYPE[kind]) for kind in JOINED}
    return joined | {kind: make_folder(base / kind, kind) for kind in KINDS}


def options(**changes: Any) -> LoraConfig:
    return LoraConfig(**(dict(rank=RANK, alpha=12, target_modules=None, dropout=0.0, sync="merged") | changes))


def layout(tp_rank: int, tp_size: int) -> Layout:
    whole = Layout.data_parallel(0, 1)
    return dataclasses.replace(whole, rank=tp_rank, world_size=tp_size, tp_rank=tp_rank, tp_size=tp_size)


def make_adapters(weight: AdaptedWeight, dims: ModelDims, tp_size: int, seed: int = 1) -> list[Adapter]:
    like = torch.zeros(1)
    return [
        adapter_class(weight.base)(weight, dims, options(), layout(rank, tp_size), like, seed)
        for rank in range(tp_size)
    ]


class TestTable:
    @pytest.mark.parametrize("kind", sorted(FAMILIES))
    def test_default_layers_are_the_linear_layers_of_transformers(self, kind: str, tmp_path: Path) -> None:
        folder = make_family_folder(tmp_path / kind, BY_TYPE[kind])
        model = empty_model(str(folder))
        table = adapted_weights(read_model_dims(folder), options())
        assert sorted(name for each in table for name in each.layers.values()) == sorted(target_layers(model, None))

    def test_factors_of_adapter_have_its_rank_and_the_sizes_of_its_layer(self, folders: dict[str, Path]) -> None:
        table = adapted_weights(read_model_dims(folders["qwen3"]), options(target_modules=["1.self_attn.k_proj"]))
        [(a, b)] = table[0].factors
        prefix = "base_model.model.model.layers.1.self_attn.k_proj"
        assert len(table) == 1 and table[0].layers == {1: "model.layers.1.self_attn.k_proj"}
        assert (a.hf, b.hf) == (((f"{prefix}.lora_A.weight", (3, 32)),), ((f"{prefix}.lora_B.weight", (48, 3)),))

    def test_model_without_rank_has_no_adapters(self, folders: dict[str, Path]) -> None:
        assert adapted_weights(read_model_dims(folders["qwen3"]), options(rank=None)) == []

    @pytest.mark.parametrize(("kind", "name"), [("qwen2", "query"), ("qwen2", "lm_head"), ("mixtral", "w1")])
    def test_name_of_no_linear_layer_is_refused(self, kind: str, name: str, folders: dict[str, Path]) -> None:
        with raises(ConfigError, keys=(f"{LORA}.target_modules",)) as caught:
            adapted_weights(read_model_dims(folders[kind]), options(target_modules=["q_proj", name]))
        assert name in str(caught.value) and "o_proj" in caught.value.remedy


class TestAdapter:
    @pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen2_moe", *JOINED])
    @pytest.mark.parametrize("tp_size", [1, 2])
    def test_initial_factors_on_any_layout_are_those_of_fsdp(
        self, kind: str, tp_size: int, folders: dict[str, Path]
    ) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folders[kind])
        add_adapters(model, options())
        initialize_adapters(model, seed=7)
        layers, dims = adapted_layers(model), read_model_dims(folders[kind])
        table = adapted_weights(dims, options())
        for weight in table:
            shards = [dict(adapter.factors()) for adapter in make_adapters(weight, dims, tp_size, seed=7)]
            for name, pair in zip(weight.layers.values(), weight.factors, strict=True):
                a, b = (join_shards(factor, dims, [each[factor] for each in shards])[0] for factor in pair)
                assert torch.equal(a, layers[name].lora_A["default"].weight)
                assert torch.equal(b, layers[name].lora_B["default"].weight) and not b.any()
        assert sum(len(weight.layers) for weight in table) == len(layers)

    def test_initial_factor_depends_on_seed_and_layer(self) -> None:
        one, same, other, next_seed = (
            initial_factor(name, 4, 50, seed) for name, seed in (("q", 1), ("q", 1), ("k", 1), ("q", 2))
        )
        assert torch.equal(one, same) and not torch.equal(one, other) and not torch.equal(one, next_seed)
        bound = 50**-0.5  # as torch.nn.Linear and peft
        assert 0.9 * bound < one.abs().max() <= bound

    @pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen2_moe", *JOINED])
    @pytest.mark.parametrize("tp_size", [1, 2])
    @pytest.mark.parametrize("is_partial", [False, True])
    def test_merged_shard_is_shard_of_merged_weight(
        self, kind: str, tp_size: int, is_partial: bool, folders: dict[str, Path]
    ) -> None:
        """Rows of q, k, v are interleaved by group, gate and up are joined per rank."""
        targets = JOINED.get(kind, ["k_proj", "o_proj", "up_proj"]) if is_partial else None
        dims = read_model_dims(folders[kind])
        for weight in adapted_weights(dims, options(target_modules=targets)):
            adapters = make_adapters(weight, dims, tp_size)
            torch.manual_seed(0)
            complete = {factor: torch.randn(factor.hf[0][1]) for pair in weight.factors for factor in pair}
            for rank, adapter in enumerate(adapters):
                for factor, parameter in adapter.factors():
                    whole = complete[factor]
                    shard = read_shard(factor, dims, lambda _, index, of=whole: of[index or ...], rank, tp_size)  # type: ignore[misc]
                    parameter.data.copy_(shard)
            base = {name: torch.randn(size) for name, size in weight.base.hf}
            merged = dict(base)
            for name, (a, b) in zip(weight.layers.values(), weight.factors, strict=True):
                merged[f"{name}.weight"] = base[f"{name}.weight"] + 4 * complete[b] @ complete[a]
            for rank, adapter in enumerate(adapters):
                own, want = (
                    read_shard(weight.base, dims, lambda name, index, of=tensors: of[name][index or ...], rank, tp_size)  # type: ignore[misc]
                    for tensors in (base, merged)
                )
                torch.testing.assert_close(adapter.merged_with(own), want)

    def test_half_precision_weight_is_merged_in_float32(self, folders: dict[str, Path]) -> None:
        """The result is rounded once."""
        dims = read_model_dims(folders["llama"])
        [weight] = adapted_weights(dims, options(target_modules=["0.mlp.down_proj"]))
        [adapter] = make_adapters(weight, dims, 1)
        adapter.to(torch.bfloat16)
        adapter.a[0].data.fill_(2.0**-12)
        adapter.b[0].data.fill_(1.0)
        parameter = torch.full((32, 48), 1.0, dtype=torch.bfloat16)
        merged: Tensor = adapter.merged_with(parameter)
        assert torch.equal(merged, (parameter.float() + RANK * 4 * 2.0**-12).to(torch.bfloat16))
        assert merged.dtype == torch.bfloat16

    def test_each_weight_with_adapter_has_other_name_than_its_factors(self, folders: dict[str, Path]) -> None:
        dims = read_model_dims(folders["qwen2_moe"])
        names = [name for weight in weights(dims) for name, _ in weight.hf]
        names += [f.hf[0][0] for weight in adapted_weights(dims, options()) for pair in weight.factors for f in pair]
        assert len(set(names)) == len(names)


SAVED = {"lora_rank": 4, "lora_alpha": 12, "target_modules": ["a", "b"]}


class TestCheckSameAdapters:
    def test_equal_settings_are_accepted(self) -> None:
        check_same_adapters(Path("saved"), None, None)
        check_same_adapters(Path("saved"), SAVED, dict(SAVED))

    @pytest.mark.parametrize(
        ("changes", "differing"),
        [
            ({"lora_alpha": 8}, ("lora_alpha",)),
            ({"lora_rank": 8, "target_modules": ["a"]}, ("lora_rank", "target_modules")),
        ],
    )
    def test_other_settings_are_refused(self, changes: dict[str, Any], differing: tuple[str, ...]) -> None:
        with raises(CheckpointMismatch, differing=differing, path=Path("saved")):
            check_same_adapters(Path("saved"), SAVED, SAVED | changes)

    def test_complete_weights_and_adapters_do_not_fit(self) -> None:
        for saved, own in ((None, SAVED), (SAVED, None)):
            with raises(CheckpointMismatch, differing=("lora_alpha", "lora_rank", "target_modules")):
                check_same_adapters(Path("saved"), saved, own)


class TestConfig:
    def test_adapters_are_accepted(self) -> None:
        base_config(f"{LORA}.rank=8", f"{LORA}.dropout=0.1", f"{LORA}.target_modules=[q_proj]")

    @pytest.mark.parametrize(
        ("overrides", "keys"),
        [
            ([f"{MEGATRON}.transformer_impl=transformer_engine"], (f"{LORA}.rank", f"{MEGATRON}.transformer_impl")),
            (
                [f"{LORA}.dropout=0.1", f"{MEGATRON}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"],
                (f"{LORA}.dropout", f"{MEGATRON}.tensor_model_parallel_size"),
            ),
        ],
    )
    def test_unsupported_setting_is_refused(self, overrides: list[str], keys: tuple[str, ...]) -> None:
        with raises(ConfigError, keys=keys):
            base_config(f"{LORA}.rank=8", "trainer.device=cuda", *overrides)

    def test_layers_with_adapters_are_those_of_torch(self) -> None:
        actors = [base_config(*overrides).actor_rollout_ref.actor for overrides in ([], [f"{LORA}.rank=8"])]
        assert [impl_setting(actor) for actor in actors] == ["auto", "local"]
