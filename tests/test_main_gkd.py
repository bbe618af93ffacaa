"""What the command decides before and around a run, without one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe_gkd.config import Config, load_config
from recipe_gkd.data import PromptData, read_table
from recipe_gkd.errors import ConfigError
from recipe_gkd.main_gkd import Terminated, _items, _until_terminated, check_outputs
from recipe_gkd.preflight import Student, meet_teachers
from recipe_gkd.quickstart.tokenizer import build_tokenizer
from teacher.errors import TeacherRequestError
from teacher.records import TeacherInfo

STUDENT = Student(Path("x"), 64, build_tokenizer(), "the same", n_tokens=60)


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

    def __init__(self, **differs: Any) -> None:
        self.asked: list[tuple[list[int], float]] = []
        self.info = replace(FITTING, **differs)

    def hello(self, timeout_s: float) -> TeacherInfo:
        return self.info

    def submit(self, sequences: Any, timeout_s: Any = None, *, temperature: float = 1.0) -> Future[Any]:
        self.asked.append(([len(sequence.token_ids) for sequence in sequences], temperature))
        future: Future[list[Any]] = Future()
        future.set_exception(TeacherRequestError("this teacher scores at temperature 1 only"))
        return future


FITTING = TeacherInfo(
    model_name="m",
    vocab_size=128,
    n_tokens=60,
    tokenizer_fingerprint="the same",
    max_model_len=1 << 20,
    n_logprobs=8,
    engine="none",
    eos_token_ids=(1,),
    protocol_version=4,
    n_workers=1,
)


def test_a_teacher_that_cannot_score_at_the_temperature_is_refused_before_anything_starts(tmp_path: Path) -> None:
    teacher = Teacher()
    meet_teachers({"t": teacher}, STUDENT, configured(tmp_path))
    assert teacher.asked == []
    with pytest.raises(TeacherRequestError, match="at temperature 1 only"):
        meet_teachers({"t": teacher}, STUDENT, configured(tmp_path, "gkd.distill_temperature=2"))
    assert teacher.asked == [([2], 2.0)]


def test_answers_end_where_any_teacher_ends_a_turn_and_output_layers_may_be_padded_differently(tmp_path: Path) -> None:
    teachers = {"a": Teacher(eos_token_ids=(3, 1)), "b": Teacher(eos_token_ids=(7,), vocab_size=60, n_logprobs=2)}
    assert meet_teachers(teachers, STUDENT, configured(tmp_path)) == (1, 3, 7)


@pytest.mark.parametrize(
    ("differs", "overrides", "says"),
    [
        (
            {"tokenizer_fingerprint": "another"},
            [],
            r"not fit .*teacher b \(m\) has .*another\), student x .*the same\)",
        ),
        ({"n_tokens": 59}, [], r"teacher b \(m\) knows the ids 0 to 58 .* ids up to 59"),
        ({"eos_token_ids": (60,)}, [], r"teacher b \(m\) ends its turns with \[60\], .* only ids 0 to 59"),
        ({"n_logprobs": 4}, ["top_k=5"], r"teacher\.top_k=5, but teacher b \(m\) returns 4 ids at most"),
        ({"n_logprobs": 1}, [], r"renormalise with a top 1 of teacher b"),
        ({}, ["top_k=1"], r"renormalise with a top 1 of teacher a"),
        ({"max_model_len": 100}, [], r"teacher b \(m\) scores at most 100 tokens, but .* = 3072"),
    ],
)
def test_a_teacher_that_does_not_fit_is_named(
    tmp_path: Path, differs: dict[str, Any], overrides: list[str], says: str
) -> None:
    config = configured(tmp_path, "gkd.tail=renormalise", *(f"actor_rollout_ref.teacher.{key}" for key in overrides))
    with pytest.raises(ConfigError, match=says):
        meet_teachers({"a": Teacher(), "b": Teacher(**differs)}, STUDENT, config)


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
    signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    closed: list[str] = []
    with pytest.raises(Terminated) as stop:
        run_and_send(number, closed)
    assert stop.value.number == number and closed == ["in order"]


def test_a_signal_that_is_ignored_stays_so(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    closed: list[str] = []
    run_and_send(number, closed)
    assert closed == ["in order"]
