"""Conditions of the import of a library: what it must not find, or not do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let ``torch.compile`` return functions as they are in the body.

    A library that compiles functions at its import then does not import the compiler, which takes seconds and 80 MB.
    """
    import torch

    original = torch.compile

    def unchanged(model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda function: function

    torch.compile = unchanged
    try:
        yield
    finally:
        torch.compile = original
