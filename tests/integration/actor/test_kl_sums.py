"""KL divergences of a validation, compared with a plain float64 program."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from recipe_gkd.commands.gpu_smoke.reference import response_logits
from recipe_gkd.data.samples import Sample, TeacherTopK
from recipe_gkd.losses import Divergence
from tests._support.layouts import CP2, PP2, SP, TP2
from tests._support.tiny_models import ACTOR, make_config, without_empty
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.plain_objectives import divergence_of
from tests.integration.actor.reference import assert_metrics, assert_weights, reference_training
from tests.integration.actor.test_objectives import make_batch

FSDP = [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=float32", "gkd.fuse_lm_head=true"]
LAYOUTS = {
    "data 2, small micro-batches": (2, [f"{ACTOR}.max_token_len=16"]),
    "FSDP 2, fused": (2, FSDP),
    "tensor 2 x context 2": (4, [TP2, SP, CP2]),
    "pipeline 2, fused": (2, [PP2, "gkd.fuse_lm_head=true"]),
}
N_SCORED = 2
"""Number of scored tokens of the sample that has fewer scores than tokens (``gkd.max_loss_position``)."""


def first_tokens(sample: Sample, n: int) -> Sample:
    """Return a sample that consists of its first n response tokens."""
    response, top_k = sample.response, sample.teacher
    return replace(
        sample,
        response=replace(
            response, ids=response.ids[:n], logprobs=response.logprobs[:n], versions_T=response.versions_T[:n]
        ),
        teacher=TeacherTopK(
            logps_TK=top_k.logps_TK[:n], ids_TK=top_k.ids_TK[:n], sampled_logps_T=top_k.sampled_logps_T[:n]
        ),
    )


@pytest.fixture(scope="module")
def measured() -> list[Sample]:
    """Return samples of which one is skipped and one has scores at its first tokens only. Two have the same uid."""
    samples = make_batch(0, skipped=(1,))
    number = next(
        number for number, sample in enumerate(samples) if number != 1 and len(sample.response.ids) > N_SCORED
    )
    whole = samples[number]
    samples[number] = replace(whole, teacher=first_tokens(whole, N_SCORED).teacher.extended(len(whole.response.ids)))
    last, uid = samples[-1], samples[0].prompt.uid  # parts of one conversation
    samples[-1] = replace(last, prompt=replace(last.prompt, uid=uid), response=replace(last.response, uid=uid))
    return samples


@pytest.fixture(scope="module")
def expected(measured: list[Sample], folders: dict[str, Path]) -> dict[int, list[float]]:
    """Return the sums of forward and reverse KL of each sample in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["qwen2"], dtype=torch.float64)
    found: dict[int, list[float]] = {}
    for sample in without_empty(measured):
        scored = first_tokens(sample, int(sample.teacher.is_scored_T.sum()))
        sums = found.setdefault(sample.prompt.uid, [0.0, 0.0])
        if len(scored.response.ids):
            with torch.no_grad():
                logits_TV = response_logits(model, scored.token_ids, len(scored.prompt.ids))
            divergences = (Divergence(kind=kind, tail="bucket") for kind in ("forward_kl", "reverse_kl"))
            sums[:] = (
                a + divergence_of(scored, logits_TV, b).sum().item() for a, b in zip(sums, divergences, strict=True)
            )
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kl_sums_equal_plain_program_and_leave_no_gradient(
    layout: str, measured: list[Sample], expected: dict[int, list[float]], pool: WorkerPool, folders: dict[str, Path]
) -> None:
    batches = [make_batch(1)]
    ranks, overrides = LAYOUTS[layout]
    config = make_config(folders["qwen2"], *overrides, ranks=ranks)
    results = pool.run(ranks, jobs.kl_sums_and_train, config, measured, batches)
    totals: defaultdict[int, torch.Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    for of_rank, _ in results:
        for uid, sums in of_rank.items():
            totals[uid] += torch.tensor(sums, dtype=torch.float64)
    assert totals.keys() == expected.keys()
    for uid, sums in expected.items():
        assert totals[uid].tolist() == pytest.approx(sums, rel=1e-5, abs=1e-6), uid
    metrics, weights = reference_training(folders["qwen2"], batches)
    assert_metrics(results[0][1].metrics, metrics)
    assert_weights(results[0][1].weights, weights)
