"""Predicted stage times of ``plan --timing``: measured updates, properties of the rooflines, and errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.__main__ import main
from recipe_gkd.actor.strategy import read_student_dims
from recipe_gkd.actor.student_dims import MoEConfig, StudentDims
from recipe_gkd.commands.plan import assumptions as assumed
from recipe_gkd.commands.plan.estimate import estimate_run
from recipe_gkd.commands.plan.rooflines import (
    DeviceRates,
    Engine,
    Workload,
    cache_bytes,
    decode_step_seconds,
    generation_seconds,
    pass_seconds,
    scoring_seconds,
    weight_bytes,
)
from recipe_gkd.commands.plan.timing import (
    TimingEstimate,
    device_rates,
    estimate_timing,
    read_teacher,
    sync_seconds,
)
from recipe_gkd.commands.plan.timing_text import timing_text
from recipe_gkd.commands.plan.update_timing import update_parts
from recipe_gkd.config import Config
from recipe_gkd.errors import ConfigError
from recipe_gkd.memory_budget.actor_states import read_actor_memory
from recipe_gkd.metrics.advice.step_time_model import step_bound
from recipe_gkd.metrics.device_peaks import MEMORY_TB_PER_S, PEAKS, memory_tb_per_s
from tests._support.base_config import gpu_config
from tests._support.errors import raises
from tests._support.repository import REPO
from tests.unit.test_doc_commands import commands_of

GIB = 1 << 30
ACTOR = "actor_rollout_ref.actor"
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
BENCHMARK = Workload(n_responses=64, prompt_tokens=32, response_tokens=1024, longest_response=1024)
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "max_position_embeddings": 32768,
}
QWEN_1_5B = QWEN | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN_7B = QWEN | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def write_config(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("student"), QWEN_1_5B)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("teacher"), QWEN_7B)


@pytest.fixture(scope="module")
def dims(student: Path) -> StudentDims:
    return read_student_dims(student, config_of(student))


@pytest.fixture
def device() -> DeviceRates:
    return device_rates(H100, "bfloat16")


def config_of(student: Path, *overrides: str) -> Config:
    return gpu_config(f"actor_rollout_ref.model.path={student}", *overrides)


def predict(config: Config, teacher: Path | None, n_teacher_gpus: int = 1) -> TimingEstimate:
    estimate = estimate_run(config, "cuda", 80 * GIB)
    folder = None if teacher is None else str(teacher)
    return estimate_timing(config, estimate, read_teacher(config, folder, n_teacher_gpus), H100)


class TestUpdate:
    @pytest.mark.parametrize(("strategy", "measured_s"), [("megatron", 1.33), ("fsdp", 1.78)])
    def test_update_on_h200_is_within_10_percent_of_the_measured_one(
        self, student: Path, dims: StudentDims, strategy: str, measured_s: float
    ) -> None:
        config = config_of(student, f"{ACTOR}.strategy={strategy}")
        parts = update_parts(config, dims, BENCHMARK, device_rates(H200, "bfloat16"))
        assert sum(parts.values()) == pytest.approx(measured_s, rel=0.1)

    def test_fused_head_on_h200_is_within_10_percent_of_the_measured_loss(
        self, student: Path, dims: StudentDims
    ) -> None:
        separate, fused = (
            update_parts(
                config_of(student, f"gkd.fuse_lm_head={value}"), dims, BENCHMARK, device_rates(H200, "bfloat16")
            )
            for value in ("false", "true")
        )
        # 4096 of the 65536 positions took 13.3 ms instead of 9.5 ms (docs/performance.md).
        assert fused["passes"] - separate["passes"] == pytest.approx(16 * (13.3e-3 - 9.5e-3), rel=0.1)

    @pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
    def test_twice_the_ranks_halve_the_passes(self, student: Path, dims: StudentDims, strategy: str) -> None:
        one, two = (
            update_parts(
                config_of(student, f"{ACTOR}.strategy={strategy}", f"trainer.n_gpus_per_node={n}"),
                dims,
                BENCHMARK,
                device_rates(H100, "bfloat16"),
            )
            for n in (1, 2)
        )
        assert two["passes"] == one["passes"] / 2
        assert two["optimizer"] < one["optimizer"]

    def test_recomputation_adds_a_forward_pass_of_the_layers(
        self, student: Path, dims: StudentDims, device: DeviceRates
    ) -> None:
        fsdp = config_of(student, f"{ACTOR}.strategy=fsdp")
        recomputed = config_of(student, f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.gradient_checkpointing=true")
        before, after = (update_parts(config, dims, BENCHMARK, device)["passes"] for config in (fsdp, recomputed))
        assert 1.2 < after / before < 4 / 3

    def test_pipeline_of_two_stages_waits_for_its_first_micro_batch(
        self, student: Path, dims: StudentDims, device: DeviceRates
    ) -> None:
        one, two = (
            update_parts(
                config_of(
                    student,
                    "trainer.n_gpus_per_node=2",
                    f"{ACTOR}.max_token_len=8448",  # 8 micro-batches of the 64 x 1056 tokens on one replica
                    f"{ACTOR}.megatron.pipeline_model_parallel_size={stages}",
                ),
                dims,
                BENCHMARK,
                device,
            )
            for stages in (1, 2)
        )
        assert two["passes"] == pytest.approx(one["passes"] * (1 + 1 / 8))

    def test_less_bandwidth_slows_the_elementwise_share_only(self, device: DeviceRates) -> None:
        slower = dataclasses.replace(device, bandwidth=device.bandwidth / 2)
        before, after = (pass_seconds(1e15, "fsdp", "bfloat16", rates, 1) for rates in (device, slower))
        on_h200 = pass_seconds(1e15, "fsdp", "bfloat16", device_rates(H200, "bfloat16"), 1)
        assert after - before == pytest.approx(assumed.ELEMENTWISE_SHARE["fsdp"] * on_h200 * 4.8 / 3.35)

    def test_offloaded_states_are_copied_twice(self, student: Path, dims: StudentDims, device: DeviceRates) -> None:
        config = config_of(student, f"{ACTOR}.megatron.optimizer_offload=true")
        (states,) = read_actor_memory(config).stages
        parts = update_parts(config, dims, BENCHMARK, device)
        assert parts["offload"] == 2 * states["optimizer"] / (assumed.HOST_GB_PER_S * 1e9)


class TestDecode:
    def engine(self, dims: StudentDims, n_gpus: int = 1) -> Engine:
        return Engine(dims=dims, item=2, n_gpus=n_gpus, max_in_flight=256)

    def test_step_of_one_response_is_weights_over_bandwidth(
        self, student: Path, dims: StudentDims, device: DeviceRates
    ) -> None:
        memory_s, compute_s = decode_step_seconds(self.engine(dims), device, 1, 0)
        n_weights = read_actor_memory(config_of(student)).n_weights  # norms and biases are below 0.1 %
        expected_s = 2 * n_weights / (device.bandwidth * assumed.DECODE_BANDWIDTH_FRACTION)
        assert memory_s == pytest.approx(expected_s, rel=1e-3) and compute_s < memory_s / 100

    def test_cache_of_qwen_1_5b_has_28_kib_per_token(self, dims: StudentDims) -> None:
        assert cache_bytes(dims, 2) == 28 * 2 * 2 * 128 * 2 == 28 << 10

    def test_large_batch_with_short_context_is_bound_by_compute(self, dims: StudentDims, device: DeviceRates) -> None:
        memory_s, compute_s = decode_step_seconds(self.engine(dims), device, 2048, 16)
        assert compute_s > memory_s

    def test_tensor_parallel_gpus_divide_a_step(self, dims: StudentDims, device: DeviceRates) -> None:
        one, two = (decode_step_seconds(self.engine(dims, n), device, 8, 100) for n in (1, 2))
        assert two == (one[0] / 2, one[1] / 2)

    def test_more_responses_than_in_flight_take_proportionally_longer(
        self, dims: StudentDims, device: DeviceRates
    ) -> None:
        work = Workload(n_responses=256, prompt_tokens=32, response_tokens=512, longest_response=1024)
        once = generation_seconds(work, self.engine(dims), device)
        twice = generation_seconds(dataclasses.replace(work, n_responses=512), self.engine(dims), device)
        assert twice.work == pytest.approx(2 * once.work) and twice.stragglers == once.stragglers
        assert (once.in_flight, twice.in_flight) == (256, 256)

    def test_equal_lengths_have_no_stragglers(self, dims: StudentDims, device: DeviceRates) -> None:
        assert generation_seconds(BENCHMARK, self.engine(dims), device).stragglers == 0

    def test_large_batch_reads_all_experts(self, dims: StudentDims) -> None:
        moe = MoEConfig(layers=(True,) * 28, experts=8, top_k=2, ffn=100, normalized=True, shared_ffn=None)
        model = dataclasses.replace(dims, moe=moe)
        one_expert = 28 * 3 * 1536 * 100 * 2
        alone, many = weight_bytes(model, 2, 1), weight_bytes(model, 2, 10_000)
        assert many - alone == pytest.approx(6 * one_expert)


class TestOtherStages:
    def test_twice_the_gpus_halve_the_teacher(self, dims: StudentDims, device: DeviceRates) -> None:
        one, two = (scoring_seconds(BENCHMARK, dims, device, n) for n in (1, 2))
        assert two == (one[0] / 2, one[1] / 2)

    @pytest.mark.parametrize(("bucket_mb", "gb_per_s"), [(64, 57), (512, 150)])
    def test_sync_over_ipc_has_the_measured_rate(self, bucket_mb: int, gb_per_s: float) -> None:
        n_bytes = 4 * 512e6
        assert n_bytes / sync_seconds(n_bytes, "ipc", bucket_mb * 1e6 / 2**20) / 1e9 == pytest.approx(
            gb_per_s, rel=0.02
        )

    def test_sync_between_nodes_takes_longer_than_within_one(self) -> None:
        assert sync_seconds(1e9, "network", 512) == 4 * sync_seconds(1e9, "node", 512) == pytest.approx(1.3 / 25)

    def test_bandwidths_are_those_of_the_data_sheets(self) -> None:
        names = [H100, H200, "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "NVIDIA B200", "NVIDIA H200 MIG 1g.18gb"]
        assert [memory_tb_per_s(name) for name in names] == [3.35, 4.8, 2.0, 1.555, 8.0, None]

    def test_each_device_with_a_bandwidth_has_a_peak(self) -> None:
        assert all(memory_tb_per_s(" ".join(words)) for words in PEAKS)
        assert all(any(set(words) >= set(known) for known in PEAKS) for words in MEMORY_TB_PER_S)


class TestEstimateTiming:
    def test_schedules_follow_the_step_time_model(self, student: Path, teacher: Path) -> None:
        timing = predict(config_of(student), teacher)
        stages = timing.stages
        assert [each.name for each in timing.schedules] == ["sync", "one_step_off", "two_step_off"]
        for each in timing.schedules:
            bound_s = step_bound(stages.generate, stages.teacher, stages.update, stages.sync, each.staleness)
            assert each.bound_s == bound_s <= each.step_s
        in_turn = stages.latency + stages.teacher + stages.update + stages.sync
        assert timing.schedules[0].step_s == pytest.approx(in_turn)
        assert [each.is_configured for each in timing.schedules] == [False, True, False]

    def test_hybrid_engine_has_its_schedule_only(self, student: Path, teacher: Path) -> None:
        hybrid = ("actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync", f"{ACTOR}.max_token_len=4096")
        timing = predict(config_of(student, *hybrid), teacher)
        assert [each.name for each in timing.schedules] == ["sync"] and timing.transport == "ipc"

    def test_small_kv_cache_limits_the_responses_in_flight(self, student: Path, teacher: Path) -> None:
        config = config_of(student, "actor_rollout_ref.rollout.kv_cache_memory_megabytes=1024")
        cached = estimate_run(config, "cuda", 80 * GIB).cached_tokens
        assert predict(config, teacher).generation.in_flight == cached // (512 + 1024) < 128

    def test_slow_wire_bounds_the_teacher(self, student: Path, teacher: Path) -> None:
        timing = predict(config_of(student), teacher, n_teacher_gpus=1000)
        assert timing.stages.teacher == timing.teacher["wire"]

    def test_reference_responses_are_not_generated(self, student: Path, teacher: Path) -> None:
        """Half of 512 prompts are references, which come once; the other half is sampled 4 times."""
        n = ("actor_rollout_ref.rollout.n=4", "gkd.sft_target=teacher", "data.train_batch_size=512")
        sampled, half, no = (
            predict(config_of(student, *n, f"gkd.sft_share={share}"), teacher) for share in (0, 0.5, 1)
        )
        assert [timing.workload.n_responses for timing in (sampled, half, no)] == [2048, 256 + 1024, 512]
        assert half.generation.prefill == pytest.approx(sampled.generation.prefill / 2)
        assert no.stages.generate == no.stages.latency == 0 and no.generation.in_flight == 0
        for part in ("forward", "wire"):
            assert half.teacher[part] == pytest.approx(sampled.teacher[part] * (256 + 1024) / 2048)
        assert no.update["passes"] == pytest.approx(sampled.update["passes"] / 4)

    @pytest.mark.parametrize("is_live", [True, False])
    def test_recorded_scores_are_read_and_not_computed(self, student: Path, teacher: Path, is_live: bool) -> None:
        live = ("gkd.sft_share=0.5",)
        recorded = ("actor_rollout_ref.teacher.backend=recorded", "gkd.sft_share=1")
        source = ("actor_rollout_ref.teacher.path=scores", "gkd.sft_target=teacher", *(live if is_live else recorded))
        timing = predict(config_of(student, "data.train_batch_size=512", *source), teacher if is_live else None)
        tokens = timing.workload.response_tokens * 512 * (0.5 if is_live else 1)
        assert timing.teacher["read"] == pytest.approx(tokens * assumed.RECORDED_TOKEN_S)
        assert (timing.n_teacher_gpus > 0) == (timing.teacher["forward"] > 0) == (timing.teacher["wire"] > 0) == is_live
        assert timing.stages.teacher >= timing.teacher["read"]
        assert "RECORDED_TOKEN_S" in {each.name for each in timing.assumptions}
        text = timing_text(timing)
        assert ("recorded scores: " in text) == ("generation: none" in text) == (not is_live)

    def test_mfu_on_h100_is_below_the_fraction_of_h200(self, student: Path, teacher: Path) -> None:
        assert 0.4 < predict(config_of(student), teacher).update_mfu < assumed.TRAINING_FRACTION["megatron"]


class TestCommand:
    def run(self, capsys: pytest.CaptureFixture[str], student: Path, *arguments: str) -> tuple[int, str, str]:
        options = ("--timing", "--device-memory-gb", "80", "trainer.n_gpus_per_node=2")
        status = main(["plan", f"actor_rollout_ref.model.path={student}", *options, *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    def test_text_has_stages_schedules_and_the_origin_of_assumptions(
        self, student: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, out, _ = self.run(capsys, student, "--device-name", H100, "--teacher-model", str(teacher))
        assert status == 0 and "no time below was measured" in out
        for part in ("  generation: ", "  teacher: ", "  update: ", "  weight sync: ", "  sync: ", "(configured)"):
            assert part in out
        assert "TRAINING_FRACTION = 0.493: of the peak rate in updates (megatron, H200) (measured)" in out
        assert "PREFILL_FRACTION = 0.5: of the peak rate in the engines (estimate)" in out

    def test_json_has_the_predictions(self, student: Path, teacher: Path, capsys: pytest.CaptureFixture[str]) -> None:
        status, out, _ = self.run(capsys, student, "--json", "--device-name", H100, "--teacher-model", str(teacher))
        timing: dict[str, Any] = json.loads(out)["timing"]
        assert status == 0 and timing["device"]["bandwidth"] == 3.35e12
        assert timing["stages"]["update"] == pytest.approx(sum(timing["update"].values()))
        assert len(timing["schedules"]) == 3 and timing["assumptions"]

    def test_unknown_device_lists_the_known_ones(
        self, student: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, _, err = self.run(capsys, student, "--device-name", "Foo 9000", "--teacher-model", str(teacher))
        assert status == 1 and "'Foo 9000' are unknown" in err and "H100 PCIE" in err and "B200" in err

    def test_machine_without_gpu_needs_a_device_name(
        self, student: Path, teacher: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", "")  # no nvidia-smi
        status, _, err = self.run(capsys, student, "--teacher-model", str(teacher))
        assert status == 1 and "no GPU whose name can be read" in err and "--device-name" in err

    def test_missing_teacher_names_the_option(self, student: Path, capsys: pytest.CaptureFixture[str]) -> None:
        status, _, err = self.run(capsys, student, "--device-name", H100)
        assert status == 1 and "--teacher-model" in err
        status, _, err = self.run(capsys, student, "--device-name", H100, "--teacher-model", "none/at/all")
        assert status == 1 and "--teacher-model=none/at/all" in err

    def test_run_on_cpu_is_refused(self, student: Path, teacher: Path, capsys: pytest.CaptureFixture[str]) -> None:
        status, _, err = self.run(capsys, student, "trainer.device=cpu", "--teacher-model", str(teacher))
        assert status == 1 and "got trainer.device=cpu" in err

    @pytest.mark.parametrize(
        "arguments", [["--device-name", H100], ["--teacher-gpus", "2"], ["--timing", "--teacher-gpus", "0"]]
    )
    def test_options_without_effect_are_refused(self, arguments: list[str], student: Path) -> None:
        with pytest.raises(SystemExit):
            main(["plan", f"actor_rollout_ref.model.path={student}", *arguments])


class TestDocs:
    """The table of docs/gpu.md has the figures that its commands print."""

    def commands(self, student: Path, teacher: Path) -> list[list[str]]:
        folders = {"Qwen/Qwen2.5-1.5B": str(student), "Qwen/Qwen2.5-7B": str(teacher)}
        found = []
        for words in commands_of(REPO / "docs/gpu.md"):
            if "--timing" in words:
                text = "\n".join(words[words.index("plan") :])
                for name, folder in folders.items():
                    text = text.replace(name, folder)
                found.append(text.split("\n"))
        return found

    def cells(self, timing: dict[str, Any]) -> list[str]:
        stages, generation = timing["stages"], timing["generation"]
        steps = {each["name"]: each for each in timing["schedules"]}
        found = [
            f"{timing['workload']['n_responses']}",
            f"{stages['latency']:.1f} ({generation['stragglers']:.1f})",
            f"{stages['teacher']:.1f}",
            f"{stages['update']:.1f} ({100 * timing['update_mfu']:.1f} %)",
            f"{stages['sync']:.2f}",
        ]
        for name in ("sync", "one_step_off", "two_step_off"):
            step = steps.get(name)
            found.append(f"{step['step_s']:.1f}, {step['response_tokens_per_s']:,.0f}" if step else "-")
        return found

    def test_table_has_the_figures_of_the_commands(
        self, student: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        expected = []
        for command in self.commands(student, teacher):
            assert main([*command, "--json"]) == 0
            expected.append(self.cells(json.loads(capsys.readouterr().out)["timing"]))
        section = (REPO / "docs/gpu.md").read_text(encoding="utf-8").partition("## Figures to expect")[2]
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
        assert [list(column) for column in zip(*(row[1:] for row in rows), strict=True)] == expected
        assert len(expected) == 2


def test_unknown_data_type_of_a_known_device_uses_16_bit_rates() -> None:
    assert device_rates(H100, "auto") == device_rates(H100, "bfloat16")
    with raises(ConfigError, keys=("--device-name",)):
        device_rates("cpu", "bfloat16")
