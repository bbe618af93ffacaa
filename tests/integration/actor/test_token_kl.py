"""KL divergences of a validation, compared with a plain float64 program."""

from __future__ import annotations

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
    """Return samples of which one is skipped and one has scores at its first tokens only.

    The last one continues the response of the first one, as a part of the same conversation.
    """
    samples = make_batch(0, skipped=(1,))
    number = next(
        number for number, sample in enumerate(samples) if number != 1 and len(sample.response.ids) > N_SCORED
    )
    whole = samples[number]
    samples[number] = replace(whole, teacher=first_tokens(whole, N_SCORED).teacher.extended(len(whole.response.ids)))
    first, last = samples[0].response, samples[-1]
    response = replace(last.response, uid=first.uid, start=len(first.ids))
    samples[-1] = replace(last, prompt=replace(last.prompt, uid=first.uid), response=response)
    return samples


@pytest.fixture(scope="module")
def expected(measured: list[Sample], folders: dict[str, Path]) -> dict[tuple[int, int], list[float]]:
    """Return forward and reverse KL at each scored token in float64, by uid and position in the response."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["qwen2"], dtype=torch.float64)
    found: dict[tuple[int, int], list[float]] = {}
    for sample in without_empty(measured):
        scored = first_tokens(sample, int(sample.teacher.is_scored_T.sum()))
        if len(scored.response.ids):
            with torch.no_grad():
                logits_TV = response_logits(model, scored.token_ids, len(scored.prompt.ids))
            divergences = (Divergence(kind=kind, tail="bucket") for kind in ("forward_kl", "reverse_kl"))
            kl_TD = torch.stack([divergence_of(scored, logits_TV, each) for each in divergences], dim=1)
            start, uid = sample.response.start, sample.prompt.uid
            found |= {(uid, start + position): values for position, values in enumerate(kl_TD.tolist())}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_kl_equals_plain_program_and_leaves_no_gradient(
    layout: str,
    measured: list[Sample],
    expected: dict[tuple[int, int], list[float]],
    pool: WorkerPool,
    folders: dict[str, Path],
) -> None:
    batches = [make_batch(1)]
    ranks, overrides = LAYOUTS[layout]
    config = make_config(folders["qwen2"], *overrides, ranks=ranks)
    results = pool.run(ranks, jobs.token_kl_and_train, config, measured, batches)
    tokens = [
        ((uid, position), values)
        for of_rank, _ in results
        for uid, position, values in zip(
            of_rank.uids_T.tolist(), of_rank.positions_T.tolist(), of_rank.kl_TD.tolist(), strict=True
        )
    ]
    found = dict(tokens)
    assert len(found) == len(tokens), "each token is in the result of one rank"
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-4, abs=1e-6), key
    metrics, weights = reference_training(folders["qwen2"], batches)
    assert_metrics(results[0][1].metrics, metrics)
    assert_weights(results[0][1].weights, weights)
