"""Teacher backends from a user's file: loading, calls with deadlines, results, and the example of the documentation."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from recipe_gkd.config import Config
from recipe_gkd.errors import ConfigError
from recipe_gkd.model_files import Student
from recipe_gkd.preflight import check_stop_ids, check_teachers
from recipe_gkd.teachers import custom_backend
from recipe_gkd.teachers.custom_backend import BackendError, CustomBackend
from recipe_gkd.teachers.router import open_teachers
from recipe_gkd.teachers.routes import Routes
from teacher.common.fingerprint import tokenizer_fingerprint
from teacher.errors import TeacherProtocolError, TeacherTimeout, TeacherUnavailable
from teacher.records import ScoredSequence, TeacherSequence
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.fake_teachers import pair
from tests._support.repository import REPO
from tests._support.teacher_service import VOCAB_SIZE

KEY = "actor_rollout_ref.teacher"
ROUTES = Routes(("default",))
EXAMPLE = REPO / "docs" / "examples" / "custom_teacher.py"
SEQUENCE = TeacherSequence(np.zeros(5, np.int32), 2)
COMPLETE = {
    "__init__": "(self, config): pass",
    "hello": "(self, timeout_s): raise NotImplementedError",
    "submit": "(self, sequences, timeout_s=None, *, temperature=1.0): raise NotImplementedError",
    "close": "(self): pass",
}


def configured(*overrides: str, others: Sequence[str] = ()) -> Config:
    return base_config(*others, *(f"{KEY}.{override}" for override in overrides))


def write_class(folder: Path, **methods: str) -> str:
    """Write a backend class to a file and return ``FILE.py:Mine``. A method is the text after ``def name``."""
    lines = [f"    def {name}{text}" for name, text in (COMPLETE | methods).items()]
    (folder / "mine.py").write_text("import threading\nclass Mine:\n" + "\n".join(lines) + "\n")
    return f"{folder}/mine.py:Mine"


def open_custom(folder: Path, **methods: str) -> CustomBackend:
    spec = write_class(folder, **methods)
    return CustomBackend(spec, configured(f"backend={spec}").actor_rollout_ref.teacher)


def scores(**arrays: Any) -> ScoredSequence:
    ids_TK = np.tile(np.arange(4, dtype=np.int32), (3, 1))
    valid = {"topk_logps_TK": np.zeros((3, 4), np.float32), "topk_ids_TK": ids_TK, "sampled_logps_T": np.zeros(3)}
    return ScoredSequence(**(valid | arrays))


class TestLoading:
    @pytest.mark.parametrize("code", ["class Mine: pass", "Mine = 3", "x = 1", "import sys; sys.exit(3)"])
    def test_unusable_file_is_refused_with_the_configuration(self, code: str, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text(code)
        with raises(ConfigError, keys=(f"{KEY}.backend",)):
            configured(f"backend={tmp_path}/mine.py:Mine")

    def test_missing_file_is_refused_with_the_configuration(self, tmp_path: Path) -> None:
        with raises(ConfigError, keys=(f"{KEY}.backend",)):
            configured(f"backend={tmp_path}/none.py:Mine")

    @pytest.mark.parametrize(
        "methods",
        [
            {"__init__": "(self): pass"},
            {"hello": "(self): pass"},
            {"submit": "(self, sequences, timeout_s): pass"},
            {"close": "(self, wait): pass"},
        ],
    )
    def test_wrong_signature_is_refused_with_the_configuration(self, methods: dict[str, str], tmp_path: Path) -> None:
        with raises(ConfigError, keys=(f"{KEY}.backend",)):
            configured(f"backend={write_class(tmp_path, **methods)}")

    def test_coroutine_function_is_refused(self, tmp_path: Path) -> None:
        spec = write_class(tmp_path)
        code = (tmp_path / "mine.py").read_text()
        (tmp_path / "mine.py").write_text(code.replace("def submit", "async def submit"))
        with raises(ConfigError, keys=(f"{KEY}.backend",)):
            configured(f"backend={spec}")

    def test_static_and_class_methods_are_accepted(self, tmp_path: Path) -> None:
        code = """
            class Mine:
                def __init__(self, config): pass
                @classmethod
                def hello(cls, timeout_s): pass
                @staticmethod
                def submit(*sequences, **options): pass
                close = staticmethod(lambda: None)
        """
        (tmp_path / "mine.py").write_text(textwrap.dedent(code))
        configured(f"backend={tmp_path}/mine.py:Mine")


class TestCalls:
    @pytest.mark.parametrize(
        ("body", "cause"), [("raise KeyError('a')", KeyError), ("raise SystemExit(2)", SystemExit)]
    )
    def test_failed_constructor_names_class(self, body: str, cause: type[BaseException], tmp_path: Path) -> None:
        with raises(ConfigError, keys=(f"{KEY}.backend",)) as failed:
            open_custom(tmp_path, __init__=f"(self, config): {body}")
        assert type(failed.value.__cause__) is cause

    @pytest.mark.parametrize(
        ("body", "fields", "cause"),
        [
            ("return {}", {"line": None, "entries": ()}, None),
            ("raise SystemExit(2)", {"line": 4}, SystemExit),
            ("raise KeyError('a')", {"line": 4}, KeyError),
            (
                "from teacher import TeacherInfo; return TeacherInfo('m', 8, 8, 'f', 9, 4, 'e', None, 0, '1')",
                {"line": None, "entries": ("n_workers", "eos_token_ids")},
                None,
            ),
        ],
    )
    def test_failed_hello_names_class(
        self, body: str, fields: dict[str, Any], cause: type[BaseException] | None, tmp_path: Path
    ) -> None:
        backend = open_custom(tmp_path, hello=f"(self, timeout_s): {body}")
        with raises(BackendError, method="hello", options=(f"{KEY}.backend",), **fields) as failed:
            backend.hello(timeout_s=1.0)
        assert failed.value.__cause__ is None if cause is None else type(failed.value.__cause__) is cause

    def test_teacher_error_of_hello_passes_unchanged(self, tmp_path: Path) -> None:
        body = "from teacher import TeacherUnavailable; raise TeacherUnavailable('gone')"
        backend = open_custom(tmp_path, hello=f"(self, timeout_s): {body}")
        with raises(TeacherUnavailable, what="gone", options=()):
            backend.hello(timeout_s=1.0)

    def test_calls_that_hang_end_at_their_deadlines(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("CREATE_TIMEOUT_S", "HELLO_MARGIN_S", "CLOSE_TIMEOUT_S"):
            monkeypatch.setattr(custom_backend, name, 0.05)
        hang = "threading.Event().wait(30)"
        for name in ("create", "call"):
            (tmp_path / name).mkdir()
        with raises(TeacherTimeout, stage="the constructor"):
            open_custom(tmp_path / "create", __init__=f"(self, config): {hang}")
        monkeypatch.setattr(custom_backend, "CREATE_TIMEOUT_S", 10.0)
        backend = open_custom(tmp_path / "call", hello=f"(self, timeout_s): {hang}", close=f"(self): {hang}")
        with raises(TeacherTimeout, stage="hello"):
            backend.hello(timeout_s=0.01)
        backend.close()
        assert "mine.py:Mine: close did not return within 0.05 s" in caplog.text

    def test_failed_close_is_a_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        open_custom(tmp_path, close="(self): 1 / 0").close()
        assert "mine.py:Mine: close raised ZeroDivisionError in line 6" in caplog.text

    @pytest.mark.parametrize(("body", "cause"), [("return []", type(None)), ("1 / 0", ZeroDivisionError)])
    def test_failed_submit_names_class(self, body: str, cause: type, tmp_path: Path) -> None:
        backend = open_custom(tmp_path, submit=f"(self, sequences, timeout_s=None, *, temperature=1.0): {body}")
        with raises(BackendError, method="submit", options=(f"{KEY}.backend",)) as failed:
            backend.submit([SEQUENCE], 1.0)
        assert type(failed.value.__cause__) is cause


class TestResults:
    @pytest.fixture
    def inner(self) -> Future[Any]:
        return Future()

    @pytest.fixture
    def checked(self, inner: Future[Any], tmp_path: Path) -> Future[list[ScoredSequence]]:
        """Future of the adapter for a request whose future from the user's class is ``inner``."""
        backend = open_custom(tmp_path)
        backend._backend.submit = lambda *_arguments, **_options: inner
        return backend.submit([SEQUENCE], 60.0)

    def test_valid_results_are_returned(self, inner: Future[Any], checked: Future[Any]) -> None:
        missing_TK = np.full((3, 4), -1, np.int64)  # a missing entry has the id -1
        inner.set_result((result := scores(topk_ids_TK=missing_TK),))
        assert checked.result(timeout=1) == [result]

    @pytest.mark.parametrize(
        ("result", "sequence", "entry"),
        [
            (None, None, ""),
            ([{}], 0, "topk_logps_TK"),
            ([scores(topk_logps_TK=torch.zeros(3, 4))], 0, "topk_logps_TK"),
            ([scores(), scores(topk_ids_TK=np.zeros((3, 4)))], 1, "topk_ids_TK"),
            ([scores(sampled_logps_T=np.zeros(3, int))], 0, "sampled_logps_T"),
            ([scores(topk_ids_TK=np.array([[0, 1, 2, 3], [7, 5, 7, 6], [0, 1, 2, 3]]))], 0, "topk_ids_TK"),
        ],
    )
    def test_invalid_result_names_class_and_array(
        self, result: Any, sequence: int | None, entry: str, inner: Future[Any], checked: Future[Any]
    ) -> None:
        inner.set_result(result)
        with raises(TeacherProtocolError, sequence=sequence, entry=entry, options=(f"{KEY}.backend",)):
            checked.result(timeout=1)

    def test_timeout_error_of_a_library_is_not_a_teacher_timeout(
        self, inner: Future[Any], checked: Future[Any]
    ) -> None:
        inner.set_exception(of_library := TimeoutError("socket"))
        error = checked.exception(timeout=1)
        assert type(error) is BackendError and error.__cause__ is of_library

    def test_teacher_error_passes_unchanged(self, inner: Future[Any], checked: Future[Any]) -> None:
        inner.set_exception(error := TeacherUnavailable("gone"))
        assert checked.exception(timeout=1) is error

    def test_cancellation_reaches_the_backend(self, inner: Future[Any], checked: Future[Any]) -> None:
        assert checked.cancel() and inner.cancelled()

    def test_request_canceled_by_the_backend_is_an_error(self, inner: Future[Any], checked: Future[Any]) -> None:
        inner.cancel()
        inner.set_running_or_notify_cancel()
        with raises(BackendError, method="the future of submit", line=None):
            checked.result(timeout=1)

    def test_late_result_of_canceled_request_is_ignored(self, inner: Future[Any], checked: Future[Any]) -> None:
        inner.set_running_or_notify_cancel()  # it cannot be canceled any more
        assert checked.cancel() and not inner.cancelled()
        inner.set_result([scores()])
        assert checked.cancelled() and not wait([inner]).not_done


