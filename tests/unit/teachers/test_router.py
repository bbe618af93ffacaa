"""Routes, Teachers and FailurePolicy."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe_gkd.config import Config
from recipe_gkd.data.rows import DataSet
from recipe_gkd.data.samples import Prompt, Response, Sample, TeacherTopK
from recipe_gkd.errors import ConfigError, DataError
from recipe_gkd.preflight import check_recorded_prompts
from recipe_gkd.teachers import failure_policy
from recipe_gkd.teachers.cache.setup import open_caches
from recipe_gkd.teachers.recorded.layout import RecordingSource
from recipe_gkd.teachers.recorded.teacher import RecordedTeacher
from recipe_gkd.teachers.recorded.writer import RecordingWriter
from recipe_gkd.teachers.router import RECORDING, Teachers, length_of_union, open_teachers
from recipe_gkd.teachers.routes import Routes, read_routes
from recipe_gkd.teachers.scoring import support as scoring_support
from teacher.client import TeacherClient
from teacher.errors import (
    TeacherError,
    TeacherProtocolError,
    TeacherRequestError,
    TeacherTimeout,
    TeacherUnavailable,
    TeacherUnreachable,
)
from teacher.records import TeacherSequence
from teacher.wire.limits import LIMITS
from tests._support.base_config import base_config
from tests._support.data_sets import data_set_of
from tests._support.errors import raises
from tests._support.fake_teachers import REFUSED, K, fake_scores, is_scored_by, pair, service
from tests._support.fake_worker import INFO, FakeEngine, expected_scores, running_worker
from tests._support.ports import free_port
from tests._support.teacher_service import running_proxy
from tests._support.waiting import wait_until_async

TEACHER = "actor_rollout_ref.teacher"
OFFSETS = {"math": 0, "code": 50}
ROUTES = Routes(("default",))


COUNTING_BACKEND = """
from concurrent.futures import Future
from teacher import TeacherInfo
from tests._support.fake_teachers import fake_scores
from tests._support.fake_worker import INFO

class Counting:
    def __init__(self, teacher):
        self.n_scored = 0

    def hello(self, timeout_s):
        return TeacherInfo(**vars(INFO), protocol_version=1, n_workers=1)

    def submit(self, sequences, timeout_s=None, *, temperature=1.0):
        self.n_scored += len(sequences)
        future = Future()
        future.set_result([fake_scores(sequence, 0) for sequence in sequences])
        return future

    def close(self):
        pass
