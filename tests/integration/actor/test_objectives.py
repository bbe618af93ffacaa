"""Each objective trains as a plain float64 program does, however the batch is divided; a perfect student stays."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe_gkd.data.samples import Sample, TeacherTopK
from tests._support.tiny_models import ACTOR, MEGATRON, VOCAB, make_config, make_samples
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.plain_objectives import plain_objective
from tests.integration.actor.reference import reference_training
from tests.integration.actor.test_layouts import assert_metrics, assert_weights

pytestmark = pytest.mark.timeout(150)

SEQUENCE_MEAN = "gkd.loss_agg_mode=seq-mean-token-mean"
FUSED = "gkd.fuse_lm_head=true"
RL = ["gkd.use_rl_loss=true", "gkd.rl_loss_coef=0.7", "custom_reward_function.path=reward.py",
      "actor_rollout_ref.rollout.n=3"]  # fmt: skip
SFT = ["gkd.sft_share=0.3", "gkd.sft_loss_coef=0.5"]
OBJECTIVES: dict[str, list[str]] = {
    "reverse KL": ["gkd.distill_loss_type=reverse_kl"],
    "reverse KL, renormalized, mean of answers": ["gkd.distill_loss_type=reverse_kl", "gkd.tail=renormalize",
                                                  SEQUENCE_MEAN],
    "forward KL without the tail, chunks of 2": ["gkd.tail=none", "gkd.chunk_tokens=2"],
    "JSD at temperature 2, fused": ["gkd.distill_loss_type=jsd", "gkd.beta=0.3", "gkd.distill_temperature=2", FUSED],
    "mixture of KLs at temperature 0.7": ["gkd.distill_loss_type=kl_rkl", "gkd.distill_temperature=0.7"],
    "skewed forward KL": ["gkd.distill_loss_type=skewed_forward_kl"],
    "skewed reverse KL": ["gkd.distill_loss_type=skewed_reverse_kl"],
    "total variation": ["gkd.distill_loss_type=tvd"],
    "k1, truncated, expected baseline": ["gkd.distill_loss_type=k1", "gkd.importance_cap=1.2"],
    "k1, baseline of the group": ["gkd.distill_loss_type=k1", "gkd.baseline=group", RL[-1]],
    "k2, masked, fused": ["gkd.distill_loss_type=k2", "gkd.importance=mask", "gkd.importance_cap=1.5", FUSED],
    "k3": ["gkd.distill_loss_type=k3", "gkd.importance=none"],
    "reward and given answers": [*RL, *SFT],
    "reward, given answers, mean of answers, fused": [*RL, *SFT, SEQUENCE_MEAN, FUSED],
    "toward the teacher along given answers": ["gkd.sft_share=0.3", "gkd.sft_target=teacher", *RL],
    "reward alone": [*RL, "gkd.distill_loss_coef=0"],
}  # fmt: skip
TP2 = f"{MEGATRON}.tensor_model_parallel_size=2"
BY_SAMPLES = f"{ACTOR}.use_dynamic_bsz=false"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "1": (1, [BY_SAMPLES, f"{ACTOR}.micro_batch_size=1"]),
    "3": (1, [BY_SAMPLES, f"{ACTOR}.micro_batch_size=3"]),
    "dynamic, data 2": (2, []),
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


def batch(seed: int, *, given: str = "", skipped: tuple[int, ...] = ()) -> list[Sample]:
    """Sampled by something near the student, some with better rewards than others; some answers are of the data.

    ``given``: none of them, or what teaches along them: `data` or `teacher`. ``skipped``: samples that the teacher gave
    no answer on.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for number, sample in enumerate(make_samples(9, seed=seed)):
        length = len(sample.response.ids)
        response = replace(sample.response, logprobs=rng.normal(-4.5, 0.4, length).astype(np.float32))
        teacher = replace(sample.teacher, sampled_logps_T=rng.normal(-4.5, 0.4, length).astype(np.float32))
        sample = replace(sample, response=response, teacher=teacher, advantage=rng.normal(), baseline=0.1, scale=1.3)
        if given and number % 3 == 2:
            prompt = replace(sample.prompt, reference_ids=sample.response.ids)
            teacher = teacher if given == "teacher" else TeacherTopK.absent(length)
            sample = replace(sample, prompt=prompt, teacher=teacher, advantage=0.0)
        if number in skipped:
            sample = replace(sample, teacher=TeacherTopK.absent(length), is_skipped=True)
        samples.append(sample)
    return samples


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_trains_as_a_plain_program_does(name: str, pool: WorkerPool, folders: dict[str, Path]) -> None:
    overrides = OBJECTIVES[name]
    gkd = make_config(folders["qwen2"], *overrides).gkd
    batches = [batch(seed, given=gkd.sft_target if gkd.sft_share else "") for seed in (0, 1)]
    want = reference_training(folders["qwen2"], batches, partial(plain_objective, gkd))
    layouts = LAYOUTS if "given" in name else {key: LAYOUTS[key] for key in ("3", "tensor 2, sequence parallel")}
    for ranks, layout in layouts.values():
        config = make_config(folders["qwen2"], *overrides, *layout, ranks=ranks)
        results = pool.run(ranks, jobs.train, config, batches)
        for _, metrics, _, _ in results:
            assert_metrics(metrics, want[0])
        assert_weights(results[0][2], want[1])


