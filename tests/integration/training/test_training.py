"""Training runs from the command line, with real Ray, Megatron-core, vLLM and teacher service."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe_gkd.commands.record import main as record
from tests._support.base_config import CONFIG_NAME
from tests._support.documented_metrics import is_documented
from tests._support.ports import free_port
from tests._support.repository import REPO
from tests._support.training_command import FULL_OBJECTIVE, Run, StartRun, Teacher, running_teacher

TEACHER = "actor_rollout_ref.teacher"
DEFAULT_PORT = 15555  # With ``backend=hf`` any other value is refused.
REWARD = (
    f"custom_reward_function.path={REPO / 'tests/_support/verl_reward.py'}",
    "custom_reward_function.num_workers=1",
    "data.ground_truth_key=answer",
)
WAITS = {"one_step_off": "wait_prev_teacher", "two_step_off": "wait_prev_prev_teacher"}
TRAINER_TIMINGS = ("wait_sync", "wait_prev_gen", "update_actor", "log", "other")
OPTIONAL_TIMINGS = ("wait_reward", "validate", "save_checkpoint")
TIMINGS = (
    "step",
    "generate_sequences",
    "generate_sequences_min",
    "generate_sequences_max",
    "generate_sequences_mean",
    "get_teacher_knowledge",
    "sync_rollout_weights",
    *TRAINER_TIMINGS,
)
SCORE = "val/quickstart/addition/compute_score"
KL = "val/quickstart/addition/kl"
METRICS = (
    "actor/kl_loss",
    "actor/grad_norm",
    "actor/lr",
    "actor/rollout_kl",
    "actor/rollout_probs_diff_mean",
    "actor/rollout_probs_diff_max",
    "response_seq_len/average",
    "response/seq_rep_4",
    "response/looping_fraction",
    "response_seq_len/max",
    "response_seq_len/min",
    "training/global_step",
    "training/epoch",
    "training/staleness_mean",
    "training/staleness_max",
    "training/mixed_version_fraction",
    "perf/tokens_per_second",
    "perf/throughput",
    "perf/mfu/actor",
    "perf/cpu_memory_used_gb",
    "perf/max_memory_allocated_gb",
    "perf/idle_actor",
    "perf/idle_rollout",
    "perf/idle_teacher",
    *(f"timing/{name}" for name in TIMINGS),
)
REPRODUCIBLE = ("actor/", "response_seq_len/", "training/")
"""Prefixes of the metrics that do not depend on the time."""


@pytest.fixture(scope="module")
def student_service(student: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teacher]:
    """Teacher service with the student's weights."""
    yield from running_teacher(student, tmp_path_factory.mktemp("student_service"))


def assert_timings_add_up(run: Run, scheduler: str) -> None:
    """Check that the parts of a step add up to its duration."""
    for line in run.metrics:
        parts = [line[f"timing/{name}"] for name in (*TRAINER_TIMINGS, WAITS[scheduler])]
        parts += [line.get(f"timing/{name}", 0) for name in OPTIONAL_TIMINGS]
        assert sum(parts) == pytest.approx(line["timing/step"])
        assert line["timing/other"] > -1e-6
        assert all(0 <= line[f"perf/idle_{pool}"] <= 1 for pool in ("actor", "rollout", "teacher"))