"""


def configured(*overrides: str) -> Config:
    keys = [override if override.startswith("gkd.") else f"{TEACHER}.{override}" for override in overrides]
    return base_config("actor_rollout_ref.rollout.n=2", *keys)


def uids(samples: Sequence[Sample]) -> list[int]:
    return [sample.prompt.uid for sample in samples]


# ---- routes


def rows_of(names: list[Any]) -> DataSet:
    return data_set_of({"prompt": ["x"] * len(names), "meta": [{"teacher": name} for name in names]})


def two_teachers(**ports: int) -> list[str]:
    return [f"teachers.{name}=127.0.0.1:{port}" for name, port in ports.items()] + ["route_key=meta.teacher"]


def test_teachers_route_key_selects_teacher_of_each_sample() -> None:
    teacher_of_row = ["math", "code", "code", "math", "code"]
    with service(OFFSETS["math"]) as math, service(OFFSETS["code"]) as code:
        config = configured(*two_teachers(math=math, code=code))
        routes = read_routes(rows_of(teacher_of_row), config)
        with open_teachers(config, routes) as teachers:

            async def two_groups() -> list[Sample]:
                groups = [pair(uid) for uid in (3, 0, 7, 4)], [pair(uid) for uid in (9, 1, 2, 8, 5, 6)]
                both = await asyncio.gather(*(teachers.score(group, step=0) for group in groups))
                assert [uids(samples) for samples in both] == [[3, 0, 7, 4], [9, 1, 2, 8, 5, 6]]
                return [sample for samples in both for sample in samples]

            samples = asyncio.run(two_groups())
            metrics = teachers.step_metrics(samples, 0, before=0)
    for sample in samples:
        name = teacher_of_row[sample.prompt.row]
        assert is_scored_by(OFFSETS[name], sample) and sample.teacher_number == ["math", "code"].index(name)
    tokens = {
        name: sum(len(s.response.ids) for s in samples if teacher_of_row[s.prompt.row] == name) for name in OFFSETS
    }
    for name, count in tokens.items():
        assert metrics[f"teacher/{name}/tokens"] == count
        assert metrics[f"teacher/{name}/token_share"] == pytest.approx(count / sum(tokens.values()))
        assert 0 < metrics[f"teacher/{name}/seconds"] < 30
    assert metrics["teacher/skipped_samples"] == metrics["teacher/skipped_samples_total"] == 0


def test_cache_dir_keeps_the_scores_of_a_backend_of_the_driver(tmp_path: Path) -> None:
    """A class of the user is asked once for each response, in two runs."""
    source = tmp_path / "counting.py"
    source.write_text(COUNTING_BACKEND)
    config = configured(f"backend={source}:Counting", f"cache_dir={tmp_path}/cache")
    found = []
    for _ in range(2):
        with open_teachers(config, ROUTES) as teachers:
            teachers.use_caches(open_caches(config, teachers.clients))
            samples = asyncio.run(teachers.score([pair(uid) for uid in range(5)], step=0))
            assert all(is_scored_by(0, sample) for sample in samples)
            metrics = teachers.step_metrics(samples, 0, before=0)
            found.append((metrics["teacher/cached_share"], teachers.clients["default"]._backend.n_scored))  # type: ignore[attr-defined]
    assert found == [(0, 1 + 5), (1, 1)]  # with the probe


class Prompts(list[Prompt]):
    """Prompts of a data set."""

    name = "the data"

    def prompt(self, index: int, uid: int) -> Prompt:
        return self[index]


def recording_of(pairs: Sequence[tuple[Prompt, Response]], folder: Path) -> Path:
    """Record the scores of the teacher with the offset 7."""
    recorded = [recorded_sample(*each, offset=7) for each in pairs]
    source = RecordingSource(
        **{name: getattr(INFO, name) for name in ("model_name", "vocab_size", "n_tokens", "tokenizer_fingerprint")},
        **dict(engine="e", max_model_len=99, eos_token_ids=(1,), temperature=1.0, top_k=K, dtype="float32"),
        **dict(prompts="", references="", teacher_prompts="", n_responses=len(recorded)),
    )
    RecordingWriter(folder, source).write(recorded)
    return folder


def test_recorded_references_are_not_sent_to_the_teacher(tmp_path: Path) -> None:
    pairs = [pair(uid, reference=uid % 2 == 0) for uid in range(6)]
    folder = recording_of([each for each in pairs if each[0].reference_ids is not None], tmp_path / "recording")
    settings = ("gkd.sft_share=0.5", "gkd.sft_target=teacher", f"path={folder}", f"top_k={K}")
    with service(0) as port, open_teachers(configured(f"server_port={port}", *settings), ROUTES) as teachers:
        assert list(teachers.sources) == ["default", RECORDING]
        samples = asyncio.run(teachers.score(pairs, step=0))
        metrics = teachers.step_metrics(samples, 0, before=0)
        unknown = pair(6, tokens=(1, 2, 3), reference=True)
        with raises(TeacherRequestError, options=(f"{TEACHER}.path",)):
            asyncio.run(teachers.score([unknown], step=1))
    assert uids(samples) == list(range(6))
    assert all(is_scored_by(7 if sample.is_reference else 0, sample) for sample in samples)
    assert metrics["teacher/cached_share"] == 0.5


@pytest.mark.parametrize("n_others", [0, 2, 3])
def test_prompts_without_recorded_response_are_reported_at_the_start(
    n_others: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All prompts of `pair` are equal, so one of other ids is not recorded."""
    prompts = [replace(pair(uid)[0], ids=np.array([5, 6 if uid >= n_others else 7], np.int32)) for uid in range(3)]
    data: Any = Prompts(prompts)
    with closing(RecordedTeacher(recording_of([pair(0)], tmp_path / "recording"))) as recording:
        if n_others == 3:
            with raises(ConfigError, keys=(f"{TEACHER}.path",)):
                check_recorded_prompts(recording, data)
            return
        check_recorded_prompts(recording, data)
    assert ("no response to 2 of the 3 prompts of the data, the first is row 0" in caplog.text) == (n_others == 2)
    assert bool(caplog.records) == (n_others == 2)