SKIPPED = (1, 4, 8)
"""Two sampled answers and a given one; all have tokens."""


@pytest.mark.parametrize(
    "name",
    [
        "toward the teacher along given answers",
        "reward, given answers, mean of answers, fused",
        "reverse KL, renormalized, mean of answers",
        "k3",
    ],
)
def test_nothing_is_learnt_from_the_teacher_on_skipped_samples_and_all_else_stays(
    name: str, pool: WorkerPool, folders: dict[str, Path]
) -> None:
    overrides = OBJECTIVES[name]
    gkd = make_config(folders["qwen2"], *overrides).gkd
    given = gkd.sft_target if gkd.sft_share else ""
    batches = [batch(seed, given=given, skipped=SKIPPED) for seed in (0, 1)]
    assert all(len(samples[number].response.ids) for samples in batches for number in SKIPPED)
    want = reference_training(folders["qwen2"], batches, partial(plain_objective, gkd))
    ranks, layout = LAYOUTS["dynamic, data 2"]
    results = pool.run(ranks, jobs.train, make_config(folders["qwen2"], *overrides, *layout, ranks=ranks), batches)
    assert_metrics(results[0][1], want[0])
    assert_weights(results[0][2], want[1])


def test_each_teacher_has_its_own_kl(pool: WorkerPool, folders: dict[str, Path]) -> None:
    teachers = [f"actor_rollout_ref.teacher.teachers.{name}=host:1" for name in ("math", "code", "idle")]
    config = make_config(folders["qwen2"], *teachers, "actor_rollout_ref.teacher.route_key=teacher")
    samples = [replace(sample, teacher_number=sample.prompt.uid % 2) for sample in batch(0)]
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
    """The untied student with a larger output layer, whose further rows are by far the likeliest, and alike tokens."""
    folder = tmp_path_factory.mktemp("padded") / "qwen2_untied"
    shutil.copytree(folders["qwen2_untied"], folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": PADDED_TO}))
    weights = load_file(folder / "model.safetensors")
    more = PADDED_TO - VOCAB
    weights["lm_head.weight"] = torch.cat([weights["lm_head.weight"], 50 * weights["lm_head.weight"][:more]])
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([table, table[:more]])
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("layout", ["1", "tensor 2, sequence parallel"])
@pytest.mark.parametrize("others", [["gkd.distill_temperature=2"], [*RL, *SFT, FUSED]], ids=["temperature", "all"])
def test_padding_of_the_output_layer_has_no_loss_and_no_gradient(
    others: list[str], layout: str, padded: Path, pool: WorkerPool, folders: dict[str, Path]
) -> None:
    ranks, overrides = LAYOUTS[layout]
    samples = batch(0, given="data" if "gkd.sft_share=0.3" in others else "")
    student = folders["qwen2_untied"]
    plain = pool.run(1, jobs.train, make_config(student, *others, *LAYOUTS["1"][1]), [samples])[0]
    got = pool.run(
        ranks, jobs.train_a_padded_student, make_config(padded, *others, *overrides, ranks=ranks), samples, VOCAB
    )
    for metrics, gradient, _ in got:
        assert gradient == 0.0
        of_same_micro_batches = ["actor/topk_overlap"] if ranks == 1 else []
        for name in ("actor/loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", *of_same_micro_batches):
            assert metrics[name] == pytest.approx(plain[1][0][name], rel=1e-5), name
    of_tokens = {name: tensor[: len(plain[2][name])] for name, tensor in got[0][2].items()}
    assert_weights(of_tokens, {name: tensor.double() for name, tensor in plain[2].items()})


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "k1", "k2"])
def test_student_that_is_its_own_teacher_has_no_loss_and_no_gradient(
    kind: str, pool: WorkerPool, folders: dict[str, Path]
) -> None:
    config = make_config(folders["qwen2_untied"], f"gkd.distill_loss_type={kind}")
    for k in (7, VOCAB):
        [metrics] = pool.run(1, jobs.teach_itself, config, make_samples(6), k)
        assert abs(metrics["actor/kl_loss"]) < 1e-6 and metrics["actor/grad_norm"] < 1e-5


def test_fused_output_layer_needs_no_whole_logits(pool: WorkerPool, folders: dict[str, Path]) -> None:
    config = make_config(folders["qwen2"], FUSED)
    names = pool.run(1, jobs.student_of_a_loss, config, make_samples(6))[0]
    assert names == {"HiddenStates"}


def test_metrics_say_where_student_and_teacher_differ(pool: WorkerPool, folders: dict[str, Path]) -> None:
    [metrics] = pool.run(1, jobs.train, make_config(folders["qwen2"]), [batch(0, given="data")])[0][1]
    for whose in ("teacher", "student"):
        whole = metrics[f"actor/{whose}_topk_mass"] + metrics[f"actor/{whose}_tail_mass"]
        assert whole == pytest.approx(1, abs=1e-5)
    assert 0 <= metrics["actor/topk_overlap"] <= 1 and metrics["actor/teacher_topk_entropy"] > 0
    assert metrics["actor/kl_loss_at/0"] == pytest.approx(metrics["actor/kl_loss"], rel=1e-5)  # 20 tokens at most
    assert metrics["actor/distill_coef"] == 1 and metrics["actor/loss"] == pytest.approx(metrics["actor/kl_loss"])
