"""Real Ray, Megatron-core, vLLM and teacher service, from the command: what a run promises."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests._support.training_command import OBJECTIVE, Run, Start, Teacher, running_teacher

pytestmark = pytest.mark.timeout(600)

WAITS = {"one_step_off": "wait_prev_teacher", "two_step_off": "wait_prev_prev_teacher"}
DONE = ("wait_sync", "wait_prev_gen", "update_actor", "log", "other")
TIMINGS = (
    "step",
    "generate_sequences",
    "generate_sequences_min",
    "generate_sequences_max",
    "generate_sequences_mean",
    "get_teacher_knowledge",
    "sync_rollout_weights",
    *DONE,
)
REWARD = "val/quickstart/addition/compute_score"
EXACT = ("actor/", "response_seq_len/", "training/")
METRICS = (
    "actor/kl_loss",
    "actor/grad_norm",
    "actor/lr",
    "response_seq_len/average",
    "response_seq_len/max",
    "response_seq_len/min",
    "training/global_step",
    "training/epoch",
    "training/staleness_mean",
    "training/staleness_max",
    "training/mixed_version_fraction",
    "perf/tokens_per_second",
    "perf/cpu_memory_used_gb",
    "perf/max_memory_allocated_gb",
    "perf/idle_actor",
    "perf/idle_rollout",
    "perf/idle_teacher",
    *(f"timing/{name}" for name in TIMINGS),
)


@pytest.fixture(scope="module")
def own_teacher(student: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teacher]:
    """The student as its own teacher."""
    yield from running_teacher(student, tmp_path_factory.mktemp("own_teacher"))


@pytest.mark.slow
def test_a_student_that_is_its_own_teacher_has_nothing_to_learn(start: Start, own_teacher: Teacher) -> None:
    run = start(
        "trainer.scheduler=sync",
        "trainer.total_training_steps=2",
        f"actor_rollout_ref.teacher.server_port={own_teacher.port}",
    ).finish()
    assert run.status == 0, run.output
    assert abs(run.metrics[0]["actor/kl_loss"]) < 1e-5
    assert run.metrics[0]["actor/grad_norm"] < 1e-5


@pytest.mark.parametrize(
    ("scheduler", "bound"),
    [("one_step_off", 1), pytest.param("two_step_off", 2, marks=pytest.mark.slow)],
)  # sync and n_step_off: below; the bound of two_step_off: test_ends.py
def test_a_schedule_trains_within_its_bound(
    start: Start, tmp_path: Path, validated: list[str], scheduler: str, bound: int
) -> None:
    run = start(
        *validated,
        f"trainer.scheduler={scheduler}",
        "trainer.total_epochs=2",
        "trainer.save_freq=2",
        "trainer.logger=[console,jsonl,tensorboard]",
        f"trainer.trace_file={tmp_path}/trace.json",
    ).finish()
    assert run.status == 0, run.output
    for metric in ("timing/save_checkpoint", "timing/validate", REWARD, "val/quickstart/addition/response_len"):
        assert [metric in line for line in run.metrics] == [False, True] * 3
    assert [line["training/global_step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert all(0 <= line["training/staleness_max"] <= bound for line in run.metrics)
    assert run.metrics[-1]["training/epoch"] == 2.0
    assert run.metrics[-1]["actor/kl_loss"] < run.metrics[0]["actor/kl_loss"]
    assert not [name for name in METRICS if name not in run.metrics[-1]]
    for line in run.metrics:  # a step is the sum of what the trainer waited for and did
        parts = [line[f"timing/{name}"] for name in (*DONE, WAITS[scheduler])]
        parts += [line.get(f"timing/{name}", 0) for name in ("wait_reward", "validate", "save_checkpoint")]
        assert sum(parts) == pytest.approx(line["timing/step"])
        assert all(0 <= line[f"perf/idle_{pool}"] <= 1 for pool in ("actor", "rollout", "teacher"))
    for steps in (run.metrics[0::2], run.metrics[1::2]):  # the latter save
        unnamed = [line["timing/other"] / line["timing/step"] for line in steps]
        assert min(unnamed) > -1e-6 and median(unnamed) < 0.05  # the machine may interrupt one step
    events = json.loads((tmp_path / "trace.json").read_text())
    spans = [event["name"].split()[0] for event in events if event["ph"] == "B"]
    assert spans.count("update") == 6 and {"generate", "score", "sync", "validate"} <= set(spans)
    assert "step 6/6" in run.output and "val  6/6  quickstart/addition/" in run.output
    assert "validation after step 6: 3 of 6 responses, all in " in (run.folder / "run.log").read_text()
    assert list((run.folder / "tensorboard").rglob("events.*"))
    assert run.leftovers() == []


def test_tensor_parallel_two_rollout_and_two_teacher_workers(
    start: Start, tmp_path: Path, validated: list[str]
) -> None:
    run = start(
        *validated,
        "actor_rollout_ref.rollout.val_kwargs.n=3",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1",
        f"trainer.best_metric={REWARD}/best@3",
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
        "actor_rollout_ref.teacher.n_server_workers=2",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=4",  # an epoch has 3
        "actor_rollout_ref.actor.checkpoint.async_save=true",
    ).finish()
    assert run.status == 0, run.output
    assert run.metrics[-1]["actor/kl_loss"] < run.metrics[0]["actor/kl_loss"]
    assert all((run.folder / f"global_step_{step}" / "trainer.json").exists() for step in (2, 4))
    best = max(run.metrics, key=lambda line: line.get(f"{REWARD}/best@3", -1))["training/global_step"]
    assert (run.folder / "best").readlink() == Path(f"global_step_{best}")
    answers = (run.folder / "validation" / f"step_{best}.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in answers] == [row for row in range(6) for _ in range(3)]
    assert (tmp_path / "timeline.json").stat().st_size > 100
    assert run.leftovers() == []


@pytest.mark.slow
def test_two_runs_of_the_sync_schedule_give_the_same_metrics_bit_by_bit(start: Start, tmp_path: Path) -> None:
    runs = [
        start(
            "trainer.scheduler=sync", "trainer.total_training_steps=3", "trainer.save_freq=-1", folder=tmp_path / name
        ).finish()
        for name in ("first", "second")
    ]
    assert [run.status for run in runs] == [0, 0]
    first, second = (
        [{name: value for name, value in line.items() if name.startswith(EXACT)} for line in run.metrics]
        for run in runs
    )
    assert first == second and len(first) == 3 and "actor/kl_loss" in first[0]


def assert_all_parts_of_the_objective_train(run: Run) -> None:
    """A quarter of the prompts have given answers, the others two sampled ones each, with rewards that differ."""
    for line in run.metrics:
        assert line["training/sft_share"] == pytest.approx(2 / (2 + 2 * 6))
        assert 0 <= line["reward/min"] < line["reward/max"] <= 1 and line["reward/zero_std_group_fraction"] < 1
        assert line["actor/pg_loss"] != 0
        parts = line["actor/distill_loss"] + line["actor/pg_loss"] + line["actor/sft_loss"]
        assert line["actor/loss"] == pytest.approx(parts, rel=1e-5)
    first, last = run.metrics[0], run.metrics[-1]
    assert last["actor/sft_loss"] < first["actor/sft_loss"] and last["actor/kl_loss"] < first["actor/kl_loss"]


def test_a_run_that_was_cut_resumes_where_it_was_and_writes_a_model_that_loads(
    start: Start, validated: list[str], whole: Run
) -> None:
    assert whole.status == 0, whole.output
    assert all(line["training/staleness_max"] == 0 for line in whole.metrics)
    assert_all_parts_of_the_objective_train(whole)
    part = start(
        "trainer.scheduler=sync",
        "trainer.total_epochs=2",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={whole.folder}/global_step_4",
        *validated,
        *OBJECTIVE,
        "trainer.val_before_train=true",
        folder=whole.folder / "again",
    ).finish()
    assert part.status == 0, part.output
    before, *steps = part.metrics
    assert before.pop("training/global_step") == 4 and before.pop("timing/validate") > 0
    assert before == {name: value for name, value in whole.metrics[3].items() if name.startswith("val/")}
    answers = [(run.folder / "validation" / "step_4.jsonl").read_text() for run in (whole, part)]
    assert answers[0] == answers[1]  # greedy, by the same weights
    assert [line["training/global_step"] for line in steps] == [5, 6]
    for resumed, first in zip(steps, whole.metrics[4:], strict=True):
        for metric in ("actor/kl_loss", "actor/pg_loss", "actor/sft_loss", "reward/mean"):
            assert resumed[metric] == pytest.approx(first[metric], rel=1e-5, abs=1e-7)
        assert resumed["actor/lr"] == first["actor/lr"]

    import transformers

    folder = part.folder / "global_step_6" / "huggingface"
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(folder)

    done = start(
        "trainer.scheduler=sync", "trainer.total_epochs=2", *validated, *OBJECTIVE, folder=whole.folder
    ).finish()
    assert done.status == 0 and "nothing left to train" in done.output


@pytest.mark.slow
def test_each_prompt_is_scored_by_the_teacher_that_its_row_names(
    start: Start, own_teacher: Teacher, teacher: Teacher, prompts: Path, tmp_path: Path
) -> None:
    """Two rows of three are for the student itself, toward which there is nothing to learn."""
    table = pq.read_table(prompts)
    names = pa.array(["other" if row % 3 == 0 else "self" for row in range(len(table))])
    pq.write_table(table.append_column("judge", names), tmp_path / "routed.parquet")
    settings = "actor_rollout_ref.teacher"
    run = start(
        f"data.train_files={tmp_path}/routed.parquet",
        "trainer.scheduler=sync",
        "trainer.total_epochs=1",
        f"{settings}.route_key=judge",
        f"{settings}.teachers.self=127.0.0.1:{own_teacher.port}",
        f"{settings}.teachers.other=127.0.0.1:{teacher.port}",
    ).finish()
    assert run.status == 0, run.output
    first = run.metrics[0]
    assert abs(first["teacher/self/kl_loss"]) < 1e-5 and first["teacher/other/kl_loss"] > 0.05
    of_both = sum(first[f"teacher/{name}/token_share"] * first[f"teacher/{name}/kl_loss"] for name in ("self", "other"))
    assert first["actor/kl_loss"] == pytest.approx(of_both, abs=1e-6)
    asked = {name: sum(line[f"teacher/{name}/tokens"] for line in run.metrics) for name in ("self", "other")}
    assert 0 < asked["other"] < asked["self"]


@pytest.mark.slow
def test_a_teacher_with_keys_and_fewer_bytes_teaches_as_well(start: Start, teacher_model: Path, tmp_path: Path) -> None:
    from teacher.wire.make_keys import make_keys

    make_keys(tmp_path / "keys")
    settings = "actor_rollout_ref.teacher"
    secured = running_teacher(teacher_model, tmp_path / "teacher", AUTH_DIR=tmp_path / "keys")
    for service in secured:
        run = start(
            "trainer.scheduler=one_step_off",
            f"{settings}.server_port={service.port}",
            f"{settings}.auth_dir={tmp_path}/keys/clients/default",
            f"{settings}.wire_dtype=float16",
            f"{settings}.top_k=4",
            f"{settings}.on_failure=skip_samples",
        ).finish()
    assert run.status == 0, run.output
    assert "top 4 of 32 ids" in (run.folder / "run.log").read_text()
    assert run.metrics[-1]["actor/kl_loss"] < run.metrics[0]["actor/kl_loss"]
    assert run.metrics[-1]["teacher/skipped_samples_total"] == 0
