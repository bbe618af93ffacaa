"""The client against a service that the test plays itself."""

from __future__ import annotations

import asyncio
import gc
import threading
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
    TeacherError,
    TeacherProtocolError,
    TeacherRequestError,
    TeacherTimeout,
)
from teacher.client.pieces import PIECE_TOKENS, cut
from teacher.records import TeacherInfo
from teacher.status import Totals
from teacher.wire import protocol
from teacher.wire.messages import Cancel, Hello, Score, StatusRequest
from tests.unit.teacher.scripted_service import ScriptedService, assert_answers, sequence, true_answer

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with ScriptedService() as running:
        yield running


@pytest.fixture
def client(service: ScriptedService) -> Iterator[TeacherClient]:
    with TeacherClient(server_port=service.port, timeout_s=20) as connected:
        yield connected


# --- pieces ---


def test_pieces_are_consecutive_and_bounded_by_tokens() -> None:
    assert cut([3, 3, 3, 9, 1, 1], 6) == [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
    assert cut([10], 6) == [range(0, 1)]
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 6000, 500).tolist()
    pieces = cut(lengths)
    assert [i for piece in pieces for i in piece] == list(range(500))
    for piece in pieces:
        assert len(piece) == 1 or sum(lengths[i] for i in piece) <= PIECE_TOKENS


def test_answers_keep_the_order_of_asking_whatever_the_order_of_the_pieces(
    service: ScriptedService, client: TeacherClient
) -> None:
    asked = [sequence(1500, 10 * i, prompt_len=1400) for i in range(8)]
    future = client.submit(asked)
    requests = [service.hear(Score) for _ in range(4)]
    assert [len(request.sequences) for request in requests] == [2, 2, 2, 2]
    for request in (requests[2], requests[0], requests[3]):
        service.answer(request)
    assert not wait([future], timeout=0.05).done
    service.answer(requests[1])
    assert_answers(future.result(timeout=5), asked)


def test_short_sequences_are_answered_while_a_long_one_is_out(service: ScriptedService, client: TeacherClient) -> None:
    long, short = client.submit([sequence(9000), sequence(5)]), client.submit([sequence(7, 3)])
    first, second, third = (service.hear(Score) for _ in range(3))
    assert [request.n_tokens for request in (first, second, third)] == [9000, 5, 7]
    service.answer(second)
    service.answer(third)
    assert_answers(short.result(timeout=5), [sequence(7, 3)])
    assert not long.done()
    service.answer(first)
    assert_answers(long.result(timeout=5), [sequence(9000), sequence(5)])


def test_the_first_piece_that_fails_fails_the_whole_and_cancels_the_rest(
    service: ScriptedService, client: TeacherClient
) -> None:
    future = client.submit([sequence(4000), sequence(3000), sequence(10), sequence(4000)])
    _, second, _ = requests = [service.hear(Score) for _ in range(3)]
    service.say(protocol.encode_error(second.request_id, TeacherRequestError("sequence 1: token id 100 is outside")))
    with pytest.raises(TeacherRequestError, match=r"scoring 4 sequences at tcp://.*: sequence 2: token id 100"):
        future.result(timeout=5)
    cancelled = {service.hear(Cancel).request_id for _ in range(2)}
    assert cancelled == {requests[0].request_id, requests[2].request_id}
    service.answer(requests[0])  # too late: dropped
    again = client.submit([sequence(3)])
    service.answer(service.hear(Score))
    assert_answers(again.result(timeout=5), [sequence(3)])


def test_limits_are_those_of_the_whole_submit(client: TeacherClient) -> None:
    with pytest.raises(TeacherRequestError, match="5000 sequences"):
        client.submit([sequence(2)] * 5000).result(timeout=5)


# --- what an answer must be ---


@pytest.mark.parametrize(
    ("answers", "complaint"),
    [
        ([true_answer(sequence(5))], "asked for 2 sequences, got answers for 1"),
        (
            [true_answer(sequence(5)), true_answer(sequence(6))],
            r"sequence 1: expected \[T, K\] = \[7, 6\], got \[5, 6\]",
        ),
        ([true_answer(sequence(5)), true_answer(sequence(8), k=3)], r"sequence 1: expected .* \[7, 6\], got \[7, 3\]"),
    ],
    ids=["sequences", "rows", "columns"],
)
def test_an_answer_of_the_wrong_size_is_refused_and_the_client_goes_on(
    service: ScriptedService, client: TeacherClient, answers: list[ScoredSequence], complaint: str
) -> None:
    future = client.submit([sequence(5), sequence(8)])
    service.say(protocol.encode_score_reply(service.hear(Score).request_id, answers))
    with pytest.raises(TeacherProtocolError, match=complaint):
        future.result(timeout=5)
    again = client.submit([sequence(3)])
    service.answer(service.hear(Score))
    assert_answers(again.result(timeout=5), [sequence(3)])


