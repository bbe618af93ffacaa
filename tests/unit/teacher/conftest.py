"""Fixtures of the fast tests of the teacher service."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from teacher import TeacherClient
from teacher.proxy import Proxy
from tests._support.teacher_service import running_proxy


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Restore the root logger, which commands of the service configure."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with running_proxy() as running:
        yield running


@pytest.fixture
def client(proxy: Proxy) -> Iterator[TeacherClient]:
    with TeacherClient(server_port=proxy.frontend_port, timeout_s=20) as connected:
        yield connected
