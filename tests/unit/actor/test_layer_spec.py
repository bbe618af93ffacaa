"""Choice of the layers' modules, of Megatron's options for them, and their report."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from recipe_gkd.actor.megatron import layer_report as report_module
from recipe_gkd.actor.megatron import model
from recipe_gkd.actor.megatron.families.reading import read_model_dims
from recipe_gkd.actor.megatron.gated_silu import GatedSilu
from recipe_gkd.actor.megatron.layer_report import layer_report
from recipe_gkd.actor.megatron.layer_spec import decoder_spec, ensure_megatron_supports_te, mlp_submodules
from recipe_gkd.actor.megatron.model import build_chunks, transformer_config
from recipe_gkd.actor.megatron.model_dims import LayerAttention, ModelDims, Rope
from recipe_gkd.actor.megatron.packed_attention import PackedAttention
from recipe_gkd.actor.megatron.rotary import PackedRotaryEmbedding, frequencies
from recipe_gkd.config.megatron_fields import FIXED_FIELDS, NEWER_FIELDS
from recipe_gkd.errors import ConfigError
from tests._support.errors import raises
from tests._support.layouts import BF16, CP2, OVERRIDE
from tests._support.tiny_models import MEGATRON, make_config, make_folder

Build = Callable[..., TransformerConfig]
GPU, CPU = torch.device("cuda"), torch.device("cpu")
H100, A100 = (9, 0), (8, 0)
DIMS = ModelDims(
    family="llama", layers=1, hidden=8, ffn=8, heads=2, kv_heads=2, head_dim=4, vocab_size=100, max_positions=8,
    tied=False, norm_eps=1e-6, ropes=(Rope(width=4, theta=1e4),),
)  # fmt: skip


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Function that returns Megatron's configuration of a tiny model for a device."""
    base = tmp_path_factory.mktemp("models")
    folders = {kind: make_folder(base / kind, kind) for kind in ("llama", "mixtral")}

    def transformer(device: torch.device, *overrides: str, kind: str = "llama", ranks: int = 1) -> TransformerConfig:
        megatron = make_config(folders[kind], *overrides, ranks=ranks).actor_rollout_ref.actor.megatron
        return transformer_config(read_model_dims(folders[kind]), megatron, device)

    return transformer


def with_te(*, experts: int | None = None, grouped_gemm: bool = True) -> Any:
    """Return the options that are read of a configuration with Transformer Engine's layers on a GPU."""
    return SimpleNamespace(
        transformer_impl="transformer_engine", use_cpu_initialization=False, params_dtype=torch.bfloat16,
        kv_channels=128, qk_layernorm=False, num_moe_experts=experts, moe_grouped_gemm=grouped_gemm,
        use_te_activation_func=experts is None, softmax_type="vanilla",
    )  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Function that sets the compute capability of this process's GPU."""
    return lambda capability: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


