"""Transport by collectives: a private gloo or NCCL group between the actor's rank 0 and the rollout workers."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from recipe_gkd.errors import GkdError
from recipe_gkd.runtime.threads import start_in_thread
from recipe_gkd.weight_sync.opening import open_on_all_ranks
from recipe_gkd.weight_sync.private_group import POLL_INTERVAL_S, PrivateGroup
from recipe_gkd.weight_sync.transport import Transport

_INTERRUPT_CHECK_INTERVAL_S = 0.2


class CollectiveTransport(Transport):
    """A :class:`Transport` between any machines.

    It uses NCCL if ``device`` is a GPU, and gloo otherwise. NCCL needs a GPU for each rank.
    """

    _group: PrivateGroup | None = None

    sends_in_place = True

    def _open(self) -> None:
        self._group = open_on_all_ranks(self.peers, self._connect, discard=PrivateGroup.end)

    def _connect(self, stop: threading.Event) -> PrivateGroup:
        """Return a group whose ranks are connected. Runs in a thread that may be abandoned."""
        peers = self.peers
        group = PrivateGroup(
            peers.mailbox.store,
            rank=peers.rank,
            world=peers.world,
            device=self.device,
            timeout_s=peers.timeout_s,
            stop=stop,
        )
        try:
            group.probe()
        except BaseException:
            group.end()
            raise
        return group

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.end()

    def broadcast(self, buffer_U: torch.Tensor) -> dist.Work:
        """Start the broadcast of a bucket from rank 0; see :meth:`Transport.broadcast`."""
        assert self._group is not None  # the ranks have passed a rendezvous, which fails on a closed transport
        return self._group.broadcast(buffer_U, self.peers.time_left())

    def finish(self, work: dist.Work, phase: str) -> None:
        """Wait for a broadcast; see :meth:`Transport.finish`."""
        try:
            if self.device.type == "cuda":
                self._finish_on_stream(work, phase)
            else:
                work.wait(self.peers.time_left())
        except GkdError:
            raise
        except (RuntimeError, TimeoutError) as error:
            self.peers.fail(phase, error, silent=self.peers.others)

    def _finish_on_stream(self, work: dist.Work, phase: str) -> None:
        """Poll a transfer of NCCL, whose ``Work.wait`` only orders streams.

        Within a node NCCL does not detect the death of a peer, so the deadline ends the wait. Between nodes it does:
        the work is then completed, and ``wait`` raises the error. Before that it aborts the communicator, which can
        block on a connection to a dead peer, so it runs in a thread that can be abandoned.
        """
        checked = time.monotonic()
        while not work.is_completed():
            now = time.monotonic()
            if now > self.peers.deadline:
                raise TimeoutError("timed out")
            if now > checked + _INTERRUPT_CHECK_INTERVAL_S:
                self.peers.check_interrupted(phase)
                checked = now
            time.sleep(POLL_INTERVAL_S)
        start_in_thread(work.wait).result(self.peers.time_left().total_seconds())
