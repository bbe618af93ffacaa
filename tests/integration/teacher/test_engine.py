"""VllmEngine without the service: scores, padding, admission, data type of the logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe_gkd.commands.gpu_smoke import reference
from recipe_gkd.commands.gpu_smoke.teacher_checks import score_errors
from recipe_gkd.commands.gpu_smoke.tiny_models import read_model
from teacher.engines.admission import Admission, Demand
from teacher.engines.sizes import ResultMemory
from teacher.engines.vllm_internals import CPU_BLOCK_TOKENS
from teacher.records import ScoredSequence, TeacherSequence
from tests._support.qwen2 import random_qwen2, save_word_tokenizer
from tests._support.teacher_service import REPO
from tests._support.waiting import PATIENCE_S
from tests.integration.teacher.engine_script import (
    DISCARDED,
    FEW,
    LONG,
    N_FEW,
    N_TOKENS,
    REFUSED,
    SHARED,
    SHORT,
    SUPPORTED,
    TOO_LARGE,
    VOCAB_SIZE,
)


def error_of(scored: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of an error in the results of ``engine_script``."""
    found: dict[str, Any] = json.loads(str(scored[name]))
    return found


@pytest.fixture(scope="module")
def padded_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random float32 Qwen2 with 17 padding rows in the output layer. One token needs 1 KiB of KV cache."""
    import torch

    folder = tmp_path_factory.mktemp("padded_qwen2")
    model = random_qwen2(seed=0, vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    with torch.no_grad():
        model.lm_head.weight[N_TOKENS:] *= 3  # padding that would be among the top k if it were not excluded
    model.save_pretrained(folder)
    save_word_tokenizer(folder, [f"t{i}" for i in range(3, N_TOKENS)])
    return folder


@pytest.fixture(scope="module")
def scored(padded_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of `engine_script`."""
    return run_script(padded_qwen2, tmp_path_factory.mktemp("scored") / "scores.npz")


def run_script(model: Path, out: Path, *arguments: str) -> dict[str, Any]:
    """Run `engine_script` in its own process, because vLLM changes its process."""
    command = [sys.executable, "-m", "tests.integration.teacher.engine_script", str(model), str(out), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(np.load(out))


Logits = Callable[[TeacherSequence], np.ndarray]


@pytest.fixture(scope="module")
def response_logits(padded_qwen2: Path) -> Logits:
    """Return a function that computes the logits [T, V] with transformers, padding included."""
    model = read_model(padded_qwen2, torch.float32)

    def logits_of(sequence: TeacherSequence) -> np.ndarray:
        with torch.no_grad():
            logits_TV = reference.response_logits(model, sequence.token_ids, sequence.prompt_len).double().numpy()
            return np.asarray(logits_TV[sequence.scored_positions_T - sequence.prompt_len])

    return logits_of


def log_mass(logits_TV: np.ndarray) -> np.ndarray:
    """Return log(sum(exp(logits))), [T, 1]."""
    return np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))


