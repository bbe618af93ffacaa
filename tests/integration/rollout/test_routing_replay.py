"""Replay of the experts of a real engine: the actor's log-probabilities come closer to those of a 16-bit rollout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from recipe_gkd.commands.gpu_smoke.tiny_models import make_prompts, random_top_k
from recipe_gkd.data.samples import Sample, TeacherTopK
from tests._support.causal_models import VOCABULARY
from tests._support.families import BY_TYPE, make_family_folder
from tests._support.rollout_models import config_for
from tests._support.tiny_models import ACTOR, make_config
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.rollout.captured_experts import convert_output, sample_with_experts, start_with_error

ROLLOUT = "actor_rollout_ref.rollout"
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 4, "num_hidden_layers": 6, "moe_intermediate_size": 96}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


def scale_experts(file: Path, factor: float) -> None:
    weights = {name: tensor * factor if ".experts." in name else tensor for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.slow
def test_replay_of_a_bfloat16_engine_lowers_the_difference_of_log_probs(pool: WorkerPool, tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path / "model", BY_TYPE["qwen3_moe"], EXPERTS)
    scale_experts(folder / "model.safetensors", 3.0)  # otherwise attention outweighs the choice of experts
    [responses] = pool.run(1, sample_with_experts, config_for(folder, f"{ROLLOUT}.dtype=bfloat16"), VOCABULARY)
    rng, samples = np.random.default_rng(0), []
    for prompt, response in zip(make_prompts(8, vocabulary=VOCABULARY), responses, strict=True):
        logps_TK, ids_TK = random_top_k(rng, len(response.ids), VOCABULARY, 4)
        top_k = TeacherTopK(
            logps_TK=logps_TK.astype(np.float32), ids_TK=ids_TK.astype(np.int32), sampled_logps_T=response.logprobs
        )
        samples.append(Sample(prompt=prompt, response=response, teacher=top_k))
    found = {}
    for replays in (False, True):
        settings = f"{ROLLOUT}.routing_replay={str(replays).lower()}", f"{ACTOR}.strategy=fsdp"
        config = make_config(folder, *settings, f"{ACTOR}.fsdp_config.dtype=float32")
        [training] = pool.run(1, jobs.train_any, config, [samples])
        [found[replays]] = training.metrics
    assert 0.8 < found[True]["actor/routing_agreement"] < 1
    for name in ("actor/rollout_log_prob_diff", "actor/rollout_kl"):
        assert found[True][name] < 0.5 * found[False][name], name


@pytest.mark.slow
def test_engine_on_a_cpu_is_refused_by_name(pool: WorkerPool, tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path / "model", BY_TYPE["qwen3_moe"])
    [error] = pool.run(1, start_with_error, config_for(folder, f"{ROLLOUT}.routing_replay=true"))
    assert "routing_replay=true on a CPU" in error


@pytest.mark.slow
def test_response_has_the_experts_of_the_output(pool: WorkerPool) -> None:
    [response] = pool.run(1, convert_output, np.full((4, 3, 2), 200, np.uint8))
    assert response.routed_experts_PX.dtype == np.int16 and response.routed_experts_PX.shape == (4, 3, 2)
    assert (response.routed_experts_PX == 200).all()
