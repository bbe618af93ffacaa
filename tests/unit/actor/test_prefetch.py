"""Preparation of micro-batches in a thread: order, look-ahead, errors, and the end of the thread."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from recipe_gkd.actor.batch.prefetch import LOOK_AHEAD, Prefetcher
from recipe_gkd.errors import DataError, DeadlineError
from tests._support.errors import raises


class Item:
    def __init__(self, index: int) -> None:
        self.index = index


class Preparation:
    """Function that records its calls, and waits in each until it is allowed to continue."""

    def __init__(self, allowed: int = 100) -> None:
        self.started: list[int] = []
        self.is_done: dict[int, threading.Event] = {index: threading.Event() for index in range(10)}
        self.allowed = threading.Semaphore(allowed)
        self.threads: set[threading.Thread] = set()

    def __call__(self, index: int) -> Item:
        self.threads.add(threading.current_thread())
        self.started.append(index)
        assert self.allowed.acquire(timeout=60)
        self.is_done[index].set()
        return Item(index)


def prefetcher(prepare: object, count: int, n_readers: int = 1, timeout_s: float = 10) -> Prefetcher[Item]:
    return Prefetcher(prepare, count=count, n_readers=n_readers, timeout_s=timeout_s)  # type: ignore[arg-type]


class TestPrefetcher:
    def test_prefetcher_prepares_next_item_while_one_is_used(self) -> None:
        prepare = Preparation()
        with prefetcher(prepare, 5) as items:
            [reader] = items.readers
            for index in range(5):
                assert next(reader).index == index
                for ahead in range(index + 1, min(index + 1 + LOOK_AHEAD, 5)):
                    assert prepare.is_done[ahead].wait(10)  # without another call of the reader
                assert len(prepare.started) <= index + 1 + LOOK_AHEAD
            assert next(reader, None) is None
        assert prepare.started == list(range(5))
        [thread] = prepare.threads
        assert thread is not threading.current_thread() and not thread.is_alive()

    def test_prefetcher_gives_all_items_to_each_reader_and_releases_them(self) -> None:
        """An interleaved pipeline computes two micro-batches with its first chunk, then the same with its second."""
        with prefetcher(Preparation(), 4, n_readers=2) as items:
            first, second = items.readers
            seen = [next(first), next(first)]
            kept = weakref.ref(seen[0])
            assert next(second) is seen[0] and next(second) is seen[1]
            seen.clear()
            assert kept() is None
            assert next(first).index == next(second).index == 2

    def test_prefetcher_after_its_context_keeps_no_item(self) -> None:
        """A reference cycle would keep the memory of a micro-batch until the next garbage collection."""
        with prefetcher(Preparation(), 2) as items:
            [reader] = items.readers
            kept = weakref.ref(next(reader))
            assert kept() is None
            ahead = items._items[1]
            assert ahead is not None
            kept = weakref.ref(ahead.result())
        gc.disable()
        try:
            del items, reader, ahead
            assert kept() is None
        finally:
            gc.enable()

    def test_prefetcher_raises_error_where_the_item_is_taken(self) -> None:
        def prepare(index: int) -> Item:
            if index == 1:
                raise DataError("micro-batch 1 is invalid", uid=1)
            return Item(index)

        with prefetcher(prepare, 3) as items:
            [reader] = items.readers
            assert next(reader).index == 0
            with raises(DataError, uid=1):
                next(reader)

    def test_prefetcher_after_error_of_the_caller_ends_its_thread(self) -> None:
        prepare = Preparation()
        with pytest.raises(RuntimeError), prefetcher(prepare, 9) as items:
            next(items.readers[0])
            raise RuntimeError
        assert not any(thread.is_alive() for thread in prepare.threads)
        assert len(prepare.started) <= 1 + LOOK_AHEAD

    def test_prefetcher_whose_item_is_late_raises_deadline_error(self) -> None:
        """The context ends although the thread is blocked."""
        prepare = Preparation(allowed=0)
        with raises(DeadlineError, waited_s=0.01), prefetcher(prepare, 2, timeout_s=0.01) as items:
            next(items.readers[0])
        [thread] = prepare.threads
        assert thread.is_alive() and not prepare.is_done[0].is_set()
        prepare.allowed.release(9)

    def test_prefetcher_whose_preparation_raises_timeout_error_passes_it_on(self) -> None:
        own = TimeoutError()

        def prepare(index: int) -> Item:
            raise own

        with prefetcher(prepare, 1) as items, pytest.raises(TimeoutError) as caught:
            next(items.readers[0])
        assert caught.value is own
