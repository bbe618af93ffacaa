"""Test of a weight sync from a mixture-of-experts actor to an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.data.samples import Response
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.rollout.ray_worker import RolloutWorker
from tests._support.qwen2 import EOS
from tests._support.rollout_models import VOCABULARY, config_for, prompts, reference_logprobs
from tests._support.waiting import PATIENCE_S
from tests.integration.rollout.conftest import environment, make_synchronizer
from tests.integration.rollout.reusable_actors import ReusableActorWorker, start_trained_actor

pytestmark = pytest.mark.slow

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
GIVEN = prompts(12)
RANKS = 2


def make_moe_model(seed: int) -> Qwen3MoeForCausalLM:
    """Return a Qwen3-MoE model. vLLM pads its experts on a CPU, because their width is not a multiple of 32."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, eos_token_id=EOS, initializer_range=0.1,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).float().eval()


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([f"{MEGATRON}.expert_model_parallel_size={RANKS}", f"{MEGATRON}.dtype=float32"], id="megatron"),
        pytest.param([f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=float32"], id="fsdp"),
    ],
)
def test_sync_from_actor_matches_export(ray_session: None, tmp_path: Path, overrides: list[str]) -> None:
    folder, export = tmp_path / "mixture", tmp_path / "export"
    make_moe_model(1).save_pretrained(folder)
    config = config_for(
        folder, f"trainer.n_gpus_per_node={RANKS}", *overrides, f"{ACTOR}.optim.lr=0.01",
        "actor_rollout_ref.nccl_timeout=60",
    )  # fmt: skip
    own = environment()
    env = {"env_vars": actor_environment("cpu")}
    processes = [ray.remote(num_cpus=0, runtime_env=env)(ReusableActorWorker).remote() for _ in range(RANKS)]
    worker = ray.remote(num_cpus=0, runtime_env=own)(RolloutWorker).remote(
        config_for(folder), rank=0, device="cpu", folder_version=0
    )
    rollout = WorkerGroup("rollout", [worker])

    async def responses() -> dict[int, Response]:
        found: dict[int, Response] = {}
        async for batch in rollout.stream(
            0, RolloutWorker.generate, GIVEN, 0, "validation", timeout_s=PATIENCE_S, phase="generate"
        ):
            found |= {response.uid: response for response in batch}
        return found

    async def before_and_after() -> tuple[dict[int, Response], dict[int, Response]]:
        ready = worker.setup.remote()
        actor = await start_trained_actor(processes, config, RANKS)
        await actor.call(ReusableActorWorker.save_hf, str(export), timeout_s=PATIENCE_S, phase="export")
        await ready
        before = await responses()
        sync = make_synchronizer(actor, rollout)
        await sync.sync(1)
        await sync.sync(2)
        return before, await responses()

    try:
        before, after = asyncio.run(before_and_after())
    finally:
        for process in (*processes, worker):
            ray.kill(process)
    assert after.keys() == {prompt.uid for prompt in GIVEN}
    assert any(not np.array_equal(after[uid].ids, response.ids) for uid, response in before.items())
    for model, found in ((make_moe_model(1), before), (AutoModelForCausalLM.from_pretrained(export), after)):
        for prompt in GIVEN:
            response = found[prompt.uid]
            np.testing.assert_allclose(
                response.logprobs, reference_logprobs(model, prompt, response), atol=1e-5, rtol=0
            )
