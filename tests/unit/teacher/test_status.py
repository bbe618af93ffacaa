"""Status records, their JSON form and their text form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from teacher.commands.table import format_status
from teacher.errors import TeacherProtocolError
from teacher.status import ServiceStatus
from tests._support.errors import raises
from tests._support.teacher_status import STATUS


class TestServiceStatus:
    def test_from_dict_inverts_to_dict(self) -> None:
        assert ServiceStatus.from_dict(STATUS.to_dict()) == STATUS

    def test_from_dict_with_wrong_type_names_field_and_type(self) -> None:
        values = STATUS.to_dict()
        values["totals"]["scored"] = "7"
        with raises(TeacherProtocolError, entry="scored"):
            ServiceStatus.from_dict(values)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
    def test_from_dict_with_number_that_cannot_be_shown_is_refused(self, value: float) -> None:
        with raises(TeacherProtocolError, entry="uptime_s"):
            ServiceStatus.from_dict(STATUS.to_dict() | {"uptime_s": value})


class TestFormatStatus:
    def test_format_status_shows_counts_and_mean_times(self) -> None:
        totals = replace(STATUS.totals, scored=4, retried_later=5, queue_s=8.0, worker_s=2.0)
        text = format_status(replace(STATUS, totals=totals), "tcp://host:1")
        assert "since the start: scored 4, " in text and "retried later 5" in text
        assert "a request, on average: 2.000 s in the queue, 0.500 s at a worker" in text
        assert "queue s" not in text and "worker s" not in text

    def test_format_status_without_worker_names_last_removal(self) -> None:
        text = format_status(replace(STATUS, workers=()), "tcp://host:1")
        assert "no worker (last removal: no worker was removed): requests wait" in text
