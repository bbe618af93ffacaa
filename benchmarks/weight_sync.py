"""Measure the speed of a weight transfer, compared with the speed of the transport itself.

    python benchmarks/weight_sync.py [--quick] [--json FILE] [--max-params 1e9] [--receivers 1 2] [--transport ipc]

One sender process and one or two receiver processes run without Ray or an engine. They use gloo on a CPU, and NCCL if
each process has a GPU. ``--transport ipc`` uses shared memory instead. Each repetition measures four methods in turn,
and a ratio is the median over the repetitions, so that noise of the machine affects all methods alike:

    sync        this project: pack, send, verify the checksum, and load (copy into the parameters, like an engine)
    raw         the same buckets, packed in advance: one broadcast after another, each followed by its load
    overlapped  like raw, but the next broadcast runs during the load of the last one: the upper bound of the speed
    per tensor  one broadcast per tensor, followed by its load
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from recipe_gkd.weight_sync.bucket_plan import Bucket, TensorMeta, pack, plan_buckets, unpack
from recipe_gkd.weight_sync.ipc import IpcTransport
from recipe_gkd.weight_sync.receiver import receive_weights
from recipe_gkd.weight_sync.sender import send_weights
from recipe_gkd.weight_sync.store import join_store, open_store
from recipe_gkd.weight_sync.transport import Transport
from recipe_gkd.weight_sync.transport_factory import open_transport

TIMEOUT_S = 300.0
METHODS = ("sync", "raw", "overlapped", "per_tensor")
MANY_SMALL = "many small"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A list of tensors, as in a model."""

    name: str
    meta: list[TensorMeta]

    @property
    def n_params(self) -> int:
        return sum(math.prod(shape) for _, shape, _ in self.meta)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a bucket size, in MiB."""

    model: Model
    bucket_mb: float
    repeats: int

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * (1 << 20))


def transformer(name: str, *, hidden: int, layers: int, vocabulary: int, wide: float = 4.0) -> Model:
    """Return the Hugging Face names and shapes of a tied Qwen2 model in bfloat16."""
    inner, kv = int(hidden * wide), max(hidden // 4, 16)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        prefix = f"model.layers.{i}."
        for part, rows in (("q", hidden), ("k", kv), ("v", kv)):
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (rows, hidden)
            shapes[f"{prefix}self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}mlp.gate_proj.weight"] = shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    return Model(name=name, meta=[(tensor, shape, "bfloat16") for tensor, shape in shapes.items()])


def models() -> list[Model]:
    """Return models by size, and last a deep and narrow one: 4802 tensors of 64 to 8192 elements."""
    return [
        transformer("0.5M", hidden=96, layers=3, vocabulary=1024),
        transformer("10M", hidden=320, layers=6, vocabulary=6000),
        transformer("100M", hidden=768, layers=10, vocabulary=32000),
        transformer("500M", hidden=896, layers=24, vocabulary=151936, wide=5.43),
        transformer("1B", hidden=1536, layers=24, vocabulary=151936),
        transformer(MANY_SMALL, hidden=64, layers=400, vocabulary=128, wide=2.0),
    ]


def cases(max_params: float, n_receivers: int, *, quick: bool, buckets_mb: list[float]) -> list[Case]:
    """Return the cases that need at most half of the free memory: weights, packed buckets, a copy per receiver."""
    free = psutil.virtual_memory().available
    selected = []
    for model in models():
        n_bytes = 2 * model.n_params
        if model.n_params > max_params or n_bytes * (2 + n_receivers) > free / 2:
            continue
        sizes = [mb for mb in buckets_mb if mb * (1 << 20) <= 2 * n_bytes] or buckets_mb[:1]
        repeats = 3 if quick else 5 if n_bytes > 500e6 else 9
        selected += [Case(model=model, bucket_mb=mb, repeats=repeats) for mb in sizes]
    return selected


# Sender and receivers. All processes measure the same cases and methods in step.


def run_rank(
    rank: int, world: int, transport_name: str, device_type: str, port: Any, todo: list[Case], results: Any
) -> None:
    """Run one process. Rank 0 sends, and reports (index of the case, method, seconds) for each repetition."""
    torch.set_num_threads(1)
    shared = transport_name == "ipc"
    device = torch.device(device_type, 0 if shared else rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = open_store("127.0.0.1", TIMEOUT_S) if rank == 0 else join_store("127.0.0.1", port.get(), TIMEOUT_S)
    if rank == 0:
        for _ in range(1, world):
            port.put(store.port)
    labels = ["sender", *(f"receiver {i}" for i in range(1, world))]
    transport = open_transport(transport_name, store, rank=rank, labels=labels, device=device, timeout_s=TIMEOUT_S)
    for number, case in enumerate(todo):
        methods = sending(transport, case) if rank == 0 else receiving(transport, case)
        for repetition in range(-1, case.repeats):  # the first one warms up
            for method in METHODS:
                seconds = timed(transport, methods[method], repetition)
                if rank == 0 and repetition >= 0:
                    results.put((number, method, seconds))
        del methods
    transport.peers.begin_update()
    transport.peers.rendezvous("all done")
    transport.close()


def timed(transport: Transport, action: Callable[[int], None], repetition: int) -> float:
    """Return the seconds from the start of all processes to the end of all processes."""
    transport.peers.begin_update()
    transport.peers.rendezvous("start")
    started = time.perf_counter()
    action(repetition)
    if transport.device.type == "cuda":
        torch.cuda.synchronize(transport.device)
    transport.peers.begin_update()
    transport.peers.rendezvous("end")
    return time.perf_counter() - started


def sending(transport: Transport, case: Case) -> dict[str, Callable[[int], None]]:
    """Return the sender's part of each method."""
    meta, buckets = case.model.meta, plan_buckets(case.model.meta, case.bucket_bytes)
    weights = parameters(case.model, transport.device)
    packed = packed_buckets(transport, buckets, weights)
    single = plan_buckets(meta, 1)
    staging_U = transport.allocate(max(bucket.n_bytes for bucket in single))

    def per_tensor(_: int) -> None:
        for bucket in single:
            tensor = weights[bucket.slots[0].name]
            buffer_U = tensor.view(-1).view(torch.uint8)
            if isinstance(transport, IpcTransport):
                buffer_U = staging_U[: buffer_U.numel()].copy_(buffer_U)
            transport.finish(transport.broadcast(buffer_U), "tensor")

    def raw(_: int) -> None:
        for buffer_U in packed:
            transport.finish(transport.broadcast(buffer_U), "raw")

    def overlapped(_: int) -> None:
        works = []
        for buffer_U in packed:
            works.append(transport.broadcast(buffer_U))
            if len(works) > 1:
                transport.finish(works.pop(0), "overlapped")
        transport.finish(works[0], "overlapped")

    def sync(repetition: int) -> None:
        send_weights(transport, repetition, meta, weights.items(), case.bucket_bytes)

    return {"sync": sync, "raw": raw, "overlapped": overlapped, "per_tensor": per_tensor}


