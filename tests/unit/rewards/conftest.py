from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest


def reward_processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if any("rewards/child.py" in word for word in child.cmdline())]


@pytest.fixture(autouse=True)
def no_reward_process_remains() -> Iterator[None]:
    yield
    assert not reward_processes()
