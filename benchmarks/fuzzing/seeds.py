"""Valid messages of every kind, made with the encoders of the service, and valid requests of other protocols."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from fuzzing.targets import Frames
from teacher.errors import TeacherProtocolError, TeacherRequestError, TeacherTimeout
from teacher.records import LastToken, LogitSettings, ModelInfo, ScoredSequence, TeacherInfo, TeacherSequence
from teacher.status import ClientStatus, ServiceStatus, ServiceTotals, WorkerStatus
from teacher.wire import protocol
from teacher.wire.limits import PROTOCOL_VERSION
from teacher.wire.messages import (
    AsleepSet,
    Cancel,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    Info,
    Message,
    Probe,
    Ready,
    Reregister,
    RetryLater,
    Score,
    ScoreReply,
    SetAsleep,
    Status,
    StatusRequest,
    Welcome,
)

REQUEST_ID = 1
"""Request id of all seeds. Targets replace it by the id of an open request."""
K = 4
MODEL = ModelInfo(
    "model",
    vocab_size=128,
    n_tokens=100,
    tokenizer_fingerprint="sha256:0123",
    max_model_len=64,
    n_logprobs=K,
    engine="prepared",
    eos_token_ids=(1, 7),
    last_tokens=(LastToken(98, "a", "f98"), LastToken(99, "b", "f99")),
)
SEQUENCES = [TeacherSequence(np.arange(n, dtype=np.int32), p) for n, p in ((5, 2), (2, 1))]
READY = Ready(MODEL, 1000, "host:7", 0.0, has_sleep_mode=True)
TIMEOUT_S = 5.0


def scores(sequences: list[TeacherSequence], k: int = K) -> list[ScoredSequence]:
    """Return scores with the shapes of these sequences."""
    result = []
    for sequence in sequences:
        n_rows = len(sequence.token_ids) - sequence.prompt_len
        ids_TK = np.tile(np.arange(k, dtype=np.int32), (n_rows, 1))
        result.append(ScoredSequence(-ids_TK.astype(np.float32), ids_TK, np.zeros(n_rows, np.float32)))
    return result


def status() -> ServiceStatus:
    """Return a status with a worker, a client and totals."""
    return ServiceStatus(
        model_name="model",
        n_logprobs=K,
        protocol_version=PROTOCOL_VERSION,
        uptime_s=1e5,
        draining=False,
        state="awake",
        queue_requests=1,
        queue_tokens=10,
        queue_oldest_s=1.5,
        max_queue_tokens=999,
        tokens_per_second=10.0,
        last_removal="no worker was removed",
        workers=(
            WorkerStatus(
                name="host:7",
                state="awake",
                joined_s=100.0,
                since_last_message_s=0.5,
                requests=1,
                tokens=10,
                capacity_tokens=1000,
                tokens_per_second=5.0,
                busy_share=0.5,
                scored_sequences=3,
                scored_tokens=30,
            ),
        ),
        clients=(
            ClientStatus(
                name="client", waiting_requests=1, waiting_tokens=9, running_requests=1, oldest_s=2.5, scored_tokens=5
            ),
        ),
        totals=ServiceTotals(**{field.name: i + 1 for i, field in enumerate(fields(ServiceTotals))}),
    )


def from_clients() -> list[Frames]:
    """Return the messages that clients send."""
    return _copied(
        Hello(REQUEST_ID, TIMEOUT_S),
        StatusRequest(REQUEST_ID, TIMEOUT_S),
        Score(REQUEST_ID, TIMEOUT_S, SEQUENCES, LogitSettings(0.7, 90), top_k=2, wire_dtype="float16"),
        Score(REQUEST_ID, TIMEOUT_S, SEQUENCES[:1], model=MODEL.identity),
        Cancel(REQUEST_ID),
        SetAsleep(REQUEST_ID, TIMEOUT_S, asleep=True),
        SetAsleep(REQUEST_ID, TIMEOUT_S, asleep=False),
    )


def to_clients() -> list[Frames]:
    """Return the messages that clients receive."""
    return _copied(
        Info(REQUEST_ID, TeacherInfo(**vars(MODEL), protocol_version=PROTOCOL_VERSION, n_workers=1)),
        Status(REQUEST_ID, status()),
        ScoreReply(REQUEST_ID, scores(SEQUENCES)),
        ScoreReply(REQUEST_ID, [one.reduced(2, "float16") for one in scores(SEQUENCES)]),
        RetryLater(REQUEST_ID, "the queue is full"),
        Failure(REQUEST_ID, TeacherTimeout("late", stage="changing", workers=("host:1",), details=("one more line",))),
        Failure(REQUEST_ID, TeacherRequestError("token id 200 is outside", sequence=1, remedy="lower it")),
        AsleepSet(REQUEST_ID, asleep=True, n_workers=1),
        Probe(),
    )


def from_workers() -> list[Frames]:
    """Return the messages that workers send."""
    return _copied(
        READY,
        Heartbeat(1, 2, 3, 4.0),
        ScoreReply(REQUEST_ID, scores(SEQUENCES)),
        Failure(REQUEST_ID, TeacherProtocolError("refused", entry="v", peer_version=7)),
        AsleepSet(REQUEST_ID, asleep=True, n_workers=1),
        Goodbye("stopped"),
        Goodbye("RuntimeError: failed", broken=True),
    )


def to_workers() -> list[Frames]:
    """Return the messages that workers receive."""
    return _copied(
        Score(REQUEST_ID, TIMEOUT_S, SEQUENCES, LogitSettings(0.7, 90), top_k=2, wire_dtype="float16"),
        Score(REQUEST_ID, TIMEOUT_S, SEQUENCES, model=MODEL.identity),
        Cancel(REQUEST_ID),
        SetAsleep(REQUEST_ID, TIMEOUT_S, asleep=True),
        SetAsleep(REQUEST_ID, TIMEOUT_S, asleep=False),
        Welcome(),
        Reregister(),
        Probe(),
        Failure(REQUEST_ID, TeacherRequestError("refused")),
        Failure(0, TeacherRequestError("refused")),
    )


def zmtp(socket_type: bytes) -> list[Frames]:
    """Return the bytes of a peer of a plain ZMTP 3.1 connection: greeting, READY command and messages.

    Args:
        socket_type: ``b"ROUTER"`` or ``b"DEALER"``.
    """
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    properties = _property(b"Socket-Type", socket_type) + _property(b"Identity", b"")
    command = b"\x05READY" + properties
    ready = b"\x04" + bytes([len(command)]) + command
    ping = b"\x04\x07\x04PING\0\0"
    probe = _zmtp_message([bytes(frame) for frame in protocol.encode(Probe())])
    score_reply = _zmtp_message(to_clients()[2])
    long_frame = b"\x02" + (1000).to_bytes(8, "big") + bytes(1000)
    return [
        [greeting, ready],
        [greeting, ready, probe],
        [greeting, ready, ping, score_reply],
        [greeting, ready, long_frame],
        [greeting[:11]],
    ]


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def _zmtp_message(frames: Frames) -> bytes:
    last = len(frames) - 1
    return b"".join(bytes([(i < last) | 2]) + len(frame).to_bytes(8, "big") + frame for i, frame in enumerate(frames))


def http() -> list[Frames]:
    """Return HTTP requests, as lines."""
    accept = b"Accept: application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain;q=0.5\r\n"
    return [
        [b"GET /healthz HTTP/1.1\r\n", b"Host: localhost\r\n", b"\r\n"],
        [b"GET /metrics HTTP/1.1\r\n", b"Host: localhost\r\n", accept, b"Accept-Encoding: gzip\r\n", b"\r\n"],
        [b"GET /metrics?name%5B%5D=teacher_workers&name[]=x HTTP/1.0\r\n", b"\r\n"],
        [b"POST /healthz HTTP/1.1\r\n", b"Content-Length: 3\r\n", b"Expect: 100-continue\r\n", b"\r\n", b"abc"],
        [b"HEAD /metrics HTTP/1.1\r\n", b"Connection: keep-alive\r\n", b"\r\n"],
        [b"OPTIONS * HTTP/1.1\r\n", b"Transfer-Encoding: chunked\r\n", b"\r\n", b"3\r\nabc\r\n0\r\n\r\n"],
        [b"GET /x?a=b&c=%ff;d#e HTTP/1.1\r\n", b"Content-Type: text/plain; charset=utf-8\r\n", b"\r\n"],
    ]


HTTP_WORDS = [
    *(b"GET", b"HTTP/1.1", b"HTTP/0.9", b"HTTP/9999999999.1", b"HTTP/1.1.1", b"/metrics", b"/healthz", b"?name[]="),
    *(b"%", b"%zz", b"\xff", b"\0", b"q=", b"q=nan", b";version=x", b";version=9.9.9", b";escaping=", b"\t", b"\r"),
    *(b"Content-Length: -1\r\n", b"Content-Length: x\r\n", b"Host:\r\n", b" \r\n", b"//", b"../", b"[::1]", b"&" * 200),
    *(b"a: b\r\n" * 120, b"x" * 17000, b"application/openmetrics-text", b"HTTP_", b"Content-Type: multipart\r\n"),
]


def _copied(*messages: Message) -> list[Frames]:
    return [[bytes(frame) for frame in protocol.encode(message)] for message in messages]
