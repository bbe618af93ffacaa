"""Choice of the checkpoint to resume from: the last complete one that fits the data of the run."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe_gkd import preflight, restarts
from recipe_gkd import run as run_module
from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.checkpoints.resume import ResumePoint, load_first_usable, resume_points
from recipe_gkd.checkpoints.run_folder import RunFolder
from recipe_gkd.checkpoints.state import Best, Progress, ResumeState
from recipe_gkd.config import Config
from recipe_gkd.data.fingerprints import FORMAT
from recipe_gkd.errors import CheckpointError, CheckpointMismatch, WorkerDied
from recipe_gkd.model_files import Student
from recipe_gkd.runtime.stop_request import StopRequest
from tests._support.base_config import base_config
from tests._support.checkpoint_files import PROGRESS, begin_checkpoint, write_checkpoints
from tests._support.errors import raises


def config(root: Path, *overrides: str) -> Config:
    return base_config(f"trainer.default_local_dir={root}", *overrides)


def steps(root: Path, *overrides: str, expected: Progress = PROGRESS) -> list[int]:
    return [point.progress.step for point in resume_points(config(root, *overrides), expected)]


def change(root: Path, step: int, **values: Any) -> None:
    file = root / f"global_step_{step}" / "trainer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_resume_points_start_at_latest(tmp_path: Path) -> None:
    assert steps(tmp_path) == []
    write_checkpoints(tmp_path, 4, 12, 8)  # step 12 belongs to an abandoned run
    assert steps(tmp_path) == [8, 4]
    assert steps(tmp_path, "trainer.resume_mode=disable") == []
    chosen = f"trainer.resume_from_path={tmp_path}/global_step_12"
    assert steps(tmp_path, "trainer.resume_mode=resume_path", chosen) == [12]


def test_chosen_checkpoint_is_the_start_of_a_repeated_command_until_the_run_has_saved_one(tmp_path: Path) -> None:
    write_checkpoints(tmp_path / "other", 12)
    chosen = f"trainer.resume_from_path={tmp_path}/other/global_step_12"
    assert steps(tmp_path / "run", chosen) == [12]
    write_checkpoints(tmp_path / "run", 16)
    assert steps(tmp_path / "run", chosen) == [16]
    assert steps(tmp_path / "run", "trainer.resume_mode=resume_path", chosen) == [12]


def test_resumed_run_declares_the_ids_of_its_teachers(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, 4)
    change(tmp_path, 4, stop_token_ids=[3])
    [point] = resume_points(config(tmp_path), replace(PROGRESS, stop_token_ids=(3, 7)))
    assert point.progress.stop_token_ids == (3, 7)


def empty(file: Path) -> None:
    file.write_text("")


def truncate(file: Path) -> None:
    file.write_text(file.read_text()[:20])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("trainer.json", Path.unlink),
        ("trainer.json", empty),
        ("trainer.json", truncate),
        ("trainer.json", lambda file: file.write_text('{"step": "8"}')),
        ("actor/metadata.json", Path.unlink),
        ("actor/metadata.json", empty),
        ("", shutil.rmtree),
    ],
    ids=["no trainer.json", "empty", "truncated", "other content", "no metadata", "empty metadata", "no folder"],
)
def test_damaged_checkpoint_is_skipped_unless_chosen(
    tmp_path: Path, name: str, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoints(tmp_path, 2, 4, 8)
    damage(tmp_path / "global_step_8" / name)
    assert steps(tmp_path) == [4, 2]
    assert "skipping a damaged checkpoint" in caplog.text and "global_step_8" in caplog.text
    with raises(CheckpointError, path=tmp_path / "global_step_8" / name, tried=()):
        steps(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_8")
    for step in (2, 4):
        (tmp_path / f"global_step_{step}" / "trainer.json").unlink()
    tried = tuple(tmp_path / f"global_step_{step}" for step in (8, 4, 2))
    with raises(CheckpointError, path=tmp_path, tried=tried):
        steps(tmp_path)  # a new run would overwrite the folder


@pytest.mark.parametrize("text", ["", "x\n"])
def test_highest_step_counts_without_readable_pointer(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoints(tmp_path, 12, 4)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    assert steps(tmp_path) == [12, 4] and "is damaged" in caplog.text
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert steps(tmp_path) == [12, 4]


@pytest.mark.parametrize("changed", [{"n_prompts": 999}, {"data_seed": 2}, {"shuffle": False}])
def test_other_data_or_order_is_rejected(tmp_path: Path, changed: dict[str, Any]) -> None:
    write_checkpoints(tmp_path, 2, 4)
    with raises(CheckpointMismatch, differing=tuple(changed)):
        steps(tmp_path, expected=replace(PROGRESS, **changed))


def test_other_prompts_of_equal_number_are_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoints(tmp_path)
    change(tmp_path, 4, data_fingerprint="abc")
    assert steps(tmp_path, expected=replace(PROGRESS, data_fingerprint="abc")) == [4] and not caplog.text
    with raises(CheckpointMismatch, differing=("data_fingerprint",), path=tmp_path / "global_step_4"):
        steps(tmp_path, expected=replace(PROGRESS, data_fingerprint="xyz"))


def test_other_reference_responses_are_rejected_if_both_runs_use_them(tmp_path: Path) -> None:
    def with_responses(fingerprint: str) -> Progress:
        return replace(PROGRESS, references_fingerprint=fingerprint)

    write_checkpoints(tmp_path)
    [point] = resume_points(config(tmp_path), with_responses("abc"))  # the first run that uses them
    assert point.progress == with_responses("abc")
    change(tmp_path, 4, references_fingerprint="abc")
    for fingerprint in ("abc", ""):
        [point] = resume_points(config(tmp_path), with_responses(fingerprint))
        assert point.progress == with_responses("abc")
    with raises(CheckpointMismatch, differing=("references_fingerprint",), path=tmp_path / "global_step_4"):
        steps(tmp_path, expected=with_responses("xyz"))


def test_other_teacher_prompts_are_rejected_if_both_runs_have_them(tmp_path: Path) -> None:
    def with_prompts(fingerprint: str) -> Progress:
        return replace(PROGRESS, teacher_prompts_fingerprint=fingerprint)

    write_checkpoints(tmp_path)
    [point] = resume_points(config(tmp_path), with_prompts("abc"))  # of a version without the attribute, for example
    assert point.progress == with_prompts("abc")
    change(tmp_path, 4, teacher_prompts_fingerprint="abc")
    for fingerprint in ("abc", ""):
        [point] = resume_points(config(tmp_path), with_prompts(fingerprint))
        assert point.progress == with_prompts("abc")
    with raises(CheckpointMismatch, differing=("teacher_prompts_fingerprint",), path=tmp_path / "global_step_4"):
        steps(tmp_path, expected=with_prompts("xyz"))


def test_former_name_of_references_fingerprint_is_read(tmp_path: Path) -> None:
    write_checkpoints(tmp_path)
    file = tmp_path / "global_step_4" / "trainer.json"
    values = json.loads(file.read_text())
    del values["references_fingerprint"]
    file.write_text(json.dumps(values | {"answers_fingerprint": "abc"}))
    [point] = resume_points(config(tmp_path), PROGRESS)
    assert point.progress == replace(PROGRESS, references_fingerprint="abc")
    with raises(CheckpointMismatch, differing=("references_fingerprint",)):
        steps(tmp_path, expected=replace(PROGRESS, references_fingerprint="xyz"))


def test_checkpoint_of_older_version_is_read_with_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoints(tmp_path)
    file = tmp_path / "global_step_4" / "trainer.json"
    values = json.loads(file.read_text())
    del values["skipped_samples"], values["data_fingerprint"]
    file.write_text(json.dumps(values))
    [point] = resume_points(config(tmp_path), replace(PROGRESS, data_fingerprint="abc"))
    assert point.progress == PROGRESS
    asyncio.run(load_first_usable([point], Actors({}).load, may_skip=True))
    assert "made by an older version, so its data cannot be compared" in caplog.text


def test_fingerprint_of_older_format_is_not_compared_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, prompts of teachers were hashed as token ids. The next checkpoint has one that can be compared."""
    write_checkpoints(tmp_path)
    file = tmp_path / "global_step_4" / "trainer.json"
    old = {"data_fingerprint": "abc", "teacher_prompts_fingerprint": "def"}
    file.write_text(json.dumps(json.loads(file.read_text()) | old))
    new = {"data_fingerprint": f"{FORMAT}1", "teacher_prompts_fingerprint": f"{FORMAT}2"}
    [point] = resume_points(config(tmp_path), replace(PROGRESS, **new))
    assert point.progress == replace(PROGRESS, **new)
    assert "made by an older version, so its prompts of the teachers cannot be compared" in caplog.text
    file.write_text(json.dumps(json.loads(file.read_text()) | new))
    with raises(CheckpointMismatch, differing=("teacher_prompts_fingerprint",)):
        resume_points(config(tmp_path), replace(PROGRESS, **new | {"teacher_prompts_fingerprint": f"{FORMAT}3"}))


