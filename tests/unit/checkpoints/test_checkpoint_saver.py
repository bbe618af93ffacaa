"""Checkpoint saver: failed saves are limited, and an incomplete checkpoint never gets a final name."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.checkpoints import folders, store
from recipe_gkd.checkpoints.folders import read_latest, steps_of
from recipe_gkd.checkpoints.saver import CheckpointSaver
from recipe_gkd.checkpoints.state import Best, Progress
from recipe_gkd.errors import CheckpointError, DeadlineError, GkdError, SavesFailed, WorkerDied
from tests._support.base_config import base_config
from tests._support.checkpoint_files import PROGRESS, list_names, read_shard
from tests._support.errors import raises

FAIL = CheckpointError("actor worker 1 of 2: No space left on device")


class Actors:
    """Fake actor ranks that write small files.

    Attributes:
        plan: Outcomes of the next calls by method: an error to raise, False (not written yet), True (written without
            the last file), or None (success).
        calls: Methods that were called.
        declared: Ids that the last Hugging Face folder declares.
        timeouts: Timeout of each call, in seconds.
    """

    def __init__(self, **plan: list[Any]) -> None:
        self.plan, self.calls, self.path = plan, list[str](), Path()
        self.timeouts = list[float]()
        self.declared: tuple[int, ...] | None = None

    async def call(self, method: Any, *args: Any, timeout_s: float) -> list[Any]:
        method = method.__name__
        await asyncio.sleep(0)
        self.calls.append(method)
        self.timeouts.append(timeout_s)
        if method == "save_hf":
            self.declared = args[1]
        if method == "save_checkpoint":
            self.path = Path(args[0])
            self.path.mkdir(parents=True)
            (self.path / "weights").write_text(self.path.parent.name[-1])
        outcomes = self.plan.get(method) or [None]
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        if method == "finish_saves" and outcome is None and self.path.exists():
            (self.path / "metadata.json").write_text("{}")
        return [outcome is not False] * 2


def saver_of(root: Path, actors: Actors, *overrides: str, best: Best | None = None) -> CheckpointSaver:
    config = base_config(f"trainer.default_local_dir={root}", *overrides)
    return CheckpointSaver(config, root, actors.call, best=best)


def at(step: int) -> Progress:
    return Progress(step, 8 * step, *(getattr(PROGRESS, name) for name in ("n_prompts", "data_seed", "shuffle")))


ASYNC = "actor_rollout_ref.actor.checkpoint.async_save=true"
BOTH = pytest.mark.parametrize("mode", [(), (ASYNC,)], ids=["sync", "async"])


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


@BOTH
@pytest.mark.parametrize("method", ["save_hf", "save_checkpoint", "finish_saves"])
def test_failed_save_keeps_latest_and_run_continues(
    tmp_path: Path, method: str, mode: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    actors = Actors(**{method: [None, FAIL, None]})
    saver = saver_of(tmp_path, actors, *mode)

    async def work() -> None:
        for step in (1, 2):
            await saver.save(at(step), None)
            await saver.finish()
        assert saver.failed_saves == 1 and not saver.is_pending
        assert list_names(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]
        assert read_latest(tmp_path) == 1
        await saver.save(at(3), None)
        await saver.finish_run(3)

    run(work)
    assert steps_of(tmp_path) == [1, 3] and read_latest(tmp_path) == 3 and read_shard(tmp_path, 3) == "3"
    assert "step 2 could not be saved" in caplog.text and "No space left" in caplog.text
    assert "1 failed so far, trainer.save_failures_allowed=1" in caplog.text
    assert caplog.text.count("could not be saved") == 1


def test_folders_declare_the_ids_that_end_responses(tmp_path: Path) -> None:
    actors = Actors()
    run(lambda: saver_of(tmp_path, actors).save(replace(at(1), stop_token_ids=(3, 7)), None))
    assert actors.declared == (3, 7)
    assert json.loads((tmp_path / "global_step_1" / "trainer.json").read_text())["stop_token_ids"] == [3, 7]


@BOTH
def test_more_failures_than_allowed_end_run(tmp_path: Path, mode: tuple[str, ...]) -> None:
    saver = saver_of(tmp_path, Actors(finish_saves=[None, FAIL, None, FAIL]), *mode)

    async def work() -> None:
        for step in (1, 2, 3, 4):
            await saver.save(at(step), None)
            await saver.finish()

    with raises(SavesFailed, count=2, newest=folders.final_folder(tmp_path, 3)) as caught:
        run(work)
    assert caught.value.what == FAIL.what
    assert saver.failed_saves == 2 and steps_of(tmp_path) == [1, 3]
    none_allowed = saver_of(tmp_path, Actors(finish_saves=[FAIL]), "trainer.save_failures_allowed=0", *mode)

    async def fail() -> None:
        await none_allowed.save(at(5), None)
        await none_allowed.finish()

    with raises(SavesFailed, count=1, newest=None):
        run(fail)


def test_failure_reported_to_canceled_call_is_no_success(tmp_path: Path) -> None:
    """The actors report a failed save once. The next call has nothing to finish, and returns True."""
    saver = saver_of(tmp_path, Actors(finish_saves=[True]), ASYNC)

    async def work() -> None:
        await saver.save(at(1), None)
        await saver.give_up(workers_failed=False)

    run(work)
    assert list_names(tmp_path) == [] and saver.failed_saves == 1


def test_slow_disk_blocks_neither_step_nor_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    monkeypatch.setattr(store, "sync_tree", lambda _: disk.wait(60))
    actors = Actors()
    saver = saver_of(tmp_path, actors, ASYNC)

    async def work() -> None:
        await saver.save(at(1), None)
        await saver.finish(wait=False)
        await saver.finish(wait=False)
        assert saver.is_pending and steps_of(tmp_path) == []
        ending = asyncio.ensure_future(saver.finish())
        await asyncio.sleep(0)
        ending.cancel()  # as after a signal: the save continues, and the next call completes it
        disk.set()
        await saver.give_up(workers_failed=False)

    run(work)
    assert steps_of(tmp_path) == [1] and saver.failed_saves == 0
    assert actors.calls.count("finish_saves") == 1


def test_save_that_the_disk_completes_after_a_worker_failed_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completion removes older checkpoints, so the run must continue from this one."""
    disk = threading.Event()
    monkeypatch.setattr(store, "sync_tree", lambda _: disk.wait(60))
    saver = saver_of(tmp_path, Actors(), ASYNC)

    async def work() -> None:
        await saver.save(at(1), None)
        await saver.finish(wait=False)
        timer = threading.Timer(1.0, disk.set)
        timer.start()
        await saver.give_up(workers_failed=True)
        timer.join()

    run(work)
    assert steps_of(tmp_path) == [1] and saver.newest == tmp_path / "global_step_1"