def assert_csv_has_metrics(path: Path, metrics: list[dict[str, float]]) -> None:
    """Check the file of ``docs/examples/custom_logger.py``."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [line["training/global_step"] for line in metrics]
    for name in ("actor/kl_loss", "response_seq_len/average", "timing/step"):
        assert [float(row[name]) for row in rows] == pytest.approx([line[name] for line in metrics])


def assert_metrics_are_documented(run: Run) -> None:
    names = {name for line in run.metrics for name in line}
    assert len(names) > 60 and [name for name in sorted(names) if not is_documented(name)] == []


class TestSchedule:
    @pytest.mark.parametrize(
        ("scheduler", "max_staleness"),
        [("one_step_off", 1), pytest.param("two_step_off", 2, marks=pytest.mark.slow)],
    )  # Other tests run sync and n_step_off. test_ends.py checks the staleness of two_step_off.
    def test_run_trains_within_staleness_limit(
        self, start_run: StartRun, tmp_path: Path, validation: list[str], scheduler: str, max_staleness: int
    ) -> None:
        run = start_run(
            *validation,
            f"trainer.scheduler={scheduler}",
            f"{TEACHER}.support=union",
            f"{TEACHER}.student_top_k=4",
            "trainer.total_epochs=2",
            "trainer.save_freq=2",
            f"trainer.logger=[console,jsonl,tensorboard,{REPO}/docs/examples/custom_logger.py:CsvLogger]",
            f"trainer.trace_file={tmp_path}/trace.json",
            "trainer.device_peak_tflops=0.1",
        ).finish()
        assert run.status == 0, run.output
        for metric in ("timing/save_checkpoint", "timing/validate", SCORE, "val/quickstart/addition/response_len", KL):
            assert [metric in line for line in run.metrics] == [False, True] * 3
        assert [line["training/global_step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
        assert all(0 <= line["training/staleness_max"] <= max_staleness for line in run.metrics)
        assert run.metrics[-1]["training/epoch"] == 2.0
        assert run.metrics[-1]["actor/kl_loss"] < run.metrics[0]["actor/kl_loss"]
        assert not [name for name in METRICS if name not in run.metrics[-1]]
        assert_metrics_are_documented(run)
        assert_timings_add_up(run, scheduler)
        events = json.loads((tmp_path / "trace.json").read_text())
        spans = [event["name"].split()[0] for event in events if event["ph"] == "B"]
        assert spans.count("update") == 6 and {"generate", "score", "sync", "validate"} <= set(spans)
        assert "step 6/6" in run.output and "val  6/6  quickstart/addition/" in run.output
        assert "validation after step 6: 3 of 6 responses, all in " in (run.folder / "run.log").read_text()
        assert list((run.folder / "tensorboard").rglob("events.*"))
        assert_csv_has_metrics(run.folder / "metrics.csv", run.metrics)
        assert run.leftovers() == []

    @pytest.mark.slow  # The layout is tested in tests/integration/actor and rollout, the schedule in virtual time.
    def test_n_step_off_with_two_ranks_per_worker_trains(
        self, start_run: StartRun, tmp_path: Path, validation: list[str]
    ) -> None:
        run = start_run(
            *validation,
            "actor_rollout_ref.rollout.val_kwargs.n=3",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1",
            f"trainer.best_metric={SCORE}/best@3",
            f"ray_init.timeline_json_file={tmp_path}/timeline.json",
            "trainer.save_freq=2",
            "trainer.scheduler=n_step_off",
            "trainer.max_staleness=3",
            "trainer.inflight_update=true",
            "trainer.n_gpus_per_node=2",
            "rollout.n_gpus_per_node=2",
            "ray_init.num_cpus=4",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "actor_rollout_ref.actor.megatron.sequence_parallel=true",
            f"{TEACHER}.n_server_workers=2",
            "actor_rollout_ref.rollout.n=2",
            "trainer.total_training_steps=4",  # An epoch has 3.
            "actor_rollout_ref.actor.checkpoint.async_save=true",
        ).finish()
        assert run.status == 0, run.output
        assert run.metrics[-1]["actor/kl_loss"] < run.metrics[0]["actor/kl_loss"]
        assert all((run.folder / f"global_step_{step}" / "trainer.json").exists() for step in (2, 4))
        best = max(run.metrics, key=lambda line: line.get(f"{SCORE}/best@3", -1))["training/global_step"]
        assert (run.folder / "best").readlink() == Path(f"global_step_{best}")
        responses = (run.folder / "validation" / f"step_{best}.jsonl").read_text().splitlines()
        assert [json.loads(line)["row"] for line in responses] == [row for row in range(6) for _ in range(3)]
        assert (tmp_path / "timeline.json").stat().st_size > 100
        assert run.leftovers() == []

    @pytest.mark.slow
    def test_two_sync_runs_have_bitwise_equal_metrics(self, start_run: StartRun, tmp_path: Path) -> None:
        """The second run has the teacher's scores from the cache of the first."""
        cache = f"{TEACHER}.cache_dir={tmp_path}/cache"
        settings = ("trainer.scheduler=sync", "trainer.total_training_steps=3", "trainer.save_freq=-1", cache)
        runs = [start_run(*settings, folder=tmp_path / name).finish() for name in ("first", "second")]
        assert [run.status for run in runs] == [0, 0]
        assert [[line["teacher/cached_share"] for line in run.metrics] for run in runs] == [[0] * 3, [1] * 3]
        first, second = (
            [{name: value for name, value in line.items() if name.startswith(REPRODUCIBLE)} for line in run.metrics]
            for run in runs
        )
        assert first == second and len(first) == 3 and "actor/kl_loss" in first[0]


