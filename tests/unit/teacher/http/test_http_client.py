"""Client of plain HTTP servers: scores, handshake, and failures of the servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teacher.client.http import Endpoint, HttpClientSpec, HttpTeacherClient
from teacher.client.http import client as client_module
from teacher.client.http import servers as servers_module
from teacher.client.http.servers import FIRST_PAUSE_S, MAX_FAULTS, Server, Servers
from teacher.errors import (
    TeacherChanged,
    TeacherClosed,
    TeacherError,
    TeacherRequestError,
    TeacherSetupError,
    TeacherTimeout,
    TeacherUnavailable,
    TeacherUnreachable,
)
from teacher.records import TeacherSequence
from tests._support.errors import raises
from tests._support.http_servers import DECODED, VOCAB_SIZE, TableServer, TableTokenizer, running, table, table_server
from tests._support.ports import free_port
from tests._support.waiting import PATIENCE_S, wait_until

TOP_K = 4
SEQUENCE = TeacherSequence([7, 3, 5, 9, 5, 11, 2], prompt_len=2)


@pytest.fixture(autouse=True)
def table_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    import teacher.common.tokenizer

    monkeypatch.setattr(teacher.common.tokenizer, "load_tokenizer", lambda *_: TableTokenizer())


@contextmanager
def client_of(*servers: TableServer, **options: Any) -> Iterator[HttpTeacherClient]:
    endpoints = tuple(Endpoint(server.url, options.pop("api_key", "")) for server in servers)
    client = HttpClientSpec(endpoints, "/nowhere", **({"top_k": TOP_K, "timeout_s": PATIENCE_S} | options)).open()
    try:
        yield client
    finally:
        client.close()


def score(client: HttpTeacherClient, *sequences: TeacherSequence, timeout_s: float = PATIENCE_S) -> list[Any]:
    return client.submit(sequences or (SEQUENCE,), timeout_s).result(PATIENCE_S)


def check_row(result: Any, sequence: TeacherSequence = SEQUENCE, seed: int = 0) -> None:
    """Compare a result with the table."""
    expected_TV = table(seed)[sequence.token_ids[sequence.scored_positions_T - 1]]
    ids_TK = np.argsort(-expected_TV, axis=1, kind="stable")[:, :TOP_K]
    np.testing.assert_array_equal(result.topk_ids_TK, ids_TK)
    np.testing.assert_array_equal(result.topk_logps_TK, np.take_along_axis(expected_TV, ids_TK, 1))
    response_T = sequence.scored_ids_T
    np.testing.assert_array_equal(result.sampled_logps_T, expected_TV[np.arange(len(response_T)), response_T])


class TestScores:
    @pytest.mark.parametrize("kind", ["completions", "generate", "sglang"])
    def test_rows_equal_table_in_each_format(self, kind: str) -> None:
        if kind == "sglang":  # it has finite values in its responses only
            sequences = [TeacherSequence([7, 3, 9, 9, 8], 2), TeacherSequence([1, 2], 1)]
        else:
            sequences = [SEQUENCE, TeacherSequence([1, 2], 1)]
        first = sequences[0]
        sequences.append(TeacherSequence(first.token_ids, 2, scored_ranges=[[2, 3], [4, 5]]))
        with table_server(kind) as server, client_of(server) as client:
            for sequence, result in zip(sequences, score(client, *sequences), strict=True):
                check_row(result, sequence)

    def test_ids_beyond_tokenizer_are_missing_entries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        n_tokens = VOCAB_SIZE - 10
        import teacher.common.tokenizer

        monkeypatch.setattr(teacher.common.tokenizer, "load_tokenizer", lambda *_: TableTokenizer(n_tokens))
        server = TableServer(free_port())
        server.decoded = DECODED[:n_tokens]
        with running(server), client_of(server, top_k=20) as client:
            [result] = score(client)
        is_missing_TK = result.topk_ids_TK < 0
        assert is_missing_TK.any() and result.topk_ids_TK.max() < n_tokens
        assert np.isneginf(result.topk_logps_TK[is_missing_TK]).all()
        assert not (np.diff(is_missing_TK.astype(int), axis=1) < 0).any()  # at the end of each row

    def test_temperature_is_refused(self) -> None:
        with table_server() as server, client_of(server) as client, raises(TeacherRequestError, argument="temperature"):
            client.submit([SEQUENCE], temperature=2.0).result(PATIENCE_S)

    def test_support_ids_are_refused(self) -> None:
        sequence = TeacherSequence([1, 2], 1, support_ids_TJ=[[3]])
        refused = raises(TeacherRequestError, argument="support_ids_TJ", options=("actor_rollout_ref.teacher.support",))
        with table_server() as server, client_of(server) as client, refused:
            client.submit([sequence]).result(PATIENCE_S)

    def test_refused_sequence_is_named(self) -> None:
        with table_server() as server, client_of(server) as client:
            client.hello()
            server.failures = [(400, {}, b'{"error": {"message": "too long"}}')] * 2
            with raises(TeacherRequestError, sequence=0):
                score(client)


class TestHandshake:
    def test_model_and_limits_are_the_servers(self) -> None:
        with table_server() as server, client_of(server) as client:
            info = client.hello()
        assert (info.model_name, info.max_model_len, info.n_logprobs, info.n_tokens) == ("table", 64, TOP_K, VOCAB_SIZE)
        assert info.eos_token_ids == (1,) and info.n_workers == 1

    def test_too_many_log_probabilities_name_the_flag(self) -> None:
        with table_server() as server, client_of(server, top_k=30) as client:
            with raises(TeacherSetupError, options=("top_k",)) as caught:
                client.hello()
            assert "--max-logprobs 30" in caught.value.remedy and "max allowed: 20" in caught.value.what

    def test_values_that_are_no_log_probabilities_are_refused(self) -> None:
        with table_server() as server, client_of(server) as client:
            server.offset = 5.0
            with raises(TeacherSetupError) as caught:
                client.hello()
            assert "--logprobs-mode" in caught.value.remedy

    def test_other_token_is_named(self) -> None:
        server = TableServer(free_port())
        server.decoded = [*DECODED[:17], "other ", *DECODED[18:]]
        with running(server), client_of(server) as client, raises(TeacherSetupError) as caught:
            client.hello()
        assert "the id 17 is 'other '" in caught.value.what

    def test_further_tokens_are_refused(self) -> None:
        server = TableServer(free_port())
        server.decoded = [*DECODED, "<think>"]
        with running(server), client_of(server) as client, raises(TeacherSetupError) as caught:
            client.hello()
        assert "'<think>'" in caught.value.what

    @pytest.mark.parametrize("is_given", [False, True])
    def test_server_that_cannot_decode_needs_a_given_tokenizer(self, is_given: bool) -> None:
        server = TableServer(free_port())
        server.decoded = None
        with running(server), client_of(server, requires_same_tokenizer=not is_given) as client:
            if is_given:
                check_row(score(client)[0])
            else:
                with raises(TeacherSetupError):
                    client.hello()

    def test_unknown_name_lists_the_models(self) -> None:
        with (
            table_server() as server,
            client_of(server, served_model_name="best") as client,
            raises(TeacherSetupError) as caught,
        ):
            client.hello()
        assert "table, adapter" in caught.value.what and "served_model_name" in caught.value.remedy

    def test_key_is_sent(self) -> None:
        with table_server() as server, client_of(server, api_key="secret") as client:
            client.hello()
            assert server.keys == {"Bearer secret"}
            assert "secret" not in repr(client.spec())

    def test_refused_key_is_an_error_of_the_configuration(self) -> None:
        with table_server() as server, client_of(server) as client:
            server.failures = [(401, {}, b"no")]
            with raises(TeacherSetupError) as caught:
                client.hello()
            assert "api_key_env" in caught.value.remedy

    def test_nothing_at_the_address_is_unreachable(self) -> None:
        with client_of(TableServer(free_port())) as client, raises(TeacherUnreachable):
            client.hello(5.0)

    def test_other_program_at_the_address_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        server = TableServer(free_port())
        monkeypatch.setattr(server, "_models", lambda request: None)
        with running(server), client_of(server) as client, raises(TeacherError):
            client.hello(1.0)


class TestFailures:
    @pytest.mark.parametrize(
        "failure",
        [
            (429, {"Retry-After": "0"}, b"slow down"),
            (503, {}, b"loading"),
            (502, {}, b"gateway"),
            (500, {}, b"engine"),
            (200, {}, b'{"choices": [{"prompt_logp'),
            (200, {}, b'{"choices": []}'),
            None,
        ],
        ids=["429", "503", "502", "500", "truncated JSON", "no scores", "connection closed"],
    )
    def test_single_failure_is_repeated(self, failure: Any) -> None:
        with table_server() as server, client_of(server) as client:
            client.hello()
            server.failures = [failure]
            check_row(score(client)[0])
            assert server.failures == []

    @pytest.mark.parametrize(
        ("failure", "error"),
        [((500, {}, b"engine"), TeacherRequestError), ((200, {}, b"{}"), TeacherUnavailable)],
        ids=["500", "no JSON of this API"],
    )
    def test_persistent_failure_is_an_error(self, failure: Any, error: type[TeacherError]) -> None:
        with table_server() as server, client_of(server) as client:
            client.hello()
            server.failures = [failure] * MAX_FAULTS
            with raises(error, sequence=0) as caught:
                score(client)
            assert type(caught.value) is error  # teacher.on_failure depends on it

    def test_retry_after_is_respected_until_the_deadline(self) -> None:
        with table_server() as server, client_of(server) as client:
            client.hello()
            server.failures = [(429, {"Retry-After": "3600"}, b"slow down")]
            with raises(TeacherTimeout) as caught:
                score(client, timeout_s=5.0)
            assert "slow down" in "".join(caught.value.details)

    def test_full_server_delays_only_the_request_that_it_refused(self) -> None:
        with table_server() as server, client_of(server) as client:
            client.hello()
            server.failures = [(429, {"Retry-After": "3600"}, b"slow down")]
            refused = client.submit([SEQUENCE])
            wait_until(lambda: server.failures == [])
            check_row(score(client)[0])
            assert not refused.done()

    def test_pauses_grow_with_failures_in_a_row_not_with_simultaneous_ones(self) -> None:
        server = Server(Endpoint("http://127.0.0.1:1"))
        for n_failures in (1, 2, 3):
            began = time.monotonic()
            for _ in range(7):
                server.pause()
            assert server.n_failures == n_failures
            assert server.paused_until >= began + FIRST_PAUSE_S * 2 ** (n_failures - 1)
            server.paused_until = time.monotonic()
        server.pause()
        server.resume()
        assert (server.n_failures, server.paused_until) == (0, 0.0)

    def test_slow_server_is_a_timeout(self) -> None:
        with table_server() as server, client_of(server) as client:
            client.hello()
            server.delay_s = 3600.0
            with raises(TeacherTimeout, stage="sent"):
                score(client, timeout_s=0.5)

    def test_missing_model_is_a_changed_teacher(self) -> None:
        with table_server() as server, client_of(server) as client:
            client.hello()
            server.failures = [(404, {}, b'{"error": {"message": "The model `table` does not exist."}}')]
            with raises(TeacherChanged):
                score(client)

    def test_server_that_hangs_is_left_out_after_a_missed_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(servers_module, "VERIFY_TIMEOUT_S", 0.5)
        with table_server() as hung, table_server() as other, client_of(hung, other) as client:
            client.hello()
            hung.delay_s = 3600.0
            with raises(TeacherTimeout):
                score(client, *[SEQUENCE] * 4, timeout_s=2.0)
            for _ in range(3):
                for result in score(client, *[SEQUENCE] * 4):
                    check_row(result)

    def test_second_server_that_hangs_at_the_start_is_left_out_at_the_deadline(self) -> None:
        with table_server() as server, table_server() as hung, client_of(server, hung) as client:
            hung.delay_s = 3600.0
            assert client.hello(5.0).n_workers == 1
            check_row(score(client)[0])

    def test_requests_of_a_lost_server_go_to_another(self) -> None:
        first, second = TableServer(free_port()), TableServer(free_port())
        with running(second), running(first), client_of(first, second) as client:
            assert client.hello().n_workers == 2
            first.failures = [None] * 100
            for result in score(client, *[SEQUENCE] * 8):
                check_row(result)
            assert second.n_scored >= 8

    def test_server_that_joins_later_is_used(self) -> None:
        first, second = TableServer(free_port()), TableServer(free_port())
        with running(first), client_of(first, second) as client:
            assert client.hello().n_workers == 1
            with running(second):
                wait_until(lambda: bool(score(client, *[SEQUENCE] * 8)) and second.n_scored > 1)

    def test_restarted_server_with_another_model_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(servers_module, "MAX_IDLE_S", 0.0)
        first = TableServer(free_port())
        with client_of(first) as client:
            with running(first):
                client.hello()
            other = TableServer(first.port, seed=1)
            with running(other), raises(TeacherChanged):
                score(client)

    @pytest.mark.parametrize(("offset", "is_same"), [(-0.2, True), (-0.3, False)])
    def test_restarted_server_may_round_differently(
        self, offset: float, is_same: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A bfloat16 output layer rounds logits between 16 and 32 to multiples of 1/8."""
        monkeypatch.setattr(servers_module, "MAX_IDLE_S", 0.0)
        with table_server() as server, client_of(server) as client:
            client.hello()
            server.offset = offset
            with nullcontext() if is_same else raises(TeacherChanged):
                score(client)

    def test_servers_of_different_models_are_refused(self) -> None:
        with (
            table_server() as first,
            table_server(seed=1) as second,
            client_of(first, second) as client,
            raises(TeacherChanged),
        ):
            client.hello()

    def test_close_fails_open_requests(self) -> None:
        with table_server() as server, client_of(server) as client:
            client.hello()
            server.delay_s = 3600.0
            future = client.submit([SEQUENCE])
            client.close()
            with raises(TeacherClosed):
                future.result(PATIENCE_S)
            with raises(TeacherClosed):
                client.submit([SEQUENCE])

    def test_canceled_request_frees_its_connection(self) -> None:
        with table_server() as server, client_of(server, n_connections=1) as client:
            client.hello()
            server.delay_s = 3600.0
            future = client.submit([SEQUENCE])
            wait_until(lambda: client._servers.all[0].n_open == 1)
            assert future.cancel()
            with pytest.raises(CancelledError):
                future.result(PATIENCE_S)
            server.delay_s = 0.0
            check_row(score(client)[0])


