"""Engines and actor agree in every mode of training, so that the guard of the generating model never warns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from recipe_gkd.weight_sync.model_check import BOUND_FLOAT32_ON_CPU, SYNC_METRIC, UPDATE_METRIC
from tests._support.training_command import StartRun

pytestmark = pytest.mark.slow

ACTOR = "actor_rollout_ref.actor"
FSDP = (f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=float32")
TENSOR_2 = ("trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=2", "ray_init.num_cpus=4")
MODES = {
    "sync": ("trainer.scheduler=sync",),
    "two_step_off": ("trainer.scheduler=two_step_off",),
    "hybrid": ("trainer.scheduler=sync", "actor_rollout_ref.hybrid_engine=true"),
    "in flight": ("trainer.scheduler=one_step_off", "trainer.inflight_update=true", "data.max_response_length=32"),
    "FSDP": FSDP,
    "LoRA": (*FSDP, f"{ACTOR}.lora.rank=4"),
    "tensor parallel": (
        *TENSOR_2,
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ),
}


@pytest.fixture
def mixture(student: Path, tmp_path: Path) -> Path:
    """Folder of a mixture of experts with the tokenizer of the student."""
    folder, tokenizer = tmp_path / "mixture", AutoTokenizer.from_pretrained(student)
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def assert_models_agree(start_run: StartRun, *overrides: str, n_compared: int = 3) -> None:
    run = start_run("trainer.total_training_steps=4", "trainer.save_freq=-1", *overrides).finish()
    assert run.status == 0, run.output
    assert "another model than the actor" not in run.output
    found = [line[name] for line in run.metrics for name in (UPDATE_METRIC, SYNC_METRIC) if name in line]
    # The first step compares the weights of the folder; the others those that training has changed.
    assert len(found) >= n_compared and max(found) < BOUND_FLOAT32_ON_CPU / 50, found
    assert all(line["actor/grad_norm"] > 1e-3 for line in run.metrics)
    assert run.leftovers() == []


@pytest.mark.parametrize("mode", MODES)
def test_engines_agree_with_the_actor(start_run: StartRun, mode: str) -> None:
    # In flight, a step compares tokens only if responses end with the newest weights.
    assert_models_agree(start_run, *MODES[mode], n_compared=2 if mode == "in flight" else 3)


def test_engines_agree_with_a_mixture_of_experts(start_run: StartRun, mixture: Path) -> None:
    assert_models_agree(start_run, f"actor_rollout_ref.model.path={mixture}")