class TestSupport:
    @pytest.mark.slow  # tests/unit/losses has the divergences, tests/integration/teacher and rollout the ids
    def test_supports_with_all_ids_train_alike(self, start_run: StartRun, teacher_model: Path, tmp_path: Path) -> None:
        """With all 32 ids the divergence is the one of the whole vocabulary, whichever model has selected them."""
        settings = ("trainer.scheduler=sync", "trainer.total_training_steps=3", "trainer.save_freq=-1")
        hf = (f"{TEACHER}.backend=hf", f"{TEACHER}.model_path={teacher_model}", f"{TEACHER}.server_port={DEFAULT_PORT}")
        supports = {
            "teacher": (f"{TEACHER}.top_k=32",),
            "student": (f"{TEACHER}.support=student", f"{TEACHER}.student_top_k=32"),
            "union": (f"{TEACHER}.support=union", f"{TEACHER}.student_top_k=32", f"{TEACHER}.top_k=8"),
        }
        found = {}
        for name, support in supports.items():
            run = start_run(*settings, *hf, *support, folder=tmp_path / name).finish()
            assert run.status == 0, run.output
            found[name] = [(line["actor/kl_loss"], line["actor/grad_norm"]) for line in run.metrics]
        assert len(found["teacher"]) == 3 and found["teacher"][0][0] > 0.01
        for name in ("student", "union"):
            assert found[name] == [pytest.approx(line, rel=1e-3) for line in found["teacher"]]


class TestColdStart:
    @pytest.mark.slow  # tests/unit has the parts: batches, recordings, routing
    def test_warm_up_on_recorded_scores_then_on_policy(
        self, start_run: StartRun, settings: list[str], tmp_path: Path
    ) -> None:
        """The recording is of the run's own teacher, so the warm-up equals the one that the teacher scores."""
        references = ("data.response_key=answer", "gkd.sft_target=teacher")
        recording = tmp_path / "recording"
        assert record(["--config-name", CONFIG_NAME, "--out", str(recording), *settings, *references]) == 0
        run_settings = ("gkd.warmup_steps=2", "trainer.total_training_steps=4", "trainer.save_freq=-1", *references)
        live = start_run(*run_settings, folder=tmp_path / "live").finish()
        recorded = start_run(*run_settings, f"{TEACHER}.path={recording}", folder=tmp_path / "recorded").finish()
        assert (live.status, recorded.status) == (0, 0), live.output + recorded.output
        for run, cached in ((live, None), (recorded, [1, 1, 0, 0])):
            assert [line["training/sft_share"] for line in run.metrics] == [1, 1, 0, 0]
            if cached is not None:
                assert [line["teacher/cached_share"] for line in run.metrics] == cached
        for line, expected in zip(recorded.metrics[:2], live.metrics[:2], strict=True):
            assert line["actor/kl_loss"] == pytest.approx(expected["actor/kl_loss"], rel=1e-4)


@pytest.mark.slow  # tests/integration/actor resumes checkpoints in any layout
class TestResume:
    def test_every_metric_is_documented(self, reference_run: Run) -> None:
        assert_metrics_are_documented(reference_run)

    def test_reference_run_trains_all_loss_terms(self, reference_run: Run) -> None:
        """A quarter of the prompts have a reference response; the others have two sampled ones with rewards."""
        assert reference_run.status == 0, reference_run.output
        for line in reference_run.metrics:
            assert line["training/staleness_max"] == 0
            assert line["training/sft_share"] == pytest.approx(2 / (2 + 2 * 6))
            assert 0 <= line["reward/min"] < line["reward/max"] <= 1 and line["reward/zero_std_group_fraction"] < 1
            assert line["actor/pg_loss"] != 0
            # Both engines compute in float32 with the same weights, so they agree on the sampled tokens.
            assert 0 <= line["actor/rollout_kl"] < 1e-8
            assert 0 < line["actor/rollout_probs_diff_mean"] < line["actor/rollout_probs_diff_max"] < 1e-4
            terms = line["actor/distill_loss"] + line["actor/pg_loss"] + line["actor/sft_loss"]
            assert line["actor/loss"] == pytest.approx(terms, rel=1e-5)
        first, last = reference_run.metrics[0], reference_run.metrics[-1]
        assert last["actor/sft_loss"] < first["actor/sft_loss"] and last["actor/kl_loss"] < first["actor/kl_loss"]

    def test_resumed_run_equals_uninterrupted_run_and_saves_loadable_model(
        self, start_run: StartRun, validation: list[str], reference_run: Run
    ) -> None:
        assert reference_run.status == 0, reference_run.output
        resumed = start_run(
            "trainer.scheduler=sync",
            "trainer.total_epochs=2",
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={reference_run.folder}/global_step_4",
            *validation,
            *FULL_OBJECTIVE,
            "trainer.val_before_train=true",
            folder=reference_run.folder / "again",
        ).finish()
        assert resumed.status == 0, resumed.output
        before, *lines = resumed.metrics
        assert before.pop("training/global_step") == 4 and before.pop("timing/validate") > 0
        assert before.pop("training/failed_validations") == 0
        expected = {name: value for name, value in reference_run.metrics[3].items() if name.startswith("val/")}
        assert before == expected
        runs = (reference_run, resumed)
        responses = [(run.folder / "validation" / "step_4.jsonl").read_text() for run in runs]
        assert responses[0] == responses[1]  # Both are greedy, with the weights of step 4.
        assert [line["training/global_step"] for line in lines] == [5, 6]
        for line, expected_line in zip(lines, reference_run.metrics[4:], strict=True):
            for metric in ("actor/kl_loss", "actor/pg_loss", "actor/sft_loss", "reward/mean"):
                assert line[metric] == pytest.approx(expected_line[metric], rel=1e-5, abs=1e-7)
            assert line["actor/lr"] == expected_line["actor/lr"]

        import transformers

        folder = resumed.folder / "global_step_6" / "huggingface"
        transformers.AutoModelForCausalLM.from_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(folder)

    def test_finished_run_has_nothing_left_to_train(
        self, start_run: StartRun, validation: list[str], reference_run: Run
    ) -> None:
        run = start_run(
            "trainer.scheduler=sync",
            "trainer.total_epochs=2",
            *validation,
            *FULL_OBJECTIVE,
            folder=reference_run.folder,
        ).finish()
        assert run.status == 0 and "nothing left to train" in run.output, run.output


