"""Computed sizes of weights, gradients and optimizer state against those of actors that have trained."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from recipe_gkd.config import Config
from recipe_gkd.memory_budget.actor_states import read_actor_memory
from teacher.common.weight_files import open_weights, weight_files
from tests._support.ports import free_port
from tests._support.tiny_models import ACTOR, MEGATRON, make_config, make_samples, started, update
from tests._support.worker_pool import WorkerPool

FSDP = f"{ACTOR}.strategy=fsdp"
FSDP_DTYPE = f"{ACTOR}.fsdp_config.dtype"
ONE_RANK = {
    "Megatron, bfloat16": ("tied", [f"{MEGATRON}.dtype=bfloat16"]),
    "Megatron, float32, not distributed": (
        "untied", [f"{MEGATRON}.dtype=float32", f"{MEGATRON}.use_distributed_optimizer=false"]
    ),
    "FSDP, bfloat16": ("tied", [FSDP, f"{FSDP_DTYPE}=bfloat16"]),
    "FSDP, float32": ("untied", [FSDP, f"{FSDP_DTYPE}=float32"]),
    "Megatron, LoRA": ("tied", [f"{MEGATRON}.dtype=bfloat16", f"{ACTOR}.lora.rank=16"]),
    "FSDP, LoRA": ("untied", [FSDP, f"{FSDP_DTYPE}=bfloat16", f"{ACTOR}.lora.rank=16"]),
}  # fmt: skip
SEVERAL_RANKS = {
    "Megatron, 2 data-parallel": ("tied", 2, [f"{MEGATRON}.dtype=bfloat16"]),
    "Megatron, 2 tensor x 2 stages": (
        "tied", 4, [f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.pipeline_model_parallel_size=2"]
    ),
    "Megatron, 2 stages x 2 chunks": (
        "untied", 2,
        [f"{MEGATRON}.pipeline_model_parallel_size=2", f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"],
    ),
    "Megatron, 2 expert-parallel": (
        "experts", 2, [f"{MEGATRON}.dtype=bfloat16", f"{MEGATRON}.expert_model_parallel_size=2"]
    ),
    "Megatron, LoRA, 2 tensor x 2 stages": (
        "experts", 4,
        [
            f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.pipeline_model_parallel_size=2",
            f"{MEGATRON}.sequence_parallel=true", f"{ACTOR}.lora.rank=16",
        ],
    ),
    "FSDP, 2 shards": ("untied", 2, [FSDP]),
    "FSDP, 2 copies": ("tied", 2, [FSDP, f"{ACTOR}.fsdp_config.fsdp_size=1"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of models with 5 to 8 million parameters, so that padding is less than 1 %."""
    import transformers

    base = tmp_path_factory.mktemp("students")
    sizes = dict(
        vocab_size=8001, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, head_dim=64, mlp_only_layers=[1])
    models = {
        "tied": transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, tie_word_embeddings=True)),
        "untied": transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, tie_word_embeddings=False)),
        "experts": transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts)),
    }
    for kind, model in models.items():
        model.save_pretrained(base / kind)
        (base / kind / "tokenizer.json").write_text("{}")
    return {kind: base / kind for kind in models}


def measure(rank: int, world_size: int, port: int, config: Config) -> tuple[int, list[int]]:
    """Return the pipeline stage of a rank, and the sizes of its states in its second optimizer step."""
    with started(rank, world_size, port, config) as actor:
        sizes: dict[str, int] = {}
        update(actor, make_samples(4))
        optimizer = actor.backend.model.optimizer
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            inner = getattr(part, "optimizer", part)
            inner.register_step_pre_hook(lambda *_: sizes.update(actor.state_sizes()))
        update(actor, make_samples(4), 1)
        return actor.layout.pp_rank, list(sizes.values())


def assert_predicted(config: Config, stage: int, sizes: list[int]) -> None:
    assert sizes == pytest.approx(list(read_actor_memory(config).stages[stage].values()), rel=0.01)


@pytest.mark.parametrize("name", ONE_RANK)
def test_sizes_on_one_rank_are_those_of_the_actor(name: str, students: dict[str, Path]) -> None:
    kind, overrides = ONE_RANK[name]
    config = make_config(students[kind], *overrides)
    assert_predicted(config, *measure(0, 1, free_port(), config))


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL_RANKS)
def test_sizes_on_several_ranks_are_those_of_the_actor(name: str, students: dict[str, Path], pool: WorkerPool) -> None:
    kind, ranks, overrides = SEVERAL_RANKS[name]
    config = make_config(students[kind], *overrides, ranks=ranks)
    for stage, sizes in pool.run(ranks, measure, config):
        assert_predicted(config, stage, sizes)


@pytest.mark.parametrize(
    ("kind", "overrides"), [("tied", []), ("untied", []), ("experts", []), ("tied", [FSDP]), ("untied", [FSDP])]
)
def test_weights_of_an_engine_are_those_of_the_folder(
    kind: str, overrides: list[str], students: dict[str, Path]
) -> None:
    shapes = []
    for path in weight_files(students[kind]):
        with open_weights(path) as file:
            shapes += [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - no mapping
    assert read_actor_memory(make_config(students[kind], *overrides)).n_weights == sum(map(math.prod, shapes))
