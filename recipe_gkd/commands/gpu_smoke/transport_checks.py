"""Weight transports between two processes. The receiver compares all tensors with what was sent.

The receiver copies the buckets on its own stream, as vLLM's tensor-parallel workers do. If memory of a bucket were
reused before the copy has run, its tensors would differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from recipe_gkd.commands.gpu_smoke.outcome import CheckFailed, Context
from recipe_gkd.commands.gpu_smoke.peer_process import running_peer, select_device
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.receiver import receive_weights
from recipe_gkd.weight_sync.sender import send_weights
from recipe_gkd.weight_sync.store import join_store, open_store
from recipe_gkd.weight_sync.transport_factory import open_transport

_TIMEOUT_S = 120.0
_VERSIONS = (1, 2, 3, 4)
_LABELS = ("the sender", "the receiver")
_ELEMENTS = {"cpu": 20_000, "cuda": 1 << 20}
"""Elements of a tensor, in bfloat16. A bucket holds four tensors."""
_TENSORS = 30
_MODULUS = 251
"""All values are integers below it, which bfloat16 represents exactly."""


def check_ipc(context: Context) -> str:
    """Transfer weights through shared memory: on one GPU, and between two if there are two."""
    pairs = [(0, 0), (0, 1)] if context.n_gpus > 1 else [(0, 0)]
    speeds = [_transfer(context, "ipc", sender, receiver) for sender, receiver in pairs]
    where = {"cpu": ["host memory"], "cuda": ["one GPU", "two GPUs through host memory"]}[context.device]
    return ", ".join(f"{name}: {speed:.2f} GB/s" for name, speed in zip(where, speeds, strict=False))


def check_collective(context: Context) -> str:
    """Transfer weights by NCCL between two GPUs, or by gloo on a CPU."""
    speed = _transfer(context, "collective", 0, 1)
    return f"{'NCCL between two GPUs' if context.device == 'cuda' else 'gloo'}: {speed:.2f} GB/s"


def _transfer(context: Context, transport: str, sender: int, receiver: int) -> float:
    """Send all versions. Return the speed of the fastest, in GB/s.

    Args:
        sender: GPU of this process.
        receiver: GPU of the other process.
    """
    device, meta = select_device(context.device, sender), _meta(context.device)
    store = open_store("127.0.0.1", _TIMEOUT_S)
    with running_peer(_receive, transport, store.port, context.device, receiver, timeout_s=2 * _TIMEOUT_S) as peer:
        link = open_transport(transport, store, rank=0, labels=_LABELS, device=device, timeout_s=_TIMEOUT_S)
        stats = [send_weights(link, v, meta, _weights(meta, v, device), _bucket_bytes(meta)) for v in _VERSIONS]
        wrong = peer.receive()
        link.close()
    if wrong:
        raise CheckFailed(f"{transport}: {len(wrong)} tensors have wrong values after the transfer: {wrong[:5]}")
    speed = max(each.n_bytes / each.seconds for each in stats) / 1e9
    context.figures[f"{transport}, GPU {sender} to {receiver}, GB/s" if context.n_gpus else f"{transport}, GB/s"] = (
        speed
    )
    return speed


def _receive(connection: Connection, transport: str, port: int, device_type: str, index: int) -> None:
    """Receive all versions, and send the list of the wrong tensors, as ``NAME of vVERSION``."""
    device, meta = select_device(device_type, index), _meta(device_type)
    store = join_store("127.0.0.1", port, _TIMEOUT_S)
    link = open_transport(transport, store, rank=1, labels=_LABELS, device=device, timeout_s=_TIMEOUT_S)
    own = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape, _ in meta}

    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            own[name].copy_(tensor)

    wrong = []
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()
    with stream:
        for version in _VERSIONS:
            receive_weights(link, version, meta, _bucket_bytes(meta), load)
            expected = _weights(meta, version, device)
            wrong += [f"{name} of v{version}" for name, tensor in expected if not torch.equal(own[name], tensor)]
    connection.send(wrong)
    link.close()


def _meta(device_type: str) -> list[TensorMeta]:
    """Return small tensors, and one that is larger than a bucket."""
    n = _ELEMENTS[device_type]
    shapes = [(n // 8, 8)] * _TENSORS
    shapes[_TENSORS // 2] = (n, 6)
    return [(f"layer.{i}.weight", shape, "bfloat16") for i, shape in enumerate(shapes)]


def _bucket_bytes(meta: list[TensorMeta]) -> int:
    rows, columns = meta[0][1]
    return 4 * 2 * rows * columns


def _weights(meta: list[TensorMeta], version: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    for i, (name, (rows, columns), _) in enumerate(meta):
        numbers = torch.arange(rows * columns, device=device) * 31 + i * 7 + version * 13
        yield name, (numbers % _MODULUS).bfloat16().view(rows, columns)
