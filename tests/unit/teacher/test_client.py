"""TeacherClient and AsyncTeacherClient against a scripted service."""

from __future__ import annotations

import asyncio
import gc
import pickle
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from typing import Any

import numpy as np
import pytest

from teacher import (
    AsyncTeacherClient,
    ScoredSequence,
    ServiceStatus,
    TeacherClient,
    TeacherProtocolError,
    TeacherRequestError,
    TeacherTimeout,
)
from teacher.client.chunks import CHUNK_TOKENS, ScoreCall, split_request
from teacher.common.fingerprint import N_LAST_TOKENS
from teacher.errors import TeacherClosed
from teacher.proxy import Proxy
from teacher.records import LogitSettings, TeacherInfo
from teacher.wire.messages import (
    Cancel,
    Failure,
    Hello,
    Info,
    Probe,
    RetryLater,
    Score,
    ScoreReply,
    Status,
    StatusRequest,
    Welcome,
)
from tests._support.errors import raises
from tests._support.fake_teachers import OffsetEngine
from tests._support.fake_worker import running_worker
from tests._support.scripted_service import ScriptedService, assert_scores, expected_scores, sequence
from tests._support.teacher_status import STATUS
from tests._support.waiting import wait_until


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with ScriptedService() as running:
        yield running


@pytest.fixture
def client(service: ScriptedService) -> Iterator[TeacherClient]:
    with TeacherClient(server_port=service.port, timeout_s=20) as connected:
        yield connected


# --- chunks ---


def test_split_request_returns_consecutive_chunks_bounded_by_tokens() -> None:
    assert split_request([3, 3, 3, 9, 1, 1], 6) == [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
    assert split_request([10], 6) == [range(0, 1)]
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 6000, 500).tolist()
    chunks = split_request(lengths)
    assert [i for chunk in chunks for i in chunk] == list(range(500))
    for chunk in chunks:
        assert len(chunk) == 1 or sum(lengths[i] for i in chunk) <= CHUNK_TOKENS


def test_submit_replies_out_of_order_keeps_request_order(service: ScriptedService, client: TeacherClient) -> None:
    sequences = [sequence(1500, 10 * i, prompt_len=1400) for i in range(8)]
    future = client.submit(sequences)
    requests = [service.receive(Score) for _ in range(4)]
    assert [len(request.sequences) for request in requests] == [2, 2, 2, 2]
    for request in (requests[2], requests[0], requests[3]):
        service.reply(request)
    assert not wait([future], timeout=0.05).done
    service.reply(requests[1])
    assert_scores(future.result(timeout=60), sequences)


def test_submit_long_sequence_does_not_block_short_ones(service: ScriptedService, client: TeacherClient) -> None:
    long, short = client.submit([sequence(9000), sequence(5)]), client.submit([sequence(7, 3)])
    first, second, third = (service.receive(Score) for _ in range(3))
    assert [request.n_tokens for request in (first, second, third)] == [9000, 5, 7]
    service.reply(second)
    service.reply(third)
    assert_scores(short.result(timeout=60), [sequence(7, 3)])
    assert not long.done()
    service.reply(first)
    assert_scores(long.result(timeout=60), [sequence(9000), sequence(5)])


def test_submit_failed_chunk_fails_call_and_cancels_rest(service: ScriptedService, client: TeacherClient) -> None:
    future = client.submit([sequence(4000), sequence(3000), sequence(10), sequence(4000)])
    _, second, _ = requests = [service.receive(Score) for _ in range(3)]
    service.send(Failure(second.request_id, TeacherRequestError("token id 100 is outside", sequence=1)))
    place = {"operation": "scoring 4 sequences", "address": client.address, "sequence": 2}
    with raises(TeacherRequestError, **place) as refused:
        future.result(timeout=60)
    assert str(refused.value) == f"scoring 4 sequences at {client.address}: sequence 2: token id 100 is outside"
    cancelled = {service.receive(Cancel).request_id for _ in range(2)}
    assert cancelled == {requests[0].request_id, requests[2].request_id}
    service.reply(requests[0])  # late, so the client drops it
    again = client.submit([sequence(3)])
    service.reply(service.receive(Score))
    assert_scores(again.result(timeout=60), [sequence(3)])


