"""The two ends of a channel, as threads of one process or as processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.collective import CollectiveTransport
from recipe_gkd.weight_sync.ipc import IpcTransport
from recipe_gkd.weight_sync.transport import Transport, join_store, open_store

CPU = torch.device("cpu")
LABELS = ["actor worker 0", *(f"rollout worker {rank}" for rank in range(3))]
KINDS = [CollectiveTransport, IpcTransport]

META: list[TensorMeta] = [(f"layer.{i}.weight", (40, 10), "float32") for i in range(5)] + [("bias", (3,), "bfloat16")]


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator).to(getattr(torch, dtype)) for name, shape, dtype in META}


def spawn(act: Callable[[], Any]) -> Future[Any]:
    """Run in a thread of its own, which does not keep the process alive."""
    done: Future[Any] = Future()

    def main() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            done.set_exception(error)

    threading.Thread(target=main, daemon=True).start()
    return done


def connect(
    n_receivers: int, timeout_s: float, kind: type[Transport] = CollectiveTransport, receivers: type[Transport] | None = None
) -> list[Any]:
    """A transport of which all ends live here; ``receivers``: their class, if it is not the sender's."""
    store = open_store("127.0.0.1", timeout_s)
    labels = LABELS[: 1 + n_receivers]

    def end(rank: int) -> Transport:
        own = store if rank == 0 else join_store("127.0.0.1", store.port, timeout_s)
        cls = (receivers or kind) if rank else kind
        return cls(own, rank=rank, labels=labels, device=CPU, timeout_s=timeout_s)

    ends = [spawn(lambda rank=rank: end(rank)) for rank in range(1 + n_receivers)]  # type: ignore[misc]
    return [future.result(timeout_s + 5) for future in ends]


def stalls(after: int, resume: threading.Event) -> Iterator[tuple[str, torch.Tensor]]:
    """An export that stops in the middle."""
    for i, item in enumerate(weights().items()):
        if i == after:
            resume.wait()
        yield item


class Timer:
    def __enter__(self) -> Timer:
        self._started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._started
