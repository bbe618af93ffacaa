"""Transport through shared memory, for an actor's rank 0 and rollout workers on one node, or on one GPU.

Rank 0 packs a bucket into memory that receivers can map, and publishes its location. Each receiver copies the bucket
and confirms. Rank 0 then reuses the memory. If all ranks share one GPU, where NCCL does not accept two ranks, the
memory is the GPU's (CUDA IPC). Otherwise it is host memory, pinned if the weights are on GPUs.

CUDA handles were tested on one H200. The path between two GPUs through host memory has not been tested on GPUs.
"""

from __future__ import annotations

import base64
import json
import os
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch

from recipe_gkd.errors import WeightSyncError
from recipe_gkd.weight_sync.mailbox import Topic
from recipe_gkd.weight_sync.shared_memory import SharedMapping
from recipe_gkd.weight_sync.transport import Transport

_MAX_MAPPED_SEGMENTS = 4
"""Segments that a receiver keeps mapped. A sender has two; a new mapping costs a page fault for each 4 KiB."""


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A broadcast in flight.

    Attributes:
        number: Number of the broadcast, starting at 1.
        buffer_U: Source on rank 0, destination elsewhere, uint8 [U].
    """

    number: int
    buffer_U: torch.Tensor


class IpcTransport(Transport):
    """A :class:`Transport` within one node. Its memory has no name in the file system, so no file is left behind.

    Attributes:
        _segments: On rank 0: address of a host memory segment -> its number, and the path under ``/proc``.
        _mapped: On other ranks: number -> mapped segment, least recently used first.
        _one_gpu: True if all ranks use the same GPU.
    """

    _segments: dict[int, tuple[int, str]]
    _mapped: OrderedDict[int, torch.Tensor]
    _n_segments = 0
    _one_gpu = False
    _n_broadcasts = 0

    def _open(self) -> None:
        self._segments, self._mapped = {}, OrderedDict()
        node, gpu = _location(self.device)
        collected = self.peers.rendezvous("connect, locations", json.dumps([node, gpu]))
        if self.rank == 0:
            locations = {rank: json.loads(text) for rank, text in collected.items()}
            if remote := [self.peers.label(rank) for rank, (other, _) in locations.items() if other != node]:
                raise WeightSyncError(
                    f"{', '.join(remote)} and {self.peers.label(0)} are on different nodes or in different "
                    "containers, so they cannot share memory",
                    phase="weight transport, connect",
                    remedy="set actor_rollout_ref.rollout.weight_transport=collective",
                )
            self._one_gpu = gpu is not None and all(other == gpu for _, other in locations.values())
        decision = self.peers.rendezvous("connect, memory", json.dumps(self._one_gpu))
        if self.rank != 0:
            self._one_gpu = json.loads(decision[0])

    def _close(self) -> None:
        self._mapped = OrderedDict()

    def bucket_topics(self) -> list[Topic]:
        """Return the topics of the buckets before, at and after the current one."""
        return [_topic(self._n_broadcasts + i) for i in range(-1, 2)]

    def allocate(self, n_bytes: int) -> torch.Tensor:
        """Return memory that all ranks can map, uint8 [n_bytes]."""
        if self._one_gpu:
            return super().allocate(n_bytes)
        descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(n_bytes, 1))
        mapping = SharedMapping(descriptor, max(n_bytes, 1))
        memory_U = mapping.tensor(self.device)
        self._n_segments += 1  # identifies the segment, because the operating system reuses paths
        self._segments[_address(memory_U)] = self._n_segments, f"/proc/{os.getpid()}/fd/{descriptor}"
        weakref.finalize(mapping, os.close, descriptor)  # the mapping lives as long as a tensor in it
        return memory_U[:n_bytes]

    def broadcast(self, buffer_U: torch.Tensor) -> _Copy:
        """Publish the location of a bucket on rank 0; elsewhere only register the destination."""
        self._n_broadcasts += 1
        work = _Copy(number=self._n_broadcasts, buffer_U=buffer_U)
        if self.rank == 0:
            _synchronize(buffer_U.device)
            # torch counts the users of a CUDA handle and expects each handle to be opened once: one for each receiver.
            handles = (
                [_export_cuda(buffer_U) for _ in self.peers.others]
                if self._one_gpu
                else [self._segments[_address(buffer_U)]]
            )
            location = json.dumps([handles, buffer_U.storage_offset(), buffer_U.numel()])
            self.peers.mailbox.publish(_topic(work.number), location)
        return work

    def finish(self, work: _Copy, phase: str) -> None:
        """Copy the bucket on a receiver; wait for all receivers on rank 0. See :meth:`Transport.finish`."""
        topic = _topic(work.number)
        collected = self.peers.collect(topic, phase)
        if self.rank == 0:
            self.peers.mailbox.retract(topic)
            return
        handles, offset, n_bytes = json.loads(collected[0])
        try:
            source_U = _import_cuda(handles[self.rank - 1]) if self._one_gpu else self._segment(*handles[0])
            work.buffer_U.copy_(source_U[offset : offset + n_bytes])
            _synchronize(self.device)
            del source_U  # closes its CUDA handle; the sender can reuse the memory as soon as it knows of the copy
        except (RuntimeError, OSError) as error:
            self.peers.fail(phase, error)
        self.peers.mailbox.publish(topic, "copied")
        self.peers.mailbox.retract(
            _topic(work.number - 2)
        )  # rank 0 has read it, or this bucket would not have been sent

    def _segment(self, number: int, path: str) -> torch.Tensor:
        if number not in self._mapped:
            self._mapped[number] = self._map(path)
        self._mapped.move_to_end(number)
        while len(self._mapped) > _MAX_MAPPED_SEGMENTS:
            self._mapped.popitem(last=False)
        return self._mapped[number]

    def _map(self, path: str) -> torch.Tensor:
        descriptor = os.open(path, os.O_RDWR)
        try:
            return SharedMapping(descriptor, 0).tensor(self.device)
        finally:
            os.close(descriptor)


def _topic(number: int) -> str:
    return f"bucket-{number}"


def _location(device: torch.device) -> tuple[str, str | None]:
    """Return the boot and pid namespace of this process, and the UUID of its GPU, independent of device numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    node = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return node, str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _synchronize(device: torch.device) -> None:
    """Wait for the copies of the current stream, so that other processes read them."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _export_cuda(memory_U: torch.Tensor) -> str:
    """Return the CUDA IPC handle of a storage, and its offset in the allocation, as ``torch.multiprocessing`` does."""
    _, *shared = memory_U.untyped_storage()._share_cuda_()
    return json.dumps([base64.b64encode(item).decode() if isinstance(item, bytes) else item for item in shared])


def _import_cuda(handle: str) -> torch.Tensor:
    # Handle, size, offset, handle of the reference counter, its offset, handle of an event, flag to wait for it.
    shared = [base64.b64decode(item) if isinstance(item, str) else item for item in json.loads(handle)]
    device = torch.cuda.current_device()  # it is the same GPU, but each process numbers its visible devices
    storage = torch.UntypedStorage._new_shared_cuda(device, *shared)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