class TestTransformerConfig:
    def test_stages_wait_for_the_gpu_only_if_overridden(self, build: Build) -> None:
        assert not build(GPU).batch_p2p_sync
        assert build(GPU, f"+{OVERRIDE}.batch_p2p_sync=true").batch_p2p_sync

    @pytest.mark.parametrize("device", [CPU, GPU])
    def test_local_layers_have_no_fused_options(self, device: torch.device, build: Build) -> None:
        config = build(
            device, f"{MEGATRON}.transformer_impl=local", f"{MEGATRON}.sequence_parallel=false", kind="mixtral"
        )
        assert config.transformer_impl == "local"
        assert config.attention_backend is AttnBackend.auto
        assert not config.apply_rope_fusion
        assert not config.moe_grouped_gemm
        assert config.moe_router_dtype == "fp32"

    def test_transformer_engine_may_not_store_scores(self, monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
        """The unfused attention of Transformer Engine is switched off, so an unsupported input is an error."""
        monkeypatch.setattr(model, "resolve_transformer_impl", lambda setting, device: "transformer_engine")
        monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", True)
        monkeypatch.setattr(TransformerConfig, "__post_init__", lambda self: None)  # would look for the package
        config = build(GPU, kind="mixtral")
        assert config.attention_backend is AttnBackend.fused
        assert config.transformer_impl == "transformer_engine"
        assert config.apply_rope_fusion
        assert config.moe_grouped_gemm
        assert config.moe_router_dtype == "fp32"

    def test_scaled_cosines_are_a_factor_of_the_scores_with_transformer_engine(self) -> None:
        """YaRN scales queries and keys. Only the layers of torch multiply the cosines and sines."""
        scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
        dims = replace(DIMS, ropes=(Rope(width=4, theta=1e4, scaling=scaling, max_positions=512),))
        _, factor = frequencies(dims.ropes[0])
        assert factor == pytest.approx(0.1 * math.log(8) + 1)
        assert model._softmax_scale(dims, "transformer_engine") == pytest.approx(factor**2 / 4**0.5)
        assert model._softmax_scale(dims, "local") is None and model._softmax_scale(DIMS, "transformer_engine") is None

    @pytest.mark.parametrize("setting", ["auto", "local", "transformer_engine"])
    def test_model_with_windows_has_layers_of_torch(self, setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        dims = replace(DIMS, attention=(LayerAttention(window=4),))
        monkeypatch.setattr(model, "resolve_transformer_impl", lambda setting, device: setting)
        megatron: Any = SimpleNamespace(transformer_impl=setting)
        if setting == "transformer_engine":
            with raises(ConfigError, keys=(f"{MEGATRON}.transformer_impl",)):
                model.layer_implementation(dims, megatron, "cuda")
        else:
            assert model.layer_implementation(dims, megatron, "cuda") == "local"
        assert model.layer_implementation(DIMS, megatron, "cuda") == setting

    @pytest.mark.parametrize(
        "override",
        [
            "attention_backend=unfused",
            "transformer_impl=local",
            "context_parallel_size=2",
            "params_dtype=float16",
            "window_size=[64,0]",
            "attention_dropout=0.1",
            "use_te_activation_func=true",
        ],
    )
    def test_override_of_chosen_option_is_refused(self, override: str, build: Build) -> None:
        with raises(ConfigError, keys=(f"{OVERRIDE}.{override.split('=')[0]}",)):
            build(CPU, f"+{OVERRIDE}.{override}")

    def test_refused_overrides_are_fields_of_megatron(self) -> None:
        unknown = FIXED_FIELDS.keys() - {field.name for field in fields(TransformerConfig)}
        assert unknown in (set(), NEWER_FIELDS.keys())

    @pytest.mark.parametrize(("capability", "is_refused"), [(H100, False), (A100, True)])
    def test_heads_must_fit_context_ranks_only_if_they_are_exchanged(
        self,
        capability: tuple[int, int],
        is_refused: bool,
        build: Build,
        gpu: Callable[[tuple[int, int]], None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Three context ranks cannot divide 4 heads. The fused attention of Transformer Engine does not divide them."""
        monkeypatch.setattr(model, "resolve_transformer_impl", lambda setting, device: "transformer_engine")
        monkeypatch.setattr(model, "ensure_megatron_supports_te", lambda: None)
        monkeypatch.setattr(TransformerConfig, "__post_init__", lambda self: None)  # would look for the package
        gpu(capability)
        overrides = (CP2.replace("=2", "=3"), BF16)
        keys = tuple(f"{MEGATRON}.{name}" for name in ("context_parallel_size", "tensor_model_parallel_size"))
        with raises(ConfigError, keys=keys) if is_refused else nullcontext():
            build(GPU, *overrides, ranks=3)

    def test_transformer_engine_that_megatron_cannot_use_is_refused(self) -> None:
        assert not gpt_layer_specs.HAVE_TE
        with raises(ConfigError, keys=(f"{MEGATRON}.transformer_impl",)):
            ensure_megatron_supports_te()


class TestBuildChunks:
    @pytest.mark.parametrize("is_fused", [False, True])
    def test_chunk_gathers_rotary_table_unless_te_rotates(
        self, is_fused: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Chunk(torch.nn.Module):
            def __init__(self, **_: Any) -> None:
                super().__init__()
                self.rotary_pos_emb = torch.nn.Identity()
                self.decoder = SimpleNamespace(layers=[])

        stage = SimpleNamespace(is_pipeline_first_stage=lambda **_: True, is_pipeline_last_stage=lambda **_: True)
        for name, value in (("GPTModel", Chunk), ("mpu", stage), ("decoder_spec", lambda *_: None)):
            monkeypatch.setattr(model, name, value)
        config: Any = SimpleNamespace(
            virtual_pipeline_model_parallel_size=None, tensor_model_parallel_size=1, params_dtype=torch.bfloat16,
            apply_rope_fusion=is_fused,
        )  # fmt: skip
        [chunk] = build_chunks(DIMS, config, CPU)
        assert isinstance(chunk.rotary_pos_emb, PackedRotaryEmbedding) is not is_fused
        if is_fused:  # Megatron's angles are computed with the frequencies of the model
            torch.testing.assert_close(chunk.rotary_pos_emb.inv_freq, torch.tensor([1.0, 1e-2]))


class TestTransformerEngineSpec:
    """The specs are Megatron's local ones, because those of Transformer Engine need the package."""

    @pytest.mark.parametrize(("capability", "is_replaced"), [(H100, False), (A100, True)])
    def test_dense_layers_have_packed_attention_where_te_would_store_scores(
        self,
        capability: tuple[int, int],
        is_replaced: bool,
        gpu: Callable[[tuple[int, int]], None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        gpu(capability)
        layer = get_gpt_layer_local_spec()
        monkeypatch.setattr(gpt_layer_specs, "get_gpt_layer_with_transformer_engine_spec", lambda **_: layer)
        spec: Any = decoder_spec(DIMS, with_te())
        assert (spec.submodules.self_attention.submodules.core_attention is PackedAttention) is is_replaced
        assert mlp_submodules(spec).activation_func is GatedSilu

    @pytest.mark.parametrize(("capability", "is_replaced"), [(H100, False), (A100, True)])
    def test_moe_layers_have_packed_attention_where_te_would_store_scores_and_local_names(
        self,
        capability: tuple[int, int],
        is_replaced: bool,
        gpu: Callable[[tuple[int, int]], None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        gpu(capability)
        block = SimpleNamespace(layer_specs=[get_gpt_layer_local_spec(), get_gpt_layer_local_spec(num_experts=4)])
        local_keys = block.layer_specs[1].submodules.sharded_state_dict_keys_map
        for layer in block.layer_specs:
            layer.submodules.sharded_state_dict_keys_map = {}  # those of Transformer Engine have none for norms
        monkeypatch.setattr(gpt_layer_specs, "get_gpt_decoder_block_spec", lambda *_, **__: block)
        spec: Any = decoder_spec(DIMS, with_te(experts=4))
        norm_keys = spec.layer_specs[1].submodules.sharded_state_dict_keys_map
        assert norm_keys and norm_keys.items() <= local_keys.items(), "both load the checkpoints of the other"
        for layer in spec.layer_specs:
            assert (layer.submodules.self_attention.submodules.core_attention is PackedAttention) is is_replaced


class TestReport:
    def test_report_on_cpu_has_no_warnings(self, build: Build) -> None:
        report = layer_report(build(CPU, kind="mixtral"), "auto")
        assert report.summary == (
            "layers: torch; attention: torch scaled_dot_product_attention in blocks; grouped GEMM: no"
        )
        assert report.warnings == []

    def test_report_names_transformer_engine_and_attention(
        self, gpu: Callable[[tuple[int, int]], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpu(H100)
        monkeypatch.setattr(report_module, "installed_version", lambda: "2.11.0")
        report = layer_report(with_te(experts=4), "auto")
        assert report.summary == (
            "layers: Transformer Engine 2.11.0; attention: Transformer Engine, cuDNN for packed sequences (THD); "
            "grouped GEMM: yes"
        )
        assert report.warnings == []

    @pytest.mark.parametrize(("setting", "expected"), [("auto", 2), ("local", 1)])
    def test_report_warns_of_slow_layers_on_gpu(
        self, setting: Any, expected: int, gpu: Callable[[tuple[int, int]], None], build: Build
    ) -> None:
        """Layers of torch are worth a warning if they are not intended, experts without grouped GEMM always."""
        gpu(A100)
        *about_te, about_experts = layer_report(build(GPU, kind="mixtral"), setting).warnings
        assert len([*about_te, about_experts]) == expected
        assert all("Transformer Engine is not installed" in warning and "gpu-te" in warning for warning in about_te)
        assert about_experts.startswith("mixture of experts without grouped GEMM: each layer computes its 4 experts")

    def test_report_warns_of_untested_version(
        self, gpu: Callable[[tuple[int, int]], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpu(H100)
        monkeypatch.setattr("recipe_gkd.actor.megatron.transformer_impl.installed_version", lambda: "2.14.1")
        [warning] = layer_report(with_te(), "auto").warnings
        assert "2.14.1 is newer" in warning
