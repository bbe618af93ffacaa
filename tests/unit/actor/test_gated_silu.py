"""The activation of an MLP equals Megatron's bit by bit, and the spec contains it where it is complete."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_layer_specs
from torch import Tensor

from recipe_gkd.actor.megatron.families.reading import read_model_dims
from recipe_gkd.actor.megatron.gated_silu import GatedSilu
from recipe_gkd.actor.megatron.layer_spec import decoder_spec, mlp_submodules
from recipe_gkd.actor.megatron.model import transformer_config
from tests._support.tiny_models import MEGATRON, make_config, make_folder


def megatron_glu(gate_and_up: Tensor) -> Tensor:
    gate, up = torch.chunk(gate_and_up, 2, dim=-1)
    return F.silu(gate) * (up + 0.0)


class TestGatedSilu:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gated_silu_equals_megatron(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        values, weight = 4 * torch.randn(37, 1, 24, dtype=dtype), torch.randn(37, 1, 12, dtype=dtype)
        results = []
        for function in (megatron_glu, GatedSilu()):
            x = values.clone().requires_grad_()
            activated = function(x * 1)
            results.append((activated, *torch.autograd.grad(activated, x, weight)))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)

    def test_gated_silu_writes_gradient_over_input_once(self) -> None:
        x = torch.randn(3, 8, requires_grad=True)
        product = x * 1
        activated = GatedSilu()(product)
        (gradient,) = torch.autograd.grad(activated.sum(), product, retain_graph=True)
        assert gradient.data_ptr() == product.data_ptr()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(activated.sum(), product)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {kind: make_folder(base / kind, kind) for kind in ("qwen2", "qwen3_moe")}


@pytest.mark.parametrize(
    ("kind", "override", "expected"),
    [
        ("qwen2", "dtype=float32", GatedSilu),
        ("qwen2", "+override_transformer_config.bias_activation_fusion=true", None),
        ("qwen2", "+override_transformer_config.bias_activation_fusion=false", GatedSilu),
        ("qwen3_moe", "dtype=float32", None),
    ],
)
def test_decoder_spec_has_gated_silu_in_dense_layers_without_fusion(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    override: str,
    expected: type | None,
) -> None:
    prefix = "+" if override.startswith("+") else ""
    megatron = make_config(
        folders[kind], f"{prefix}{MEGATRON}.{override.removeprefix('+')}"
    ).actor_rollout_ref.actor.megatron
    dims = read_model_dims(str(folders[kind]))
    config = transformer_config(dims, megatron, torch.device("cpu"))
    monkeypatch.setattr(gpt_layer_specs, "get_num_layers_to_build", lambda *_, **__: 1)
    monkeypatch.setattr(gpt_layer_specs, "get_transformer_layer_offset", lambda *_, **__: 0)
    for layer in decoder_spec(dims, config).layer_specs:
        assert getattr(mlp_submodules(layer), "activation_func", None) is expected