@pytest.mark.slow
class TestFsdp:
    def test_run_begins_as_with_megatron_and_resumes(
        self, start_run: StartRun, validation: list[str], reference_run: Run
    ) -> None:
        settings = (
            "actor_rollout_ref.actor.strategy=fsdp",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "trainer.scheduler=sync",
            "trainer.total_epochs=2",
            *validation,
            *FULL_OBJECTIVE,
        )
        run = start_run(*settings, "trainer.save_freq=4").finish()
        assert run.status == 0, run.output
        for metric in ("actor/kl_loss", "actor/pg_loss", "actor/sft_loss", "actor/grad_norm", "reward/mean"):
            assert run.metrics[0][metric] == pytest.approx(reference_run.metrics[0][metric], rel=1e-4, abs=1e-7)
        assert all(0 <= line["actor/rollout_kl"] < 1e-8 for line in run.metrics)
        resumed = start_run(
            *settings,
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={run.folder}/global_step_4",
            folder=run.folder / "again",
        ).finish()
        assert resumed.status == 0, resumed.output
        for line, expected in zip(resumed.metrics, run.metrics[4:], strict=True):
            assert line["actor/kl_loss"] == pytest.approx(expected["actor/kl_loss"], rel=1e-5)
        assert run.leftovers() == resumed.leftovers() == []


