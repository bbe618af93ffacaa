"""What the command decides before and around a run, without one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe_gkd.config import Config, load_config
from recipe_gkd.data import PromptData, read_table
from recipe_gkd.errors import ConfigError
from recipe_gkd.main_gkd import Terminated, _items, _until_terminated, check_outputs
from recipe_gkd.preflight import Student, meet_teacher
from recipe_gkd.quickstart.tokenizer import build_tokenizer
from teacher.errors import TeacherRequestError

STUDENT = Student(Path("x"), 64, build_tokenizer(), "the same")


def configured(folder: Path, *overrides: str) -> Config:
    pq.write_table(pa.table({"prompt": ["1+1="], "ground_truth": ["2"]}), folder / "train.parquet")
    needed = [f"data.train_files={folder}/train.parquet", "actor_rollout_ref.model.path=x"]
    return load_config(
        "on_policy_distill_trainer", [*needed, f"trainer.default_local_dir={folder}", "data.val_files=x", *overrides]
    )


# ---- outputs


def test_a_folder_where_the_link_to_the_best_goes_is_told_before_anything_starts(tmp_path: Path) -> None:
    reward = ["custom_reward_function.path=x", "trainer.test_freq=1"]
    config = configured(tmp_path, "trainer.best_metric=val/data/score", *reward)
    check_outputs(config)
    (tmp_path / "best").symlink_to("global_step_4")
    check_outputs(config)
    (tmp_path / "best").unlink()
    (tmp_path / "best").mkdir()
    check_outputs(configured(tmp_path))
    with pytest.raises(ConfigError, match="best is to be a link to the best checkpoint"):
        check_outputs(config)


# ---- rewards


@pytest.mark.parametrize(
    ("overrides", "judged"),
    [
        ((), False),
        (("custom_reward_function.path=x",), True),
        (("custom_reward_function.path=x", "custom_reward_function.on_training=false"), False),
        (
            (
                "custom_reward_function.path=x",
                "custom_reward_function.on_training=false",
                "gkd.use_rl_loss=true",
                "actor_rollout_ref.rollout.n=2",
            ),
            True,
        ),
        (("custom_reward_function.path=x", "data.ground_truth_key=nowhere"), False),
    ],
)
def test_training_answers_are_judged_if_a_loss_needs_it_or_they_may_be(
    tmp_path: Path, overrides: tuple[str, ...], judged: bool
) -> None:
    config = configured(tmp_path, *overrides)
    data = PromptData(read_table(config.data.train_files, config.data.prompt_key), config.data, STUDENT.tokenizer)
    assert (_items(config, data, STUDENT) is not None) == judged


# ---- the teacher


class Teacher:
    """Scores at temperature 1 only."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], float]] = []

    def hello(self, timeout_s: float) -> Any:
        return SimpleNamespace(
            tokenizer_fingerprint="the same",
            vocab_size=64,
            model_name="t",
            eos_token_ids=(),
            n_logprobs=8,
            max_model_len=1 << 20,
        )

    def submit(self, sequences: list[Any], timeout_s: float, *, temperature: float) -> Future[list[Any]]:
        self.asked.append(([len(sequence.token_ids) for sequence in sequences], temperature))
        future: Future[list[Any]] = Future()
        future.set_exception(TeacherRequestError("this teacher scores at temperature 1 only"))
        return future


def test_a_teacher_that_cannot_score_at_the_temperature_is_refused_before_anything_starts(tmp_path: Path) -> None:
    teacher: Any = Teacher()
    meet_teacher(teacher, STUDENT, configured(tmp_path))
    assert teacher.asked == []
    with pytest.raises(TeacherRequestError, match="at temperature 1 only"):
        meet_teacher(teacher, STUDENT, configured(tmp_path, "gkd.distill_temperature=2"))
    assert teacher.asked == [([2], 2.0)]


# ---- signals


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)


def run_and_send(number: signal.Signals, closed: list[str]) -> None:
    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.1)
        finally:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)
            closed.append("in order")

    asyncio.run(_until_terminated(work()))


def test_a_signal_ends_the_run_which_closes_what_it_opened_even_if_it_comes_twice(number: signal.Signals) -> None:
    closed: list[str] = []
    with pytest.raises(Terminated) as stop:
        run_and_send(number, closed)
    assert stop.value.number == number and closed == ["in order"]


def test_a_signal_that_is_ignored_stays_so(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    closed: list[str] = []
    run_and_send(number, closed)
    assert closed == ["in order"]
