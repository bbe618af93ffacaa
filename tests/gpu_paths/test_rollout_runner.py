"""The rollout engine with vLLM's V2 runner: weight updates while a batch is in flight, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe_gkd.commands.gpu_smoke.reference import sampled_logps
from recipe_gkd.commands.gpu_smoke.tiny_models import read_model, write_model
from tests.gpu_paths import rollout_script
from tests.gpu_paths.rollout_script import RESPONSE_TOKENS, STEP_TOKENS, prompts
from tests.gpu_paths.v2_runner import run_script

LIMIT = 2e-5  # of the errors of log-probabilities; up to 3e-6 was found
VISIBLE = 0.1  # smallest error that weights of another version must cause, so that a wrong version is noticed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of the weights of even and odd versions."""
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / str(seed), seed=seed) for seed in (0, 1)]


class Reference:
    """Log-probabilities of transformers for the weights of each version."""

    def __init__(self, folders: list[Path]) -> None:
        self._models = [read_model(folder, torch.float32) for folder in folders]

    def log_probs(self, ids: list[int], version: int) -> np.ndarray:
        """Return the log-probability of each id after the first, [N - 1]."""
        return sampled_logps(self._models[version % 2], ids, prompt_len=1)

    def error(self, responses: dict[str, Any], shift: int = 0) -> float:
        """Return the largest error of log-probabilities, if versions are those of the tokens ``shift`` places later."""
        errors = []
        for prompt in prompts():
            response = responses[str(prompt.uid)]
            ids, places_T = [*prompt.ids.tolist(), *response["ids"]], np.arange(RESPONSE_TOKENS)
            versions_T = np.take(response["versions_T"], places_T + shift, mode="clip")
            logps_T2 = np.stack([self.log_probs(ids, version)[len(prompt.ids) - 1 :] for version in (0, 1)], axis=1)
            errors.append(np.abs(logps_T2[places_T, versions_T % 2] - response["logprobs"]).max())
        return float(max(errors))


@pytest.mark.parametrize(
    ("n_ranks", "setting", "kinds"),
    [
        pytest.param(1, "null", ["double-buffered", "in-place"], id="one rank", marks=pytest.mark.slow),
        pytest.param(2, "null", ["in-place"], id="two ranks", marks=pytest.mark.slow),
        pytest.param(1, "false", ["in-place"], id="no async scheduling", marks=pytest.mark.slow),
    ],
)
def test_update_with_batch_in_flight_each_token_has_logprob_of_its_version(
    folders: list[Path], n_ranks: int, setting: str, kinds: list[str]
) -> None:
    found = run_script(rollout_script.__name__, *folders, n_ranks, setting, *kinds)
    assert found["engine"] == {
        "V2 runner": [True] * n_ranks,
        "async scheduling": setting == "null",
        "chunked prefill": True,
        "tokens of a step": STEP_TOKENS,
    }
    reference = Reference(folders)
    for version, kind in enumerate(kinds, start=1):
        update, responses = found[kind], found[kind]["responses"]
        assert (update["batches in flight"] >= 1) == (setting == "null")
        for response in responses.values():
            assert len(response["ids"]) == len(response["versions_T"]) == RESPONSE_TOKENS
            assert np.unique(response["versions_T"]).tolist() == [version - 1, version]
        assert reference.error(responses) < LIMIT
        assert min(reference.error(responses, shift) for shift in (-1, 1)) > VISIBLE
        ids = prompts()[0].ids.tolist()
        assert np.abs(reference.log_probs(ids, version) - update["log_probs"]).max() < LIMIT