def recorded_sample(prompt: Prompt, response: Response, offset: int) -> Sample:
    ids = np.concatenate([prompt.ids, response.ids])
    scored = fake_scores(TeacherSequence(ids, len(prompt.ids)), offset)
    rows = TeacherTopK(logps_TK=scored.topk_logps_TK, ids_TK=scored.topk_ids_TK, sampled_logps_T=scored.sampled_logps_T)
    return Sample(prompt=prompt, response=response, teacher=rows)


def test_open_teachers_skips_unused_and_shares_clients_by_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = configured(*two_teachers(math=9, code=9, idle=1))
    routes = read_routes(rows_of(["math", "code"]), config)
    assert "no row of the training data is for teacher idle" in caplog.text
    with open_teachers(config, routes) as teachers:
        assert list(teachers.clients) == ["math", "code"]
        assert teachers.clients["math"] is teachers.clients["code"]


@pytest.mark.parametrize("value", ["cod", None])
def test_read_routes_unknown_teacher_raises_with_row_and_names(value: str | None) -> None:
    config = configured(*two_teachers(math=1, code=2))
    with raises(DataError, row=2, column="meta.teacher"):
        read_routes(rows_of(["math", "code", value]), config)


def test_read_routes_missing_column_raises_with_present_columns() -> None:
    config = configured(*two_teachers(math=1, code=2))
    with raises(DataError, row=None, column="meta.teacher", existing=("prompt",)):
        read_routes(data_set_of({"prompt": ["x"]}), config)


def test_run_without_teacher_connects_to_none_and_scores_nothing() -> None:
    config = configured("server_port=9", "gkd.enable_teacher=false", "gkd.sft_share=0.5")
    routes = read_routes(rows_of(["any"]), config)
    with open_teachers(config, routes) as teachers:
        samples = asyncio.run(teachers.score([pair(0), pair(1)], step=0))
        assert not teachers.clients and teachers.step_metrics(samples, 0, before=0) == {}
    assert not any(sample.is_skipped or sample.teacher.is_scored_T.any() for sample in samples)


def test_positions_beyond_the_last_one_are_not_requested_and_absent() -> None:
    pairs = [pair(0), pair(5)]
    n = max(len(response.ids) for _, response in pairs) - 1
    with service(0) as port:
        config = configured(f"server_port={port}", f"gkd.max_loss_position={n}")
        with open_teachers(config, ROUTES) as teachers:
            samples = asyncio.run(teachers.score(pairs, step=0))
            metrics = teachers.step_metrics(samples, 0, before=0)
        with open_teachers(configured(f"server_port={port}"), ROUTES) as teachers:
            complete = asyncio.run(teachers.score(pairs, step=0))
    for sample, expected in zip(samples, complete, strict=True):
        n_scored = min(n, len(sample.response.ids))
        assert sample.teacher.is_scored_T.tolist() == [position < n for position in range(len(sample.response.ids))]
        for name in ("logps_TK", "ids_TK", "sampled_logps_T"):
            got, want = getattr(sample.teacher, name), getattr(expected.teacher, name)
            assert got.dtype == want.dtype and got.shape == want.shape
            np.testing.assert_array_equal(got[:n_scored], want[:n_scored])
    assert metrics["teacher/default/tokens"] == sum(min(n, len(response.ids)) for _, response in pairs)