@pytest.mark.slow
class TestTeacher:
    @pytest.mark.parametrize(
        ("objective", "metric"),
        [
            ([*REWARD, "gkd.use_rl_loss=true", "actor_rollout_ref.rollout.n=4", "gkd.enable_teacher=false"], "pg_loss"),
            (["gkd.sft_share=1", "data.response_key=answer"], "sft_loss"),
        ],
        ids=["policy loss", "reference responses"],
    )
    def test_objective_without_distillation_needs_no_teacher(
        self, start_run: StartRun, objective: list[str], metric: str
    ) -> None:
        port = free_port()
        run = start_run(*objective, "trainer.total_training_steps=2", f"{TEACHER}.server_port={port}").finish()
        assert run.status == 0, run.output
        for line in run.metrics:
            assert f"actor/{metric}" in line
            assert not [name for name in line if name.startswith("teacher/") or name == "actor/kl_loss"]

    def test_student_as_its_own_teacher_has_no_loss(self, start_run: StartRun, student_service: Teacher) -> None:
        run = start_run(
            "trainer.scheduler=sync",
            "trainer.total_training_steps=2",
            f"{TEACHER}.server_port={student_service.port}",
        ).finish()
        assert run.status == 0, run.output
        assert abs(run.metrics[0]["actor/kl_loss"]) < 1e-5
        assert run.metrics[0]["actor/grad_norm"] < 1e-5

    def test_two_teachers_score_prompts_by_route_column(
        self, start_run: StartRun, student_service: Teacher, teacher: Teacher, prompts: Path, tmp_path: Path
    ) -> None:
        """Two of three rows name the student as their teacher. Their loss is 0, also in validation without rewards."""
        table = pq.read_table(prompts)
        names = pa.array(["other" if row % 3 == 0 else "self" for row in range(len(table))])
        pq.write_table(table.append_column("teacher", names), tmp_path / "routed.parquet")
        run = start_run(
            f"data.train_files={tmp_path}/routed.parquet",
            "trainer.scheduler=sync",
            "trainer.total_epochs=1",
            f"data.val_files={tmp_path}/routed.parquet",
            "data.data_source_key=teacher",
            "trainer.val_before_train=true",
            "trainer.test_freq=1",
            "trainer.best_metric=val/other/kl",
            f"{TEACHER}.route_key=teacher",
            f"{TEACHER}.teachers.self=127.0.0.1:{student_service.port}",
            f"{TEACHER}.teachers.other=127.0.0.1:{teacher.port}",
        ).finish()
        assert run.status == 0, run.output
        names_of_teachers = ("self", "other")
        before, *steps = run.metrics
        first = steps[0]
        assert abs(first["teacher/self/kl_loss"]) < 1e-5 and first["teacher/other/kl_loss"] > 0.05
        weighted = [
            first[f"teacher/{name}/token_share"] * first[f"teacher/{name}/kl_loss"] for name in names_of_teachers
        ]
        assert first["actor/kl_loss"] == pytest.approx(sum(weighted), abs=1e-6)
        n_tokens = {name: sum(line[f"teacher/{name}/tokens"] for line in steps) for name in names_of_teachers}
        assert 0 < n_tokens["other"] < n_tokens["self"]
        assert abs(before["val/self/kl"]) < 1e-5 and before["val/other/kl"] > 0.05
        assert before["val/other/reverse_kl"] > 0.05 and "val/other/compute_score" not in before
        lowest = min(steps, key=lambda line: line["val/other/kl"])["training/global_step"]
        assert (run.folder / "best").readlink() == Path(f"global_step_{lowest}")

    def test_own_checkpoint_that_sees_the_solution_has_a_loss(
        self, start_run: StartRun, student_service: Teacher, prompts: Path, tmp_path: Path
    ) -> None:
        """Both teachers are the student's checkpoint, and one of them sees the solution."""
        table = pq.read_table(prompts)
        names = pa.array(["solved" if row % 2 else "plain" for row in range(len(table))])
        pq.write_table(table.append_column("teacher", names), tmp_path / "routed.parquet")
        settings = (
            f"data.train_files={tmp_path}/routed.parquet",
            "trainer.scheduler=sync",
            "trainer.save_freq=1",
            f"{TEACHER}.route_key=teacher",
            f"{TEACHER}.teachers.plain=127.0.0.1:{student_service.port}",
            f"{TEACHER}.teachers.solved.address=127.0.0.1:{student_service.port}",
        )
        template = f"{TEACHER}.teachers.solved.prompt_template="
        run = start_run(*settings, "trainer.total_training_steps=1", f'{template}"{{answer}};{{prompt}}"').finish()
        assert run.status == 0, run.output
        assert "teacher solved: own prompts of up to 42 tokens" in run.output
        first = run.metrics[0]
        assert abs(first["teacher/plain/kl_loss"]) < 1e-5 and first["teacher/solved/kl_loss"] > 0.01
        other = start_run(
            *settings, "trainer.total_training_steps=2", f'{template}"{{prompt}};{{answer}}"', folder=run.folder
        ).finish()
        assert other.status == 1 and "was made with other prompts of the teachers" in other.output, other.output

    def test_service_with_keys_and_float16_scores_trains(
        self, start_run: StartRun, teacher_model: Path, tmp_path: Path
    ) -> None:
        from teacher.wire.make_keys import make_keys

        make_keys(tmp_path / "keys")
        for service in running_teacher(teacher_model, tmp_path / "teacher", AUTH_DIR=tmp_path / "keys"):
            run = start_run(
                "trainer.scheduler=one_step_off",
                f"{TEACHER}.server_port={service.port}",
                f"{TEACHER}.auth_dir={tmp_path}/keys/clients/default",
                f"{TEACHER}.wire_dtype=float16",
                f"{TEACHER}.top_k=4",
                f"{TEACHER}.on_failure=skip_samples",
            ).finish()
        assert run.status == 0, run.output
        assert "top 4 of 32 ids" in (run.folder / "run.log").read_text()
        assert run.metrics[-1]["actor/kl_loss"] < run.metrics[0]["actor/kl_loss"]
        assert run.metrics[-1]["teacher/skipped_samples_total"] == 0
