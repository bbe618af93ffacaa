"""The queue in which Megatron's checkpoint writers report, served by a process that ends when this one does.

Megatron serves it from a plain multiprocessing manager (dist_checkpointing/strategies/filesystem_async.py:55), which
outlives a process that is killed, as Ray kills its workers. Imports nothing large: that process imports this module.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from functools import cache
from multiprocessing.managers import SyncManager


def install_queue() -> None:
    """Idempotent; to be called before the first save."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = _manager().Queue()


@cache
def _manager() -> SyncManager:
    manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
    manager.start(initializer=_end_with_parent)
    return manager


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
