"""Batches of reference responses only, as in ``gkd.warmup_steps`` of a run that later has a policy loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests._support.custom_loss_runs import gkd_config, loss_and_gradients, scored_samples


@pytest.mark.parametrize("target", ["data", "teacher"])
def test_warm_up_has_no_policy_loss_and_a_finite_gradient(target: str) -> None:
    references = [
        replace(sample, prompt=replace(sample.prompt, reference_ids=sample.response.ids), reward=None, advantage=0.0)
        for sample in scored_samples()
    ]
    gkd = replace(gkd_config("gkd.warmup_steps=3", f"gkd.sft_target={target}"), use_rl_loss=True)
    loss_T, metrics, gradients = loss_and_gradients(gkd, references)
    assert torch.isfinite(loss_T).all() and all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.any() for gradient in gradients)
    assert "actor/pg_loss" not in metrics and all(math.isfinite(value) for value in metrics.values())