# ---- loading by the actors


def points(*steps: int) -> list[ResumePoint]:
    return [ResumePoint(Path(f"/run/global_step_{step}"), replace(PROGRESS, step=step)) for step in steps]


class Actors:
    """Fake actors that reject checkpoints of some steps."""

    def __init__(self, errors: dict[int, CheckpointError]) -> None:
        self.errors, self.loaded = errors, list[str]()

    async def load(self, path: str) -> None:
        self.loaded.append(path)
        if error := self.errors.get(int(path.split("_")[-1].split("/")[0])):
            raise error


def test_checkpoint_with_damaged_shards_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    actors = Actors({8: CheckpointError("shard"), 6: CheckpointError("shard")})
    loaded = asyncio.run(load_first_usable(points(8, 6, 4, 2), actors.load, may_skip=True))
    assert loaded.progress.step == 4 and caplog.text.count("using the previous one") == 2
    assert actors.loaded == [f"/run/global_step_{step}/actor" for step in (8, 6, 4)]


def test_chosen_or_mismatched_checkpoint_is_not_skipped() -> None:
    damaged = Actors({8: CheckpointError("shard 3", path=Path("3")), 6: CheckpointError("shard 5", path=Path("5"))})
    with raises(CheckpointError, path=Path("3"), tried=()):
        asyncio.run(load_first_usable(points(8), damaged.load, may_skip=False))
    tried = Path("/run/global_step_8"), Path("/run/global_step_6")
    with raises(CheckpointError, path=Path("/run"), tried=tried, details=("shard 3", "shard 5")):
        asyncio.run(load_first_usable(points(8, 6), damaged.load, may_skip=True))
    other = Actors({8: CheckpointMismatch("of another model", differing=("family",))})
    with raises(CheckpointMismatch, differing=("family",)):
        asyncio.run(load_first_usable(points(8, 6), other.load, may_skip=True))
    assert other.loaded == ["/run/global_step_8/actor"]


