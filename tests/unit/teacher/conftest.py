"""Fixtures of the service's fast tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from teacher.proxy import Proxy
from tests._support.teacher_service import running_proxy


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands of the service, called in this process, set it up for themselves."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with running_proxy() as running:
        yield running