def test_hung_disk_blocks_neither_failed_save_nor_end_of_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Removing and making folders have deadlines, and stay in order once the disk answers."""
    disk, remove = threading.Event(), folders.remove_folder
    waits_for = [disk]

    def remove_folder(folder: Path) -> None:
        assert waits_for[-1].wait(30)
        remove(folder)

    monkeypatch.setattr(folders, "remove_folder", remove_folder)
    monkeypatch.setattr("recipe_gkd.checkpoints.save_folders.DISCARD_TIMEOUT_S", 0.1)
    actors = Actors(finish_saves=[FAIL])
    saver = saver_of(tmp_path, actors, ASYNC, "trainer.save_failures_allowed=9")

    async def work() -> None:
        saver._folders._timeout_s = 0.3
        await saver.save(at(1), None)
        assert saver.failed_saves == 1 and "did not make a folder within 0.3 s" in caplog.text
        disk.set()
        saver._folders._timeout_s = 30
        await saver.save(at(1), None)
        disk.clear()
        await saver.finish()
        assert saver.failed_saves == 2 and ".writing_global_step_1 was not removed within 0.1 s" in caplog.text
        waits_for.append(threading.Event())
        waits_for[-1].set()  # only the removal hangs
        again = asyncio.ensure_future(saver.save(at(1), None))
        await asyncio.sleep(0.1)
        disk.set()
        await again
        await asyncio.sleep(0.1)
        await saver.finish()
        assert saver.failed_saves == 2 and steps_of(tmp_path) == [1]
        await saver.save(at(2), None)
        waits_for[-1].clear()
        actors.plan["finish_saves"] = [False]
        await asyncio.wait_for(saver.give_up(workers_failed=True), 5)
        waits_for[-1].set()

    run(work)
    assert steps_of(tmp_path) == [1]


def broken(*_: object) -> Any:
    raise OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize(("owner", "name"), [(Path, "is_file"), (store, "keep_best")])
def test_network_disk_error_is_failed_save(
    tmp_path: Path, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = saver_of(tmp_path, Actors(), ASYNC)

    async def work() -> None:
        await saver.save(at(1), Best("m", 1.0, 1))
        with monkeypatch.context() as disk:
            disk.setattr(owner, name, broken)
            await saver.finish()
        await saver.save(at(2), None)
        await saver.finish()

    run(work)
    assert saver.failed_saves == 1 and "Stale file handle" in caplog.text and read_latest(tmp_path) == 2


@pytest.mark.parametrize("name", ["steps_of", "best.json"])
def test_failed_removal_of_old_checkpoints_is_no_failed_save(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if name == "steps_of":
        monkeypatch.setattr(folders, name, broken)
    else:
        (tmp_path / name).write_text("{")
    saver = saver_of(tmp_path, Actors(), "trainer.max_actor_ckpt_to_keep=1", "trainer.save_failures_allowed=0")

    async def work() -> None:
        for step in (1, 2):
            await saver.save(at(step), None)

    run(work)
    assert saver.failed_saves == 0 and read_latest(tmp_path) == 2
    assert caplog.text.count("old checkpoints could not be removed") == 2


@pytest.mark.parametrize("error", [WorkerDied("x"), DeadlineError("x")])
def test_other_errors_end_run_after_grace_period(tmp_path: Path, error: GkdError) -> None:
    actors = Actors(save_checkpoint=[None, error])
    saver = saver_of(tmp_path, actors, ASYNC)

    async def work(last: Any) -> None:
        await saver.save(at(1), None)
        actors.plan["finish_saves"] = [error, last]
        with pytest.raises(type(error)):
            await saver.finish(wait=False)
        await saver.give_up(workers_failed=True)

    run(lambda: work(False))  # not written yet
    assert list_names(tmp_path) == [] and actors.timeouts[-1] == 1.0
    actors.plan["save_checkpoint"] = []
    run(lambda: work(None))
    assert steps_of(tmp_path) == [1]
    assert saver.failed_saves == 0


def test_last_checkpoint_is_tried_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    allowed = "trainer.save_failures_allowed=5"
    saver = saver_of(tmp_path, Actors(finish_saves=[FAIL, None]), ASYNC, allowed)

    async def work() -> None:
        await saver.save(at(1), None)
        await saver.finish_run(1)

    run(work)
    assert steps_of(tmp_path) == [1] and "trying once more" in caplog.text
    saver = saver_of(tmp_path, Actors(finish_saves=[FAIL, FAIL]), allowed)
    with raises(SavesFailed, count=2, newest=None, path=folders.final_folder(tmp_path, 1)):
        run(work)
    saver = saver_of(tmp_path, Actors(finish_saves=[FAIL]), allowed)

    async def earlier() -> None:
        await saver.save(at(1), None)
        await saver.finish_run(2)  # no save of step 2 was due

    run(earlier)


def test_best_of_failed_save_is_not_best(tmp_path: Path) -> None:
    first, second, third = (Best("m", value, step) for step, value in ((1, 0.1), (2, 0.9), (3, 0.5)))
    saver = saver_of(tmp_path, Actors(finish_saves=[None, FAIL, None]), ASYNC)

    async def work() -> None:
        await saver.save(at(1), first)
        assert saver.best_of(first) == first  # it is being written
        await saver.finish()
        await saver.save(at(2), second)
        await saver.finish()
        assert saver.best_of(second) == first and (tmp_path / "best").resolve() == tmp_path / "global_step_1"
        await saver.save(at(3), third)
        await saver.finish()
        assert saver.best_of(third) == third and (tmp_path / "best").resolve() == tmp_path / "global_step_3"

    run(work)


def test_old_checkpoints_are_removed_after_each_save(tmp_path: Path) -> None:
    saver = saver_of(tmp_path, Actors(), "trainer.max_actor_ckpt_to_keep=2")

    async def work() -> None:
        for step in range(1, 6):
            await saver.save(at(step), Best("m", step, step) if step == 1 else None)
            assert read_latest(tmp_path) == step

    run(work)
    assert steps_of(tmp_path) == [1, 4, 5]


def test_full_disk_of_driver_is_failed_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = saver_of(tmp_path / "file", Actors())
    (tmp_path / "file").write_text("")

    async def work() -> None:
        await saver.save(at(1), None)

    with caplog.at_level(logging.WARNING):
        run(work)
    assert saver.failed_saves == 1 and "file/.writing_global_step_1 cannot be written" in caplog.text
