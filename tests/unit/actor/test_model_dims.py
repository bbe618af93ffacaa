"""Dimensions of a model folder, and parallel layouts that do not divide them."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.actor.megatron.families.reading import read_model_dims
from recipe_gkd.actor.megatron.layout_checks import ensure_heads_fit_context, ensure_layout_fits
from recipe_gkd.actor.megatron.model import check_overrides
from recipe_gkd.errors import ConfigError, ModelError
from recipe_gkd.preflight import read_student
from tests._support.errors import raises
from tests._support.families import BY_TYPE, make_family_folder
from tests._support.layouts import CP2, EP2, ETP1, OVERRIDE, PP2, SP, TP2, VPP2
from tests._support.tiny_models import MEGATRON, make_config, make_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of tiny models, by kind."""
    base = tmp_path_factory.mktemp("models")
    gpt_oss = make_family_folder(base / "gpt_oss", BY_TYPE["gpt_oss"])
    return {kind: make_folder(base / kind, kind) for kind in ("qwen2", "llama", "qwen3_moe", "mixtral")} | {
        "gpt_oss": gpt_oss
    }


class TestReadModelDims:
    def test_import_of_model_dims_imports_no_megatron(self) -> None:
        module = "recipe_gkd.actor.megatron.model_dims"
        program = f"import sys; import {module}; sys.exit(bool({{'megatron', 'torch'}} & set(sys.modules)))"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"model_type": "gpt2"}, "model_type"),
            ({"model_type": "unknown"}, "model_type"),
            ({"hidden_act": "gelu"}, "hidden_act"),
            ({"use_sliding_window": True}, "use_sliding_window"),
            ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
            ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "rope_parameters"),
            (
                {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "new": 1}},
                "rope_parameters",
            ),
        ],
    )
    def test_read_model_dims_of_unsupported_model_raises(
        self, changes: dict[str, object], expected: str, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        config = json.loads((folders["qwen2"] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with raises(ModelError, path=tmp_path, names=(expected,)):
            read_model_dims(tmp_path)

    def test_read_model_dims_of_value_with_wrong_type_raises(self, folders: dict[str, Path], tmp_path: Path) -> None:
        config = json.loads((folders["qwen2"] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
        with raises(ModelError, path=tmp_path / "config.json"):
            read_model_dims(tmp_path)

    def test_read_model_dims_without_config_raises(self, tmp_path: Path) -> None:
        with raises(ModelError, path=tmp_path / "config.json"):
            read_model_dims(tmp_path)

    @pytest.mark.parametrize("change", [{"num_experts_per_tok": 1}, {"router_jitter_noise": 0.1}])
    def test_read_model_dims_with_unsupported_routing_raises(
        self, change: dict[str, float], folders: dict[str, Path], tmp_path: Path
    ) -> None:
        config = json.loads((folders["mixtral"] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with raises(ModelError, path=tmp_path, names=tuple(change)):
            read_model_dims(tmp_path)


def keys(*names: str) -> tuple[str, ...]:
    return tuple(f"{MEGATRON}.{name}" for name in names)


CONTEXT_KEYS = keys("context_parallel_size", "tensor_model_parallel_size")


class TestEnsureLayoutFits:
    def test_indivisible_layout_raises(self, folders: dict[str, Path]) -> None:
        def check(*overrides: str, ranks: int) -> None:
            config = make_config(folders["llama"], *overrides, ranks=ranks)
            ensure_layout_fits(read_model_dims(folders["llama"]), config.actor_rollout_ref.actor.megatron)

        check(TP2, PP2, VPP2, ranks=4)
        with raises(ConfigError, keys=keys("tensor_model_parallel_size")):
            check(TP2.replace("=2", "=4"), ranks=4)
        stages = keys("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
        with raises(ConfigError, keys=stages):
            check(PP2.replace("=2", "=3"), ranks=3)
        with raises(ConfigError, keys=stages):
            check(PP2.replace("=2", "=3"), f"+{OVERRIDE}.recompute_granularity=selective", ranks=3)
        check(PP2.replace("=2", "=3"), f"+{OVERRIDE}.num_layers_in_last_pipeline_stage=2", ranks=3)

    def test_indivisible_heads_of_context_ranks_raises(self, folders: dict[str, Path]) -> None:
        def check(cp: int, *overrides: str, ranks: int) -> None:
            config = make_config(folders["llama"], CP2.replace("=2", f"={cp}"), *overrides, ranks=ranks)
            ensure_heads_fit_context(read_model_dims(folders["llama"]), config.actor_rollout_ref.actor.megatron)

        check(2, ranks=2)
        check(4, ranks=4)  # the 2 key/value heads are copied
        check(2, TP2, ranks=4)
        with raises(ConfigError, keys=CONTEXT_KEYS):
            check(3, ranks=3)
        with raises(ConfigError, keys=CONTEXT_KEYS):
            check(4, TP2, ranks=8)

    @pytest.mark.parametrize(
        ("device", "impl", "is_refused"),
        [
            ("cpu", "auto", True),
            ("cuda", "local", True),
            ("cuda", "auto", False),  # the worker checks the heads
        ],
    )
    def test_driver_checks_heads_of_context_ranks_if_they_are_exchanged_for_sure(
        self, device: str, impl: str, is_refused: bool, folders: dict[str, Path]
    ) -> None:
        config = make_config(
            folders["llama"], CP2.replace("=2", "=3"), f"trainer.device={device}",
            f"{MEGATRON}.transformer_impl={impl}",
            "data.max_prompt_length=16", "data.max_response_length=16", ranks=3,
        )  # fmt: skip
        refusal = raises(ConfigError, keys=CONTEXT_KEYS)
        next_check = raises(ModelError, path=folders["llama"])
        with refusal if is_refused else next_check:
            read_student(config)

    @pytest.mark.parametrize(
        ("kind", "ranks", "overrides", "names"),
        [
            ("qwen2", 2, [EP2], ["expert_model_parallel_size", "expert_tensor_parallel_size"]),
            ("qwen3_moe", 3, [EP2.replace("=2", "=3")], ["expert_model_parallel_size"]),
            ("qwen3_moe", 3, [ETP1.replace("=1", "=3")], ["expert_tensor_parallel_size"]),
            ("gpt_oss", 2, [TP2, SP], ["expert_tensor_parallel_size"]),  # their biases are not divided
            ("qwen3_moe", 2, [TP2], ["sequence_parallel", "tensor_model_parallel_size"]),
            ("qwen3_moe", 4, [PP2.replace("=2", "=4")], ["pipeline_model_parallel_size"]),
        ],
    )
    def test_indivisible_experts_raises(
        self, kind: str, ranks: int, overrides: list[str], names: list[str], folders: dict[str, Path]
    ) -> None:
        config: Any = make_config(folders[kind], *overrides, ranks=ranks)
        with raises(ConfigError, keys=keys(*names)):
            ensure_layout_fits(read_model_dims(folders[kind]), config.actor_rollout_ref.actor.megatron)

    @pytest.mark.parametrize(
        ("stages", "overrides", "is_refused"),
        [
            (3, ["num_layers_in_first_pipeline_stage=1", "num_layers_in_last_pipeline_stage=2"], True),  # 0 | 1 | 2 3
            (3, ["num_layers_in_last_pipeline_stage=2"], True),
            (2, ["num_layers_in_first_pipeline_stage=3"], False),
            (3, ["pipeline_model_parallel_layout='Et|t|ttL'"], True),
            (3, ["pipeline_model_parallel_layout='Et|tt|tL'"], False),
            (2, ["pipeline_model_parallel_layout='E|t|t|ttL'"], True),  # 1 | 0 2 3, in two virtual stages
            (3, ["account_for_embedding_in_pipeline_split=true", "account_for_loss_in_pipeline_split=true"], False),
            (5, ["account_for_embedding_in_pipeline_split=true"], True),  # the first rank has the embedding only
        ],
    )
    def test_unequal_stage_without_experts_raises(
        self, stages: int, overrides: list[str], is_refused: bool, folders: dict[str, Path]
    ) -> None:
        """Layer 1 of the 4 layers is dense."""
        keys_of_layout = [PP2.replace("=2", f"={stages}"), *(f"+{OVERRIDE}.{override}" for override in overrides)]
        config: Any = make_config(folders["qwen3_moe"], *keys_of_layout, ranks=stages)
        dims, megatron = read_model_dims(folders["qwen3_moe"]), config.actor_rollout_ref.actor.megatron
        ensure_layout_fits(dims, megatron)
        with raises(ConfigError, keys=keys("pipeline_model_parallel_size")) if is_refused else nullcontext():
            check_overrides(dims, megatron, "cpu")
