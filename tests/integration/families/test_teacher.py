"""Scores of the teacher service's engine with each family: equality with transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests._support.families import BY_TYPE, FAMILIES, Family, make_family_folder
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S
from tests.integration.families.teacher_script import PROMPT_TOKENS, RESPONSE_TOKENS
from tests.integration.rollout.fsdp_workers import load

SERVED = [pytest.param(family, 1, id=family.model_type) for family in FAMILIES if not family.teacher]
DIVIDED = pytest.param(BY_TYPE["lfm2"], 2, id="lfm2 on two ranks")
"""vLLM spawns the ranks, and its CPU build computes LFM2 wrongly without corrections in each of them."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp_size"), [*SERVED, DIVIDED])
def test_scores_equal_transformers(family: Family, tp_size: int, tmp_path: Path) -> None:
    """The sequences share a prompt, which is cached if the family can have a prefix cache."""
    folder, out = make_family_folder(tmp_path / "model", family, family.rollout_config), tmp_path / "scores.npz"
    script = [sys.executable, "-m", "tests.integration.families.teacher_script", str(folder), str(out), str(tp_size)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE_S, cwd=REPO)
    assert done.returncode == 0, done.stderr
    model, scores = load(folder)[0], np.load(out)
    for key, n_tokens in enumerate(RESPONSE_TOKENS):
        ids_T, top_TK = scores[f"{key}/ids_T"].astype(np.int64), scores[f"{key}/topk_ids_TK"].astype(np.int64)
        with torch.no_grad():
            logps_TV = model(torch.tensor(ids_T)[None]).logits[0, PROMPT_TOKENS - 1 : -1].log_softmax(-1).numpy()
        assert len(top_TK) == n_tokens
        want_TK = np.take_along_axis(logps_TV, top_TK, axis=1)
        np.testing.assert_allclose(scores[f"{key}/topk_logps_TK"], want_TK, atol=1e-4, rtol=0)
        np.testing.assert_allclose(want_TK, -np.sort(-logps_TV)[:, : want_TK.shape[1]], atol=1e-4, rtol=0)
        sampled_T = logps_TV[np.arange(n_tokens), ids_T[PROMPT_TOKENS:]]
        np.testing.assert_allclose(scores[f"{key}/sampled_logps_T"], sampled_T, atol=1e-4, rtol=0)
