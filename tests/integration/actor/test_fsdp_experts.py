"""Mixtures of experts on FSDP: training, export and saved folders of each family that transformers has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests._support.tiny_models import (
    ACTOR,
    VOCAB,
    make_config,
    make_samples,
    with_turns,
)
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs, save_jobs
from tests.integration.actor.reference import assert_metrics, assert_weights, reference_training

FSDP = [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=float32"]
BATCHES = [make_samples(9, seed=0), with_turns(make_samples(9, seed=1)), make_samples(9, seed=2)]
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, dtype="float32",
    num_experts_per_tok=2, pad_token_id=None, eos_token_id=1, bos_token_id=0,
)  # fmt: skip
NARROW = dict(moe_intermediate_size=20)
ROUTED = dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1)
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, n_group=2,
    topk_group=1,
)  # fmt: skip
CONFIGS = {
    "qwen2_moe": SIZES | NARROW | dict(num_experts=4, shared_expert_intermediate_size=24),
    "qwen3_moe": SIZES | NARROW | dict(num_experts=4, head_dim=12, mlp_only_layers=[1]),
    "mixtral": SIZES | dict(num_local_experts=4),
    "olmoe": SIZES | dict(num_experts=4),
    "gpt_oss": SIZES
    | dict(
        num_local_experts=4, head_dim=8, sliding_window=6, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    ),
    "glm4_moe": SIZES
    | NARROW
    | ROUTED
    | dict(head_dim=8, n_group=1, topk_group=1, partial_rotary_factor=0.5, use_qk_norm=True),
    "deepseek_v2": SIZES | NARROW | ROUTED | LATENT | dict(q_lora_rank=None, topk_method="group_limited_greedy"),
    "deepseek_v3": SIZES | NARROW | ROUTED | LATENT | dict(q_lora_rank=16, routed_scaling_factor=1.5),
}
DEFAULT = ("qwen3_moe", "gpt_oss", "glm4_moe")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny models with random weights, by ``model_type``."""
    base = tmp_path_factory.mktemp("experts")
    return {kind: make_folder(base / kind, kind) for kind in CONFIGS}


def make_folder(path: Path, kind: str) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **CONFIGS[kind]))
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if "norm" in name:
                tensor.copy_(1 + 0.1 * torch.randn_like(tensor))
            elif tensor.is_floating_point():  # also the correction of the router's scores, which is a buffer
                tensor.normal_(0, 0.1 if "bias" in name or "sinks" in name else 0.15)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in DEFAULT else [pytest.mark.slow]) for kind in CONFIGS]
)
def test_training_on_two_shards_equals_reference_and_exports_the_tensors_of_the_folder(
    kind: str, pool: WorkerPool, experts: dict[str, Path]
) -> None:
    want_metrics, want_weights = reference_training(experts[kind], BATCHES)
    results = pool.run(2, jobs.train_any, make_config(experts[kind], *FSDP, ranks=2), BATCHES)
    for result in results:
        assert_metrics(result.metrics, want_metrics, rel=1e-4)
    weights, meta = results[0].weights, results[0].meta
    assert weights.keys() == want_weights.keys()
    assert [(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in weights.items()] == meta
    assert_weights(weights, want_weights)


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_saved_folder_has_the_exported_weights_and_resumes(
    kind: str, pool: WorkerPool, experts: dict[str, Path], tmp_path: Path
) -> None:
    config, resumed = (make_config(experts[kind], *FSDP, ranks=ranks) for ranks in (2, 1))
    paths = tmp_path / "checkpoint", tmp_path / "saved"
    metrics, weights = pool.run(2, save_jobs.train_and_save, config, BATCHES[0], BATCHES[1], *paths)[0]
    saved = load_file(paths[1] / "model.safetensors")
    assert saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name]) for name in saved)
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(paths[1], output_loading_info=True)
    assert not any(loading.values()), loading
    step, again, after = pool.run(1, save_jobs.resume_and_train, resumed, paths[0], BATCHES[1])[0]
    assert step == 1 and again["actor/kl_loss"] == pytest.approx(metrics["actor/kl_loss"], rel=1e-5)
    assert_weights(after, {name: tensor.double() for name, tensor in weights.items()})
