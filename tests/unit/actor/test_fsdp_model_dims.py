"""Dimensions of causal language models of transformers, and the models that the FSDP backend refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipe_gkd.actor.fsdp.mixtures import MIXTURES
from recipe_gkd.actor.fsdp.model_dims import GATED_FAMILIES, CausalLMDims, read_causal_lm_dims
from recipe_gkd.actor.megatron.families import FAMILIES
from recipe_gkd.actor.megatron.families.reading import read_model_dims
from recipe_gkd.actor.strategy import read_student_dims
from recipe_gkd.config.limits import MAX_INT32
from recipe_gkd.errors import ConfigError, ModelError
from recipe_gkd.metrics.flops import forward_flops, token_flops
from recipe_gkd.preflight import read_student
from recipe_gkd.rollout.limits import check_engine_fits
from teacher.common.weight_files import INDEX_NAME
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.families import BY_TYPE

ROLLOUT = "actor_rollout_ref.rollout"
FSDP = "actor_rollout_ref.actor.strategy=fsdp"

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 100}
GQA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 100,
}  # fmt: skip
PHI = GQA | {"model_type": "phi", "num_key_value_heads": 4}
OPT = {
    "model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "vocab_size": 100, "word_embed_proj_dim": 32,
}  # fmt: skip
BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100}
FALCON = {
    "model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "multi_query": True, "new_decoder_architecture": False, "max_position_embeddings": 64, "ffn_hidden_size": 128,
}  # fmt: skip
GEMMA4 = GQA | {
    "model_type": "gemma4_text", "num_hidden_layers": 5, "num_kv_shared_layers": 3, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"],
    "head_dim": 12, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
}  # fmt: skip
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 64}


def family(model_type: str, **changes: Any) -> dict[str, Any]:
    return GQA | {"model_type": model_type} | changes


def write(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def config_of(folder: Path, *overrides: str) -> Any:
    lengths = ("data.max_prompt_length=16", "data.max_response_length=16")
    return base_config(FSDP, "trainer.device=cpu", *lengths, f"actor_rollout_ref.model.path={folder}", *overrides)


def dims(**values: int) -> dict[str, int]:
    """Return the dimensions that most of the models have in common, with changes."""
    return {
        "layers": 2, "hidden": 32, "ffn": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab_size": 100,
        "max_positions": 64, "cached_layers": 2, "window": 0,
    } | values  # fmt: skip


class TestReadCausalLMDims:
    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (GPT2, dims(ffn=0, kv_heads=4)),
            (OPT, dims(kv_heads=4)),
            (PHI, dims(kv_heads=4)),
            (family("gemma", head_dim=12), dims(head_dim=12)),
            (family("gemma2", head_dim=12, sliding_window=16), dims(head_dim=12, window=16, cached_layers=1)),
            (family("olmo"), dims()),
            (family("mistral", sliding_window=None, head_dim=None), dims()),
            (family("mistral", sliding_window=16), dims(window=16, cached_layers=0)),
            (family("qwen2", sliding_window=16, use_sliding_window=False), dims()),
            (BLOOM, dims(ffn=0, kv_heads=4, max_positions=MAX_INT32)),
            (FALCON, dims(ffn=128, kv_heads=1)),
            (
                MAMBA,
                dims(ffn=64, heads=0, kv_heads=0, head_dim=0, max_positions=MAX_INT32, cached_layers=0),
            ),
            (
                {"model_type": "gemma3", "text_config": family("gemma3_text", head_dim=12, sliding_window=16)},
                dims(head_dim=12, window=16, cached_layers=0),
            ),
            (GEMMA4, dims(layers=5, kv_heads=1, head_dim=24, window=16, cached_layers=1)),
        ],
        ids=lambda given: given.get("model_type", "dims"),
    )
    def test_dims_of_architecture(self, content: dict[str, Any], expected: dict[str, int], tmp_path: Path) -> None:
        found = read_causal_lm_dims(write(tmp_path, content))
        assert {name: getattr(found, name) for name in expected} == expected
        assert found.n_cached_layers() == expected["cached_layers"] and found.moe is None

    @pytest.mark.parametrize(
        ("content", "name"),
        [
            ({"model_type": "hrm_text"}, "model_type"),
            ({"model_type": "t5"}, "model_type"),
            (
                {
                    "model_type": "qwen3_5",
                    "architectures": ["Qwen3_5ForConditionalGeneration"],
                    "text_config": family("qwen3_5_text", layer_types=["linear_attention", "full_attention"]),
                },
                "architectures",
            ),
            ({"model_type": "bart"}, "model_type"),
            ({"model_type": "vit"}, "model_type"),
            (family("llama", quantization_config={"quant_method": "gptq", "bits": 4}), "quantization_config"),
            (
                {"model_type": "gemma3", "text_config": family("x", quantization_config={"quant_method": "awq"})},
                "quantization_config",
            ),
        ],
    )
    def test_unsupported_model_raises(self, content: Any, name: str, tmp_path: Path) -> None:
        with raises(ModelError, path=tmp_path, names=(name,)):
            read_causal_lm_dims(write(tmp_path, content))

    @pytest.mark.parametrize("content", [{"model_type": "unknown"}, family("llama", hidden_size="wide"), []])
    def test_config_that_transformers_rejects_raises(self, content: Any, tmp_path: Path) -> None:
        with raises(ModelError, path=tmp_path / "config.json", names=()):
            read_causal_lm_dims(write(tmp_path, content))

    def test_folder_without_config_raises(self, tmp_path: Path) -> None:
        with raises(ModelError, path=tmp_path / "config.json"):
            read_causal_lm_dims(tmp_path)

    def test_model_with_own_code_needs_permission(self, tmp_path: Path) -> None:
        content = GQA | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Lm"}}
        (write(tmp_path, content) / "own.py").write_text(
            "from transformers import PretrainedConfig\nclass Own(PretrainedConfig):\n    model_type = 'own'\n"
        )
        assert read_causal_lm_dims(tmp_path, trust_remote_code=True).heads == 4
        with raises(ModelError, path=tmp_path / "config.json"):
            read_causal_lm_dims(tmp_path)

    def test_import_imports_no_torch(self) -> None:
        module = "recipe_gkd.actor.fsdp.model_dims"
        program = f"import sys; import {module}; sys.exit(bool({{'megatron', 'torch'}} & set(sys.modules)))"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def count_weights(folder: Path) -> tuple[int, int, int]:
    """Return the numbers of weights in linear layers, routers and experts, without the output layer."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    assert head.weight.shape == (config.get_text_config().vocab_size, config.get_text_config().hidden_size)
    n_linear = n_routers = n_experts = 0
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            n_linear += part.weight.numel() if part is not head else 0
        elif type(part).__name__.endswith("Experts"):
            n_experts += sum(weight.numel() for weight in part.parameters() if weight.ndim == 3)
        elif type(part).__name__.endswith("Router"):
            n_routers += part.weight.numel()
    return n_linear, n_routers, n_experts


