"""Mixtures of experts: on any layout, training and the exported weights are those of a plain program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from recipe_gkd.actor.model_dims import check_fits, read_model_dims
from recipe_gkd.errors import ConfigError, ModelError
from tests._support.tiny_models import MEGATRON, make_config
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.test_checkpoint import FIRST, SECOND
from tests.integration.actor.test_layouts import (
    BATCHES,
    PLAIN_OPTIMIZER,
    PP2,
    SP,
    TP2,
    VPP2,
    assert_metrics,
    assert_weights,
    reference,
)

pytestmark = pytest.mark.timeout(150)

EP2 = f"{MEGATRON}.expert_model_parallel_size=2"
ETP1 = f"{MEGATRON}.expert_tensor_parallel_size=1"
OVERRIDE = f"{MEGATRON}.override_transformer_config"
BF16 = f"{MEGATRON}.dtype=bfloat16"

LAYOUTS: dict[str, tuple[str, int, list[str]]] = {
    "one process": ("qwen3_moe", 1, []),
    "one process, a shared expert": ("qwen2_moe", 1, []),
    "expert 2": ("qwen3_moe", 2, [EP2]),
    "expert 2, plain optimizer, mixtral": ("mixtral", 2, [EP2, PLAIN_OPTIMIZER]),
    "tensor 2 of each expert": ("qwen3_moe", 2, [TP2, SP]),
    "tensor 2, all experts whole on both": ("qwen3_moe", 2, [TP2, SP, ETP1]),
    "tensor 2, half of the experts on each, a shared expert": ("qwen2_moe", 2, [TP2, SP, ETP1, EP2]),
    "tensor 2 x expert 2": ("qwen3_moe", 4, [TP2, SP, EP2]),
    "pipeline 2 x expert 2": ("qwen3_moe", 4, [PP2, EP2]),
    "pipeline 2, interleaved, x expert 2": ("qwen3_moe", 4, [PP2, VPP2, EP2]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_of_experts_trains_as_a_plain_program_does_and_exports_every_expert(
    name: str, pool: WorkerPool, folders: dict[str, Path]
) -> None:
    """Weights as they were loaded; logits of packed sequences; loss, norm of the gradient, weights of two updates."""
    kind, ranks, overrides = LAYOUTS[name]
    want_metrics, want_weights, want_logits = reference(folders[kind])
    results = pool.run(ranks, jobs.export_and_train, make_config(folders[kind], *overrides, ranks=ranks), BATCHES)

    loaded, _, _, weights, meta = results[0]
    assert [(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in loaded.items()] == meta
    assert not any(before or after for before, _, _, after, _ in results[1:]), "only rank 0 may be given weights"
    in_file = load_file(folders[kind] / "model.safetensors")
    assert loaded.keys() == in_file.keys() and sum(".experts.3." in name for name in loaded) >= 9
    assert all(torch.equal(tensor, in_file[name]) for name, tensor in loaded.items())

    last_stages = [logits for _, logits, *_ in results if logits is not None]
    assert last_stages
    for logits in last_stages:
        torch.testing.assert_close(logits[: len(want_logits)], want_logits, rtol=0, atol=1e-5)
    for _, _, metrics, _, _ in results:
        assert_metrics(metrics, want_metrics)
    assert_weights(weights, want_weights)


def test_bfloat16_routes_in_float32_and_exports_bfloat16(pool: WorkerPool, folders: dict[str, Path]) -> None:
    want_metrics, _, _ = reference(folders["qwen3_moe"])
    config = make_config(folders["qwen3_moe"], TP2, SP, EP2, ETP1, BF16, ranks=2)
    _, metrics, weights, meta = pool.run(2, jobs.train, config, BATCHES)[0]
    assert {dtype for _, _, dtype in meta} == {"bfloat16"} == {str(t.dtype)[6:] for t in weights.values()}
    for one, other in zip(metrics, want_metrics, strict=True):
        assert one["actor/kl_loss"] == pytest.approx(other["actor/kl_loss"], rel=2e-2)
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=5e-2)


def test_experts_are_balanced_only_on_request(pool: WorkerPool, folders: dict[str, Path]) -> None:
    """The loss that is reported stays the divergence; the gradient is another."""
    want_metrics, _, _ = reference(folders["qwen3_moe"])
    config = make_config(folders["qwen3_moe"], EP2, f"{OVERRIDE}.moe_aux_loss_coeff=0.5", ranks=2)
    _, metrics, _, _ = pool.run(2, jobs.train, config, BATCHES)[0]
    assert metrics[0]["actor/kl_loss"] == pytest.approx(want_metrics[0]["actor/kl_loss"], rel=1e-5)
    assert metrics[0]["actor/grad_norm"] != pytest.approx(want_metrics[0]["actor/grad_norm"], rel=1e-2)


@pytest.mark.parametrize(
    ("saved", "then"),
    [
        pytest.param([EP2], [([EP2], 2), ([], 1), ([TP2, SP, EP2, ETP1], 2)], id="expert 2"),
        pytest.param([PP2], [([EP2], 2)], id="pipeline 2"),
    ],
)
def test_mixture_resumed_in_any_layout_takes_the_same_next_step(
    saved: list[str], then: list[tuple[list[str], int]], pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = make_config(folders["qwen3_moe"], *saved, ranks=2)
    want_metrics, want_weights = pool.run(2, jobs.train_and_save, config, FIRST, SECOND, tmp_path / "ckpt")[0]
    for resumed, ranks in then:
        config = make_config(folders["qwen3_moe"], *resumed, ranks=ranks)
        step, metrics, weights = pool.run(ranks, jobs.resume_and_train, config, tmp_path / "ckpt", SECOND)[0]
        exactly = resumed == saved
        assert step == 1
        for key in ("actor/kl_loss", "actor/grad_norm"):
            assert metrics[key] == pytest.approx(want_metrics[key], rel=0 if exactly else 1e-5), (key, resumed)
        for name, tensor in weights.items():
            assert (tensor - want_weights[name]).abs().max() <= (0 if exactly else 1e-5), (name, resumed)


def test_saved_mixture_loads_in_transformers_with_the_logits_of_the_actor(
    pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = make_config(folders["qwen3_moe"], EP2, ranks=2)
    logits = next(x for x in pool.run(2, jobs.save_hf, config, FIRST, tmp_path / "saved") if x is not None)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    want = jobs.transformers_rows(model, FIRST)
    torch.testing.assert_close(logits[: len(want)], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "ranks", "overrides", "message"),
    [
        ("qwen2", 2, [EP2], "expert_model_parallel_size=2, .*the student has no experts to divide; set 1 and null"),
        ("qwen3_moe", 3, [EP2.replace("=2", "=3")], "expert_model_parallel_size is 3; it must divide the model's 4"),
        ("qwen3_moe", 3, [ETP1.replace("=1", "=3")], "expert_tensor_parallel_size is 3; it must divide the 20 feed-"),
        ("qwen3_moe", 2, [TP2], "tensor_model_parallel_size=2 without sequence_parallel: .*set .*sequence_parallel=tr"),
        ("qwen3_moe", 4, [PP2.replace("=2", "=4")], "pipeline rank 1 would have dense layers only"),
    ],
)
def test_layouts_that_do_not_divide_the_experts_are_refused(
    kind: str, ranks: int, overrides: list[str], message: str, folders: dict[str, Path]
) -> None:
    config: Any = make_config(folders[kind], *overrides, ranks=ranks)
    with pytest.raises(ConfigError, match=message):
        check_fits(read_model_dims(folders[kind]), config.actor_rollout_ref.actor.megatron)


@pytest.mark.parametrize("change", [{"num_experts_per_tok": 1}, {"sliding_window": 64}, {"router_jitter_noise": 0.1}])
def test_routing_that_megatron_has_not_is_refused(
    change: dict[str, float], folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders["mixtral"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=f"{next(iter(change))}=.* in config.json is not supported for a mixtral"):
        read_model_dims(tmp_path)