def test_another_kind_of_answer_is_refused(service: ScriptedService, client: TeacherClient) -> None:
    future = client.submit([sequence(5)])
    service.say(protocol.encode_info(service.hear(Score).request_id, INFO))
    with pytest.raises(TeacherProtocolError, match="expected ScoreReply, got Info"):
        future.result(timeout=5)


def test_float16_on_the_wire_arrives_as_float32(service: ScriptedService) -> None:
    with TeacherClient(server_port=service.port, timeout_s=5, top_k=3, wire_dtype="float16") as client:
        future = client.submit([sequence(50, 1)])
        request = service.hear(Score)
        assert (request.top_k, request.wire_dtype) == (3, "float16")
        service.answer(request)
        (answer,) = future.result(timeout=5)
    want = true_answer(sequence(50, 1), k=3)
    assert answer.topk_logps_TK.dtype == np.float32 and answer.topk_logps_TK.shape == (49, 3)
    error = np.abs(answer.topk_logps_TK - want.topk_logps_TK) / np.abs(want.topk_logps_TK)
    assert 0 < error.max() < 1e-3
    np.testing.assert_array_equal(answer.sampled_logps_T, want.sampled_logps_T)


def test_fewer_columns_than_asked_for_are_refused(service: ScriptedService) -> None:
    with TeacherClient(server_port=service.port, timeout_s=5, top_k=3) as client:
        future = client.submit([sequence(5)])
        service.say(protocol.encode_score_reply(service.hear(Score).request_id, [true_answer(sequence(5), k=2)]))
        with pytest.raises(TeacherProtocolError, match=r"expected \[T, K\] = \[4, 3\], got \[4, 2\]"):
            future.result(timeout=5)


@pytest.mark.parametrize("arguments", [{"top_k": 0}, {"top_k": 2.0}, {"wire_dtype": "bfloat16"}, {"timeout_s": -1}])
def test_arguments_out_of_range_are_refused_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(TeacherRequestError, match=next(iter(arguments))):
        TeacherClient(**arguments)


# --- put off ---


def test_what_is_put_off_is_asked_again(service: ScriptedService, client: TeacherClient) -> None:
    future = client.submit([sequence(5)])
    for _ in range(3):
        service.say(protocol.encode_retry_later(service.hear(Score).request_id, "8192 tokens wait already"))
    service.answer(service.hear(Score))
    assert_answers(future.result(timeout=5), [sequence(5)])


def test_what_is_put_off_until_its_deadline_says_why(service: ScriptedService, client: TeacherClient) -> None:
    future = client.submit([sequence(5)], timeout_s=0.3)
    while not future.done():
        if isinstance(request := service.hear_any(0.05), Score):
            service.say(protocol.encode_retry_later(request.request_id, "8192 tokens wait already"))
    with pytest.raises(TeacherTimeout, match=r"put it off until its deadline, 0.3 s.*8192 tokens wait already"):
        future.result()


def test_a_full_service_is_not_hammered(service: ScriptedService, client: TeacherClient) -> None:
    futures = [client.submit([sequence(5, i)]) for i in range(500)]
    n_heard, until = 0, time.monotonic() + 1.0
    while time.monotonic() < until:
        if isinstance(request := service.hear_any(0.05), Score):
            n_heard += 1
            service.say(protocol.encode_retry_later(request.request_id, "full"))
    assert n_heard <= 500 + 4 * 6
    unanswered = len(futures)
    while unanswered:
        service.answer(service.hear(Score))
        unanswered -= 1
    for i, future in enumerate(futures):
        assert_answers(future.result(timeout=5), [sequence(5, i)])


# --- surprises ---


def test_probes_are_no_news_and_surprises_are_dropped(
    service: ScriptedService, client: TeacherClient, caplog: pytest.LogCaptureFixture
) -> None:
    future = client.submit([sequence(5)])
    request = service.hear(Score)
    service.say(protocol.encode_probe())
    service.say(protocol.encode_welcome())
    service.say([b"garbage"])
    service.answer(request)
    service.answer(request)  # a second time
    assert_answers(future.result(timeout=5), [sequence(5)])
    dropped = [record.getMessage() for record in caplog.records]
    assert len(dropped) == 2 and "Welcome" in dropped[0] and "no msgpack" in dropped[1]


# --- cancel and close ---


