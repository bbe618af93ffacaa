"""Teacher backends: configuration, the in-process Hugging Face teacher, and checks of results."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, MptConfig, Qwen2ForCausalLM

from recipe_gkd.commands.gpu_smoke.reference import response_logits
from recipe_gkd.config import Config, compose, config_dir
from recipe_gkd.config.teachers import urls
from recipe_gkd.errors import ConfigError, VocabularyMismatch
from recipe_gkd.model_files import Student
from recipe_gkd.preflight import check_teacher
from recipe_gkd.teachers import backends
from recipe_gkd.teachers.backends import hello_now
from recipe_gkd.teachers.hf_teacher import HfTeacher
from recipe_gkd.teachers.router import open_teachers
from recipe_gkd.teachers.routes import Routes
from recipe_gkd.teachers.scoring.checks import check_scores
from teacher.client.http import Endpoint, HttpClientSpec, HttpTeacherClient
from teacher.common.fingerprint import tokenizer_fingerprint
from teacher.common.position_limit import NO_LIMIT
from teacher.errors import (
    TeacherClosed,
    TeacherError,
    TeacherProtocolError,
    TeacherRequestError,
    TeacherSetupError,
    TeacherTimeout,
)
from teacher.records import ScoredSequence, TeacherSequence
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.fake_teachers import pair
from tests._support.http_servers import TableTokenizer, table_server
from tests._support.teacher_service import MAX_MODEL_LEN, VOCAB_SIZE

KEY = "actor_rollout_ref.teacher"
ROUTES = Routes(("default",))


def configured(*overrides: str, others: Sequence[str] = ()) -> Config:
    return base_config(*others, *(f"{KEY}.{override}" for override in overrides))


def random_sequences(*sizes: tuple[int, int]) -> list[TeacherSequence]:
    """Return sequences of these numbers of tokens and prompt tokens. Of long ones, two ranges are scored."""
    rng, found = np.random.default_rng(0), []
    for n, prompt_len in sizes:
        ids_N = rng.integers(0, VOCAB_SIZE, n, dtype=np.int32)
        ranges = [[prompt_len + 1, prompt_len + 9], [n - 5, n - 2]] if n - prompt_len > 20 else None
        found.append(TeacherSequence(ids_N, prompt_len, scored_ranges=ranges))
    return found


def expected_logps(model: Any, sequence: TeacherSequence, temperature: float) -> np.ndarray:
    """Return the log-probabilities at the response positions, computed in float64 from the model's logits, [T, V]."""
    with torch.no_grad():
        logits_TV = response_logits(model, sequence.token_ids, sequence.prompt_len).double()
        logits_TV = logits_TV[sequence.scored_positions_T - sequence.prompt_len]
    return (logits_TV / temperature).log_softmax(dim=-1).numpy()


