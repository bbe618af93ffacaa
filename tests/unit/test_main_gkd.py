"""What the command decides before and around a run, without one."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zmq

from recipe_gkd import main_gkd
from recipe_gkd.checkpoints.run_folder import check_outputs
from recipe_gkd.config import Config, load_config
from recipe_gkd.data.prompts import PromptData, read_table
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import ConfigError, UnexpectedError
from recipe_gkd.main_gkd import Terminated, _items, _until_terminated
from recipe_gkd.preflight import Student, check_stop_ids, meet_teachers
from recipe_gkd.quickstart.tokenizer import build_tokenizer
from recipe_gkd.ray_cluster import worker_group
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
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
        ({"n_logprobs": 1}, [], r"renormalize with a top 1 of teacher b"),
        ({}, ["top_k=1"], r"renormalize with a top 1 of teacher a"),
        ({"max_model_len": 100}, [], r"teacher b \(m\) scores at most 100 tokens, but .* = 3072"),
    ],
)
def test_a_teacher_that_does_not_fit_is_named(
    tmp_path: Path, differs: dict[str, Any], overrides: list[str], says: str
) -> None:
    config = configured(tmp_path, "gkd.tail=renormalize", *(f"actor_rollout_ref.teacher.{key}" for key in overrides))
    with pytest.raises(ConfigError, match=says):
        meet_teachers({"a": Teacher(), "b": Teacher(**differs)}, STUDENT, config)


# ---- where a response ends


def student_with(folder: Path, *, eos: object) -> Student:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return replace(STUDENT, path=folder)


END = STUDENT.tokenizer.eos_token_id
SHARE = "gkd.sft_share=0.5"


@pytest.mark.parametrize(
    ("eos", "of_teachers", "ends"), [(END, (), {END}), ([END, 3], (7,), {END, 3, 7}), (None, (END,), {END})]
)
def test_sampled_and_reference_responses_end_alike(
    tmp_path: Path, eos: object, of_teachers: tuple[int, ...], ends: set[int]
) -> None:
    assert check_stop_ids(configured(tmp_path, SHARE), student_with(tmp_path, eos=eos), of_teachers) == ends


@pytest.mark.parametrize(
    ("eos", "overrides", "says"),
    [
        (None, [], r"runs? to data\.max_response_length=2048: .* name none; set eos_token_id in .*generation_config"),
        ([60], [], r"name only \[60\], which its tokenizer does not have"),
        (None, ["gkd.sft_share=1", *("trainer.test_freq=1", "custom_reward_function.path=x")], "name none"),
        ([3], [SHARE], rf"id {END}\), but sampled responses end at \[3\]: gkd\.sft_share=0\.5 .* to \[{END}, 3\]"),
    ],
)
def test_responses_that_would_not_end_are_refused(tmp_path: Path, eos: object, overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        check_stop_ids(configured(tmp_path, *overrides), student_with(tmp_path, eos=eos), ())


def test_an_end_that_only_the_tokenizer_knows_is_a_warning_where_nobody_trains_on_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert check_stop_ids(configured(tmp_path), student_with(tmp_path, eos=3), ()) == {3}
    assert f"(id {END}), but sampled responses end at [3]" in caplog.text


@pytest.mark.parametrize(("eos", "ends"), [(None, set()), (3, {3})])
def test_where_nothing_is_sampled_nothing_is_said_about_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, eos: object, ends: set[int]
) -> None:
    config = configured(tmp_path, "gkd.sft_share=1")
    assert check_stop_ids(config, student_with(tmp_path, eos=eos), ()) == ends
    assert not caplog.records


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


@pytest.fixture
def terminating() -> Iterator[None]:
    """SIGTERM as in a shell, whatever the tests run under."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL), signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the stuck workers of a test are told, last that their processes end. Every signal counts as another one."""
    calls: list[str] = []

    async def end_workers(handles: Any, *, timeout_s: float) -> None:
        await asyncio.sleep(0.1)
        calls.append("killed")

    monkeypatch.setattr(main_gkd, "_SAME_REQUEST_S", 0.0)
    monkeypatch.setattr(worker_group, "end_workers", end_workers)
    return calls


