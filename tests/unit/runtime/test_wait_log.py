from __future__ import annotations

import logging
import pickle
import re
import threading

import pytest

from recipe_gkd.runtime import wait_log
from recipe_gkd.runtime.keyed_timeout import KeyedTimeout, key_of, with_margin
from recipe_gkd.runtime.wait_log import WaitLog, _line, _Wait
from tests._support.waiting import wait_until


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="recipe_gkd")


class TestLine:
    def test_deadline_has_its_value_and_key_without_the_margin(self) -> None:
        wait = _Wait("sync", KeyedTimeout(600, "nccl_timeout", 2.5), lambda: {"rollout worker 0": 1}, "", 0.0)
        assert re.fullmatch(r"sync: waits \d+ of 600 s \(nccl_timeout\) for rollout worker 0", _line([wait]))
        timeout_s = with_margin(KeyedTimeout(400, "rollout.timeout_s", factor=5), 3)
        wait = _Wait("validate", timeout_s, lambda: {"rollout worker 0": 1}, "", 0.0)
        assert timeout_s == 2003 and re.search(r" of 2000 s \(5 x rollout\.timeout_s\) for ", _line([wait]))

    def test_deadline_without_key_and_missing_deadline(self) -> None:
        assert " of 60 s for a" in _line([_Wait("p", 60.0, lambda: {"a": 1}, "", 0.0)])
        assert re.fullmatch(r"p: waits \d+ s for a", _line([_Wait("p", None, lambda: {"a": 1}, "", 0.0)]))

    def test_waits_of_a_phase_are_added_up_and_names_are_limited(self) -> None:
        of_a = _Wait("p", 9.0, lambda: {"a": 3}, "responses", 0.0)
        others = [_Wait("p", 9.0, lambda i=i: {f"b{i}": i}, "responses", 0.0) for i in range(5)]  # type: ignore[misc]
        line = _line([of_a, of_a, *others])
        assert line.endswith("for 6 responses of a, 0 responses of b0, 1 responses of b1, 2 responses of b2 and 2 more")


class TestIntervals:
    def test_line_after_the_first_interval_and_then_one_per_repetition(self) -> None:
        waits = WaitLog(first_line_s=30, repeat_s=60)
        a, b = (_Wait("p", 600.0, dict, "", started) for started in (0.0, 20.0))
        waits._waits = {1: a, 2: b}
        times = [t for t in range(0, 200) if waits.take_due(t)]
        assert times == [30, 90, 150]

    def test_younger_wait_of_a_phase_does_not_log_more_often(self) -> None:
        waits = WaitLog(first_line_s=30, repeat_s=60)
        waits._waits = {1: _Wait("p", 600.0, dict, "", 0.0)}
        assert waits.take_due(30)
        waits._waits = {2: _Wait("p", 600.0, dict, "", 5.0)}
        assert [t for t in range(31, 200) if waits.take_due(t)] == [90, 150]


class TestWaiting:
    def test_long_wait_is_logged_while_its_thread_is_blocked(self, caplog: pytest.LogCaptureFixture) -> None:
        waits = WaitLog(first_line_s=0.01, repeat_s=0.01)
        with waits.waiting("update, step 3", 60.0, lambda: {"actor worker 1": 1}):
            wait_until(lambda: caplog.text.count("update, step 3: waits 0 of 60 s for actor worker 1") >= 2)
        assert not waits._waits and not waits._logged_at

    def test_short_wait_logs_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        waits = WaitLog(first_line_s=60)
        for _ in range(3):
            with waits.waiting("p", 60.0, dict):
                pass
        assert not caplog.records and waits._take_pause_s(0.0) is None

    def test_wait_that_fails_is_removed(self) -> None:
        waits = WaitLog()
        with pytest.raises(ZeroDivisionError), waits.waiting("p", 60.0, dict):
            raise ZeroDivisionError
        assert not waits._waits

    def test_all_waits_of_the_process_share_one_thread(self) -> None:
        with wait_log.waiting_for("p", 60.0, "a"):
            before = threading.active_count()
            with wait_log.waiting_for("q", 60.0, "b"):
                assert threading.active_count() == before


class TestKeyedTimeout:
    def test_margin_is_added_and_keeps_the_key(self) -> None:
        timeout_s = with_margin(KeyedTimeout(10, "k", 1), 2.5)
        assert timeout_s == 13.5 and key_of(timeout_s) == "k" and timeout_s.margin_s == 3.5  # type: ignore[attr-defined]
        assert with_margin(10.0, 1) == 11 and key_of(10.0) == key_of(None) == ""

    def test_other_processes_get_a_plain_number(self) -> None:
        copied = pickle.loads(pickle.dumps(KeyedTimeout(10, "k", 1)))
        assert copied == 11 and type(copied) is float