class TestConfig:
    @pytest.mark.parametrize(
        ("overrides", "keys"),
        [
            (["model_path=x"], ("model_path", "backend")),
            (["backend=hf"], ("backend", "model_path")),
            (["backend=hf", "model_path=x", "server_ip=10.0.0.1"], ("server_ip", "backend")),
            (["backend=hf", "model_path=x", "auth_dir=keys"], ("auth_dir", "backend")),
            (["backend=hf", "model_path=x", "wire_dtype=float16"], ("wire_dtype", "backend")),
            (["backend=hf", "model_path=x", "n_connections=2"], ("n_connections", "backend")),
            (["backend=hf", "model_path=x", "teachers.a=b:1"], ("backend", "teachers")),
            (["backend=vllm"], ("backend",)),
            (["backend=http"], ("backend", "url")),
            (["url=http://a:8000"], ("url", "backend")),
            (["served_model_name=x"], ("served_model_name", "backend")),
            (["backend=http", "url=a:8000"], ("url",)),
            (["backend=http", "url=[http://a:8000,ftp://b]"], ("url",)),
            (["backend=http", "url=http://a:80", "server_port=1"], ("server_port", "backend")),
            (["backend=http", "url=http://a:80", "wire_dtype=float16"], ("wire_dtype", "backend")),
            (["backend=http", "url=http://a:80", "vocabulary=compatible"], ("vocabulary", "backend")),
            (["backend=http", "url=http://a:80", "api_key_env=NOT_SET_ANYWHERE"], ("api_key_env",)),
            (["backend=http", "url=http://a:80", "teachers.b='http://b:80'"], ("url", "teachers")),
            (["backend=http", "teachers.b=b:80"], ("teachers.b.address",)),
        ],
    )
    def test_ineffective_or_invalid_settings_raise(self, overrides: list[str], keys: tuple[str, ...]) -> None:
        with raises(ConfigError, keys=tuple(f"{KEY}.{key}" for key in keys)):
            configured(*overrides)

    def test_hf_accepts_changed_defaults_of_the_service(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "config"
        shutil.copytree(config_dir(), folder)
        section = folder / "teacher" / "zmq.yaml"
        section.write_text(section.read_text().replace("server_port: 15555", "server_port: 15999"))
        monkeypatch.setattr(compose, "config_dir", lambda: folder)
        assert configured("backend=hf", "model_path=x").actor_rollout_ref.teacher.server_port == 15999
        with raises(ConfigError, keys=(f"{KEY}.server_port", f"{KEY}.backend")):
            configured("backend=hf", "model_path=x", "server_port=15555")

    @pytest.mark.parametrize(
        ("overrides", "expected"), [([], 1), (["auth_dir=keys"], 4), (["auth_dir=keys", "n_connections=2"], 2)]
    )
    def test_open_backend_connections_follow_encryption(
        self, overrides: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened: dict[str, Any] = {}
        monkeypatch.setattr(backends, "TeacherClient", lambda *_, **options: opened.update(options))
        backends.open_backend(configured(*overrides), "default")
        assert opened["n_connections"] == expected

    def test_temperature_with_http_is_refused(self) -> None:
        with raises(ConfigError, keys=("gkd.distill_temperature", f"{KEY}.backend")):
            configured("backend=http", "url=http://a:80", others=["gkd.distill_temperature=2"])

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("url=http://a:8000/v1/", {"default": ("http://a:8000",)}),
            ("url='http://a:8000, https://b'", {"default": ("http://a:8000", "https://b")}),
            ("url=[http://a:8000,https://b]", {"default": ("http://a:8000", "https://b")}),
            ("teachers.math='http://a:1,http://b:2'", {"math": ("http://a:1", "http://b:2")}),
        ],
    )
    def test_urls_may_be_a_list_or_text(self, override: str, expected: dict[str, tuple[str, ...]]) -> None:
        assert urls(configured("backend=http", override).actor_rollout_ref.teacher) == expected

    def test_http_client_has_the_settings(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("TEACHER_KEY", "secret")
        options = ("backend=http", "url=[http://a:1,http://b:2]", "api_key_env=TEACHER_KEY", "n_connections=3")
        client = backends.open_backend(configured(*options, f"model_path={tmp_path}", "top_k=5"), "default")
        try:
            assert isinstance(client, HttpTeacherClient)
            spec = client.spec()
        finally:
            client.close()
        assert spec.endpoints == (Endpoint("http://a:1", "secret"), Endpoint("http://b:2", "secret"))
        assert (spec.tokenizer_path, spec.requires_same_tokenizer) == (str(tmp_path), False)
        assert (spec.n_connections, spec.top_k, spec.is_loopback) == (3, 5, False)

    def test_hf_with_worker_count_is_accepted(self) -> None:
        configured("backend=hf", "model_path=x", "n_server_workers=2", "top_k=4")


@pytest.fixture(scope="module")
def model(tiny_qwen2: Path) -> Any:
    return Qwen2ForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float32).eval()


class TestHelloNow:
    def test_busy_http_server_has_time_for_its_probe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("teacher.common.tokenizer.load_tokenizer", lambda *_: TableTokenizer())
        monkeypatch.setattr(backends, "HELLO_TIMEOUT_S", 0.1)
        with table_server() as server:
            server.delay_s = 0.5
            client = HttpClientSpec((Endpoint(server.url),), "/nowhere", top_k=4).open()
            try:
                info = hello_now(client, configured("backend=http", f"url={server.url}"))
            finally:
                client.close()
        assert info.model_name == "table"