def receiving(transport: Transport, case: Case) -> dict[str, Callable[[int], None]]:
    """Return a receiver's part of each method."""
    meta, buckets = case.model.meta, plan_buckets(case.model.meta, case.bucket_bytes)
    weights = parameters(case.model, transport.device)
    largest = max(bucket.n_bytes for bucket in buckets)
    pair = [torch.empty(largest, dtype=torch.uint8, device=transport.device).fill_(1) for _ in range(2)]

    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            weights[name].copy_(tensor)

    def per_tensor(_: int) -> None:
        for name, weight in weights.items():
            buffer_U = pair[0][: weight.nbytes]
            transport.finish(transport.broadcast(buffer_U), "tensor")
            load([(name, buffer_U.view(weight.dtype).view(weight.shape))])

    def raw(_: int) -> None:
        for bucket in buckets:
            buffer_U = pair[0][: bucket.n_bytes]
            transport.finish(transport.broadcast(buffer_U), "raw")
            load(unpack(bucket, buffer_U))

    def overlapped(_: int) -> None:
        works: list[tuple[Any, Bucket, torch.Tensor]] = []
        for i, bucket in enumerate([*buckets, None]):
            if bucket is not None:
                buffer_U = pair[i % 2][: bucket.n_bytes]
                works.append((transport.broadcast(buffer_U), bucket, buffer_U))
            if i > 0:
                work, done, received_U = works.pop(0)
                transport.finish(work, "overlapped")
                load(unpack(done, received_U))

    def sync(repetition: int) -> None:
        receive_weights(transport, repetition, meta, case.bucket_bytes, load)

    return {"sync": sync, "raw": raw, "overlapped": overlapped, "per_tensor": per_tensor}


def parameters(model: Model, device: torch.device) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(shape, i % 97, dtype=getattr(torch, dtype), device=device)
        for i, (name, shape, dtype) in enumerate(model.meta)
    }


