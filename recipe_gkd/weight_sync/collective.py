"""Transport by collectives: a private gloo or NCCL group between the actor's rank 0 and the rollout workers.

It does not touch the default group of ``torch.distributed``, which Megatron uses on rank 0 and vLLM on other ranks.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recipe_gkd.errors import GkdError
from recipe_gkd.weight_sync.transport import Transport

_POLL_INTERVAL_S = 0.0002
_INTERRUPT_CHECK_INTERVAL_S = 0.2


class CollectiveTransport(Transport):
    """A :class:`Transport` between any machines.

    It uses NCCL if ``device`` is a GPU, and gloo otherwise. NCCL needs a GPU for each rank.
    """

    _group: Any = None

    sends_in_place = True

    def _open(self) -> None:
        peers = self.peers
        self._group = _process_group(peers.mailbox.store, peers.rank, peers.world, self.device, peers.timeout_s)

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def broadcast(self, buffer_U: torch.Tensor) -> dist.Work:
        """Start the broadcast of a bucket from rank 0; see :meth:`Transport.broadcast`."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self.peers.time_left()
        return self._group.broadcast([buffer_U], options)

    def finish(self, work: dist.Work, phase: str) -> None:
        """Wait for a broadcast; see :meth:`Transport.finish`."""
        try:
            if self.device.type == "cuda":
                self._finish_on_stream(work, phase)
            else:
                work.wait(self.peers.time_left())
        except GkdError:
            raise
        except RuntimeError as error:
            self.peers.fail(phase, error, silent=self.peers.others)

    def _finish_on_stream(self, work: dist.Work, phase: str) -> None:
        # NCCL's ``Work.wait`` only orders streams, and NCCL does not detect the death of a peer: the host must poll.
        checked = time.monotonic()
        while not work.is_completed():
            now = time.monotonic()
            if now > self.peers.deadline:
                raise RuntimeError("timed out")
            if now > checked + _INTERRUPT_CHECK_INTERVAL_S:
                self.peers.check_interrupted(phase)
                checked = now
            time.sleep(_POLL_INTERVAL_S)
        work.wait()


def _process_group(store: dist.Store, rank: int, world: int, device: torch.device, timeout_s: float) -> Any:
    prefixed = dist.PrefixStore("group", store)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        # NCCL's watchdog would end the process, so its timeout must be later than the deadline of the update.
        nccl._timeout = timedelta(seconds=2 * timeout_s + 60)
        return dist.ProcessGroupNCCL(prefixed, rank, world, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timedelta(seconds=timeout_s)
    assert isinstance(store, dist.TCPStore)
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address_toward(store.host))]
    return dist.ProcessGroupGloo(prefixed, rank, world, gloo)


def _own_address_toward(host: str) -> str:
    """Return the address of the network interface that leads to ``host``.

    gloo would take the address of the host name, which other machines may not reach.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # on a datagram socket this selects the route and sends nothing
        return str(probe.getsockname()[0])
