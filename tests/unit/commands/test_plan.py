"""Figures of ``plan``, and the search for the smallest change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_gkd.__main__ import main
from recipe_gkd.actor.strategy import read_student_dims
from recipe_gkd.commands.plan.activations import micro_batch_memory
from recipe_gkd.commands.plan.changes import smallest_change, with_values
from recipe_gkd.commands.plan.estimate import estimate_run
from recipe_gkd.config import Config
from recipe_gkd.memory_budget.actor_states import read_actor_memory
from recipe_gkd.memory_budget.phases import CUDA_GRAPH_BYTES, ENGINE_CONTEXT_BYTES
from tests._support.base_config import gpu_config

GIB = 1 << 30
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
RECOMPUTE = tuple(
    f"{MEGATRON}.override_transformer_config.{field}"
    for field in ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
)
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the config.json of Qwen2.5-7B only."""
    folder = tmp_path_factory.mktemp("student")
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return folder


@pytest.fixture
def config(student: Path) -> Config:
    return gpu_config(f"actor_rollout_ref.model.path={student}", "trainer.n_gpus_per_node=4", f"{ACTOR}.timeout_s=60")


def parts(config: Config, pool: str, memory: int | None = 80 * GIB) -> dict[str, float]:
    (found,) = (each for each in estimate_run(config, "cuda", memory).pools if each.name == pool)
    return dict(found.parts)


def pipeline_config(student: Path, stages: int, *overrides: str) -> Config:
    size = (f"{MEGATRON}.pipeline_model_parallel_size={stages}", f"trainer.n_gpus_per_node={stages}")
    return gpu_config(f"actor_rollout_ref.model.path={student}", *size, f"{ACTOR}.max_token_len=16384", *overrides)


def activations(config: Config, n_micro_batches: int) -> float:
    """Return the bytes of activations of the first pipeline stage: the last one has next to no logits."""
    dims = replace(read_student_dims(config.actor_rollout_ref.model.path, config), vocab_size=1)
    return micro_batch_memory(config, "cuda", dims, 1, n_micro_batches).activations