# ---- runs


@pytest.mark.parametrize("damaged", [False, True])
def test_position_and_best_follow_loaded_checkpoint(
    tmp_path: Path, damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does the end of the learning rate decay, which depends on the position and the batch size."""
    write_checkpoints(tmp_path, 2, best=Best("m", 0.1, 2))
    write_checkpoints(tmp_path, 4, best=Best("m", 0.2, 4))
    change(tmp_path, 2, prompts_trained=10)
    change(tmp_path, 4, prompts_trained=40)
    actors = Actors({4: CheckpointError("actor worker 0 of 2: a shard is truncated")} if damaged else {})
    called: list[Any] = []
    started: list[ResumeState] = []

    async def call(method: Any, *args: Any, timeout_s: float, phase: str) -> list[Any]:
        method = method.__name__
        called.append((method, *args))
        if method == "load_checkpoint":
            await actors.load(*args)
        return []

    @asynccontextmanager
    async def start_cluster(*_: Any, total_steps: int, **__: Any) -> AsyncIterator[Any]:
        called.append(("start_cluster", total_steps))
        yield SimpleNamespace(actors=SimpleNamespace(call=call), scoring=None)

    class Trainer:
        def __init__(self, *args: Any) -> None:
            started.append(next(arg for arg in args if isinstance(arg, ResumeState)))

        async def fit(self, stop: StopRequest) -> None: ...

    monkeypatch.setattr(restarts, "start_cluster", start_cluster)
    monkeypatch.setattr(restarts, "Trainer", Trainer)
    monkeypatch.setattr(restarts, "choose_device", lambda _: "cpu")
    validation = ["trainer.test_freq=1", "data.val_files=x", "custom_reward_function.path=x"]
    settings: Any = config(tmp_path, "trainer.best_metric=m", *validation)
    loader: Any = SimpleNamespace(last_step=lambda position, step: step + (100 - position) // 10)
    folder = RunFolder(tmp_path)
    nothing: Any = None
    teachers: Any = SimpleNamespace(client_specs=dict, caches={})
    points = resume_points(settings, PROGRESS)
    plan = restarts.TrainingPlan(loader=loader, points=points, fresh=PROGRESS, stop_token_ids=(), n_tokens=8)
    asyncio.run(restarts.train(settings, plan, teachers, nothing, folder, StopRequest()))
    [start] = started
    load = ("load_checkpoint", str(tmp_path / "global_step_4" / "actor"))
    if damaged:
        assert called == [
            ("start_cluster", 10),
            load,
            ("load_checkpoint", str(tmp_path / "global_step_2" / "actor")),
            ("set_total_steps", 11),
        ]
        assert start.progress.prompts_trained == 10 and start.best == Best("m", 0.1, 2)
        assert (tmp_path / "best").readlink() == Path("global_step_2")
    else:
        assert called == [("start_cluster", 10), load]
        assert start.progress.prompts_trained == 40 and start.best == Best("m", 0.2, 4)


def test_restart_resumes_from_a_checkpoint_that_the_disk_completed_later(tmp_path: Path) -> None:
    """Its save was given up when the actors were lost, and it may have removed the one before."""
    write_checkpoints(tmp_path, 4)
    nothing: Any = None
    plan = restarts.TrainingPlan(loader=nothing, points=[], fresh=PROGRESS, stop_token_ids=(), n_tokens=8)
    [point] = restarts.newest_point(config(tmp_path), tmp_path / "global_step_2", plan)
    assert point.folder == tmp_path / "global_step_4"


class Command:
    """``run.run`` without teacher, Ray and workers. ``train`` replaces the training."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        table = {"prompt": ["1+1=", "1+2="], "answer": ["2", "3"]}
        pq.write_table(pa.table(table), root / "train.parquet")
        self.root = root / "run"
        self.root.mkdir()
        self.config = config(
            self.root,
            f"data.train_files={root}/train.parquet",
            "gkd.sft_share=0.5",
            "data.response_key=answer",
            *overrides,
        )
        self.points: list[int] = []
        self.progress = PROGRESS
        self.train: Callable[[], object] = lambda: None
        student = Student(Path("x"), 64, build_tokenizer(), "fingerprint", n_tokens=60)
        replacements: dict[str, Any] = {
            "read_student": lambda _: student,
            "open_teachers": lambda *_: nullcontext(
                SimpleNamespace(clients={}, sources={}, recorded_references=None, use_caches=lambda caches: None)
            ),
            "check_teachers": lambda *_: (),
            "identify_model": lambda *_: {"tokenizer": student.fingerprint},
            "connected_cluster": lambda _: nullcontext(),
            "choose_device": lambda _: "cpu",
            "raise_on_signals": lambda: None,
            "train": self._train,
        }
        for name, replacement in replacements.items():
            monkeypatch.setattr(run_module, name, replacement)
        monkeypatch.setattr(preflight, "check_stop_ids", lambda *_: frozenset())

    async def _train(self, config: Any, plan: restarts.TrainingPlan, *_: Any) -> None:
        self.points, self.progress = [point.progress.step for point in plan.points], plan.fresh
        self.train()

    def run(self) -> None:
        folder = RunFolder(self.root)
        run_module.run(self.config, "", folder)


def test_run_recovers_before_and_after_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command(tmp_path, monkeypatch)
    command.run()
    assert len(command.progress.data_fingerprint) == len(FORMAT) + len(command.progress.references_fingerprint)
    writer = begin_checkpoint(command.root, 8)  # of a run that was killed before the rename
    writer.progress = replace(command.progress, step=8)
    writer._mark_as_written()
    command.train = lambda: begin_checkpoint(command.root, 9)
    command.run()
    assert command.points == [8] and not list(command.root.glob(".writing*"))


def test_run_uses_as_many_rows_as_the_key_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command(tmp_path, monkeypatch, "data.train_max_samples=1")
    command.run()
    assert command.progress.n_prompts == 1


@pytest.mark.parametrize("disk", ["broken", "hung"])
def test_failed_last_recovery_does_not_hide_error(
    tmp_path: Path, disk: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command, disk_answers = Command(tmp_path, monkeypatch), threading.Event()

    def fail() -> None:
        def recover(_: Path) -> None:
            if disk == "broken":
                raise OSError(errno.ESTALE, "Stale file handle")
            disk_answers.wait(30)

        monkeypatch.setattr(run_module, "recover", recover)
        raise WorkerDied("actor worker 0 of 1")

    monkeypatch.setattr(run_module, "LAST_RECOVERY_S", 0.2)
    command.train = fail
    with pytest.raises(WorkerDied):
        command.run()
    assert ("Stale file handle" if disk == "broken" else "did not answer within 0.2 s") in caplog.text
    disk_answers.set()
