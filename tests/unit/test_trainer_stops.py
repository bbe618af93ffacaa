"""Stops of the training loop: work that is dropped can neither delay nor break the checkpoint, and validation ends."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from recipe_gkd.checkpoints.folders import steps_of
from recipe_gkd.checkpoints.state import Progress, ResumeState
from recipe_gkd.checkpoints.store import recorded_best
from recipe_gkd.config import Config
from recipe_gkd.data.batches import ReadyBatch
from recipe_gkd.data.prompts import PromptData, PromptLoader
from recipe_gkd.data.rows import TRAINING, read_data_set
from recipe_gkd.data.samples import Prompt, Response, Reward, Sample
from recipe_gkd.errors import CheckpointError, DeadlineError, RewardError, WeightSyncError, WorkerDied, WorkerError
from recipe_gkd.rewards import RewardItem, RewardItems, RewardScorer
from recipe_gkd.runtime.stop_request import StopRequest
from recipe_gkd.teachers.routes import Routes
from recipe_gkd.trainer import RewardContext, Trainer
from recipe_gkd.validation.validation import read_validation
from teacher.errors import TeacherUnavailable
from tests._support.waiting import PATIENCE_S
from tests.unit.validation.test_validation import BEST, TOKENIZER, FakeCluster, NoTeacher, make_config

ERRORS = {
    "reward": RewardError("the reward function failed"),
    "teacher": TeacherUnavailable("the teacher is gone"),
    "rollout": WorkerDied("the rollout worker died"),
}


class Faults:
    """Faults of a run, and the moments at which they happen.

    Attributes:
        stage: Stage that fails while the checkpoint is written: ``"reward"``, ``"teacher"`` or ``"rollout"``.
        saving: Set when the actors begin to write the checkpoint.
        validating: Set when a validation waits.
        validation_error: Error of every validation. None: there is none.
        validation_waits: True if a validation without an error waits for ever.
        scorer: Reward function. None: one that returns 1.
    """

    def __init__(
        self,
        stage: str = "",
        validation_error: Exception | None = None,
        *,
        validation_waits: bool = True,
        scorer: RewardScorer | None = None,
    ) -> None:
        self.stage, self.validation_error, self.validation_waits = stage, validation_error, validation_waits
        self.scorer = scorer
        self.saving, self.validating = asyncio.Event(), asyncio.Event()
        self.stopped = False
        self.log: list[str] = []

    async def at(self, stage: str) -> None:
        """Fail in this stage once a stop was requested and the checkpoint is being written."""
        if self.stopped and stage == self.stage:
            self.log.append(stage)
            await self.saving.wait()
            raise ERRORS[stage]


class FaultyCluster(FakeCluster):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults

    async def stream(
        self, rank: int, method: object, prompts: list[Prompt], step: int, *arguments: Any, **options: Any
    ) -> AsyncIterator[list[Response]]:
        if "validation" in arguments:
            self.faults.validating.set()
            if self.faults.validation_error is not None:
                raise self.faults.validation_error
            await asyncio.sleep(3600 if self.faults.validation_waits else 0)
        async for responses in super().stream(rank, method, prompts, step, *arguments, **options):
            await self.faults.at("rollout")
            yield responses

    async def call(self, method: Any, *args: Any, **options: Any) -> list[Any]:
        if method.__name__ == "save_checkpoint":
            self.faults.saving.set()
            await asyncio.sleep(0.05)  # time for the fault
        return await super().call(method, *args, **options)


class FaultyTeacher(NoTeacher):
    faults: Faults

    async def score(self, group: Sequence[tuple[Prompt, Response]], step: int) -> list[Sample]:
        await self.faults.at("teacher")
        return await super().score(group, step)


class FaultyScorer:
    failures = 0

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    async def score(self, items: Sequence[RewardItem]) -> list[Reward]:
        await self.faults.at("reward")
        return [Reward(1.0) for _ in items]


class StoppingTrainer(Trainer):
    """A trainer without updates, which is stopped in the update of a step.

    Attributes:
        stop_in: Step, counted from 0. None: in a validation.
    """

    faults: Faults
    stop: StopRequest
    stop_in: int | None = 1

    async def fake_update(self, batch: ReadyBatch) -> dict[str, float]:
        if batch.step == self.stop_in:
            self.faults.stopped = True
            await asyncio.sleep(0.05)  # the stages of the next batches come to the fault
            async with asyncio.timeout(PATIENCE_S):
                while self.faults.stage and not self.faults.log:
                    await asyncio.sleep(0.01)
            assert self.stop.request("SIGTERM")
        await asyncio.sleep(0.001)
        return {}


def make_trainer(config: Config, faults: Faults) -> StoppingTrainer:
    data = PromptData(read_data_set(config.data.train_files, config.data, TRAINING), config.data, TOKENIZER)
    loader = PromptLoader(data, config.data, n=1, epochs=9, max_steps=config.trainer.total_training_steps)
    scorer: Any = faults.scorer or FaultyScorer(faults)
    items = RewardItems(data, config.data, TOKENIZER)
    context = RewardContext(scorer, items, read_validation(config, TOKENIZER))
    teachers = FaultyTeacher(config, Routes(("default",)), {})
    teachers.faults = faults
    cluster: Any = FaultyCluster(faults)
    cluster.config = config
    start = ResumeState(Progress(0, 0, len(data), config.data.seed, config.data.shuffle))
    trainer = StoppingTrainer(config, cluster, teachers, loader, start, context)
    cluster.update = trainer.fake_update
    trainer.faults, trainer.stop = faults, StopRequest()
    return trainer


def fit(trainer: StoppingTrainer) -> None:
    asyncio.run(asyncio.wait_for(trainer.fit(trainer.stop), PATIENCE_S))


LENGTH = ("trainer.total_training_steps=6", "trainer.scheduler=two_step_off", "trainer.save_freq=100")


class TestDroppedWork:
    @pytest.mark.parametrize("save_freq", [100, 2], ids=["save of the stop", "save that is due"])
    @pytest.mark.parametrize("stage", list(ERRORS))
    def test_failing_stage_of_a_dropped_batch_loses_no_checkpoint(
        self, tmp_path: Path, stage: str, save_freq: int
    ) -> None:
        config = make_config(tmp_path, *LENGTH, "trainer.test_freq=-1", f"trainer.save_freq={save_freq}")
        trainer = make_trainer(config, Faults(stage))
        fit(trainer)
        assert trainer.stop.reason == "SIGTERM" and trainer.progress.step == 2
        assert steps_of(tmp_path) == [2]


class TestBackgroundSave:
    @pytest.mark.parametrize("save_freq", [100, 2], ids=["save of the stop", "save that is due"])
    def test_checkpoint_of_a_stop_does_not_wait_for_loggers(self, tmp_path: Path, save_freq: int) -> None:
        """A tracking service may need 30 s to close."""
        file, seen = tmp_path / "user.py", tmp_path / "seen"
        file.write_text(
            "import pathlib\n"
            "class Mine:\n"
            "    def __init__(self, run): self.folder = run.folder\n"
            "    def log(self, step, metrics): pass\n"
            "    def close(self):\n"
            f"        pathlib.Path({str(seen)!r}).write_text(str((self.folder / 'global_step_2').is_dir()))\n"
        )
        config = make_config(
            tmp_path,
            *LENGTH,
            f"trainer.save_freq={save_freq}",
            "trainer.test_freq=-1",
            "actor_rollout_ref.actor.checkpoint.async_save=true",
            f"trainer.logger=[{file}:Mine]",
        )
        fit(make_trainer(config, Faults()))
        assert seen.read_text() == "True"

    @pytest.mark.parametrize("is_lost", [False, True], ids=["reward error", "actor lost"])
    def test_error_of_another_stage_keeps_a_save_that_needs_longer_than_the_grace_period(
        self, tmp_path: Path, is_lost: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("recipe_gkd.checkpoints.saver.SAVE_GRACE_PERIOD_S", 0.1)
        save = "actor_rollout_ref.actor.checkpoint.async_save=true"
        trainer = make_trainer(
            make_config(tmp_path, *LENGTH, save, "trainer.save_freq=2", "trainer.test_freq=-1"), Faults()
        )
        trainer.stop_in = None
        cluster: Any = trainer.cluster
        call = cluster.call

        async def slow_writers(method: Any, *args: Any, timeout_s: float, phase: str) -> list[Any]:
            if method.__name__ == "finish_saves":
                if not args[0]:
                    return [False]
                if timeout_s < 0.5:
                    raise DeadlineError("the writers need 0.5 s")
                await asyncio.sleep(0.5)
            return await call(method, *args, timeout_s=timeout_s, phase=phase)

        async def fail_in_third(batch: ReadyBatch) -> dict[str, float]:
            if batch.step == 2:
                raise RewardError("the reward function failed")
            return {}

        async def actor_is_lost(error: BaseException) -> bool:
            return is_lost

        cluster.call, cluster.update, cluster.actor_is_lost = slow_writers, fail_in_third, actor_is_lost
        with pytest.raises(RewardError):
            fit(trainer)
        assert steps_of(tmp_path) == ([] if is_lost else [2])


class TestFailedSave:
    def test_repeated_save_of_a_stop_is_still_the_best_checkpoint(self, tmp_path: Path) -> None:
        """The checkpoint was due only because its weights are the best."""
        trainer = make_trainer(make_config(tmp_path, *LENGTH, BEST), Faults(validation_waits=False))
        trainer.stop_in = None
        cluster: Any = trainer.cluster
        call, cluster.save_errors = cluster.call, [CheckpointError("disk full")]

        async def stop_at_failure(method: Any, *args: Any, **options: Any) -> list[Any]:
            try:
                return cast(list[Any], await call(method, *args, **options))
            except CheckpointError:
                assert trainer.stop.request("SIGTERM")
                raise

        cluster.call = stop_at_failure
        fit(trainer)
        best = recorded_best(tmp_path)
        assert steps_of(tmp_path) == [2] and best is not None and best.step == 2


class TestSharedDevices:
    def test_devices_that_cannot_be_prepared_do_not_prevent_the_save(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """For example, a teacher that shares the devices does not fall asleep."""
        trainer = make_trainer(make_config(tmp_path, *LENGTH, "trainer.test_freq=-1"), Faults())

        @asynccontextmanager
        async def turn(phase: str) -> AsyncIterator[None]:
            if trainer.stop.reason is not None and phase == "update":
                raise TeacherUnavailable("the teacher does not fall asleep")
            yield

        trainer.devices.turn = turn  # type: ignore[method-assign, assignment]
        fit(trainer)
        assert steps_of(tmp_path) == [2]
        assert "although the devices could not be prepared: the teacher does not fall asleep" in caplog.text


class TestValidation:
    def test_stop_during_validation_cancels_it_and_saves(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        trainer = make_trainer(make_config(tmp_path, *LENGTH, "trainer.test_freq=2"), Faults())
        trainer.stop_in = None

        async def work() -> None:
            training = asyncio.ensure_future(trainer.fit(trainer.stop))
            await trainer.faults.validating.wait()
            assert trainer.stop.request("SIGTERM")
            await training

        asyncio.run(asyncio.wait_for(work(), PATIENCE_S))
        assert trainer.progress.step == 2 and steps_of(tmp_path) == [2]
        assert "SIGTERM: the validation after step 2 is left out" in caplog.text

    @pytest.mark.parametrize(("step", "saved"), [(1, [2]), (5, [6])], ids=["before the end", "last step"])
    def test_stop_in_update_skips_validation(self, tmp_path: Path, step: int, saved: list[int]) -> None:
        trainer = make_trainer(make_config(tmp_path, *LENGTH, f"trainer.test_freq={step + 1}"), Faults())
        trainer.stop_in = step
        fit(trainer)
        assert steps_of(tmp_path) == saved and not trainer.faults.validating.is_set()
        assert (trainer.stop.reason is None) == (saved == [6])  # the run is complete

    def test_stop_in_validation_before_training_ends_without_checkpoint(self, tmp_path: Path) -> None:
        trainer = make_trainer(make_config(tmp_path, *LENGTH, "trainer.val_before_train=true"), Faults())

        async def work() -> None:
            training = asyncio.ensure_future(trainer.fit(trainer.stop))
            await trainer.faults.validating.wait()
            assert trainer.stop.request("SIGTERM")
            await training

        asyncio.run(asyncio.wait_for(work(), PATIENCE_S))
        assert trainer.progress.step == 0 and steps_of(tmp_path) == []

    @pytest.mark.parametrize("error", [WorkerError("no response"), TeacherUnavailable("gone"), KeyError("bug")])
    def test_failed_validation_ends_nothing_and_is_counted(
        self, tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = make_config(tmp_path, *LENGTH, "trainer.test_freq=2", "trainer.val_before_train=true")
        trainer = make_trainer(config, Faults(validation_error=error))
        trainer.stop_in = None
        with caplog.at_level(logging.WARNING):
            fit(trainer)
        assert trainer.progress.step == 6 and steps_of(tmp_path) == [6]
        counted = [json.loads(line).get("training/failed_validations") for line in (tmp_path / "metrics.jsonl").open()]
        assert counted == [1, None, 2, None, 3, None, 4]
        assert "the validation after step 2 failed, and the training continues" in caplog.text

    @pytest.mark.parametrize("error", [RewardError("key"), WeightSyncError("no weights")])
    def test_error_that_concerns_the_training_ends_the_run(self, tmp_path: Path, error: Exception) -> None:
        trainer = make_trainer(make_config(tmp_path, *LENGTH), Faults(validation_error=error))
        trainer.stop_in = None
        with pytest.raises(type(error)):
            fit(trainer)
