"""All ranks of a transport in one process, and the weights that the tests transfer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.collective import CollectiveTransport
from recipe_gkd.weight_sync.ipc import IpcTransport
from recipe_gkd.weight_sync.store import join_store, open_store
from recipe_gkd.weight_sync.transport import Transport
from tests._support.waiting import PATIENCE_S

CPU = torch.device("cpu")
LABELS = ["actor worker 0", *(f"rollout worker {rank}" for rank in range(3))]
KINDS = [CollectiveTransport, IpcTransport]

META: list[TensorMeta] = [(f"layer.{i}.weight", (40, 10), "float32") for i in range(5)] + [("bias", (3,), "bfloat16")]


def make_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator).to(getattr(torch, dtype)) for name, shape, dtype in META}


def spawn(act: Callable[[], Any]) -> Future[Any]:
    """Run ``act`` in a daemon thread, and return the future of its result."""
    done: Future[Any] = Future()

    def main() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001 - the test reads it
            done.set_exception(error)

    threading.Thread(target=main, daemon=True).start()
    return done


def connect_all(
    n_receivers: int,
    timeout_s: float,
    kind: type[Transport] = CollectiveTransport,
    receiver_kind: type[Transport] | None = None,
) -> list[Any]:
    """Return all ranks of a new transport whose updates have ``timeout_s``.

    ``receiver_kind`` is the class of the receivers, by default ``kind``.
    """
    store = open_store("127.0.0.1", PATIENCE_S)
    labels = LABELS[: 1 + n_receivers]

    def connect(rank: int) -> Transport:
        own = store if rank == 0 else join_store("127.0.0.1", store.port, PATIENCE_S)
        cls = (receiver_kind or kind) if rank else kind
        transport = cls(own, rank=rank, labels=labels, device=CPU, timeout_s=PATIENCE_S)
        transport.peers.timeout_s = timeout_s
        return transport

    ranks = [spawn(lambda rank=rank: connect(rank)) for rank in range(1 + n_receivers)]  # type: ignore[misc]
    return [future.result(PATIENCE_S) for future in ranks]


def stalling_export(after: int, resume: threading.Event) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights, but wait for ``resume`` before the tensor number ``after``."""
    for i, item in enumerate(make_weights().items()):
        if i == after:
            resume.wait()
        yield item
