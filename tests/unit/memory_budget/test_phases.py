"""Memory of each phase by hand, and refusals of phases that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from recipe_gkd.errors import MemoryBudgetError
from recipe_gkd.memory_budget import phases
from recipe_gkd.memory_budget.actor_states import ActorMemory
from recipe_gkd.memory_budget.phases import check_memory_budget, engine_overhead, phase_memory
from teacher.common.sizes import GIB
from tests._support.base_config import gpu_config
from tests._support.errors import raises
from tests._support.tiny_models import ACTOR, MEGATRON

ROLLOUT = "actor_rollout_ref.rollout"
HYBRID = ("actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync", f"{ROLLOUT}.kv_cache_memory_megabytes=3072")
ALL = {"actor weights": 2.0, "gradients": 4.0, "optimizer state": 12.0}
ENGINE = {"engine weights": 2.0, "KV cache": 3.0}
BUCKET = {"buckets": 0.25}
STATES: Any = {"params": 2.0 * GIB, "grads": 4.0 * GIB, "optimizer": 12.0 * GIB}
STUDENT = ActorMemory(stages=[STATES], n_weights=GIB)
ALL_OFFLOADED = [f"{MEGATRON}.{state}_offload=true" for state in ("param", "grad", "optimizer")]


def parts(
    *overrides: str, device: str = "cuda", student: ActorMemory = STUDENT, memory: int | None = 80 * GIB
) -> list[dict[str, float]]:
    """Return the parts of sync, generate and update, in GiB."""
    config = gpu_config(*HYBRID, f"{ROLLOUT}.update_weights_bucket_megabytes=512", *overrides)
    found = phase_memory(config, device, student, memory)
    assert [each.phase for each in found] == ["sync", "generate", "update"]
    return [{name: size / GIB for name, size in each.parts.items()} for each in found]


class TestPhaseMemory:
    def test_without_offload_all_states_stay_on_the_device(self) -> None:
        weights = {"engine weights": 2.0}
        assert parts() == [ALL | weights | BUCKET, ALL | ENGINE, ALL]

    def test_offloaded_states_are_on_the_device_in_the_phases_that_need_them(self) -> None:
        weights = {"actor weights": 2.0, "engine weights": 2.0}
        assert parts(*ALL_OFFLOADED) == [weights | BUCKET, ENGINE, ALL]

    def test_gradients_of_fsdp_exist_during_an_update_only(self) -> None:
        without = {name: size for name, size in ALL.items() if name != "gradients"}
        sync, generate, update = parts(f"{ACTOR}.strategy=fsdp")
        assert generate == without | ENGINE and update == ALL and "gradients" not in sync

    def test_sleep_level_determines_what_an_engine_keeps(self) -> None:
        for level, device, kept in ((1, "cuda", {}), (1, "cpu", {"engine weights": 2.0}), (0, "cuda", ENGINE)):
            sync, _, update = parts(f"{ROLLOUT}.sleep_level={level}", device=device)
            assert update == ALL | kept
            assert ("KV cache" in sync) == (level == 0)

    def test_bucket_of_adapters_has_their_size(self) -> None:
        student = ActorMemory(stages=[STATES], n_weights=GIB, n_adapters=GIB // 64)
        lora = (f"{ACTOR}.lora.rank=8", f"{ACTOR}.lora.sync=adapter", f"{ROLLOUT}.sleep_level=1")
        sync, _, _ = parts(*lora, student=student)
        assert sync["buckets"] == 2 / 64

    def test_engine_has_its_own_type_and_layout(self) -> None:
        found = parts(
            f"{ROLLOUT}.dtype=float32", f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"
        )
        assert found[1]["engine weights"] == 4.0 / 2

    def test_kv_cache_without_size_fills_the_fraction_of_a_gpu(self) -> None:
        unset = [f"{ROLLOUT}.kv_cache_memory_megabytes=null", f"{ROLLOUT}.gpu_memory_utilization=0.5"]
        assert parts(*unset)[1]["KV cache"] == pytest.approx(40 - 2)
        assert parts(*unset, memory=None)[1]["KV cache"] == 0
        assert parts(*unset, device="cpu")[1]["KV cache"] == 0.25

    def test_largest_pipeline_stage_counts_on_cuda_and_the_mean_on_a_cpu(self) -> None:
        smaller: Any = {state: size / 2 for state, size in STATES.items()}
        student = ActorMemory(stages=[smaller, STATES], n_weights=GIB)
        assert parts(student=student)[2]["optimizer state"] == 12
        assert parts(student=student, device="cpu")[2]["optimizer state"] == 9


class TestEngineOverhead:
    UNSET = f"{ROLLOUT}.kv_cache_memory_megabytes=null"

    def names(self, *overrides: str, device: str = "cuda") -> list[list[str]]:
        """Return the names of the parts in sync, generate and update."""
        config = gpu_config(*HYBRID, *overrides)
        found = phase_memory(config, device, STUDENT, 80 * GIB)
        return [list(engine_overhead(config, device, each)) for each in found]

    def test_engine_keeps_context_and_graphs_in_every_phase(self) -> None:
        assert self.names() == [["engine context", "CUDA graphs"]] * 3

    def test_eager_engine_has_no_graphs(self) -> None:
        assert self.names(f"{ROLLOUT}.enforce_eager=true") == [["engine context"]] * 3

    def test_graphs_are_in_the_fraction_of_an_engine_that_is_awake(self) -> None:
        both, context = ["engine context", "CUDA graphs"], ["engine context"]
        assert self.names(self.UNSET) == [both, context, both]
        assert self.names(self.UNSET, f"{ROLLOUT}.sleep_level=0") == [context] * 3

    def test_cpu_has_neither(self) -> None:
        assert self.names(device="cpu") == [[]] * 3


class TestCheckMemoryBudget:
    @pytest.fixture(autouse=True)
    def student(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(phases, "read_actor_memory", lambda _: STUDENT)

    def check(self, memory: dict[str, int], *overrides: str, device: str = "cuda") -> str:
        return check_memory_budget(gpu_config(*HYBRID, *overrides), device, memory)

    def refusal(self, memory: dict[str, int], *overrides: str, device: str = "cuda") -> Mapping[str, tuple[str, ...]]:
        """Return the keys to change of each phase that does not fit."""
        with raises(MemoryBudgetError) as caught:
            self.check(memory, *overrides, device=device)
        assert set(caught.value.keys) == {key for keys in caught.value.keys_by_phase.values() for key in keys}
        return caught.value.keys_by_phase

    def test_table_has_a_row_for_each_phase(self) -> None:
        table = self.check({"node a": 80 * GIB}).splitlines()
        names = [*ALL, *ENGINE, *BUCKET]
        assert " ".join(table[0].split()) == f"GiB {' '.join(names)} sum"
        assert table[2].split() == ["generate", "2.00", "4.00", "12.00", "2.00", "3.00", "-", "23.00"]
        assert [line.split()[0] for line in table[1:4]] == ["sync", "generate", "update"] and "80.00 GiB" in table[4]

    def test_unknown_memory_refuses_nothing(self) -> None:
        assert "memory of a slot: unknown" in self.check({})

    def test_teacher_that_sleeps_is_reported_as_unknown(self) -> None:
        assert "memory of the teacher is unknown" in self.check(
            {}, "actor_rollout_ref.teacher.sleep_between_batches=true"
        )

    def test_smallest_node_with_phase_and_keys_is_named(self) -> None:
        with raises(MemoryBudgetError, node="node b") as caught:
            self.check({"node a": 80 * GIB, "node b": 22 * GIB})
        assert "generate needs 23.00 GiB, 1.00 GiB more than a slot has" in caught.value.details[-1]
        assert caught.value.keys_by_phase.keys() == {"generate"}
        offload = {f"{ACTOR}.megatron.{name}_offload" for name in ("param", "grad")}
        wanted = {*offload, f"{ROLLOUT}.kv_cache_memory_megabytes", "trainer.n_gpus_per_node"}
        assert wanted <= {*caught.value.keys}

    def test_offload_makes_room_for_the_engine(self) -> None:
        assert self.check({"node b": 22 * GIB}, *ALL_OFFLOADED)

    def test_update_that_does_not_fit_is_not_helped_by_offload(self) -> None:
        update = self.refusal({"node a": 16 * GIB}, f"{ROLLOUT}.sleep_level=0")["update"]
        assert not [key for key in update if "offload" in key] and f"{ROLLOUT}.sleep_level" in update

    def test_slots_of_a_cpu_get_more_memory_if_there_are_fewer(self) -> None:
        update = self.refusal({"node a": 16 * GIB}, "trainer.n_gpus_per_node=2", device="cpu")["update"]
        assert "trainer.n_gpus_per_node" in update

    def test_layout_keys_of_fsdp_are_named(self) -> None:
        fsdp = [f"{ACTOR}.strategy=fsdp", "trainer.n_gpus_per_node=2", f"{ACTOR}.fsdp_config.fsdp_size=1"]
        update = self.refusal({"node a": 16 * GIB}, *fsdp)["update"]
        assert {f"{ACTOR}.fsdp_config.fsdp_size", f"{ACTOR}.lora.rank"} <= {*update}
        assert not [key for key in update if "megatron" in key]

    def test_fraction_below_the_weights_of_the_engine_is_refused(self) -> None:
        unset = [f"{ROLLOUT}.kv_cache_memory_megabytes=null", f"{ROLLOUT}.gpu_memory_utilization=0.05"]
        keys = (f"{ROLLOUT}.gpu_memory_utilization", f"{ROLLOUT}.tensor_model_parallel_size")
        with raises(MemoryBudgetError, keys_by_phase={"generate": keys}):
            self.check({"node a": 30 * GIB}, *unset, *ALL_OFFLOADED)