def test_error_with_a_huge_sequence_index_fails_only_its_call(service: ScriptedService, client: TeacherClient) -> None:
    future = client.submit([sequence(3)])
    error = TeacherRequestError("too long", sequence=10**9)
    service.send(Failure(service.receive(Score).request_id, error))
    with raises(TeacherProtocolError, entry="sequence", operation="scoring 1 sequences"):
        future.result(timeout=60)
    again = client.submit([sequence(3)])
    service.reply(service.receive(Score))
    assert_scores(again.result(timeout=60), [sequence(3)])


def test_defect_in_reading_a_reply_fails_its_call_and_open_ones(
    service: ScriptedService, client: TeacherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request of the reply is not open any more, but its future must not wait until the deadline."""
    answered, is_open = client.submit([sequence(3)]), client.submit([sequence(4)])
    monkeypatch.setattr(ScoreCall, "accept", lambda *_: 1 / 0)
    service.reply(service.receive(Score))
    for future in (answered, is_open):
        with raises(TeacherClosed, operation="scoring 1 sequences", address=client.address):
            future.result(timeout=60)
    with raises(TeacherClosed, operation="", address=client.address):
        client.submit([sequence(3)]).result(timeout=60)


def test_submit_too_many_sequences_is_refused(client: TeacherClient) -> None:
    with raises(TeacherRequestError, argument="sequences", sequence=None):
        client.submit([sequence(2)] * 5000).result(timeout=60)


# --- invalid replies ---


@pytest.mark.parametrize(
    ("replies", "wrong"),
    [
        ([expected_scores(sequence(5))], None),
        ([expected_scores(sequence(5)), expected_scores(sequence(6))], 1),
        ([expected_scores(sequence(5)), expected_scores(sequence(8), k=3)], 1),
    ],
    ids=["sequences", "rows", "columns"],
)
def test_reply_wrong_shape_fails_call_and_keeps_client_usable(
    service: ScriptedService, client: TeacherClient, replies: list[ScoredSequence], wrong: int | None
) -> None:
    future = client.submit([sequence(5), sequence(8)])
    service.send(ScoreReply(service.receive(Score).request_id, replies))
    with raises(TeacherProtocolError, sequence=wrong, entry="arrays" if wrong is None else ""):
        future.result(timeout=60)
    again = client.submit([sequence(3)])
    service.reply(service.receive(Score))
    assert_scores(again.result(timeout=60), [sequence(3)])


def test_reply_wrong_type_fails_call(service: ScriptedService, client: TeacherClient) -> None:
    future = client.submit([sequence(5)])
    service.send(Info(service.receive(Score).request_id, INFO))
    with raises(TeacherProtocolError, entry="kind"):
        future.result(timeout=60)


def test_reply_float16_on_wire_is_returned_as_float32(service: ScriptedService) -> None:
    with TeacherClient(server_port=service.port, timeout_s=5, top_k=3, wire_dtype="float16") as client:
        future = client.submit([sequence(50, 1)])
        request = service.receive(Score)
        assert (request.top_k, request.wire_dtype) == (3, "float16")
        service.reply(request)
        (scored,) = future.result(timeout=60)
    want = expected_scores(sequence(50, 1), k=3)
    assert scored.topk_logps_TK.dtype == np.float32 and scored.topk_logps_TK.shape == (49, 3)
    error = np.abs(scored.topk_logps_TK - want.topk_logps_TK) / np.abs(want.topk_logps_TK)
    assert 0 < error.max() < 1e-3
    np.testing.assert_array_equal(scored.sampled_logps_T, want.sampled_logps_T)


def test_reply_fewer_columns_than_top_k_fails_call(service: ScriptedService) -> None:
    with TeacherClient(server_port=service.port, timeout_s=5, top_k=3) as client:
        future = client.submit([sequence(5)])
        request_id = service.receive(Score).request_id
        service.send(ScoreReply(request_id, [expected_scores(sequence(5), k=2)]))
        with raises(TeacherProtocolError, sequence=0, entry=""):
            future.result(timeout=60)


@pytest.mark.parametrize("arguments", [{"top_k": 0}, {"top_k": 2.0}, {"wire_dtype": "bfloat16"}, {"timeout_s": -1}])
def test_init_argument_out_of_range_raises(arguments: dict[str, Any]) -> None:
    with raises(TeacherRequestError, argument=next(iter(arguments))):
        TeacherClient(**arguments)


# --- deferred requests ---


def test_deferred_request_is_retried(service: ScriptedService, client: TeacherClient) -> None:
    future = client.submit([sequence(5)])
    for _ in range(3):
        service.send(RetryLater(service.receive(Score).request_id, "8192 tokens wait already"))
    service.reply(service.receive(Score))
    assert_scores(future.result(timeout=60), [sequence(5)])


def test_deferred_request_at_deadline_reports_reason(service: ScriptedService, client: TeacherClient) -> None:
    future = client.submit([sequence(5)], timeout_s=0.3)
    while not future.done():
        if isinstance(request := service.receive_any(0.05), Score):
            service.send(RetryLater(request.request_id, "8192 tokens wait already"))
    with raises(TeacherTimeout, stage="deferred", operation="scoring 1 sequences") as late:
        future.result()
    assert "8192 tokens" in late.value.what


def test_full_service_receives_few_retries(service: ScriptedService, client: TeacherClient) -> None:
    futures = [client.submit([sequence(5, i)]) for i in range(500)]
    n_received, until = 0, time.monotonic() + 1.0
    while time.monotonic() < until:
        if isinstance(request := service.receive_any(0.05), Score):
            n_received += 1
            service.send(RetryLater(request.request_id, "full"))
    assert n_received <= 500 + 4 * 6
    n_open = len(futures)
    while n_open:
        service.reply(service.receive(Score))
        n_open -= 1
    for i, future in enumerate(futures):
        assert_scores(future.result(timeout=60), [sequence(5, i)])


# --- unexpected messages ---


def test_unexpected_messages_are_logged_and_dropped(
    service: ScriptedService, client: TeacherClient, caplog: pytest.LogCaptureFixture
) -> None:
    future = client.submit([sequence(5)])
    request = service.receive(Score)
    service.send(Probe())
    service.send(Welcome())
    service.send([b"garbage"])
    service.reply(request)
    service.reply(request)  # a second time
    assert_scores(future.result(timeout=60), [sequence(5)])
    dropped = [record.getMessage() for record in caplog.records]
    assert len(dropped) == 2 and "Welcome" in dropped[0] and "no msgpack" in dropped[1]


# --- cancel and close ---


def test_cancel_future_cancels_requests_at_service(service: ScriptedService, client: TeacherClient) -> None:
    future = client.submit([sequence(9000), sequence(7)])
    requests = [service.receive(Score) for _ in range(2)]
    assert future.cancel()
    assert {service.receive(Cancel).request_id for _ in range(2)} == {request.request_id for request in requests}
    with pytest.raises(CancelledError):
        future.result()
    assert wait([future], timeout=5).done  # a waiting thread is woken up as well
    service.reply(requests[0])
    again = client.submit([sequence(3)])
    service.reply(service.receive(Score))
    assert_scores(again.result(timeout=60), [sequence(3)])
    assert not again.cancel()


def test_close_fails_open_calls_and_cancels_requests(service: ScriptedService) -> None:
    client = TeacherClient(server_port=service.port)
    pending, cancelled = client.submit([sequence(9000), sequence(7)]), client.submit([sequence(2)])
    requests = [service.receive(Score) for _ in range(3)]
    cancelled.cancel()
    client.close()
    with raises(TeacherClosed, operation="scoring 2 sequences"):
        pending.result(timeout=0)
    assert cancelled.cancelled()
    assert {service.receive(Cancel).request_id for _ in range(3)} == {request.request_id for request in requests}
    with raises(TeacherClosed, operation=""):
        client.status()


def test_result_is_freed_with_its_future(service: ScriptedService, client: TeacherClient) -> None:
    future = client.submit([sequence(5)])
    service.reply(service.receive(Score))
    kept = weakref.ref(future.result(timeout=60)[0])
    service.send(Probe())
    client.submit([sequence(2)])  # the I/O thread has finished its previous round
    service.receive(Score)
    gc.disable()
    try:
        del future
        wait_until(lambda: kept() is None)
    finally:
        gc.enable()


# --- hello, status, asyncio ---

INFO = TeacherInfo("m", 100, 100, "none", 32, 4, "none", (1,), protocol_version=4, n_workers=2)


def test_async_status_and_hello_return_replies(service: ScriptedService) -> None:
    async def status_and_hello() -> tuple[ServiceStatus, TeacherInfo]:
        async with AsyncTeacherClient(server_port=service.port, timeout_s=5) as client:
            tasks = asyncio.create_task(client.status()), asyncio.create_task(client.hello())
            await asyncio.to_thread(lambda: service.send(Status(service.receive(StatusRequest).request_id, STATUS)))
            await asyncio.to_thread(lambda: service.send(Info(service.receive(Hello).request_id, INFO)))
            return await tasks[0], await tasks[1]

    assert asyncio.run(status_and_hello()) == (STATUS, INFO)


def test_status_without_reply_times_out(client: TeacherClient) -> None:
    with raises(TeacherTimeout, operation="status", stage="sent"):
        client.status(timeout_s=0.2)


def test_async_client_works_in_several_loops_and_cancels_with_its_task(service: ScriptedService) -> None:
    client = AsyncTeacherClient(server_port=service.port, timeout_s=5)

    async def score() -> list[ScoredSequence]:
        task = asyncio.create_task(client.score([sequence(5)], temperature=2.0))
        request = await asyncio.to_thread(service.receive, Score)
        assert request.logits == LogitSettings(2.0)
        service.reply(request)
        return await task

    async def time_out() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.score([sequence(5)])
        request = await asyncio.to_thread(service.receive, Score)
        cancel = await asyncio.to_thread(service.receive, Cancel)
        assert cancel.request_id == request.request_id

    for _ in range(2):
        assert_scores(asyncio.run(score()), [sequence(5)])
    asyncio.run(time_out())
    asyncio.run(client.close())


# --- many calls ---


def test_many_submits_get_their_own_results(service: ScriptedService, client: TeacherClient) -> None:
    requests = [[sequence(3, i)] for i in range(2000)]
    futures = [client.submit(request) for request in requests]
    for _ in futures:
        service.reply(service.receive(Score))
    for request, future in zip(requests, futures, strict=True):
        assert_scores(future.result(timeout=60), request)


def test_spec_without_last_tokens_is_small_for_a_ray_actor_that_may_be_restarted(proxy: Proxy) -> None:
    """Ray deletes constructor arguments above 100 KiB, and then cannot start the actor again."""
    with (
        running_worker(proxy.backend_port, OffsetEngine(0)),
        TeacherClient(server_port=proxy.frontend_port, timeout_s=20) as client,
    ):
        info, spec = client.hello(), client.spec()
        assert len(info.last_tokens) == N_LAST_TOKENS and len(pickle.dumps(info)) > 100 << 10
        assert len(pickle.dumps(spec)) < 4 << 10
        assert spec.model is not None and spec.model.identity == info.identity
        with spec.open() as opened:
            [scores] = opened.submit([sequence(3)]).result()
        assert len(scores.topk_ids_TK) == 2
