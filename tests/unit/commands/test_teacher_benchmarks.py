"""Benchmarks of the teacher without a service: failed requests and deadlines."""

from __future__ import annotations

import subprocess
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import teacher_processes
import teacher_proxy
import teacher_service

from teacher import ScoredSequence, TeacherRequestError, TeacherSequence
from tests._support.errors import raises

SEQUENCE = TeacherSequence(np.zeros(2, np.int32), 1)


class Client:
    """Client whose requests end at once; the numbers in ``failing`` with an error, those in ``lost`` never."""

    def __init__(self, failing: int = -1, lost: int = -1) -> None:
        self.n_calls, self._failing, self._lost = 0, failing, lost

    def submit(self, sequences: list[TeacherSequence]) -> Future[list[ScoredSequence]]:
        future = Future[list[ScoredSequence]]()
        if self.n_calls == self._failing:
            future.set_exception(TeacherRequestError("no worker"))
        elif self.n_calls != self._lost:
            future.set_result([])
        self.n_calls += 1
        return future


def score_all(client: Client, n_calls: int) -> None:
    teacher_proxy.score_all(client, SEQUENCE, n_calls)  # type: ignore[arg-type]


def test_score_all_waits_for_every_request() -> None:
    client = Client()
    score_all(client, 3)
    assert client.n_calls == 3


def test_score_all_raises_the_error_of_a_request() -> None:
    with raises(TeacherRequestError):
        score_all(Client(failing=1), 3)


def test_score_all_lost_request_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_proxy, "TIMEOUT_S", 0.05)
    with pytest.raises(RuntimeError, match=r"not answered within 0\.05 s"):
        score_all(Client(lost=0), 2)


def test_start_of_a_service_has_time_for_the_compilation_of_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        given.update(options)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(teacher_processes.subprocess, "run", run)
    teacher_processes.Service(tmp_path, tmp_path, 4).start()
    assert given["timeout"] > teacher_processes.START_TIMEOUT_S >= 1800


def test_start_of_an_engine_has_time_for_the_compilation_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, context = mock.MagicMock(), mock.MagicMock()
    pipe.poll.return_value, pipe.recv.return_value = True, 0.0
    context.Pipe.return_value = (pipe, mock.MagicMock())
    monkeypatch.setattr(teacher_service.multiprocessing, "get_context", lambda _: context)
    case = teacher_service.Case(sequences=1, positions=1, k=1, vocabulary=8, threads=1)
    teacher_service.EngineAlone(Path("model"), case).seconds(0)
    waits = [call.args[0] for call in pipe.poll.call_args_list]
    assert waits == [teacher_processes.START_TIMEOUT_S, teacher_processes.TIMEOUT_S]