class TestEstimateRun:
    def test_states_are_those_of_the_memory_budget(self, config: Config) -> None:
        (states,) = read_actor_memory(config).stages
        found = parts(config, "actor")
        assert [found["actor weights"], found["gradients"], found["optimizer state"]] == list(states.values())

    def test_activations_and_logits_are_proportional_to_the_micro_batch(self, config: Config) -> None:
        whole, half = (parts(with_values(config, {f"{ACTOR}.max_token_len": n}), "actor") for n in (16384, 8192))
        assert whole["activations"] == 2 * half["activations"] and whole["logits"] == 2 * half["logits"]
        assert whole["logits"] == 16384 * 152064 * 4, "float32 logits of 16-bit weights on CUDA"

    def test_fused_head_and_recomputation_lower_their_parts(self, config: Config) -> None:
        before = parts(config, "actor")
        assert parts(with_values(config, {"gkd.fuse_lm_head": True}), "actor")["logits"] < before["logits"] / 3
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        after = parts(with_values(config, {f"{MEGATRON}.override_transformer_config": recompute}), "actor")
        assert after["activations"] < before["activations"] / 5

    def test_recomputed_layer_exists_once_and_inputs_for_each_micro_batch_in_flight(self, student: Path) -> None:
        config = pipeline_config(student, 4, f"{MEGATRON}.transformer_impl=local", *RECOMPUTE)
        hidden, heads, keys, ffn = 3584, 3584, 512, 18944
        layer = 5 * hidden + 4 * heads + 3 * keys + 3 * ffn
        for n_micro_batches, n_in_flight in ((2, 2), (4, 4), (64, 4)):
            numbers = n_in_flight * 28 / 4 * hidden + layer + 6 * hidden
            assert activations(config, n_micro_batches) == pytest.approx(16384 * 2 * numbers)

    def test_interleaved_stages_store_more_micro_batches(self, student: Path) -> None:
        """Megatron's first stage of 4 begins a backward pass after 2 x 3 + 4 + 1 forward passes of half a stage."""
        plain = pipeline_config(student, 4, *RECOMPUTE)
        config = pipeline_config(student, 4, f"{MEGATRON}.virtual_pipeline_model_parallel_size=2", *RECOMPUTE)
        stored = (activations(plain, 64) - activations(plain, 1)) / 3
        assert activations(config, 64) - activations(plain, 1) == pytest.approx(stored * (11 / 2 - 1))

    def test_layers_with_adapters_are_those_of_torch(self, student: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        installed = SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: object()))  # Transformer Engine
        monkeypatch.setattr("recipe_gkd.commands.plan.activations.importlib", installed)
        auto, local = (f"{MEGATRON}.transformer_impl={impl}" for impl in ("auto", "local"))
        lora = f"{ACTOR}.lora.rank=16"
        found = [activations(pipeline_config(student, 1, *keys), 1) for keys in ([auto], [auto, lora], [local, lora])]
        assert found[0] < found[1] == found[2]

    def test_step_with_16_bit_gradients_needs_float32_copies(self, config: Config) -> None:
        small = {f"{ACTOR}.max_token_len": 3072, f"{MEGATRON}.use_distributed_optimizer": False}
        in_float32 = parts(with_values(config, small), "actor")
        reduced = {f"{MEGATRON}.override_ddp_config": {"grad_reduce_in_fp32": False}}
        in_16_bits = parts(with_values(config, small | reduced), "actor")
        n = estimate_run(config, "cuda", None).n_parameters
        assert in_float32["optimizer step"] == 4 * n and in_16_bits["optimizer step"] == 8 * n

    def test_phases_of_the_hybrid_engine_have_context_and_graphs_of_the_engine(self, config: Config) -> None:
        shared = {"actor_rollout_ref.hybrid_engine": True, "trainer.scheduler": "sync"}
        hybrid = with_values(config, {**shared, f"{ROLLOUT}.kv_cache_memory_megabytes": 1024})
        for phase in ("sync", "generate", "update"):
            found = parts(hybrid, phase)
            assert (found["engine context"], found["CUDA graphs"]) == (ENGINE_CONTEXT_BYTES, CUDA_GRAPH_BYTES)
        eager = parts(with_values(hybrid, {f"{ROLLOUT}.enforce_eager": True}), "update")
        assert sum(parts(hybrid, "update").values()) - sum(eager.values()) == CUDA_GRAPH_BYTES
        assert "engine context" not in parts(config, "actor")

    def test_traffic_of_a_step_follows_from_the_batch(self, config: Config) -> None:
        estimate = estimate_run(config, "cuda", None)
        n_responses = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        assert estimate.teacher_bytes == n_responses * config.data.max_response_length * (256 * 8 + 4)
        assert estimate.sync_bytes == 2 * estimate.n_parameters == 2 * 7_615_616_512
        assert estimate.problems == [] and estimate.device_memory is None

    @pytest.mark.parametrize(("target", "n_scored"), [("teacher", 64 + 512), ("data", 512)])
    def test_references_come_once_and_are_scored_if_the_teacher_is_their_target(
        self, config: Config, target: str, n_scored: int
    ) -> None:
        values = {"data.train_batch_size": 128, f"{ROLLOUT}.n": 8, "gkd.sft_share": 0.5, "gkd.sft_target": target}
        estimate = estimate_run(with_values(config, values), "cuda", None)
        longest = config.data.max_prompt_length + config.data.max_response_length
        assert estimate.tokens == (64 + 64 * 8) * longest
        assert estimate.teacher_bytes == n_scored * config.data.max_response_length * estimate.token_bytes

    @pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
    def test_sync_of_adapters_sends_their_factors_in_the_training_type(self, student: Path, strategy: str) -> None:
        lora = (f"{ACTOR}.strategy={strategy}", f"{ACTOR}.lora.rank=16")
        paths = (f"actor_rollout_ref.model.path={student}", *lora)
        merged, adapter = (gpu_config(*paths, f"{ACTOR}.lora.sync={sync}") for sync in ("merged", "adapter"))
        assert estimate_run(merged, "cuda", None).sync_bytes == 2 * 7_615_616_512
        sizes = [(3584, 3584), (3584, 512), (3584, 512), (3584, 3584)]  # inputs and outputs of q, k, v, o
        sizes += [(3584, 18944), (3584, 18944), (18944, 3584)]
        n_adapters = 28 * 16 * sum(inputs + outputs for inputs, outputs in sizes)
        assert estimate_run(adapter, "cuda", None).sync_bytes == 2 * n_adapters

    def test_kv_cache_too_small_for_a_sequence_is_a_problem(self, config: Config) -> None:
        estimate = estimate_run(config, "cuda", 16 * GIB)
        assert any("KV cache of 0.00 GiB does not hold one sequence of" in text for text in estimate.problems)