def packed_buckets(transport: Transport, buckets: list[Bucket], weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    memory_U = transport.allocate(sum(bucket.n_bytes for bucket in buckets))
    packed = list(memory_U.split([bucket.n_bytes for bucket in buckets]))
    tensors = iter(weights.items())
    for bucket, buffer_U in zip(buckets, packed, strict=True):
        pack(bucket, tensors, buffer_U)
    return packed


# Parent process.


def measure(todo: list[Case], n_receivers: int, transport: str, device_type: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each case, in order.

    Raises:
        RuntimeError: A process failed, or there was no measurement within ``TIMEOUT_S``.
    """
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), context.Queue()
    world = 1 + n_receivers
    processes = [
        context.Process(target=run_rank, args=(rank, world, transport, device_type, port, todo, results), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        for number, case in enumerate(todo):
            seconds: dict[str, list[float]] = {method: [] for method in METHODS}
            for _ in range(case.repeats * len(METHODS)):
                reported, method, duration = _next(results, processes)
                assert reported == number
                seconds[method].append(duration)
            yield row(case, n_receivers, transport, seconds)
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _next(results: Any, processes: list[Any]) -> Any:
    silent_since = time.monotonic()
    while time.monotonic() - silent_since < TIMEOUT_S:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            if failed := [i for i, process in enumerate(processes) if process.exitcode]:
                raise RuntimeError(f"process {failed[0]} failed; see its output above") from None
    raise RuntimeError(f"no measurement within {TIMEOUT_S:g} s")


def row(case: Case, n_receivers: int, transport: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the figures of one case."""

    def ratio(method: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[method], seconds[to], strict=True))

    megabytes = sum(bucket.n_bytes for bucket in plan_buckets(case.model.meta, case.bucket_bytes)) / 1e6
    median = {method: statistics.median(seconds[method]) for method in METHODS}
    return {
        "model": case.model.name,
        "params": case.model.n_params,
        "tensors": len(case.model.meta),
        "transport": transport,
        "receivers": n_receivers,
        "bucket_mb": case.bucket_mb,
        "megabytes": megabytes,
        **{f"{method}_s": median[method] for method in METHODS},
        **{f"{method}_min_s": min(seconds[method]) for method in METHODS},
        "mb_per_s": megabytes / median["sync"],
        "sync_over_raw": ratio("sync", "raw"),
        "sync_over_overlapped": ratio("sync", "overlapped"),
        "speedup_over_per_tensor": ratio("per_tensor", "sync"),
    }


HEADER = (
    f"{'model':>10} {'tensors':>7} {'MB':>7} {'recv':>4} {'bucket':>7} | "
    f"{'sync':>8} {'raw':>8} {'overlap':>8} {'per tens':>8} | {'MB/s':>6} {'/raw':>5} {'/over':>5} {'x tens':>6}"
)


def line(found: dict[str, Any]) -> str:
    """Return a row as a line of the table."""
    times = " ".join(f"{1000 * found[f'{method}_s']:>6.1f}ms" for method in METHODS)
    return (
        f"{found['model']:>10} {found['tensors']:>7} {found['megabytes']:>7.1f} {found['receivers']:>4} "
        f"{found['bucket_mb']:>5g}MB | {times} | {found['mb_per_s']:>6.0f} {found['sync_over_raw']:>5.2f} "
        f"{found['sync_over_overlapped']:>5.2f} {found['speedup_over_per_tensor']:>6.2f}"
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the largest model, and of many small tensors.

    Both are for the best bucket size, with the smallest number of receivers.
    """

    def best(candidates: list[dict[str, Any]]) -> dict[str, Any]:
        fewest = min(found["receivers"] for found in candidates)
        return min(
            (found for found in candidates if found["receivers"] == fewest), key=lambda found: float(found["sync_s"])
        )

    largest = max(found["params"] for found in rows)
    top = best([found for found in rows if found["params"] == largest])
    keys = ("model", "bucket_mb", "sync_over_raw", "sync_over_overlapped", "speedup_over_per_tensor", "mb_per_s")
    found = {key: top[key] for key in keys}
    if small := [found for found in rows if found["model"] == MANY_SMALL]:
        found["many_small_tensors"] = {key: best(small)[key] for key in keys}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="names of models, such as 1B or 'many small' (default: all)")
    parser.add_argument("--max-params", type=float, default=1.2e9, help="skip models with more parameters")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--buckets", type=float, nargs="+", default=[1, 16, 64, 512], help="bucket sizes in MiB")
    parser.add_argument("--transport", choices=["collective", "ipc"], default="collective")
    parser.add_argument("--quick", action="store_true", help="one receiver, up to 100M parameters, two bucket sizes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.quick:
        args.max_params, args.receivers, args.buckets = min(args.max_params, 1.2e8), [1], [16, 64]
    n_gpus = torch.cuda.device_count()
    rows = []
    for n_receivers in args.receivers:
        enough_gpus = n_gpus > 0 if args.transport == "ipc" else n_gpus > n_receivers
        device_type = "cuda" if enough_gpus else "cpu"
        todo = cases(args.max_params, n_receivers, quick=args.quick, buckets_mb=sorted(args.buckets))
        todo = [case for case in todo if args.models is None or case.model.name in args.models]
        print(f"{args.transport}, {device_type}, {n_receivers} receiver(s)\n{HEADER}", flush=True)
        for found in measure(todo, n_receivers, args.transport, device_type):
            rows.append(found | {"device": device_type})
            print(line(found), flush=True)
    found = summary(rows)
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
