"""Small helpers that trainer and service share."""

from __future__ import annotations

import pytest

from teacher.common.causes import causes_of
from teacher.common.sizes import size_text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 bytes"), (1000, "1000 bytes"), (1536, "1.5 KiB"), (5 << 19, "2.5 MiB"), (3 << 30, "3.00 GiB")],
)
def test_size_text_has_the_unit_that_fits(n_bytes: int, text: str) -> None:
    assert size_text(n_bytes) == text


def test_causes_of_cycle_end() -> None:
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__context__ = other, one
    assert list(causes_of(one)) == [one, other]
    assert not list(causes_of(None))
