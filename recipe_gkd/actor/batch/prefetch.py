"""Preparation of micro-batches in a thread, while the device computes earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

from recipe_gkd.errors import DeadlineError

T = TypeVar("T")

LOOK_AHEAD = 1
"""Number of items that are prepared before they are taken. Each needs the memory of a micro-batch."""


class Prefetcher(Generic[T]):
    """Items ``prepare(0)`` to ``prepare(count - 1)``, prepared in order in one thread.

    Every reader receives all items, in order. An item is released when all readers have taken it. If ``prepare``
    raises, the error is raised where the item is taken. The thread ends with the context, except after a deadline::

        with Prefetcher(prepare, count=8, n_readers=1, timeout_s=60) as prefetcher:
            [items] = prefetcher.readers
            for item in items: ...

    Args:
        prepare: Function of the index of an item.
        count: Number of items.
        n_readers: Number of readers. They may be at different items, as the chunks of an interleaved pipeline are.
        timeout_s: Longest time to wait for one item, in seconds.

    Attributes:
        readers: The readers. All must be used by the same thread.
    """

    def __init__(self, prepare: Callable[[int], T], *, count: int, n_readers: int, timeout_s: float) -> None:
        self._prepare, self._count, self._n_readers, self._timeout_s = prepare, count, n_readers, timeout_s
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._items: list[Future[T] | None] = []
        self._n_taken = [0] * count
        self.readers: list[Iterator[T]] = [self._read() for _ in range(n_readers)]

    def __enter__(self) -> Prefetcher[T]:
        self._start_until(LOOK_AHEAD)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # After a deadline the thread may be blocked, and a wait for it would hold the error back.
        self._executor.shutdown(wait=not isinstance(error, DeadlineError), cancel_futures=True)
        self.readers.clear()  # they refer to this object, and a reference cycle would keep the items alive

    def _read(self) -> Iterator[T]:
        for index in range(self._count):
            yield self._take(index)  # without a variable, which would keep the item alive

    def _take(self, index: int) -> T:
        self._start_until(index + 1)
        item = self._wait(index)
        self._n_taken[index] += 1
        if self._n_taken[index] == self._n_readers:
            self._items[index] = None
        # Started only now, so that no more than `LOOK_AHEAD` items exist that no reader has taken.
        self._start_until(index + 1 + LOOK_AHEAD)
        return item

    def _start_until(self, end: int) -> None:
        while len(self._items) < min(end, self._count):
            self._items.append(self._executor.submit(self._prepare, len(self._items)))

    def _wait(self, index: int) -> T:
        future = self._items[index]
        assert future is not None  # each reader takes each item once
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            if future.done():
                raise  # an error of `prepare` itself
            raise DeadlineError(
                f"micro-batch {index} was not packed within {self._timeout_s:g} s",
                remedy="check the load of this node's processors and whether it swaps memory",
                waited_s=self._timeout_s,
            ) from None
