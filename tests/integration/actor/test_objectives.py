"""Training with each objective and layout, compared with a plain float64 program."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipe_gkd.commands.gpu_smoke.reference import forward_kl_T
from recipe_gkd.data.samples import Sample, TeacherTopK
from tests._support import custom_losses
from tests._support.layouts import CP2, SP
from tests._support.tiny_models import ACTOR, MEGATRON, VOCAB, make_config, make_samples, with_turns, without_empty
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.plain_objectives import plain_objective
from tests.integration.actor.reference import reference_training
from tests.integration.actor.test_layouts import assert_metrics, assert_weights

SEQUENCE_MEAN = "gkd.loss_agg_mode=seq-mean-token-mean"
FUSED = "gkd.fuse_lm_head=true"
RL = ["gkd.use_rl_loss=true", "gkd.rl_loss_coef=0.7", "custom_reward_function.path=reward.py",
      "actor_rollout_ref.rollout.n=3"]  # fmt: skip
SFT = ["gkd.sft_share=0.3", "gkd.sft_loss_coef=0.5"]
CUSTOM = [f"gkd.custom_loss.path={custom_losses.__file__}", "gkd.custom_loss.name=forward_kl"]
OBJECTIVES: dict[str, list[str]] = {
    "reverse KL": ["gkd.distill_loss_type=reverse_kl"],
    "reverse KL, renormalized, mean of responses": ["gkd.distill_loss_type=reverse_kl", "gkd.tail=renormalize",
                                                    SEQUENCE_MEAN],
    "forward KL without the tail, chunks of 2": ["gkd.tail=none", "gkd.chunk_tokens=2"],
    "JSD at temperature 2, fused": ["gkd.distill_loss_type=jsd", "gkd.beta=0.3", "gkd.distill_temperature=2", FUSED],
    "mixture of KLs at temperature 0.7": ["gkd.distill_loss_type=kl_rkl", "gkd.distill_temperature=0.7"],
    "skewed forward KL": ["gkd.distill_loss_type=skewed_forward_kl"],
    "skewed reverse KL": ["gkd.distill_loss_type=skewed_reverse_kl"],
    "generalized reverse KL, clipped": ["gkd.distill_loss_type=reverse_kl", "gkd.tail=generalized",
                                        "gkd.token_clip=0.4"],
    "total variation": ["gkd.distill_loss_type=tvd"],
    "k1, truncated, expected baseline": ["gkd.distill_loss_type=k1", "gkd.importance_cap=1.2"],
    "k1, baseline of the group": ["gkd.distill_loss_type=k1", "gkd.baseline=group", RL[-1]],
    "k2, masked, fused": ["gkd.distill_loss_type=k2", "gkd.importance=mask", "gkd.importance_cap=1.5", FUSED],
    "k3": ["gkd.distill_loss_type=k3", "gkd.importance=none"],
    "reward and reference responses": [*RL, *SFT],
    "reward, reference responses, mean of responses, fused": [*RL, *SFT, SEQUENCE_MEAN, FUSED],
    "teacher on reference responses": ["gkd.sft_share=0.3", "gkd.sft_target=teacher", *RL],
    "reward alone": [*RL, "gkd.distill_loss_coef=0"],
    "custom forward KL": CUSTOM,
    "custom forward KL at temperature 2, fused": [*CUSTOM, "gkd.distill_temperature=2", FUSED],
}  # fmt: skip
TP2 = f"{MEGATRON}.tensor_model_parallel_size=2"
BY_SAMPLES = f"{ACTOR}.use_dynamic_bsz=false"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "1": (1, [BY_SAMPLES, f"{ACTOR}.micro_batch_size=1"]),
    "3": (1, [BY_SAMPLES, f"{ACTOR}.micro_batch_size=3"]),
    "dynamic, data 2": (2, []),
    "context 2": (2, [CP2]),
    "tensor 2, sequence parallel": (2, [TP2, f"{MEGATRON}.sequence_parallel=true"]),
    "tensor 2 x pipeline 2, interleaved, recomputed": (
        4,
        [
            TP2,
            f"{MEGATRON}.pipeline_model_parallel_size=2",
            f"{MEGATRON}.virtual_pipeline_model_parallel_size=2",
            f"{MEGATRON}.override_transformer_config.recompute_granularity=full",
            f"{MEGATRON}.override_transformer_config.recompute_method=uniform",
            f"{MEGATRON}.override_transformer_config.recompute_num_layers=1",
        ],
    ),
}  # fmt: skip
SEQUENCE_PARALLEL, INTERLEAVED = "tensor 2, sequence parallel", "tensor 2 x pipeline 2, interleaved, recomputed"
# Each objective is trained in one tensor-parallel layout and one other, and each layout with at least two objectives.
DEFAULT_LAYOUTS = ("3", SEQUENCE_PARALLEL)
OTHER_LAYOUTS = {
    "reverse KL, renormalized, mean of responses": ("dynamic, data 2", SEQUENCE_PARALLEL),
    "k1, baseline of the group": ("1", SEQUENCE_PARALLEL),
    "reward and reference responses": ("3", INTERLEAVED),
    "reward, reference responses, mean of responses, fused": ("context 2", INTERLEAVED),
    "k3": ("context 2", SEQUENCE_PARALLEL),
    "teacher on reference responses": ("1", SEQUENCE_PARALLEL),
    "custom forward KL": ("dynamic, data 2", INTERLEAVED),
}
SLOW = {
    "mixture of KLs at temperature 0.7", "skewed forward KL", "skewed reverse KL", "total variation",
    "k2, masked, fused", "custom forward KL at temperature 2, fused", "reward alone", "reverse KL",
    "reward and reference responses",
}  # fmt: skip
"""Objectives whose terms tests/unit/losses and tests/integration/losses compare, and whose paths another one takes."""


def make_batch(seed: int, *, reference: str = "", skipped: tuple[int, ...] = ()) -> list[Sample]:
    """Return samples with advantages, whose sampling weights are close to the student. Odd seeds give conversations.

    Args:
        seed: Seed of the random numbers.
        reference: ``gkd.sft_target`` of every third sample, which gets a reference response; "" for no such sample.
        skipped: Samples that the teacher failed to score.
    """
    rng = np.random.default_rng(seed)
    samples = []
    of_one_turn = make_samples(9, seed=seed)
    for number, sample in enumerate(with_turns(of_one_turn, seed=seed) if seed % 2 else of_one_turn):
        length = len(sample.response.ids)
        response = replace(sample.response, logprobs=rng.normal(-4.5, 0.4, length).astype(np.float32))
        teacher = replace(sample.teacher, sampled_logps_T=rng.normal(-4.5, 0.4, length).astype(np.float32))
        sample = replace(sample, response=response, teacher=teacher, advantage=rng.normal(), baseline=0.1, scale=1.3)
        if reference and number % 3 == 2:
            prompt = replace(sample.prompt, reference_ids=sample.response.ids)
            teacher = teacher if reference == "teacher" else TeacherTopK.absent(length)
            sample = replace(sample, prompt=prompt, teacher=teacher, advantage=0.0)
        if number in skipped:
            sample = replace(sample, teacher=TeacherTopK.absent(length), is_skipped=True)
        samples.append(sample)
    return samples


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in OBJECTIVES]
)
def test_training_equals_plain_program(name: str, pool: WorkerPool, folders: dict[str, Path]) -> None:
    overrides = OBJECTIVES[name]
    gkd = make_config(folders["qwen2"], *overrides).gkd
    batches = [make_batch(seed, reference=gkd.sft_target if gkd.sft_share else "") for seed in (0, 1)]
    expected = reference_training(folders["qwen2"], batches, partial(plain_objective, gkd))
    for ranks, layout in (LAYOUTS[key] for key in OTHER_LAYOUTS.get(name, DEFAULT_LAYOUTS)):
        config = make_config(folders["qwen2"], *overrides, *layout, ranks=ranks)
        results = pool.run(ranks, jobs.train, config, batches)
        for _, metrics, _, _ in results:
            assert_metrics(metrics, expected[0])
            if "custom" in name:
                assert all(one["actor/custom_kl"] == pytest.approx(one["actor/kl_loss"]) for one in metrics)
        assert_weights(results[0][2], expected[1])


SKIPPED = (1, 4, 8)  # two sampled responses and a reference response, all with tokens


@pytest.mark.parametrize(
    "name",
    [
        "teacher on reference responses",
        "reward, reference responses, mean of responses, fused",
        "reverse KL, renormalized, mean of responses",
        "k3",
    ],
)
def test_skipped_samples_have_no_distillation_loss(name: str, pool: WorkerPool, folders: dict[str, Path]) -> None:
    overrides = OBJECTIVES[name]
    gkd = make_config(folders["qwen2"], *overrides).gkd
    reference = gkd.sft_target if gkd.sft_share else ""
    batches = [make_batch(seed, reference=reference, skipped=SKIPPED) for seed in (0, 1)]
    assert all(len(samples[number].response.ids) for samples in batches for number in SKIPPED)
    expected = reference_training(folders["qwen2"], batches, partial(plain_objective, gkd))
    ranks, layout = LAYOUTS["dynamic, data 2"]
    results = pool.run(ranks, jobs.train, make_config(folders["qwen2"], *overrides, *layout, ranks=ranks), batches)
    assert_metrics(results[0][1], expected[0])
    assert_weights(results[0][2], expected[1])


@pytest.mark.parametrize("mode", ["token-mean", pytest.param("seq-mean-token-mean", marks=pytest.mark.slow)])
def test_positions_without_scores_have_no_distillation_loss(
    mode: str, pool: WorkerPool, folders: dict[str, Path]
) -> None:
    """``gkd.max_loss_position``: the mean is over the first tokens of each response, at which the teacher scored."""
    n = 2
    batches = [make_batch(seed) for seed in (0, 1)]
    assert any(len(sample.response.ids) > n for sample in batches[0])

    def first_tokens(sample: Sample) -> Sample:
        top_k, length = sample.teacher, len(sample.response.ids)
        first = TeacherTopK(
            logps_TK=top_k.logps_TK[:n], ids_TK=top_k.ids_TK[:n], sampled_logps_T=top_k.sampled_logps_T[:n]
        )
        return replace(sample, teacher=first.extended(max(length, len(first.ids_TK))))

    def objective(samples: Sequence[tuple[Sample, Tensor]]) -> dict[str, Tensor]:
        losses = [forward_kl_T(sample, logits_TV)[:n] for sample, logits_TV in samples]
        kl = torch.cat(losses).mean()
        return {
            "actor/loss": kl if mode == "token-mean" else torch.stack([loss.mean() for loss in losses]).mean(),
            "actor/kl_loss": kl,
        }

    expected = reference_training(folders["qwen2"], batches, objective)
    ranks, layout = LAYOUTS["dynamic, data 2"]
    scored = [[first_tokens(sample) for sample in batch] for batch in batches]
    overrides = ["gkd.max_loss_position=2", f"gkd.loss_agg_mode={mode}"]
    config = make_config(folders["qwen2"], *overrides, *layout, ranks=ranks)
    results = pool.run(ranks, jobs.train, config, scored)
    assert_metrics(results[0][1], expected[0])
    assert_weights(results[0][2], expected[1])


@pytest.mark.parametrize("overrides", [[CP2], pytest.param([CP2, TP2, SP], marks=pytest.mark.slow)])
def test_custom_loss_with_context_ranks_has_whole_responses(
    overrides: list[str], pool: WorkerPool, folders: dict[str, Path]
) -> None:
    custom_loss = [CUSTOM[0], "gkd.custom_loss.name=response_weighted_kl", BY_SAMPLES, f"{ACTOR}.micro_batch_size=3"]
    batches = [make_batch(0), without_empty(make_batch(1))[:1], []]
    [want] = pool.run(1, jobs.train, make_config(folders["qwen2"], *custom_loss), batches)
    ranks = 2 ** len(overrides[:2])
    got = pool.run(ranks, jobs.train, make_config(folders["qwen2"], *custom_loss, *overrides, ranks=ranks), batches)
    names = ("actor/loss", "actor/response_kl", "actor/grad_norm", "actor/n_tokens")
    assert_metrics(got[0][1], [{name: one[name] for name in names if name in one} for one in want[1]])
    assert_weights(got[0][2], {name: tensor.double() for name, tensor in want[2].items()})


def test_position_weights_with_context_ranks_have_whole_responses(pool: WorkerPool, folders: dict[str, Path]) -> None:
    weights = [
        f"gkd.position_weights={custom_losses.__file__}:share_of_response",
        BY_SAMPLES,
        f"{ACTOR}.micro_batch_size=3",
    ]
    batches = [make_batch(0), without_empty(make_batch(1))[:1], []]
    [want] = pool.run(1, jobs.train, make_config(folders["qwen2"], *weights), batches)
    got = pool.run(2, jobs.train, make_config(folders["qwen2"], *weights, CP2, ranks=2), batches)
    names = ("actor/loss", "actor/kl_loss", "actor/position_weight", "actor/grad_norm", "actor/n_tokens")
    assert 0 < want[1][0]["actor/position_weight"] < 1
    assert_metrics(got[0][1], [{name: one[name] for name in names if name in one} for one in want[1]])
    assert_weights(got[0][2], {name: tensor.double() for name, tensor in want[2].items()})


def test_kl_of_each_teacher_is_over_its_own_tokens(pool: WorkerPool, folders: dict[str, Path]) -> None:
    teachers = [f"actor_rollout_ref.teacher.teachers.{name}=host:1" for name in ("math", "code", "idle")]
    config = make_config(folders["qwen2"], *teachers, "actor_rollout_ref.teacher.route_key=teacher")
    samples = [replace(sample, teacher_number=sample.prompt.uid % 2) for sample in make_batch(0)]
    [metrics] = pool.run(1, jobs.train, config, [samples])[0][1]
    for number, name in enumerate(("math", "code")):
        own = [replace(sample, teacher_number=0) for sample in samples if sample.teacher_number == number]
        [alone] = pool.run(1, jobs.train, make_config(folders["qwen2"]), [own])[0][1]
        assert metrics[f"teacher/{name}/kl_loss"] == pytest.approx(alone["actor/kl_loss"], rel=1e-5)
        assert alone["teacher/default/kl_loss"] == alone["actor/kl_loss"]
    assert "teacher/idle/kl_loss" not in metrics


PADDED_TO = 112


@pytest.fixture(scope="module")
def padded(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied student with padding rows in the output layer that are much likelier than all tokens."""
    folder = tmp_path_factory.mktemp("padded") / "qwen2_untied"
    shutil.copytree(folders["qwen2_untied"], folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": PADDED_TO}))
    weights = load_file(folder / "model.safetensors")
    n_padding = PADDED_TO - VOCAB
    weights["lm_head.weight"] = torch.cat([weights["lm_head.weight"], 50 * weights["lm_head.weight"][:n_padding]])
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([table, table[:n_padding]])
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "objective", [["gkd.distill_temperature=2"], [*RL, *SFT, FUSED]], ids=["temperature", "all terms"]
)
def test_padding_of_output_layer_has_no_loss_and_no_gradient(
    objective: list[str], padded: Path, pool: WorkerPool, folders: dict[str, Path]
) -> None:
    samples = make_batch(0, reference="data" if "gkd.sft_share=0.3" in objective else "")
    student = folders["qwen2_untied"]
    plain = pool.run(1, jobs.train, make_config(student, *objective, *LAYOUTS["1"][1]), [samples])[0]
    for ranks, overrides in (LAYOUTS["1"], LAYOUTS[SEQUENCE_PARALLEL]):
        config = make_config(padded, *objective, *overrides, ranks=ranks)
        got = pool.run(ranks, jobs.train_padded_model, config, samples, VOCAB)
        for metrics, gradient, _ in got:
            assert gradient == 0.0
            names = ["actor/loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm"]
            if ranks == 1:  # the overlap depends on the division into micro-batches
                names.append("actor/topk_overlap")
            for name in names:
                assert metrics[name] == pytest.approx(plain[1][0][name], rel=1e-5), name
        token_rows = {name: tensor[: len(plain[2][name])] for name, tensor in got[0][2].items()}
        assert_weights(token_rows, {name: tensor.double() for name, tensor in plain[2].items()})


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "k1", "k2"])
def test_student_as_its_own_teacher_has_no_loss_and_no_gradient(
    kind: str, pool: WorkerPool, folders: dict[str, Path]
) -> None:
    config = make_config(folders["qwen2_untied"], f"gkd.distill_loss_type={kind}")
    for k in (7, VOCAB):
        [metrics] = pool.run(1, jobs.train_on_own_top_k, config, make_samples(6), k)
        assert abs(metrics["actor/kl_loss"]) < 1e-6 and metrics["actor/grad_norm"] < 1e-5


def test_fused_output_layer_passes_hidden_states_to_loss(pool: WorkerPool, folders: dict[str, Path]) -> None:
    config = make_config(folders["qwen2"], FUSED)
    names = pool.run(1, jobs.record_student_types, config, make_samples(6))[0]
    assert names == {"HiddenStates"}


def test_difference_metrics_are_consistent(pool: WorkerPool, folders: dict[str, Path]) -> None:
    [metrics] = pool.run(1, jobs.train, make_config(folders["qwen2"]), [make_batch(0, reference="data")])[0][1]
    for model in ("teacher", "student"):
        whole = metrics[f"actor/{model}_topk_mass"] + metrics[f"actor/{model}_tail_mass"]
        assert whole == pytest.approx(1, abs=1e-5)
    assert 0 <= metrics["actor/topk_overlap"] <= 1 and metrics["actor/teacher_topk_entropy"] > 0
    # Responses have at most 20 tokens, so all of them are in the first bucket of positions.
    assert metrics["actor/kl_loss_at/0"] == pytest.approx(metrics["actor/kl_loss"], rel=1e-5)
    assert metrics["actor/distill_coef"] == 1 and metrics["actor/loss"] == pytest.approx(metrics["actor/kl_loss"])
