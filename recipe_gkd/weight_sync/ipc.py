"""Buckets through shared memory, for an actor's rank 0 and rollout workers on one node, or on one GPU.

The sender packs into memory that the receivers can map, and tells them in a note where a bucket is; each receiver
copies it out and says so; then the sender may write there again. The memory is the GPU's own, by CUDA IPC, if all ends
are on one GPU (where NCCL refuses to have two ranks), or else the host's.

Not yet run on a GPU: neither the CUDA handles nor the way between two GPUs through the host's memory.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch

from recipe_gkd.errors import WeightSyncError
from recipe_gkd.weight_sync.transport import Transport

_MAPPED = 4
"""Segments that a receiver keeps mapped; a sender has two, and mapping one anew costs a page fault each 4 KiB."""


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A broadcast that was started."""

    number: int
    buffer_U: torch.Tensor


class IpcTransport(Transport):
    """A :class:`Transport` within one node. Nothing of it has a name in the file system, so nothing is ever left."""

    _segments: dict[int, tuple[int, str]]
    """Rank 0: address of a segment of host memory -> its number, and the path by which others find it."""
    _mapped: OrderedDict[int, torch.Tensor]
    """The others: number -> segment; the one used last is at the end."""
    _n_segments = 0
    _one_gpu = False
    _n_broadcasts = 0

    def _open(self) -> None:
        self._segments, self._mapped = {}, OrderedDict()
        node, gpu = _place(self.device)
        heard = self.rendezvous("connect, places", json.dumps([node, gpu]))
        if self.rank == 0:
            places = {rank: json.loads(text) for rank, text in heard.items()}
            if away := [self.label(rank) for rank, place in places.items() if place[0] != node]:
                raise WeightSyncError(
                    f"weight channel, connect: {', '.join(away)} is on another node, or in another container, than "
                    f"{self.label(0)}, and cannot map its memory; set "
                    "actor_rollout_ref.rollout.weight_transport=collective"
                )
            self._one_gpu = gpu is not None and all(place[1] == gpu for place in places.values())
        said = self.rendezvous("connect, memory", json.dumps(self._one_gpu))
        if self.rank != 0:
            self._one_gpu = json.loads(said[0])

    def _close(self) -> None:
        self._mapped = OrderedDict()

    def _due(self) -> list[object]:
        return [*super()._due(), *(_topic(self._n_broadcasts + i) for i in range(-1, 2))]

    def allocate(self, n_bytes: int) -> torch.Tensor:
        if self._one_gpu:
            return super().allocate(n_bytes)
        descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(n_bytes, 1))
        memory = mmap.mmap(descriptor, max(n_bytes, 1))
        memory_U = torch.frombuffer(memory, dtype=torch.uint8)
        self._n_segments += 1  # a path may come again
        self._segments[_address(memory_U)] = self._n_segments, f"/proc/{os.getpid()}/fd/{descriptor}"
        weakref.finalize(memory, os.close, descriptor)  # the mapping lives as long as a tensor in it
        return memory_U[:n_bytes]

    def broadcast(self, buffer_U: torch.Tensor) -> _Copy:
        self._n_broadcasts += 1
        work = _Copy(number=self._n_broadcasts, buffer_U=buffer_U)
        if self.rank == 0:
            _settle(buffer_U.device)
            # torch counts the users of a CUDA handle, and expects that each is opened once: one for each receiver.
            handles = (
                [_cuda_handle(buffer_U) for _ in self.others] if self._one_gpu else [self._segments[_address(buffer_U)]]
            )
            self.publish(_topic(work.number), json.dumps([handles, buffer_U.storage_offset(), buffer_U.numel()]))
        return work

    def finish(self, work: _Copy, phase: str) -> None:
        """On rank 0: until every receiver has its copy. A receiver makes it here."""
        topic = _topic(work.number)
        heard = self.collect(topic, phase)
        if self.rank == 0:
            self.retract(topic)
            return
        handles, offset, n_bytes = json.loads(heard[0])
        try:
            source_U = _cuda_memory(handles[self.rank - 1]) if self._one_gpu else self._segment(*handles[0])
            work.buffer_U.copy_(source_U[offset : offset + n_bytes])
            _settle(self.device)
        except (RuntimeError, OSError) as error:
            self.fail(phase, error)
        self.publish(topic, "taken")
        self.retract(_topic(work.number - 2))  # rank 0 has heard it, or would not have come to this one

    def _segment(self, number: int, path: str) -> torch.Tensor:
        if number not in self._mapped:
            self._mapped[number] = _host_memory(path)
        self._mapped.move_to_end(number)
        while len(self._mapped) > _MAPPED:
            self._mapped.popitem(last=False)
        return self._mapped[number]


def _topic(number: int) -> str:
    return f"bucket-{number}"


def _place(device: torch.device) -> tuple[str, str | None]:
    """The machine, as far as processes of it see each other; and the GPU, wherever it stands in who is visible."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    node = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return node, str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _settle(device: torch.device) -> None:
    """What was copied is there for other processes, too."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _host_memory(path: str) -> torch.Tensor:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _cuda_handle(memory_U: torch.Tensor) -> str:
    """What ``torch.multiprocessing`` would pickle of a storage: a CUDA IPC handle, and where in it the storage lies."""
    _, *shared = memory_U.untyped_storage()._share_cuda_()
    return json.dumps([base64.b64encode(item).decode() if isinstance(item, bytes) else item for item in shared])


def _cuda_memory(handle: str) -> torch.Tensor:
    # Handle, size, offset, handle of the reference counter, its offset, handle of an event, whether to wait for it.
    shared = [base64.b64decode(item) if isinstance(item, str) else item for item in json.loads(handle)]
    device = torch.cuda.current_device()  # one GPU, but each process numbers those that it sees
    storage = torch.UntypedStorage._new_shared_cuda(device, *shared)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