class TestSpec:
    def test_client_of_another_process_accepts_only_the_same_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with table_server() as server, client_of(server) as client:
            client.hello()
            spec = client.spec()
            monkeypatch.setattr(client_module, "check_vocabulary", None)  # the driver has compared the tokenizer
            with table_server() as same, table_server(seed=1) as other:
                opened = {name: _moved(spec, at).open() for name, at in (("same", same), ("other", other))}
                check_row(score(opened["same"])[0])
                with raises(TeacherChanged):
                    score(opened["other"])
                for each in opened.values():
                    each.close()
        assert spec.is_loopback and (spec.n_columns, spec.entry_bytes) == (TOP_K, 8)


def _moved(spec: HttpClientSpec, server: TableServer) -> HttpClientSpec:
    from dataclasses import replace

    return replace(spec, endpoints=(Endpoint(server.url),))


@pytest.mark.parametrize("n_dead", [0, 1])
def test_requests_are_limited_per_server(n_dead: int) -> None:
    dead = [TableServer(free_port()) for _ in range(n_dead)]
    with table_server() as server, client_of(server, *dead, n_connections=2) as client:
        client.hello()
        most = 0
        original = Servers.post

        async def post(self: Servers, *arguments: Any) -> Any:
            nonlocal most
            most = max(most, self.all[0].n_open)
            return await original(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Servers, "post", post)
            score(client, *[SEQUENCE] * 10)
        assert most == 2


def test_folder_of_tokenizer_may_declare_the_end_of_turn(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 2]}')
    with table_server() as server:
        client = HttpClientSpec((Endpoint(server.url),), str(tmp_path), top_k=TOP_K).open()
        try:
            assert client.hello().eos_token_ids == (2, 4)
        finally:
            client.close()