class TestSmallestChange:
    def test_change_makes_it_fit_and_half_of_it_does_not(self, config: Config) -> None:
        config = with_values(
            config, {f"{MEGATRON}.tensor_model_parallel_size": 4, f"{MEGATRON}.sequence_parallel": True}
        )
        config = with_values(config, {f"{ACTOR}.max_token_len": 65536})
        assert estimate_run(config, "cuda", 80 * GIB).problems
        change = smallest_change(config, "cuda", 80 * GIB)
        assert change is not None
        (override,) = change.overrides
        key, _, value = override.partition("=")
        assert key == f"{ACTOR}.max_token_len"
        assert not estimate_run(with_values(config, {key: int(value)}), "cuda", 80 * GIB).problems
        assert estimate_run(with_values(config, {key: 2 * int(value)}), "cuda", 80 * GIB).problems

    def test_change_of_a_free_form_section_names_the_new_keys_only(self, config: Config) -> None:
        """The other keys of the section keep their values, such as null."""
        key = f"{MEGATRON}.override_transformer_config"
        config = with_values(config, {key: {"moe_router_dtype": None}})
        changes = (smallest_change(config, "cuda", size * GIB) for size in range(20, 90, 10))
        overrides = [override for change in changes if change is not None for override in change.overrides]
        assert f"{key}.recompute_granularity=full" in overrides and not any("None" in each for each in overrides)
        values = dict(override.split("=") for override in overrides if override.startswith(key))
        changed = with_values(config, values).actor_rollout_ref.actor.megatron.override_transformer_config
        assert changed["moe_router_dtype"] is None and changed["recompute_granularity"] == "full"

    def test_several_changes_are_combined_if_one_is_not_enough(self, config: Config) -> None:
        change = smallest_change(config, "cuda", 44 * GIB)
        assert change is not None and len(change.overrides) > 1 and not change.estimate.problems

    def test_impossible_memory_has_no_change(self, config: Config) -> None:
        assert smallest_change(config, "cuda", 1 * GIB) is None


class TestCommand:
    def run(self, capsys: pytest.CaptureFixture[str], student: Path, *arguments: str) -> tuple[int, str, str]:
        status = main(["plan", f"actor_rollout_ref.model.path={student}", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    def test_text_names_what_does_not_fit_and_the_change(
        self, student: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, out, _ = self.run(capsys, student, "--device-memory-gb", "80", "trainer.n_gpus_per_node=4")
        assert status == 1
        assert "student: 7.62 B parameters" in out and "does not fit: actor needs" in out
        assert "smallest change that makes it fit: actor_rollout_ref." in out

    def test_json_has_all_figures(self, student: Path, capsys: pytest.CaptureFixture[str]) -> None:
        status, out, _ = self.run(capsys, student, "--json", "--device-memory-gb", "1000")
        report: dict[str, Any] = json.loads(out)
        assert status == 0 and report["fits"] and report["smallest_change"] is None
        assert {pool["name"] for pool in report["estimate"]["pools"]} == {"actor", "rollout"}

    @pytest.mark.parametrize("device", ["auto", "cuda"])
    def test_machine_without_gpu_shows_the_figures_without_a_comparison(
        self, student: Path, device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", "")  # no nvidia-smi
        status, out, err = self.run(capsys, student, f"trainer.device={device}")
        *figures, advice = out.splitlines()
        assert status == 0 and not err
        assert "student: 7.62 B parameters" in out and "memory of a GPU: unknown" in figures
        assert any(line.startswith("  actor: ") for line in figures)
        assert any(line.startswith("KV cache: unknown") for line in figures)
        assert "no GPU" in advice and "--device-memory-gb 80" in advice