def assert_scores(scored: dict[str, Any], name: str, sequence: TeacherSequence, logps_TV: np.ndarray) -> None:
    fields = {field: scored[f"{name}/{field}"] for field in ("topk_logps_TK", "topk_ids_TK", "sampled_logps_T")}
    assert score_errors(logps_TV, sequence, ScoredSequence(**fields)).max() < 1e-5
    ids_TK = fields["topk_ids_TK"]
    assert all(len(set(row)) == ids_TK.shape[1] for row in ids_TK.tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_engine_padded_output_layer_agrees_with_transformers_without_padding(
    response_logits: Logits, scored: dict[str, Any], temperature: float
) -> None:
    for key in set(range(len(SHORT))) - {DISCARDED}:
        logits_TV = response_logits(SHORT[key]) / temperature
        tokens_TV, padding_TV = np.split(logits_TV, [N_TOKENS], axis=1)
        assert (log_mass(padding_TV) > log_mass(tokens_TV) - 1).any(), "the padding is too small to be noticed"
        assert_scores(scored, f"at {temperature:g}/{key}", SHORT[key], tokens_TV - log_mass(tokens_TV))
        assert scored[f"at {temperature:g}/{key}/topk_ids_TK"].shape[1] == N_TOKENS


def test_engine_shared_prompts_are_computed_once_and_have_no_logits(
    response_logits: Logits, scored: dict[str, Any]
) -> None:
    kept = [SHARED[key] for key in set(range(len(SHARED))) - {DISCARDED}]
    for key in set(range(len(SHARED))) - {DISCARDED}:
        tokens_TV = response_logits(SHARED[key])[:, :N_TOKENS]
        assert_scores(scored, f"shared/{key}", SHARED[key], tokens_TV - log_mass(tokens_TV))
    n_scored = sum(each.n_scored for each in kept)
    assert scored["shared/rows"] == n_scored + len(kept)  # vLLM computes the row of the next token too
    n_cached = sum((each.first_scored - 1) // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS for each in kept[1:])  # full blocks
    assert scored["shared/tokens"] == sum(len(each.token_ids) for each in kept) - n_cached


def test_engine_shared_prompts_are_computed_each_time_after_a_failed_check(scored: dict[str, Any]) -> None:
    kept = [SHARED[key] for key in set(range(len(SHARED))) - {DISCARDED}]
    assert scored["unshared/tokens"] == sum(len(each.token_ids) for each in kept)
    for key in set(range(len(SHARED))) - {DISCARDED}:
        name = f"{key}/sampled_logps_T"
        np.testing.assert_allclose(scored[f"unshared/{name}"], scored[f"shared/{name}"], atol=1e-5)


def test_engine_support_ids_agree_with_transformers(response_logits: Logits, scored: dict[str, Any]) -> None:
    kept = set(range(len(SUPPORTED))) - {DISCARDED, REFUSED}
    for key in kept:
        sequence, tokens_TV = SUPPORTED[key], response_logits(SUPPORTED[key])[:, :N_TOKENS]
        logps_TV = tokens_TV - log_mass(tokens_TV)
        ids_TJ, logps_TJ = sequence.support_ids_TJ, scored[f"support/{key}/support_logps_TJ"]
        assert ids_TJ is not None and (logps_TJ[ids_TJ < 0] == -np.inf).all()
        expected_TJ = np.take_along_axis(logps_TV, np.maximum(ids_TJ, 0), 1)
        assert np.abs(logps_TJ - expected_TJ)[ids_TJ >= 0].max() < 1e-5
        assert scored[f"support/{key}/topk_ids_TK"].shape[1] == 8 * sequence.with_top_k
        if sequence.with_top_k:
            assert_scores(scored, f"support/{key}", sequence, logps_TV)
    assert any(len(SUPPORTED[key].token_ids) > 900 for key in kept)  # several steps


@pytest.mark.slow
def test_engine_with_tensor_parallel_ranks_keeps_sequences_apart(
    padded_qwen2: Path, response_logits: Logits, tmp_path: Path
) -> None:
    """Each rank has part of the vocabulary: scores are wrong if ranks compute sequences in different orders."""
    scored = run_script(padded_qwen2, tmp_path / "scores.npz", "2")
    for key in set(range(len(SUPPORTED))) - {DISCARDED}:
        tokens_TV = response_logits(SUPPORTED[key])[:, :N_TOKENS]
        logps_TV, ids_TJ = tokens_TV - log_mass(tokens_TV), SUPPORTED[key].support_ids_TJ
        assert ids_TJ is not None
        expected_TJ = np.take_along_axis(logps_TV, np.maximum(ids_TJ, 0), 1)
        found_TJ = scored[f"two ranks/{key}/support_logps_TJ"]
        assert np.abs(found_TJ - expected_TJ)[ids_TJ >= 0].max() < 1e-5


@pytest.mark.parametrize("name", ["wide", "padded"])
def test_engine_refuses_support_ids(scored: dict[str, Any], name: str) -> None:
    error = error_of(scored, f"{name}/error")
    assert (error["type"], error["argument"]) == ("TeacherRequestError", "support_ids_TJ")


def test_engine_padding_ids_are_rejected(scored: dict[str, Any]) -> None:
    assert scored["n_tokens"] == N_TOKENS
    padding, k = error_of(scored, "padding/error"), error_of(scored, "k/error")
    assert (padding["type"], padding["argument"]) == ("TeacherRequestError", "token_ids")
    assert (k["type"], k["options"]) == ("TeacherSetupError", ["N_LOGPROBS"])


def test_engine_excluded_ids_have_no_probability(response_logits: Logits, scored: dict[str, Any]) -> None:
    """Log-probabilities are those of a vocabulary that ends before the excluded ids."""
    for key in set(range(len(FEW))) - {DISCARDED}:
        few_TV = response_logits(FEW[key])[:, :N_FEW]
        assert_scores(scored, f"few/{key}", FEW[key], few_TV - log_mass(few_TV))
        assert np.asarray(scored[f"few/{key}/topk_ids_TK"]).max() < N_FEW
    assert error_of(scored, "few/error")["argument"] == "token_ids"
    assert error_of(scored, "too few/error")["argument"] == "n_ids"


def test_engine_kv_cache_for_one_scores_many_without_preemption(
    response_logits: Logits, scored: dict[str, Any]
) -> None:
    for key in set(range(len(LONG))) - {DISCARDED, REFUSED}:
        tokens_TV = response_logits(LONG[key])[:, :N_TOKENS]
        assert_scores(scored, f"smallest/{key}", LONG[key], tokens_TV - log_mass(tokens_TV))
    assert scored["smallest/preemptions"] == 0


def test_engine_sequence_rejected_by_vllm_gets_its_error_alone(scored: dict[str, Any]) -> None:
    assert [name for name in scored if name.startswith("smallest/") and name.endswith("/error")] == [
        f"smallest/{REFUSED}/error"
    ]
    refused = error_of(scored, f"smallest/{REFUSED}/error")
    assert refused["type"] == "TeacherRequestError" and "ValueError: no room for request 4" in refused["what"]
    assert f"smallest/{REFUSED}/topk_ids_TK" not in scored and not scored["smallest/has work"]


def test_engine_discarded_sequence_has_no_result(scored: dict[str, Any]) -> None:
    assert not [name for name in scored if f"/{DISCARDED}/" in name]


def test_engine_too_small_kv_cache_raises_at_start(scored: dict[str, Any]) -> None:
    refused = error_of(scored, "kv cache/error")
    assert refused["type"] == "TeacherSetupError" and "KV_CACHE_MIB" in refused["options"]
    assert "MAX_MODEL_LEN to 991 or less" in refused["remedy"], "the number is read from vLLM's text"


def test_engine_too_large_result_is_rejected_with_the_options(scored: dict[str, Any]) -> None:
    size_mib = ResultMemory(N_TOKENS, id_bytes=4, max_bytes=2**20).bytes_of(TOO_LARGE) / 2**20
    refused = error_of(scored, "result/error")
    assert size_mib > 1 and refused["argument"] == "token_ids"
    assert refused["options"] == ["N_LOGPROBS", "MAX_RESULT_MIB"]


def test_engine_float32_head_returns_logits_without_rounding_to_16_bits(scored: dict[str, Any]) -> None:
    assert scored["head model/dtype"] == "torch.bfloat16" and scored["head model/error"] > 1e-2
    assert scored["head float32/dtype"] == "torch.float32" and scored["head float32/error"] < 1e-4
    assert "bfloat16 (logits float32, checkpoint float32)" in str(scored["head float32/engine"])
    mass_T = np.exp(scored["head float32/4/topk_logps_TK"].astype(np.float64)).sum(axis=1)
    assert np.abs(mass_T - 1).max() < 1e-5, "padding rows of the output layer have probability"


def test_engine_woken_returns_the_same_scores(scored: dict[str, Any]) -> None:
    before = {name: array for name, array in scored.items() if name.startswith("at 1/")}
    for name, array in before.items():
        np.testing.assert_array_equal(scored[name.replace("at 1/", "woken/")], array)
    assert len(before) > 3 * (len(SHORT) - 1)
    assert scored["woken/released"] > 48 << 20, "expected most of the KV cache of 64 MiB"


def test_engine_with_one_changed_weight_refuses_to_wake(scored: dict[str, Any]) -> None:
    error = error_of(scored, "woken/wake error")
    assert (error["type"], error["tensors"]) == ("TeacherModelDamaged", ["lm_head.weight of rank 0"])
    assert scored["woken/checksums"] > 10


def test_engine_with_uniform_scores_refuses_to_wake(scored: dict[str, Any]) -> None:
    error = error_of(scored, "woken/uniform error")
    assert (error["type"], error["tensors"]) == ("TeacherModelDamaged", []), "only the probe differs"


def test_engine_logit_rows_are_those_that_vllm_computes_at_a_time(scored: dict[str, Any]) -> None:
    assert scored["chunks"].tolist() == [7, 7, 6]


ANY = TeacherSequence(np.zeros(2, np.int32), 1)


def admitted(admission: Admission) -> list[int]:
    return [pair[0] for pair in iter(admission.admit, None)]


def test_admission_admits_in_order_and_within_capacity() -> None:
    admission = Admission(Demand(10, 100))
    for key, demand in enumerate(
        [Demand(4, 1), Demand(4, 90), Demand(4, 1), Demand(1, 1), Demand(10, 100), Demand(1, 1)]
    ):
        admission.queue(key, ANY, demand)
    assert admitted(admission) == [0, 1]
    admission.release(0)
    assert admitted(admission) == [2, 3]
    assert admission.discard([1, 5, 7]) == [1] and admitted(admission) == []
    admission.release(2)
    assert admitted(admission) == []
    admission.release(3)
    assert admitted(admission) == [4]


def test_admission_empty_engine_admits_any_sequence() -> None:
    admission = Admission(Demand(10, 100))
    admission.queue(0, ANY, Demand(11, 1))
    admission.queue(1, ANY, Demand(1, 1))
    assert admitted(admission) == [0]
    admission.release(0)
    assert admitted(admission) == [1]