class TestHfTeacher:
    @pytest.fixture
    def hf_teacher(self, tiny_qwen2: Path) -> Iterator[HfTeacher]:
        teacher = HfTeacher(str(tiny_qwen2), top_k=8, device="cpu")
        yield teacher
        teacher.close()

    def test_hello_describes_model(self, hf_teacher: HfTeacher, tiny_qwen2: Path) -> None:
        info = hf_teacher.hello()
        assert info.tokenizer_fingerprint == tokenizer_fingerprint(AutoTokenizer.from_pretrained(tiny_qwen2))
        assert (info.n_tokens, info.n_logprobs, info.max_model_len) == (VOCAB_SIZE, 8, MAX_MODEL_LEN)
        assert info.eos_token_ids == (1,) and info.model_name == tiny_qwen2.name

    @pytest.mark.parametrize(
        ("config", "max_model_len"),
        [(MptConfig(d_model=8, n_heads=2, n_layers=1, max_seq_len=48), 48), (BloomConfig(hidden_size=8), NO_LIMIT)],
    )
    def test_any_causal_model_has_a_limit(
        self, config: Any, max_model_len: int, tiny_qwen2: Path, tmp_path: Path
    ) -> None:
        """Families name their maximum length in several ways, and some have none."""
        folder = tmp_path / "model"
        shutil.copytree(tiny_qwen2, folder)
        for path in [*folder.glob("*.safetensors*"), folder / "config.json"]:
            path.unlink(missing_ok=True)
        config.vocab_size, config.n_layer = VOCAB_SIZE, 1
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        teacher = HfTeacher(str(folder), top_k=8, device="cpu")
        assert teacher.hello().max_model_len == max_model_len
        teacher.close()

    @pytest.mark.parametrize("fits", [True, False])
    def test_preflight_compares_tokenizer_fingerprint(
        self, hf_teacher: HfTeacher, tiny_qwen2: Path, fits: bool
    ) -> None:
        fingerprint = hf_teacher.hello().tokenizer_fingerprint if fits else "sha256:0"
        tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
        student = Student(tiny_qwen2, VOCAB_SIZE, tokenizer, fingerprint, VOCAB_SIZE)
        limits = ["data.max_prompt_length=32", "data.max_response_length=32", "gkd.distill_temperature=2"]
        config = configured("backend=hf", f"model_path={tiny_qwen2}", "top_k=8", others=limits)
        if fits:
            assert check_teacher("default", hf_teacher, student, config) == hf_teacher.hello()
            return
        with raises(VocabularyMismatch, keys=(), ids=()):
            check_teacher("default", hf_teacher, student, config)

    def test_restricted_scores_equal_float64_log_softmax_of_fewer_ids(self, hf_teacher: HfTeacher, model: Any) -> None:
        n_ids = 40
        sequence = TeacherSequence(np.arange(1, 30, dtype=np.int32), 5)
        hf_teacher.restrict_ids(n_ids)
        [scored] = hf_teacher.submit([sequence]).result(timeout=60)
        with torch.no_grad():
            logps_TV = response_logits(model, sequence.token_ids, 5)[:, :n_ids].double().log_softmax(1)
        expected = logps_TV.topk(8)
        np.testing.assert_allclose(scored.topk_logps_TK, expected.values, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(scored.topk_ids_TK, expected.indices)
        sampled_T = logps_TV.gather(1, torch.as_tensor(sequence.token_ids[5:]).long()[:, None])[:, 0]
        np.testing.assert_allclose(scored.sampled_logps_T, sampled_T, rtol=1e-5, atol=1e-5)
        refused = hf_teacher.submit([TeacherSequence([1, n_ids], 1)])
        with raises(TeacherRequestError, sequence=0, argument="token_ids"):
            refused.result(timeout=60)

    def test_preflight_restricts_teacher_with_further_tokens(self, hf_teacher: HfTeacher, tiny_qwen2: Path) -> None:
        """The student's tokenizer is the teacher's without its last three tokens."""
        vocabulary = AutoTokenizer.from_pretrained(tiny_qwen2).get_vocab()
        shorter = SimpleNamespace(get_vocab=lambda: {t: i for t, i in vocabulary.items() if i < VOCAB_SIZE - 3})
        student = Student(tiny_qwen2, VOCAB_SIZE, shorter, tokenizer_fingerprint(shorter), VOCAB_SIZE - 3)
        limits = ["data.max_prompt_length=32", "data.max_response_length=32"]
        options = ("backend=hf", f"model_path={tiny_qwen2}", "top_k=8")
        with raises(VocabularyMismatch, keys=(f"{KEY}.vocabulary",)):
            check_teacher("default", hf_teacher, student, configured(*options, others=limits))
        check_teacher("default", hf_teacher, student, configured(*options, "vocabulary=compatible", others=limits))
        [scored] = hf_teacher.submit([TeacherSequence([1, 2, 3], 1)]).result(timeout=60)
        assert scored.topk_ids_TK.max() < VOCAB_SIZE - 3

    @pytest.mark.parametrize("batch_tokens", [1, 100, 10_000])
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_scores_equal_float64_log_softmax(
        self, hf_teacher: HfTeacher, model: Any, temperature: float, batch_tokens: int
    ) -> None:
        hf_teacher._batch_tokens = batch_tokens
        sequences = random_sequences((5, 1), (64, 60), (2, 1), (40, 7), (17, 16))
        scored = hf_teacher.submit(sequences, 30.0, temperature=temperature).result(timeout=60)
        check_scores("hf", sequences, scored)
        for sequence, result in zip(sequences, scored, strict=True):
            want_TV = expected_logps(model, sequence, temperature)
            assert np.abs(result.topk_logps_TK + np.sort(-want_TV, axis=1)[:, :8]).max() < 1e-5
            np.testing.assert_allclose(
                result.topk_logps_TK, np.take_along_axis(want_TV, result.topk_ids_TK, 1), atol=1e-5
            )
            response_T1 = sequence.scored_ids_T[:, None]
            sampled_T = np.take_along_axis(want_TV, response_T1, 1)[:, 0]
            np.testing.assert_allclose(result.sampled_logps_T, sampled_T, atol=1e-5)
            assert result.topk_ids_TK.dtype == np.int32 and result.topk_logps_TK.dtype == np.float32

    @pytest.mark.parametrize("batch_tokens", [7, 10_000])
    @pytest.mark.parametrize("with_top_k", [True, False])
    def test_support_ids_have_the_scores_of_float64(
        self, hf_teacher: HfTeacher, model: Any, with_top_k: bool, batch_tokens: int
    ) -> None:
        hf_teacher._batch_tokens = batch_tokens
        rng, sequences = np.random.default_rng(0), []
        for each in random_sequences((5, 1), (64, 40), (2, 1)):
            ids_TJ = np.array([rng.permutation(VOCAB_SIZE)[:6] for _ in range(each.n_scored)], np.int32)
            ids_TJ[:, 2] = -1
            sequences.append(
                TeacherSequence(
                    each.token_ids,
                    each.prompt_len,
                    scored_ranges=each.scored_ranges,
                    support_ids_TJ=ids_TJ,
                    with_top_k=with_top_k,
                )
            )
        scored = hf_teacher.submit(sequences, 30.0, temperature=0.7).result(timeout=60)
        check_scores("hf", sequences, scored)
        for sequence, result in zip(sequences, scored, strict=True):
            want_TV, ids_TJ = expected_logps(model, sequence, 0.7), sequence.support_ids_TJ
            assert ids_TJ is not None and result.topk_ids_TK.shape[1] == 8 * with_top_k
            want_TJ = np.take_along_axis(want_TV, np.maximum(ids_TJ, 0), 1)
            want_TJ[:, 2] = -np.inf
            np.testing.assert_allclose(result.support_logps_TJ, want_TJ, atol=1e-5)

    def test_support_id_outside_the_vocabulary_fails_its_request(self, hf_teacher: HfTeacher) -> None:
        sequence = TeacherSequence([1, 2], 1, support_ids_TJ=[[VOCAB_SIZE]])
        with raises(TeacherRequestError, sequence=0, argument="support_ids_TJ"):
            hf_teacher.submit([sequence]).result(timeout=60)

    @pytest.mark.parametrize("batch_tokens", [1, 7])
    def test_logits_of_long_response_stay_within_bound(self, hf_teacher: HfTeacher, batch_tokens: int) -> None:
        hf_teacher._batch_tokens = batch_tokens
        n_positions: list[int] = []
        layer = hf_teacher._model._output_layer
        hook = layer.register_forward_hook(lambda _layer, _args, logits: n_positions.append(logits[..., 0].numel()))
        try:
            hf_teacher.submit(random_sequences((64, 10), (20, 15))).result(timeout=60)
        finally:
            hook.remove()
        assert n_positions and max(n_positions) == batch_tokens

    @pytest.mark.parametrize("ids", [[1, VOCAB_SIZE], [1] * (MAX_MODEL_LEN + 1)], ids=["id", "length"])
    def test_invalid_sequence_fails_its_request(self, hf_teacher: HfTeacher, ids: list[int]) -> None:
        future = hf_teacher.submit([TeacherSequence(np.array(each, np.int32), 1) for each in ([1, 2], ids)])
        with raises(TeacherRequestError, sequence=1, argument="token_ids"):
            future.result(timeout=60)

    def test_deadline_fails_request_while_model_runs(
        self, hf_teacher: HfTeacher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        blocked = threading.Event()
        score_batch = hf_teacher._score_batch
        monkeypatch.setattr(hf_teacher, "_score_batch", lambda *batch: blocked.wait(30) and score_batch(*batch))
        late = [hf_teacher.submit(random_sequences((5, 1)), 0.05) for _ in range(2)]
        for future in late:
            with raises(TeacherTimeout, stage="scoring", options=(f"{KEY}.timeout_s",)):
                future.result(timeout=60)
        blocked.set()
        assert len(hf_teacher.submit(random_sequences((5, 1))).result(timeout=60)) == 1

    def test_cancelled_request_is_skipped(self, hf_teacher: HfTeacher, monkeypatch: pytest.MonkeyPatch) -> None:
        scored: list[int] = []
        started, blocked = threading.Event(), threading.Event()
        score_batch = hf_teacher._score_batch

        def score(sequences: list[TeacherSequence], temperature: float) -> list[ScoredSequence]:
            started.set()
            blocked.wait(30)
            scored.append(len(sequences))
            return score_batch(sequences, temperature)

        monkeypatch.setattr(hf_teacher, "_score_batch", score)
        first, second, third = (hf_teacher.submit(random_sequences(*[(5, 1)] * n)) for n in (1, 2, 3))
        assert started.wait(20) and second.cancel()
        blocked.set()
        assert len(first.result(timeout=60)) == 1 and len(third.result(timeout=60)) == 3
        assert scored == [1, 3]

    def test_model_error_fails_request_and_keeps_teacher_usable(
        self, hf_teacher: HfTeacher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(hf_teacher, "_score_batch", lambda *batch: 1 / 0)
            with raises(TeacherError, operation="scoring 1 sequences"):
                hf_teacher.submit(random_sequences((5, 1))).result(timeout=60)
        assert len(hf_teacher.submit(random_sequences((5, 1))).result(timeout=60)) == 1

    def test_close_fails_open_requests(self, tiny_qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        teacher = HfTeacher(str(tiny_qwen2), device="cpu")
        started, blocked = threading.Event(), threading.Event()
        monkeypatch.setattr(teacher, "_score_batch", lambda *batch: started.set() or blocked.wait(30))
        future = teacher.submit(random_sequences((5, 1)))
        assert started.wait(20)
        closing = threading.Thread(target=teacher.close)
        closing.start()
        with raises(TeacherClosed, operation="scoring 1 sequences"):
            future.result(timeout=60)
        blocked.set()
        closing.join(timeout=60)
        assert not closing.is_alive()
        with raises(TeacherClosed, operation=""):
            teacher.submit(random_sequences((5, 1)))

    def test_missing_folder_raises_with_key(self, tmp_path: Path) -> None:
        with raises(TeacherSetupError, path=tmp_path / "none", options=(f"{KEY}.model_path",)):
            HfTeacher(str(tmp_path / "none"))

    def test_open_teachers_routes_samples_to_it(self, tiny_qwen2: Path) -> None:
        config = configured("backend=hf", f"model_path={tiny_qwen2}", "top_k=4")
        with open_teachers(config, ROUTES) as teachers:
            samples = asyncio.run(teachers.score([pair(0), pair(5)], step=0))
        assert [sample.teacher.logps_TK.shape for sample in samples] == [(1, 4), (3, 4)]


class TestCheckScores:
    SEQUENCE = TeacherSequence(np.zeros(5, np.int32), 2)

    @pytest.mark.parametrize(
        "shapes", [[(2, 4), (3, 4), (3,)], [(3, 4), (3, 5), (3,)], [(3, 4), (3, 4), (2,)], [(3,)] * 3]
    )
    def test_wrong_shape_raises(self, shapes: list[tuple[int, ...]]) -> None:
        scored = ScoredSequence(*(np.zeros(shape) for shape in shapes))
        with raises(TeacherProtocolError, teacher="a", sequence=0):
            check_scores("a", [self.SEQUENCE], [scored])

    @pytest.mark.parametrize("k", [0, 4])
    def test_top_k_is_returned_if_and_only_if_it_is_requested(self, k: int) -> None:
        support_TJ = np.zeros((3, 2), np.int32)
        scored = ScoredSequence(np.zeros((3, k)), np.zeros((3, k)), np.zeros(3), np.zeros((3, 2)))
        for with_top_k in (True, False):
            sequence = TeacherSequence(np.zeros(5, np.int32), 2, support_ids_TJ=support_TJ, with_top_k=with_top_k)
            if with_top_k == (k > 0):
                check_scores("a", [sequence], [scored])
            else:
                with raises(TeacherProtocolError, teacher="a", sequence=0):
                    check_scores("a", [sequence], [scored])

    @pytest.mark.parametrize("support_TJ", [None, np.zeros((3, 1)), np.zeros((2, 2))])
    def test_missing_support_names_the_key(self, support_TJ: np.ndarray | None) -> None:
        sequence = TeacherSequence(np.zeros(5, np.int32), 2, support_ids_TJ=np.zeros((3, 2), np.int32))
        scored = ScoredSequence(np.zeros((3, 4)), np.zeros((3, 4)), np.zeros(3), support_TJ)
        with raises(TeacherProtocolError, teacher="a", sequence=0, options=("actor_rollout_ref.teacher.support",)):
            check_scores("a", [sequence], [scored])

    def test_missing_result_raises(self) -> None:
        with raises(TeacherProtocolError, teacher="a", sequence=None):
            check_scores("a", [self.SEQUENCE], [])


class TestResultWithin:
    def test_future_that_is_never_done_times_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backends, "RESULT_MARGIN_S", 0.01)

        async def wait() -> None:
            await backends.result_within(asyncio.wrap_future(Future[None]()), 0.02, "math")

        with raises(TeacherTimeout, teacher="math", stage="submit"):
            asyncio.run(wait())

    def test_timeout_error_of_backend_is_no_missed_deadline(self) -> None:
        of_library = TimeoutError("of a library")

        async def wait() -> None:
            future = Future[None]()
            future.set_exception(of_library)
            await backends.result_within(asyncio.wrap_future(future), 3600.0, "math")

        with pytest.raises(TimeoutError) as raised:
            asyncio.run(wait())
        assert type(raised.value) is TimeoutError and raised.value.args == of_library.args

    def test_canceled_caller_cancels_request(self) -> None:
        request = Future[None]()

        async def cancel() -> None:
            waiting = asyncio.create_task(backends.result_within(asyncio.wrap_future(request), 3600.0, "math"))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        asyncio.run(cancel())
        assert request.cancelled()
