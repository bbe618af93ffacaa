"""Fixtures of the fast tests of the teacher service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from teacher import TeacherClient
from teacher.proxy import Proxy
from tests._support.fixtures import proxy, restored_logging

__all__ = ["proxy", "restored_logging"]


@pytest.fixture
def client(proxy: Proxy) -> Iterator[TeacherClient]:
    with TeacherClient(server_port=proxy.frontend_port, timeout_s=20) as connected:
        yield connected