@pytest.mark.parametrize("support", ["student", "union"])
def test_rows_have_the_ids_of_the_student_with_the_scores_of_the_teacher(support: str) -> None:
    sampled = [(prompt, with_student_ids(response)) for prompt, response in (pair(0), pair(5))]
    pairs = [*sampled, pair(7, reference=True)]
    overrides = (f"support={support}", "gkd.max_loss_position=2", "gkd.sft_share=0.5", "gkd.sft_target=teacher")
    with running_proxy() as proxy, running_worker(proxy.backend_port, FakeEngine()):
        config = configured(f"server_port={proxy.frontend_port}", *overrides)
        with open_teachers(config, ROUTES) as teachers:
            *samples, reference = asyncio.run(teachers.score(pairs, step=0))
    for sample, (_, response) in zip(samples, sampled, strict=True):
        n_scored = min(2, len(response.ids))
        assert response.student_ids_TJ is not None and sample.response.student_ids_TJ is None
        sequence = TeacherSequence(
            np.concatenate([sample.prompt.ids, response.ids[:n_scored]]),
            len(sample.prompt.ids),
            support_ids_TJ=response.student_ids_TJ[:n_scored],
            with_top_k=support == "union",
        )
        logps_TK, ids_TK = scoring_support.rows_of(sequence, expected_scores(sequence))
        np.testing.assert_array_equal(sample.top_k.ids_TK[:n_scored], ids_TK)
        np.testing.assert_array_equal(sample.top_k.logps_TK[:n_scored], logps_TK)
        assert sample.teacher.is_scored_T.tolist() == [t < n_scored for t in range(len(response.ids))]
    assert reference.top_k.ids_TK.shape[1] == INFO.n_logprobs  # the student has not sampled it


def with_student_ids(response: Response) -> Response:
    """Return a response with three ids of the student at each position, one of them also in the teacher's top k."""
    return replace(response, student_ids_TJ=(response.ids[:, None] + np.array([2, 40, 50], np.int32)) % 100)


# ---- requests


