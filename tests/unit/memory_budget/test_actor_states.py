"""Sizes of an actor rank in parallel layouts, by hand. Those of real actors are in ``tests/integration/actor``."""

from __future__ import annotations

import dataclasses

import pytest

from recipe_gkd.actor.megatron.lora_table import adapted_weights
from recipe_gkd.actor.megatron.model_dims import ModelDims, Rope
from recipe_gkd.actor.student_dims import MoEConfig
from recipe_gkd.memory_budget.actor_states import fsdp_states, megatron_states
from tests._support.base_config import gpu_config
from tests._support.tiny_models import ACTOR, MEGATRON

FSDP = f"{ACTOR}.strategy=fsdp"
BF16, LORA = f"{MEGATRON}.dtype=bfloat16", f"{ACTOR}.lora.rank=4"
DENSE = ModelDims(
    family="llama", layers=4, hidden=256, ffn=512, heads=4, kv_heads=2, head_dim=64, vocab_size=1024, max_positions=64,
    tied=False, qkv_bias=False, qk_norm=None, norm_eps=1e-6, ropes=(Rope(width=64, theta=1e4),),
)  # fmt: skip
NORMS = 2 * 256  # of a layer; tensor parallelism does not divide them
LAYER = 256 * 256 + 2 * 128 * 256 + 256 * 256 + 3 * 512 * 256  # query, key and value, output, feed-forward
EMBEDDING = 1024 * 256
MOE = dataclasses.replace(
    DENSE,
    family="mixtral",
    moe=MoEConfig(layers=(True,) * 4, experts=8, top_k=2, ffn=512, normalized=True, shared_ffn=None),
)
EXPERTS = 4 * 8 * 3 * 512 * 256


def stages(dims: ModelDims, *overrides: str, ranks: int = 1) -> list[dict[str, float]]:
    config = gpu_config(f"trainer.n_gpus_per_node={ranks}", *(f"{MEGATRON}.{each}" for each in overrides))
    return [dict(stage) for stage in megatron_states(dims, config.actor_rollout_ref.actor.megatron, ranks)]


class TestMegatronStates:
    def test_tensor_parallelism_divides_all_but_norms(self) -> None:
        n = (4 * LAYER + 2 * EMBEDDING) / 2 + 4 * NORMS + 256
        found = stages(DENSE, "tensor_model_parallel_size=2", "dtype=bfloat16", ranks=2)
        assert found == [{"params": 2 * n, "grads": 4 * n, "optimizer": 12 * n}]

    def test_data_and_context_parallelism_divide_the_distributed_optimizer(self) -> None:
        n = 4 * (LAYER + NORMS) + 2 * EMBEDDING + 256
        found = stages(DENSE, "context_parallel_size=2", "dtype=bfloat16", ranks=4)
        assert found == [{"params": 2 * n, "grads": 4 * n, "optimizer": 12 * n / 4}]
        whole = stages(DENSE, "use_distributed_optimizer=false", "dtype=float32", ranks=4)
        assert whole == [{"params": 4 * n, "grads": 4 * n, "optimizer": 8 * n}]

    def test_gradients_without_float32_have_the_type_of_the_weights(self) -> None:
        found = stages(DENSE, "dtype=bfloat16", "override_ddp_config.grad_reduce_in_fp32=false")
        assert found[0]["grads"] == found[0]["params"]

    @pytest.mark.parametrize("tied", [False, True])
    def test_first_and_last_pipeline_stage_have_an_embedding(self, tied: bool) -> None:
        dims = dataclasses.replace(DENSE, tied=tied)
        found = stages(dims, "pipeline_model_parallel_size=4", "dtype=float32", ranks=4)
        layer = LAYER + NORMS
        assert [stage["params"] / 4 for stage in found] == [layer + EMBEDDING, layer, layer, layer + EMBEDDING + 256]

    def test_unequal_stages_count_as_their_mean(self) -> None:
        unequal = "override_transformer_config.num_layers_in_first_pipeline_stage=1"
        found = stages(DENSE, "pipeline_model_parallel_size=2", "dtype=float32", unequal, ranks=2)
        assert found[0]["params"] / 4 == (4 * (LAYER + NORMS) + 2 * EMBEDDING + 256) / 2 and len(found) == 1

    def test_experts_are_divided_by_their_own_layout(self) -> None:
        layout = ["expert_model_parallel_size=2", "expert_tensor_parallel_size=1", "tensor_model_parallel_size=2"]
        found = stages(MOE, *layout, "sequence_parallel=true", "dtype=bfloat16", ranks=4)
        attention = 4 * (LAYER - 3 * 512 * 256)
        dense = (attention + 2 * EMBEDDING) / 2 + 4 * (NORMS + 8 * 256) + 256  # the router is not divided
        experts = EXPERTS / 2
        assert found[0]["params"] == 2 * (dense + experts)
        assert found[0]["optimizer"] == 12 * (dense / 2 + experts / 2)

    def test_adapters_are_the_only_trained_parameters(self) -> None:
        """Factors of rank 4: A has the inputs of a layer, B its outputs. Each layer is divided on one side only."""
        config = gpu_config("trainer.n_gpus_per_node=4", f"{MEGATRON}.tensor_model_parallel_size=2", BF16, LORA)
        actor = config.actor_rollout_ref.actor
        inputs_and_outputs = [(256, 256 / 2), (256, 128 / 2), (256, 128 / 2), (256 / 2, 256)]  # q, k, v, o
        inputs_and_outputs += [(256, 512 / 2), (256, 512 / 2), (512 / 2, 256)]
        adapters = 4 * 4 * sum(sum(sizes) for sizes in inputs_and_outputs)
        base = (4 * LAYER + 2 * EMBEDDING) / 2 + 4 * NORMS + 256
        found = megatron_states(DENSE, actor.megatron, 4, adapted_weights(DENSE, actor.lora))
        assert found == [{"params": 2 * (base + adapters), "grads": 4 * adapters, "optimizer": 12 * adapters / 2}]

    def test_experts_have_no_adapters(self) -> None:
        config = gpu_config(LORA, f"{ACTOR}.lora.target_modules=[q_proj]")
        actor = config.actor_rollout_ref.actor
        [found] = megatron_states(MOE, actor.megatron, 1, adapted_weights(MOE, actor.lora))
        assert found["grads"] == 4 * 4 * 4 * (256 + 256)


class TestFsdpStates:
    def test_ranks_that_share_a_copy_divide_rows(self) -> None:
        shapes = [(5, 10), (3,)]
        for fsdp_size, n in ((-1, 2 * 10 + 1), (2, 3 * 10 + 2), (1, 53)):
            config = gpu_config(FSDP, f"{ACTOR}.fsdp_config.fsdp_size={fsdp_size}", "trainer.n_gpus_per_node=4")
            found = fsdp_states(shapes, [], config.actor_rollout_ref.actor, 4)
            assert found == {"params": 4 * n, "grads": 4 * n, "optimizer": 8 * n}

    def test_frozen_weights_have_neither_gradients_nor_optimizer_state(self) -> None:
        config = gpu_config(FSDP, f"{ACTOR}.fsdp_config.dtype=bfloat16")
        found = fsdp_states([(100, 10)], [(2, 10), (100, 2)], config.actor_rollout_ref.actor, 1)
        assert found == {"params": 2 * 1000 + 4 * 220, "grads": 4 * 220, "optimizer": 8 * 220}
