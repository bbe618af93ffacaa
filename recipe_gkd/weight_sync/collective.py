"""Buckets by collectives: a private gloo or NCCL group between the actor's rank 0 and the rollout workers.

It does not touch ``torch.distributed``'s default group, which belongs to Megatron on one end and to vLLM on the other.
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

_POLL_S = 0.0002
_LOOK_S = 0.2


class CollectiveTransport(Transport):
    """A :class:`Transport` between any machines: NCCL if ``device`` is a GPU (one of its own for each end), or gloo."""

    _group: Any = None

    sends_in_place = True

    def _open(self) -> None:
        self._group = _process_group(self.store, self.rank, self.world, self.device, self.timeout_s)

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def broadcast(self, buffer_U: torch.Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self.left()
        return self._group.broadcast([buffer_U], options)

    def finish(self, work: dist.Work, phase: str) -> None:
        try:
            if self.device.type == "cuda":
                self._finish_on_stream(work, phase)
            else:
                work.wait(self.left())
        except GkdError:
            raise
        except RuntimeError as error:
            self.fail(phase, error, silent=self.others)

    def _finish_on_stream(self, work: dist.Work, phase: str) -> None:
        # NCCL's ``Work.wait`` only orders streams, and NCCL does not notice a peer's death: the host has to look.
        looked = time.monotonic()
        while not work.is_completed():
            now = time.monotonic()
            if now > self.deadline:
                raise RuntimeError("timed out")
            if now > looked + _LOOK_S:
                self.check_interrupted(phase)
                looked = now
            time.sleep(_POLL_S)
        work.wait()


def _process_group(store: dist.Store, rank: int, world: int, device: torch.device, timeout_s: float) -> Any:
    prefixed = dist.PrefixStore("group", store)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        # NCCL's own watchdog would end the process; it must never be earlier than our deadline.
        nccl._timeout = timedelta(seconds=2 * timeout_s + 60)
        return dist.ProcessGroupNCCL(prefixed, rank, world, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timedelta(seconds=timeout_s)
    assert isinstance(store, dist.TCPStore)
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address_toward(store.host))]
    return dist.ProcessGroupGloo(prefixed, rank, world, gloo)


def _own_address_toward(host: str) -> str:
    """The address of the interface that leads to ``host``; gloo's own choice, the host name's, may be unreachable."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: chooses the route and sends nothing
        return str(probe.getsockname()[0])