class Scripted:
    """A backend whose requests fail with the given errors, one after the other, and then succeed."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.n_requests = 0
        self.timeouts: list[float | None] = []

    def hello(self, timeout_s: float) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def submit(self, sequences: Any, timeout_s: float | None = None, *, temperature: float = 1.0) -> Future[Any]:
        self.n_requests += 1
        self.timeouts.append(timeout_s)
        future: Future[Any] = Future()
        if (error := self.errors.pop(0) if self.errors else None) is not None:
            future.set_exception(error)
        else:
            future.set_result([fake_scores(sequence, 0) for sequence in sequences])
        return future


def score(teachers: Teachers, group: Sequence[tuple[Prompt, Response]], step: int = 0) -> list[Sample]:
    return asyncio.run(teachers.score(group, step))


@pytest.mark.parametrize("target", ["data", "teacher"])
def test_teachers_score_only_responses_that_need_a_teacher(target: str) -> None:
    teachers = Teachers(configured(f"gkd.sft_target={target}"), ROUTES, {"default": Scripted()})
    empty = pair(1)[0], Response(**vars(pair(1)[1]) | {"ids": np.zeros(0, np.int32), "logprobs": [], "versions_T": []})
    plain, empty_sample, reference = score(teachers, [pair(0), empty, pair(2, reference=True)])
    assert is_scored_by(0, plain) and is_scored_by(0, reference) == (target == "teacher")
    assert not (empty_sample.is_skipped or reference.is_skipped)
    assert teachers.step_metrics([plain, empty_sample, reference], 0, before=0)["teacher/default/tokens"] == 1 + 3 * (
        target == "teacher"
    )


# ---- failures


GONE, LATE, REFUSAL = TeacherUnavailable("gone"), TeacherTimeout("late"), TeacherRequestError("refused")
BAD_BYTES, CLOSED = TeacherProtocolError("bytes"), TeacherError("the client is closed")


@pytest.mark.parametrize(
    ("policy", "ends_the_run"),
    [
        ("fail", [GONE, LATE, REFUSAL, BAD_BYTES, CLOSED]),
        ("wait", [REFUSAL, BAD_BYTES, CLOSED]),
        ("skip_samples", [BAD_BYTES, CLOSED]),
    ],
)
def test_failure_policy_fatal_error_is_raised_at_once(policy: str, ends_the_run: list[TeacherError]) -> None:
    for error in ends_the_run:
        client = Scripted(error)
        with pytest.raises(type(error)) as raised:
            score(Teachers(configured(f"on_failure={policy}"), ROUTES, {"default": client}), [pair(0)])
        assert str(raised.value) == f"step 0: teacher default, 1 samples (0): {error}" and client.n_requests == 1


def test_failure_policy_wait_retries_and_warns_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_policy, "MIN_RETRY_INTERVAL_S", 0.0)
    client = Scripted(GONE, LATE, GONE)
    samples = score(Teachers(configured("on_failure=wait"), ROUTES, {"default": client}), [pair(0), pair(1)], step=7)
    assert client.n_requests == 4 and all(is_scored_by(0, sample) for sample in samples)
    waiting, back = [record.getMessage() for record in caplog.records]
    assert waiting.startswith("step 7: teacher default, 2 samples (0, 1): retrying for up to 3600 s more")
    assert waiting.endswith("TeacherUnavailable: gone")
    assert back.startswith("step 7: teacher default, 2 samples (0, 1): scored, ")


def test_failure_policy_wait_gives_slow_teacher_all_remaining_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure_policy, "MIN_RETRY_INTERVAL_S", 0.0)
    client = Scripted(GONE, LATE)
    score(Teachers(configured("on_failure=wait", "timeout_s=9"), ROUTES, {"default": client}), [pair(0)])
    assert client.timeouts[:2] == [9, 9] and client.timeouts[2] == pytest.approx(3600, abs=5)


def test_failure_policy_wait_exceeds_maximum_timeout_of_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client accepts time limits of up to 7 days, ``max_wait_s`` up to 30 days."""
    monkeypatch.setattr(failure_policy, "MIN_RETRY_INTERVAL_S", 0.0)
    month, week = 30 * 24 * 3600, LIMITS.timeout_s
    client = Scripted(LATE, GONE, LATE, LATE)
    config = configured("on_failure=wait", f"max_wait_s={month}", "timeout_s=9")
    assert is_scored_by(0, score(Teachers(config, ROUTES, {"default": client}), [pair(0)])[0])
    assert client.timeouts == [9, week, 9, week, week]
    with TeacherClient(server_port=free_port()) as real:
        real.submit([TeacherSequence(np.zeros(2, np.int32), 1)], client.timeouts[-1]).cancel()


def test_failure_policy_wait_survives_absent_and_restarted_service(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_policy, "WARN_INTERVAL_S", 0.0)
    port = free_port()
    config = configured(f"server_port={port}", "on_failure=wait", "timeout_s=0.3")

    async def run(teachers: Teachers) -> None:
        for step, offset in enumerate((10, 20)):
            caplog.clear()
            pending = asyncio.create_task(teachers.score([pair(0), pair(1)], step))
            await wait_until_async(lambda: "retrying" in caplog.text)
            with service(offset, port):
                samples = await pending
                assert all(is_scored_by(offset, sample) for sample in samples) and uids(samples) == [0, 1]

    with open_teachers(config, ROUTES) as teachers:
        asyncio.run(run(teachers))


def test_failure_policy_wait_ends_after_its_budget() -> None:
    config = configured(f"server_port={free_port()}", "on_failure=wait", "timeout_s=0.1", "max_wait_s=0.3")
    with (
        open_teachers(config, ROUTES) as teachers,
        raises(TeacherUnreachable, step=3, teacher="default", samples=(0,), options=(f"{TEACHER}.max_wait_s",)),
    ):
        score(teachers, [pair(0)], step=3)


