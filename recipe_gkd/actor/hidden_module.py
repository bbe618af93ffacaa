"""Optional dependencies of a library, hidden from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden_module(name: str) -> Iterator[None]:
    """Let imports of a module fail in the body with ``ImportError``. A module that is already imported stays visible.

    Args:
        name: Name of the module.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
