"""LoRA adapters: target layers, initial values, merged weights, dropout, and refused settings. Nothing is sharded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from recipe_gkd.actor.fsdp.checkpoint_load import check_same_model
from recipe_gkd.actor.fsdp.checkpoint_state import model_dims
from recipe_gkd.actor.fsdp.lora import (
    adapted_layers,
    adapter_dims,
    adapter_dropout,
    add_adapters,
    base_state,
    initialize_adapters,
    layers_by_weight,
    merged_weight,
    target_layers,
)
from recipe_gkd.config.schema import LoraConfig
from recipe_gkd.errors import CheckpointMismatch, ConfigError
from recipe_gkd.metrics.utilization import ActorUtilization
from tests._support.base_config import base_config
from tests._support.errors import raises

LORA = "actor_rollout_ref.actor.lora"
FSDP = "actor_rollout_ref.actor.strategy=fsdp"


def make_model(kind: str = "qwen2") -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        gpt2 = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8)
        return transformers.GPT2LMHeadModel(gpt2).eval()
    sizes: dict[str, Any] = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.Qwen2Config(vocab_size=32, num_key_value_heads=1, **sizes)
    return transformers.Qwen2ForCausalLM(config).eval()


def options(**changes: Any) -> LoraConfig:
    return LoraConfig(**(dict(rank=4, alpha=12, target_modules=None, dropout=0.0, sync="merged") | changes))


def fill_adapters(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()


class TestAddAdapters:
    @pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
    def test_default_layers_are_those_of_all_linear(self, kind: str) -> None:
        model, other = make_model(kind), make_model(kind)
        add_adapters(model, options())
        initialize_adapters(model, seed=1)
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules="all-linear", fan_in_fan_out=kind == "gpt2"), other)
        assert list(adapted_layers(model)) == list(adapted_layers(other))
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)

    def test_initial_values_depend_on_seed_only(self) -> None:
        models = [make_model() for _ in range(3)]
        for model, seed in zip(models, (1, 1, 2), strict=True):
            torch.rand(seed)
            state = torch.get_rng_state()
            add_adapters(model, options())
            initialize_adapters(model, seed=seed)
            assert torch.equal(torch.get_rng_state(), state)
        one, same, other = ([p for p in model.parameters() if p.requires_grad] for model in models)
        assert all(torch.equal(*pair) for pair in zip(one, same, strict=True))
        assert not all(torch.equal(*pair) for pair in zip(one, other, strict=True))

    def test_model_on_meta_gets_adapters_on_meta(self) -> None:
        with torch.device("meta"):
            model = make_model()
        add_adapters(model, options())
        initialize_adapters(model, seed=1)
        assert all(parameter.is_meta for parameter in model.parameters())

    def test_target_names_select_layers_by_last_parts(self) -> None:
        prefix = "model.layers.0"
        assert target_layers(make_model(), ["q_proj", "mlp.up_proj"]) == [
            f"{prefix}.self_attn.q_proj", f"{prefix}.mlp.up_proj"
        ]  # fmt: skip

    @pytest.mark.parametrize("name", ["query", "lm_head", "embed_tokens", "proj"])
    def test_target_name_of_no_linear_layer_is_refused(self, name: str) -> None:
        with raises(ConfigError, keys=(f"{LORA}.target_modules",)):
            add_adapters(make_model(), options(target_modules=["q_proj", name]))


class TestMergedWeights:
    @pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
    def test_base_state_with_merged_weights_equals_merge_and_unload(self, kind: str) -> None:
        model = make_model(kind)
        names = list(model.state_dict())
        add_adapters(model, options())
        initialize_adapters(model, seed=1)
        fill_adapters(model)
        layers, state = layers_by_weight(model), base_state(model)
        assert list(state) == names
        got = {name: merged_weight(layers[id(each)]) if id(each) in layers else each for name, each in state.items()}
        wrapped = peft.get_peft_model(make_model(kind), peft_config(model))
        for own, theirs in zip(adapters(model), adapters(wrapped), strict=True):
            theirs.data.copy_(own)
        want = wrapped.merge_and_unload().state_dict()
        assert len(layers) == len(adapted_layers(model))
        assert all(torch.equal(got[name], want[name]) for name in names)

    def test_half_precision_weight_is_merged_in_float32(self) -> None:
        """A change of less than one half unit of bfloat16 is not lost before the caller rounds."""
        model = make_model()
        add_adapters(model, options(target_modules=["q_proj"]))
        initialize_adapters(model, seed=1)
        [layer] = adapted_layers(model).values()
        layer.base_layer.to(torch.bfloat16).weight.data.fill_(1.0)
        layer.lora_A["default"].weight.data.fill_(2.0**-12)
        layer.lora_B["default"].weight.data.fill_(1.0)
        assert torch.equal(merged_weight(layer), torch.full((16, 16), 1 + 4 * 3 * 2.0**-12))


def adapters(model: Any) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if ".lora_" in name]


def peft_config(model: Any) -> Any:
    return model.peft_config["default"]


def test_checkpoint_of_other_alpha_is_refused() -> None:
    """The shapes of the weights are equal, but not their effect."""
    models = {alpha: make_model() for alpha in (12, 8)}
    for alpha, model in models.items():
        add_adapters(model, options(alpha=alpha))
        initialize_adapters(model, seed=1)
    saved, own = ({"model": model_dims(SimpleNamespace(module=model)), "weights": {}} for model in models.values())  # type: ignore[arg-type]
    check_same_model(Path("saved"), saved, saved["model"], {})
    with raises(CheckpointMismatch, differing=("lora_alpha",), path=Path("saved")):
        check_same_model(Path("saved"), saved, own["model"], {})


def test_utilization_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    config = base_config(FSDP, f"{LORA}.rank=8", "trainer.device_peak_tflops=1")
    with caplog.at_level("INFO"):
        assert ActorUtilization.of(config, ["cpu"]) is None
    assert "frozen weights" in caplog.text


class TestDropout:
    def test_dropout_is_active_only_inside_of_context(self) -> None:
        model, ids = make_model(), torch.arange(6)[None]
        add_adapters(model, options(dropout=0.5))
        initialize_adapters(model, seed=1)
        fill_adapters(model.eval())
        want = model(ids).logits
        with adapter_dropout(model):
            assert not torch.allclose(model(ids).logits, want)
            assert {type(part).__name__ for part in model.modules() if part.training} == {"Dropout", "ModuleDict"}
        assert torch.equal(model(ids).logits, want)

    def test_model_without_adapters_is_unchanged(self) -> None:
        model = make_model()
        with adapter_dropout(model):
            assert not any(part.training for part in model.modules())
        assert base_state(model).keys() == model.state_dict().keys()
        assert adapter_dims(model) == {}


class TestConfig:
    @pytest.mark.parametrize(
        ("overrides", "key"),
        [
            ([FSDP, f"{LORA}.target_modules=[q_proj]"], "target_modules"),
            ([FSDP, f"{LORA}.dropout=0.1", f"{LORA}.rank=0"], "dropout"),
            ([FSDP, f"{LORA}.rank=8", f"{LORA}.target_modules=[]"], "target_modules"),
            ([FSDP, f"{LORA}.rank=8", f"{LORA}.dropout=0.1", "gkd.distill_loss_type=k1"], "dropout"),
        ],
    )
    def test_setting_without_effect_is_refused(self, overrides: list[str], key: str) -> None:
        with raises(ConfigError) as caught:
            base_config(*overrides)
        assert f"{LORA}.{key}" in caught.value.keys

    @pytest.mark.parametrize("overrides", [[], [f"{LORA}.rank=8", f"{LORA}.dropout=0.1"], [f"{LORA}.rank=0"]])
    def test_working_setting_is_accepted(self, overrides: list[str]) -> None:
        base_config(FSDP, *overrides)