def test_failure_policy_skip_loses_only_failed_samples(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with service(0) as math, service(50) as code:
        config = configured(*two_teachers(math=math, code=code), "on_failure=skip_samples")
        with open_teachers(config, Routes(("math", "code"), np.array([0, 1, 0]))) as teachers:
            caplog.set_level(logging.WARNING, "recipe_gkd.teachers")
            samples = score(teachers, [pair(0), pair(2, [8, REFUSED]), pair(1), pair(3), pair(5)], step=4)
            assert uids(samples) == [0, 2, 1, 3, 5]
            assert [sample.is_skipped for sample in samples] == [False, True, False, False, False]
            again = score(teachers, [pair(0), pair(2)], step=5)
            metrics = teachers.step_metrics(samples, 4, before=0)
            later = teachers.step_metrics(again, 5, before=2)
    assert all(is_scored_by(50 * sample.teacher_number, sample) for sample in samples if not sample.is_skipped)
    for sample in samples:
        if sample.is_skipped:
            assert np.isneginf(sample.teacher.logps_TK).all() and (sample.teacher.ids_TK == -1).all()
            assert len(sample.teacher.logps_TK) == len(sample.response.ids) and sample.teacher_number == 1
    assert is_scored_by(0, again[0]) and is_scored_by(50, again[1])
    [record] = caplog.records
    expected = r"step 4: teacher code, 1 samples \(2\): skipped, 1 of at most 256 .*TeacherRequestError: .*token 99"
    assert re.match(expected, record.getMessage())
    assert metrics["teacher/skipped_samples"] == metrics["teacher/skipped_samples_total"] == 1
    assert 0 < metrics["teacher/code/tokens"] < metrics["teacher/math/tokens"]
    assert (later["teacher/skipped_samples"], later["teacher/skipped_samples_total"]) == (0, 2)


@pytest.mark.parametrize("error", [GONE, LATE, REFUSAL])
def test_failure_policy_skip_ends_above_budget_of_resumed_run(error: TeacherError) -> None:
    config = configured("on_failure=skip_samples", "max_skipped_samples=5")
    teachers = Teachers(config, ROUTES, {"default": Scripted(error, error, error, None, error)})
    teachers.resume(2)
    assert [sample.is_skipped for sample in score(teachers, [pair(0), pair(1), pair(2)])] == [True] * 3
    assert not score(teachers, [pair(3)])[0].is_skipped
    place = {"step": 9, "teacher": "default", "samples": (4,)}
    with raises(type(error), options=(f"{TEACHER}.max_skipped_samples",), **place) as over:
        score(teachers, [pair(4)], step=9)
    assert over.value.details == (f"the last error: {error}",)


def test_teachers_step_metrics_without_scores_raises_if_distilling() -> None:
    for coefficient in (1, 0):
        rewards = ["gkd.use_rl_loss=true", "gkd.enable_teacher=true"] if not coefficient else []
        config = base_config(
            *("actor_rollout_ref.rollout.n=2", "custom_reward_function.path=x", f"{TEACHER}.on_failure=skip_samples"),
            *(f"gkd.distill_loss_coef={coefficient}", *rewards),
        )
        teachers = Teachers(config, ROUTES, {"default": Scripted(LATE, LATE)})
        samples = [sample for uid in range(2) for sample in score(teachers, [pair(uid)])]
        if coefficient:
            with raises(TeacherTimeout, step=0, options=(f"{TEACHER}.on_failure",)):
                teachers.step_metrics(samples, 0, before=0)
        else:
            assert teachers.step_metrics(samples, 0, before=0)["teacher/skipped_samples"] == 2


def test_length_of_union_counts_overlaps_once() -> None:
    assert length_of_union([]) == 0
    assert length_of_union([(5, 6), (0, 2), (1, 3), (1.5, 1.6)]) == 4