def test_a_cancelled_request_is_cancelled_at_the_service(service: ScriptedService, client: TeacherClient) -> None:
    future = client.submit([sequence(9000), sequence(7)])
    requests = [service.hear(Score) for _ in range(2)]
    assert future.cancel()
    assert {service.hear(Cancel).request_id for _ in range(2)} == {request.request_id for request in requests}
    with pytest.raises(CancelledError):
        future.result()
    assert wait([future], timeout=5).done  # who waits is told, too
    service.answer(requests[0])
    again = client.submit([sequence(3)])
    service.answer(service.hear(Score))
    assert_answers(again.result(timeout=5), [sequence(3)])
    assert not again.cancel()


def test_close_is_quick_fails_what_is_open_and_tells_the_service(service: ScriptedService) -> None:
    client = TeacherClient(server_port=service.port)
    pending, cancelled = client.submit([sequence(9000), sequence(7)]), client.submit([sequence(2)])
    requests = [service.hear(Score) for _ in range(3)]
    cancelled.cancel()
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 5
    with pytest.raises(TeacherError, match="closed by its owner"):
        pending.result(timeout=0)
    assert cancelled.cancelled()
    assert {service.hear(Cancel).request_id for _ in range(3)} == {request.request_id for request in requests}
    with pytest.raises(TeacherError, match="is closed"):
        client.status()


def test_an_answer_is_freed_with_its_future(service: ScriptedService, client: TeacherClient) -> None:
    future = client.submit([sequence(5)])
    service.answer(service.hear(Score))
    kept = weakref.ref(future.result(timeout=5)[0])
    service.say(protocol.encode_probe())
    client.submit([sequence(2)])  # the I/O thread has come round
    service.hear(Score)
    gc.disable()
    try:
        del future
        deadline = time.monotonic() + 2
        while kept() is not None and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert kept() is None
    finally:
        gc.enable()


# --- hello, status, asyncio ---

INFO = TeacherInfo("m", 100, 100, "none", 32, 4, "none", (1,), protocol_version=4, n_workers=2)
STATUS = ServiceStatus(
    model_name="m",
    n_logprobs=4,
    protocol_version=4,
    uptime_s=1.5,
    draining=False,
    queue_requests=0,
    queue_tokens=0,
    queue_oldest_s=0.0,
    max_queue_tokens=100,
    tokens_per_second=0.0,
    last_loss="none has registered yet",
    workers=(),
    clients=(),
    totals=Totals(),
)


def test_status_and_hello_are_asked_and_answered(service: ScriptedService) -> None:
    async def ask() -> tuple[ServiceStatus, TeacherInfo]:
        async with AsyncTeacherClient(server_port=service.port, timeout_s=5) as client:
            asked = asyncio.create_task(client.status()), asyncio.create_task(client.hello())
            await asyncio.to_thread(
                lambda: service.say(protocol.encode_status(service.hear(StatusRequest).request_id, STATUS))
            )
            await asyncio.to_thread(lambda: service.say(protocol.encode_info(service.hear(Hello).request_id, INFO)))
            return await asked[0], await asked[1]

    assert asyncio.run(ask()) == (STATUS, INFO)


def test_a_status_that_nobody_gives_ends_at_its_deadline(client: TeacherClient) -> None:
    with pytest.raises(TeacherTimeout, match=r"status: .* connected but gave no answer within 0.2 s"):
        client.status(timeout_s=0.2)


def test_the_asyncio_form_serves_one_loop_after_another_and_cancels_with_its_task(service: ScriptedService) -> None:
    client = AsyncTeacherClient(server_port=service.port, timeout_s=5)

    async def score() -> list[ScoredSequence]:
        task = asyncio.create_task(client.score([sequence(5)], temperature=2.0))
        request = await asyncio.to_thread(service.hear, Score)
        assert request.temperature == 2.0
        service.answer(request)
        return await task

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.score([sequence(5)])
        request = await asyncio.to_thread(service.hear, Score)
        cancel = await asyncio.to_thread(service.hear, Cancel)
        assert cancel.request_id == request.request_id

    for _ in range(2):
        assert_answers(asyncio.run(score()), [sequence(5)])
    asyncio.run(give_up())
    asyncio.run(client.close())


# --- many ---


def test_ten_thousand_small_submits_take_no_quadratic_time(service: ScriptedService, client: TeacherClient) -> None:
    def seconds(n: int) -> float:
        began = time.monotonic()
        futures = [client.submit([sequence(3, i)]) for i in range(n)]
        for _ in futures:
            service.answer(service.hear(Score))
        for future in futures:
            future.result(timeout=5)
        return time.monotonic() - began

    few = seconds(1000)
    assert seconds(9000) < 30 * few + 1.0
