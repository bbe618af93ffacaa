"""Check the type and the data of a raised error, not its wording."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from recipe_gkd.errors import ConfigError
from teacher.common.detailed_error import DetailedError

E = TypeVar("E", bound=DetailedError)


@contextmanager
def raises(kind: type[E] | tuple[type[E], ...], /, **fields: object) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of a class whose fields have the given values.

    Args:
        kind: Class, or several of them.
        **fields: Expected values of attributes, such as ``keys=("trainer.total_epochs",)``.

    Yields:
        Object whose ``value`` is the error after the block.
    """
    with pytest.raises(kind) as caught:
        yield caught
    check_error(caught.value, kind, **fields)


def check_error(error: object, kind: type[E] | tuple[type[E], ...], /, **fields: object) -> None:
    """Check the class and the data of an error that was returned, for example by a job of another process.

    Args:
        kind: Class, or several of them.
        **fields: Expected values of attributes.
    """
    assert isinstance(error, kind), repr(error)
    found = {name: getattr(error, name) for name in fields}
    assert found == fields, f"{type(error).__name__}: {error}"


def culprits(error: DetailedError) -> set[str]:
    """Return the labels of the workers that died, failed or did not answer, according to an error and its causes."""
    found: set[str] = set()
    current: BaseException | None = error
    while isinstance(current, DetailedError):
        lists = (getattr(current, name, ()) for name in ("silent", "missing", "reported_by"))
        found |= {label for label in (current.worker, *itertools.chain(*lists)) if label}
        found |= {label for failure in getattr(current, "failures", ()) for label in culprits(failure)}
        current = current.__cause__
    return found


def keys_of_parts(error: ConfigError) -> list[tuple[str, ...]]:
    """Return the keys of each error that is joined in ``error``, or its own."""
    return [part.keys for part in error.parts or (error,)]
