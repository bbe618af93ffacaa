"""Metrics of terms that no token of an update has: they are left out, because 0 would be a value."""

from __future__ import annotations

import pytest

from recipe_gkd.data.samples import Sample
from tests._support.custom_loss_runs import gkd_config, loss_and_gradients, scored_samples

SAMPLES = scored_samples()
ONLY_REFERENCES = [sample for sample in SAMPLES if sample.is_reference]
ONLY_SAMPLED = [sample for sample in SAMPLES if not sample.is_reference]
RL = ("gkd.use_rl_loss=true", "custom_reward_function.path=reward.py", "actor_rollout_ref.rollout.n=3")
SFT = "gkd.sft_share=0.3"
CLIP = "gkd.token_clip=0.5"


@pytest.mark.parametrize(
    ("overrides", "samples", "name", "is_reported"),
    [
        pytest.param((SFT,), SAMPLES, "sft_loss", True, id="references"),
        pytest.param((SFT,), ONLY_SAMPLED, "sft_loss", False, id="batch without references"),
        pytest.param((SFT, "gkd.sft_target=teacher"), SAMPLES, "sft_loss", False, id="teacher on references"),
        pytest.param((SFT, *RL), SAMPLES, "pg_loss", True, id="rewards"),
        pytest.param((SFT, *RL), ONLY_REFERENCES, "pg_loss", False, id="batch of references"),
        pytest.param((CLIP,), SAMPLES, "kl_clipfrac", True, id="clipped divergence"),
        pytest.param((CLIP, "gkd.distill_loss_type=k2"), SAMPLES, "kl_clipfrac", False, id="k2 is not clipped"),
    ],
)
def test_metric_is_left_out_without_its_tokens(
    overrides: tuple[str, ...], samples: list[Sample], name: str, is_reported: bool
) -> None:
    _, metrics, _ = loss_and_gradients(gkd_config(*overrides), samples)
    assert (f"actor/{name}" in metrics) is is_reported and "actor/loss" in metrics