class TestFlopsProblem:
    @pytest.mark.parametrize("model_type", sorted(GATED_FAMILIES))
    def test_gated_family_has_the_matrix_products_that_are_counted(self, model_type: str, tmp_path: Path) -> None:
        folder = write(tmp_path, family(model_type, head_dim=12, pad_token_id=0))
        found = read_causal_lm_dims(folder)
        n_linear, n_routers, n_experts = count_weights(folder)
        assert token_flops(found) == 2 * n_linear and n_routers == n_experts == 0
        assert found.flops_problem() is None

    @pytest.mark.parametrize("model_type", sorted(MIXTURES))
    def test_mixture_has_the_matrix_products_of_active_experts(self, model_type: str, tmp_path: Path) -> None:
        folder = write(tmp_path, dict(BY_TYPE[model_type].config) | {"model_type": model_type})
        found = read_causal_lm_dims(folder)
        assert found.moe is not None and found.moe.top_k < found.moe.experts
        n_linear, n_routers, n_experts = count_weights(folder)
        active = n_experts * found.moe.top_k // found.moe.experts
        assert token_flops(found) == 2 * (n_linear + n_routers + active)
        assert found.flops_problem() is None

    @pytest.mark.parametrize("model_type", sorted(MIXTURES.keys() & FAMILIES.keys()))
    def test_flops_of_a_mixture_are_those_of_the_other_backend(self, model_type: str, tmp_path: Path) -> None:
        folder = write(tmp_path, dict(BY_TYPE[model_type].config) | {"model_type": model_type})
        for lengths, n_rows in (([5, 3], 4), ([], 7)):
            found = forward_flops(read_causal_lm_dims(folder), lengths, n_rows)
            assert found == forward_flops(read_model_dims(folder), lengths, n_rows)

    def test_flops_of_a_mixture_equal_the_operations_of_transformers(self, tmp_path: Path) -> None:
        """PyTorch computes the scores of all pairs of a sequence, this project counts those of the causal mask."""
        import transformers

        folder = write(tmp_path, dict(BY_TYPE["qwen3_moe"].config) | {"model_type": "qwen3_moe"})
        found, n = read_causal_lm_dims(folder), 6
        config = transformers.AutoConfig.from_pretrained(folder)
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
        with FlopCounterMode(display=False) as counter:
            model(input_ids=torch.arange(n)[None], use_cache=False)
        n_masked_pairs = n * n - n * (n + 1) // 2
        masked = 4 * found.heads * found.head_dim * n_masked_pairs * found.layers
        assert counter.get_total_flops() - masked == forward_flops(found, [n], n)

    def test_other_layers_are_named(self, tmp_path: Path) -> None:
        assert read_causal_lm_dims(write(tmp_path, GPT2)).flops_problem() == "the FLOPs of a 'gpt2' model are unknown"

    def test_pairs_outside_of_windows_are_not_counted(self, tmp_path: Path) -> None:
        # Of 17 tokens, only the last one is too far from the first for a window of 16.
        whole, windowed = (
            read_causal_lm_dims(write(tmp_path, family("mistral", sliding_window=window))) for window in (None, 16)
        )
        assert forward_flops(whole, [16], 0) == forward_flops(windowed, [16], 0)
        of_pair = 4 * whole.heads * whole.head_dim
        assert forward_flops(whole, [17], 0) - forward_flops(windowed, [17], 0) == whole.layers * of_pair
        assert windowed.flops_problem() is None