@pytest.mark.parametrize(
    ("first", "second", "raised"),
    [(signal.SIGTERM, signal.SIGTERM, Terminated), (signal.SIGINT, signal.SIGTERM, KeyboardInterrupt)],
)
def test_a_second_signal_ends_waiting_for_a_save_and_cuts_the_closing_short_and_still_ends_processes(
    terminating: None, told: list[str], first: int, second: int, raised: type[BaseException]
) -> None:
    """Also if the second one comes when the workers are being closed, as a third would here."""

    class Stuck(WorkerGroup):
        async def call(self, method: str, *args: Any, **_: Any) -> list[Any]:
            told.append(method)
            return [await asyncio.sleep(60)]

    async def fit() -> None:
        try:
            try:
                os.kill(os.getpid(), first)
                await asyncio.sleep(60)
            finally:
                asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), second)
                asyncio.get_running_loop().call_later(0.25, os.kill, os.getpid(), second)
                await asyncio.sleep(60)  # a checkpoint in the background
        finally:
            await asyncio.wait_for(Stuck("actor", []).stop(timeout_s=1), 10)

    with pytest.raises(raised):
        asyncio.run(asyncio.wait_for(_until_terminated(fit()), 30))
    assert told == ["shutdown", "killed"]


def test_a_second_signal_while_workers_close_kills_them_at_once(terminating: None, told: list[str]) -> None:
    class Stuck(WorkerGroup):
        async def call(self, method: str, *args: Any, **_: Any) -> list[Any]:
            asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
            return [await asyncio.sleep(60)]

    async def train() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            await Stuck("actor", []).stop(timeout_s=100)

    with pytest.raises(Terminated):
        asyncio.run(asyncio.wait_for(_until_terminated(train()), 30))
    assert told == ["killed"]


def test_a_signal_that_is_ignored_stays_so(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    closed: list[str] = []
    run_and_send(number, closed)
    assert closed == ["in order"]


# ---- the unexpected


def test_an_exception_that_nobody_expects_is_told_in_one_message_and_its_traceback_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: Any) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    root, handlers = logging.getLogger(), logging.getLogger().handlers[:]
    monkeypatch.setattr(logging, "raiseExceptions", True)  # main sets it
    monkeypatch.setattr(main_gkd, "run", run)
    monkeypatch.setattr(main_gkd, "_raise_on_signals", lambda: None)
    overrides = [f"data.train_files={tmp_path}/x", "actor_rollout_ref.model.path=x"]
    try:
        status = main_gkd.main([*overrides, f"trainer.default_local_dir={tmp_path}/run"])
    finally:
        root.handlers[:] = handlers
    told = capsys.readouterr().err
    assert status == 1 and "Traceback" not in told
    assert "error: outside the training: ZMQError: Too many open files" in told and "test_main_gkd.py" in told
    log = (tmp_path / "run" / "run.log").read_text()
    assert f"the traceback is in {tmp_path}/run/run.log" in told and "Traceback" in log and "zmq.ZMQError" in log


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device", "/x/y"), r"training: OSError: \[Errno 28\] .* '/x/y'\n.*the disk"),
        (RuntimeError("CUDA error: lost"), r"training: RuntimeError: CUDA error: lost\nin .*may be a bug"),
        (ExceptionGroup("two", [ExceptionGroup("", [KeyError("a")])]), r"training: KeyError: 'a'"),
    ],
)
def test_the_unexpected_becomes_an_error_with_its_phase_and_its_place(error: Exception, says: str) -> None:
    known = as_known_error(error, "training")
    assert isinstance(known, UnexpectedError) and re.match(says, str(known), re.DOTALL) and known.__cause__ is error
    assert as_known_error(known, "later") is known
