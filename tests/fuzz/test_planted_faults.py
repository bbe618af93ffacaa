"""Controls: each property test fails for a decoder, a receiver or a proxy with a planted fault."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teacher.errors import TeacherProtocolError
from teacher.wire import frames as framing
from teacher.wire import protocol
from teacher.wire.messages import Message, Ready, Score
from tests._support.fake_worker import RunningWorker
from tests.fuzz import test_decoders, test_receivers
from tests.fuzz.hostile import Frames
from tests.fuzz.proxy_process import DEADLINE_S, ProxyProcess
from tests.fuzz.receivers import StrictEngine
from tests.fuzz.test_proxy import check_client_messages

DECODE = protocol.decode


def decode_or_fail(frames: Any) -> Message:
    """Raise another error than the documented one for a refused message."""
    try:
        return DECODE(frames)
    except TeacherProtocolError as error:
        raise IndexError from error


class TestDecoder:
    """A decoder with a fault."""

    def test_unexpected_error_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(protocol, "decode", decode_or_fail)
        with pytest.raises(IndexError):
            test_decoders.TestMessages().test_changed_message_is_decoded_or_refused(Score)

    def test_allocation_by_an_unchecked_size_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def decode_array(spec: Any, frame: Any) -> np.ndarray:
            if isinstance(spec, list) and all(type(size) is int and 0 < size < 2**25 for size in spec[1:]):
                np.empty(spec[1:], np.uint8)
            return array_of(spec, frame)

        array_of = framing._decode_array
        monkeypatch.setattr(framing, "_decode_array", decode_array)
        with pytest.raises(AssertionError, match="allocated"):
            test_decoders.TestParts().test_announced_size_is_not_allocated()

    def test_kept_messages_are_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept: list[Any] = []

        def unpack_header(frame: Any) -> framing.Header:
            kept.append(framing.unpack_header(frame))
            return kept[-1]

        monkeypatch.setattr(protocol, "unpack_header", unpack_header)
        with pytest.raises(AssertionError, match="left"):
            test_decoders.TestMessages().test_changed_message_is_decoded_or_refused(Ready)

    def test_slow_message_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def decode(frames: Frames) -> Message:
            end_s = time.thread_time() + 0.1
            while time.thread_time() < end_s:
                pass
            return DECODE(frames)

        monkeypatch.setattr(protocol, "decode", decode)
        monkeypatch.setattr(test_decoders, "CPU_LIMIT_S", 0.05)
        with pytest.raises(AssertionError):
            test_decoders.decode([b"\x80"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("role", ["client", "worker"])
class TestReceiver:
    """A client or worker with a fault."""

    def test_unexpected_error_is_found(self, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(protocol, "decode", decode_or_fail)
        with pytest.raises(AssertionError, match=r"ended|closed"):
            test_receivers.test_receiver_hostile_message_is_survived(role)

    def test_kept_messages_are_found(self, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = []

        def decode(frames: Any) -> Message:
            kept.append([bytes(frame) for frame in frames])
            return DECODE(frames)

        monkeypatch.setattr(protocol, "decode", decode)
        with pytest.raises(AssertionError):
            test_receivers.test_receiver_repeated_messages_leave_no_memory(role)


@pytest.mark.parametrize(("fault", "n_examples", "text"), [("leak", 150, "grew"), ("crash", 20, "ended with status")])
def test_proxy_with_a_fault_is_found(
    fault: str, n_examples: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    with closing(ProxyProcess(tmp_path, "tests.fuzz.faulty_proxy")) as proxy:
        worker = RunningWorker(proxy.backend_port, StrictEngine())
        assert worker.settled.wait(DEADLINE_S)
        with pytest.raises(AssertionError, match=text):
            check_client_messages(proxy, proxy.check_serves, n_examples)
        worker.stop()