class TestDriver:
    def test_strategy_selects_the_supported_models(self, tmp_path: Path) -> None:
        folder = write(tmp_path, GPT2)
        assert isinstance(read_student_dims(folder, config_of(folder)), CausalLMDims)
        megatron = base_config(f"actor_rollout_ref.model.path={folder}")
        with raises(ModelError, path=folder, names=("model_type",)):
            read_student_dims(folder, megatron)

    @pytest.mark.parametrize(
        ("overrides", "key"),
        [
            ([f"{ROLLOUT}.max_model_len=65"], "max_model_len"),
            ([f"{ROLLOUT}.tensor_model_parallel_size=3", "rollout.n_gpus_per_node=3"], "tensor_model_parallel_size"),
        ],
    )
    def test_read_student_checks_engine(self, overrides: list[str], key: str, tmp_path: Path) -> None:
        folder = write(tmp_path, GPT2)
        with raises(ConfigError, keys=(f"{ROLLOUT}.{key}",)):
            read_student(config_of(folder, *overrides))

    def test_read_student_checks_lengths(self, tmp_path: Path) -> None:
        folder = write(tmp_path, GPT2)
        with raises(ConfigError, keys=("data.max_prompt_length", "data.max_response_length")):
            read_student(config_of(folder, "data.max_prompt_length=60"))

    def test_read_student_does_not_check_the_layout_of_megatron(self, tmp_path: Path) -> None:
        folder = write(tmp_path, GPT2)
        with raises(ModelError, path=folder, names=("model.safetensors", INDEX_NAME)):  # the next check
            read_student(config_of(folder))

    @pytest.mark.parametrize(
        ("content", "fits"),
        [(MAMBA, True), (family("mistral", sliding_window=16), True), (GPT2, False), (family("mistral"), False)],
        ids=["mamba", "mistral_window", "gpt2", "mistral"],
    )
    def test_cache_is_checked_for_layers_that_keep_all_tokens(
        self, content: dict[str, Any], fits: bool, tmp_path: Path
    ) -> None:
        sizes = {"n_positions" if content is GPT2 else "max_position_embeddings": 1 << 20}
        found = read_causal_lm_dims(write(tmp_path, {"sliding_window": None} | content | sizes))
        config = config_of(tmp_path, "data.max_response_length=10000", f"{ROLLOUT}.kv_cache_memory_megabytes=1")
        if fits:
            check_engine_fits(found, config)
        else:
            with raises(ConfigError, keys=(f"{ROLLOUT}.kv_cache_memory_megabytes",)):
                check_engine_fits(found, config)
