"""Dimensions of a model folder, and parallel layouts that do not divide them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.actor.megatron.model_dims import ensure_heads_fit_context, ensure_layout_fits, read_model_dims
from recipe_gkd.errors import ConfigError, ModelError
from recipe_gkd.preflight import read_student
from tests._support.layouts import CP2, EP2, ETP1, OVERRIDE, PP2, TP2, VPP2
from tests._support.tiny_models import MEGATRON, make_config, make_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of tiny models, by kind."""
    base = tmp_path_factory.mktemp("models")
    return {kind: make_folder(base / kind, kind) for kind in ("qwen2", "llama", "qwen3_moe", "mixtral")}


class TestReadModelDims:
    def test_import_of_model_dims_imports_no_megatron(self) -> None:
        module = "recipe_gkd.actor.megatron.model_dims"
        program = f"import sys; import {module}; sys.exit(bool({{'megatron', 'torch'}} & set(sys.modules)))"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"model_type": "gpt2"}, "is a 'gpt2' model; the actor supports: qwen2, qwen3, llama"),
            ({"model_type": "unknown"}, "is a 'unknown' model; the actor supports: qwen2, qwen3, llama"),
            ({"hidden_size": "wide"}, "config.json cannot be read .*'hidden_size' expected int"),
            ({"hidden_act": "gelu"}, "hidden_act=gelu"),
            ({"use_sliding_window": True}, "use_sliding_window=True"),
            ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rotary scaling .*yarn"),
            (
                {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
                r"partial_rotary_factor=0\.5",
            ),
        ],
    )
    def test_read_model_dims_of_unsupported_model_raises(
        self, changes: dict[str, object], expected: str, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        config = json.loads((folders["qwen2"] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ModelError, match=expected):
            read_model_dims(tmp_path)

    def test_read_model_dims_without_config_raises(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"no config.json in .*; actor_rollout_ref.model.path must be"):
            read_model_dims(tmp_path)

    @pytest.mark.parametrize(
        "change", [{"num_experts_per_tok": 1}, {"sliding_window": 64}, {"router_jitter_noise": 0.1}]
    )
    def test_read_model_dims_with_unsupported_routing_raises(
        self, change: dict[str, float], folders: dict[str, Path], tmp_path: Path
    ) -> None:
        config = json.loads((folders["mixtral"] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=f"{next(iter(change))}=.* in config.json is not supported for a mixtral"):
            read_model_dims(tmp_path)


class TestEnsureLayoutFits:
    def test_indivisible_layout_raises(self, folders: dict[str, Path]) -> None:
        def check(*overrides: str, ranks: int) -> None:
            config = make_config(folders["llama"], *overrides, ranks=ranks)
            ensure_layout_fits(read_model_dims(folders["llama"]), config.actor_rollout_ref.actor.megatron)

        check(TP2, PP2, VPP2, ranks=4)
        with pytest.raises(ConfigError, match="must divide the model's 4 heads, 2 key/value heads"):
            check(TP2.replace("=2", "=4"), ranks=4)
        with pytest.raises(ConfigError, match="4 layers cannot be divided equally into 3 pipeline stages"):
            check(PP2.replace("=2", "=3"), ranks=3)
        with pytest.raises(ConfigError, match="cannot be divided equally"):
            check(PP2.replace("=2", "=3"), f"+{OVERRIDE}.recompute_granularity=selective", ranks=3)
        check(PP2.replace("=2", "=3"), f"+{OVERRIDE}.num_layers_in_last_pipeline_stage=2", ranks=3)

    def test_indivisible_heads_of_context_ranks_raises(self, folders: dict[str, Path]) -> None:
        def check(cp: int, *overrides: str, ranks: int) -> None:
            config = make_config(folders["llama"], CP2.replace("=2", f"={cp}"), *overrides, ranks=ranks)
            ensure_heads_fit_context(read_model_dims(folders["llama"]), config.actor_rollout_ref.actor.megatron)

        check(2, ranks=2)
        check(4, ranks=4)  # the 2 key/value heads are copied
        check(2, TP2, ranks=4)
        with pytest.raises(ConfigError, match="context_parallel_size is 3; it must divide the 4 heads of a tensor-par"):
            check(3, ranks=3)
        with pytest.raises(ConfigError, match="context_parallel_size is 4; it must divide the 2 heads of a tensor-par"):
            check(4, TP2, ranks=8)

    @pytest.mark.parametrize(
        ("device", "impl", "error", "message"),
        [
            ("cpu", "auto", ConfigError, "context_parallel_size is 3"),
            ("cuda", "local", ConfigError, "context_parallel_size is 3"),
            ("cuda", "auto", ModelError, "tokenizer"),  # the next check: the worker checks the heads
        ],
    )
    def test_driver_checks_heads_of_context_ranks_if_they_are_exchanged_for_sure(
        self, device: str, impl: str, error: type[Exception], message: str, folders: dict[str, Path]
    ) -> None:
        config = make_config(
            folders["llama"], CP2.replace("=2", "=3"), f"trainer.device={device}",
            f"{MEGATRON}.transformer_impl={impl}",
            "data.max_prompt_length=16", "data.max_response_length=16", ranks=3,
        )  # fmt: skip
        with pytest.raises(error, match=message):
            read_student(config)

    @pytest.mark.parametrize(
        ("kind", "ranks", "overrides", "message"),
        [
            ("qwen2", 2, [EP2], "expert_model_parallel_size=2, .*the student has no experts; set them to 1 and null"),
            (
                "qwen3_moe",
                3,
                [EP2.replace("=2", "=3")],
                "expert_model_parallel_size is 3; it must divide the model's",
            ),
            ("qwen3_moe", 3, [ETP1.replace("=1", "=3")], "expert_tensor_parallel_size is 3; it must divide the 20 f"),
            ("qwen3_moe", 2, [TP2], "tensor_model_parallel_size=2 without sequence_parallel: .*set .*sequence_paral"),
            ("qwen3_moe", 4, [PP2.replace("=2", "=4")], "pipeline rank 1 would have dense layers only"),
        ],
    )
    def test_indivisible_experts_raises(
        self, kind: str, ranks: int, overrides: list[str], message: str, folders: dict[str, Path]
    ) -> None:
        config: Any = make_config(folders[kind], *overrides, ranks=ranks)
        with pytest.raises(ConfigError, match=message):
            ensure_layout_fits(read_model_dims(folders[kind]), config.actor_rollout_ref.actor.megatron)
