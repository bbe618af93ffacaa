"""Responses of the engine of ``evaluate`` and ``data inspect --rollout``: equality with transformers on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recipe_gkd.commands.gpu_smoke.reference import response_logps
from tests._support.families import FAMILIES, Family, make_family_folder
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S
from tests.integration.families.offline_script import N_GREEDY, N_SAMPLED, PROMPT_TOKENS
from tests.integration.rollout.fsdp_workers import load

DEFAULT = "deepseek_v3"
"""Family with latent attention, which vLLM's CPU build alone computes wrongly, or refuses in float32."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.model_type, marks=() if family.model_type == DEFAULT else pytest.mark.slow)
        for family in FAMILIES
        if not family.rollout
    ],
)
def test_greedy_responses_equal_transformers(family: Family, tmp_path: Path) -> None:
    """The script also samples more prompts than a step holds. A seeded prompt must not be split."""
    folder, out = make_family_folder(tmp_path / "model", family, family.rollout_config), tmp_path / "responses.npz"
    script = [sys.executable, "-m", "tests.integration.families.offline_script", str(folder), str(out)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE_S, cwd=REPO)
    assert done.returncode == 0, done.stderr
    model, responses = load(folder)[0], np.load(out)
    assert responses["n_sampled"] == N_SAMPLED
    for key in range(N_GREEDY):
        ids = responses[f"{key}/ids"]
        logps_TV = response_logps(model, ids, PROMPT_TOKENS)
        chosen_T = logps_TV[np.arange(len(logps_TV)), ids[PROMPT_TOKENS:]]
        np.testing.assert_allclose(chosen_T, logps_TV.max(1), atol=1e-4, rtol=0)
