"""The long profile, which pytest selects before it imports tests, and no log of refused messages."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest

from tests.fuzz import profile

__all__ = ["profile"]


@pytest.fixture(autouse=True)
def unlogged_warnings() -> Iterator[None]:
    """Drop the warnings of refused messages, whose records pytest keeps."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def frozen_objects() -> Iterator[None]:
    """Exclude the objects of the other tests from garbage collection, so that one after each message costs little."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