class TestExample:
    """The class of the documentation in preflight and in a run's requests."""

    COUNTS_V = np.arange(VOCAB_SIZE, dtype=np.float64)

    @pytest.fixture
    def folder(self, tiny_qwen2: Path, tmp_path: Path) -> Path:
        AutoTokenizer.from_pretrained(tiny_qwen2).save_pretrained(tmp_path)
        np.save(tmp_path / "counts.npy", self.COUNTS_V)
        return tmp_path

    def test_scores_samples(self, folder: Path) -> None:
        config = configured(f"backend={EXAMPLE}:UnigramTeacher", f"model_path={folder}", "top_k=4")
        with open_teachers(config, ROUTES) as teachers:
            samples = asyncio.run(teachers.score([pair(0), pair(5)], step=0))
        logps_V = np.log((self.COUNTS_V + 1) / (self.COUNTS_V + 1).sum())
        for sample in samples:
            assert (sample.teacher.ids_TK == [95, 94, 93, 92]).all()
            np.testing.assert_allclose(sample.teacher.sampled_logps_T, logps_V[sample.response.ids], rtol=1e-5)

    def test_class_without_restriction_cannot_exclude_tokens(self, folder: Path) -> None:
        config = configured(f"backend={EXAMPLE}:UnigramTeacher", f"model_path={folder}", "vocabulary=compatible")
        lacks_method = raises(ConfigError, keys=(f"{KEY}.backend", f"{KEY}.vocabulary"))
        with open_teachers(config, ROUTES) as teachers, lacks_method:
            teachers.clients["default"].restrict_ids(9)

    def test_passes_preflight(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
        student = Student(folder, VOCAB_SIZE, tokenizer, tokenizer_fingerprint(tokenizer), VOCAB_SIZE)
        config = configured(
            f"backend={EXAMPLE}:UnigramTeacher", f"model_path={folder}", others=["gkd.distill_temperature=2"]
        )
        with open_teachers(config, ROUTES) as teachers:
            teacher_ids = check_teachers(teachers.clients, student, config)
        assert teacher_ids == ()
        assert check_stop_ids(config, student, teacher_ids) == {tokenizer.eos_token_id}

    @pytest.mark.parametrize(
        ("raised", "is_skipped"), [("teacher.TeacherTimeout('slow')", True), ("TimeoutError('slow')", False)]
    )
    def test_failure_policy_handles_teacher_errors_only(self, folder: Path, raised: str, is_skipped: bool) -> None:
        code = f"""
            import importlib.util, teacher
            spec = importlib.util.spec_from_file_location("example", {str(EXAMPLE)!r})
            example = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(example)
            class Failing(example.UnigramTeacher):
                def submit(self, sequences, timeout_s=None, *, temperature=1.0):
                    future = example.Future()
                    future.set_exception({raised})
                    return future
        """
        (folder / "failing.py").write_text(textwrap.dedent(code))
        backend = f"backend={folder}/failing.py:Failing"
        config = configured(backend, f"model_path={folder}", "on_failure=skip_samples")
        with open_teachers(config, ROUTES) as teachers:
            if is_skipped:
                [sample] = asyncio.run(teachers.score([pair(0)], step=0))
                assert sample.is_skipped
                return
            with raises(BackendError, method="the future of submit", step=0, samples=(0,)):
                asyncio.run(teachers.score([pair(0)], step=0))
