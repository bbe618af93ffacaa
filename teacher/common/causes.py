"""Chain of an exception and its causes."""

from __future__ import annotations

from collections.abc import Iterator


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its cause or context, the cause of that, and so on. A cycle of causes ends."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
