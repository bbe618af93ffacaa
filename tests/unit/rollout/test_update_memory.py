"""Tests of the memory that a weight update needs, and of its release."""

from __future__ import annotations

import asyncio
import weakref
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe_gkd.errors import ResourceError
from recipe_gkd.rollout import ray_worker
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.rollout.update_memory import free_memory, largest_layer_bytes, memory_shortage, update_memory
from recipe_gkd.rollout.update_outcome import UpdateOutcome
from recipe_gkd.runtime import cgroup_memory
from recipe_gkd.weight_sync.spec import TransportAddress
from tests._support.errors import raises
from tests._support.rollout_models import config_for

MIB, GIB = 1 << 20, 1 << 30
ROLLOUT = "actor_rollout_ref.rollout"
BUCKET_KEY, CACHE_KEY = f"{ROLLOUT}.update_weights_bucket_megabytes", f"{ROLLOUT}.gpu_memory_utilization"
CUDA = torch.device("cuda", 0)


def use_device(monkeypatch: pytest.MonkeyPatch, *, free: int, reserved: int, active: int) -> None:
    """Let a GPU of 80 GiB have this free memory, and torch this memory on it."""
    segments = [
        {"device": 0, "total_size": reserved, "active_size": active, "segment_pool_id": (0, 0)},
        {"device": 1, "total_size": GIB, "active_size": 0, "segment_pool_id": (0, 0)},
    ]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)


class TestFreeMemory:
    def test_cuda_includes_cached_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use_device(monkeypatch, free=2 * GIB, reserved=30 * GIB, active=25 * GIB)
        assert free_memory(CUDA) == 7 * GIB

    @pytest.mark.parametrize(
        ("folder", "limit", "used", "prefix"),
        [
            (".", "memory.max", "memory.current", ""),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ],
    )
    def test_cpu_counts_the_limit_of_a_container_without_cached_files(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, limit: str, used: str, prefix: str
    ) -> None:
        monkeypatch.setattr(cgroup_memory, "CGROUPS", tmp_path)
        group = tmp_path / folder
        group.mkdir(exist_ok=True)
        assert free_memory(torch.device("cpu")) > 10 * MIB
        (group / limit).write_text(f"{10 * MIB}\n")
        (group / used).write_text(f"{8 * MIB}\n")
        assert free_memory(torch.device("cpu")) == 2 * MIB
        (group / "memory.stat").write_text(f"anon 7\n{prefix}active_file {MIB}\n{prefix}inactive_file {2 * MIB}\n")
        assert free_memory(torch.device("cpu")) == 5 * MIB

    def test_double_buffering_continues_after_the_first_update(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The buckets of an update stay in torch's cache, which the driver counts as used."""
        for cached in (0, 3 * GIB):
            use_device(monkeypatch, free=6 * GIB - cached, reserved=20 * GIB + cached, active=20 * GIB)
            assert update_memory([3 * GIB], GIB).fits_double_buffered(free_memory(CUDA), n_sharing_host=1)


class TestUpdateMemory:
    def test_in_place_needs_three_consecutive_buckets_and_the_largest_layer(self) -> None:
        needed = update_memory([1000, 500, 500, 400, 500], layer_bytes=1000)
        assert (needed.in_place, needed.double_buffered) == (3000, 5800)

    def test_small_model_needs_its_own_size(self) -> None:
        assert update_memory([300], layer_bytes=100).in_place == 400
        assert update_memory([], layer_bytes=100).in_place == 100

    def test_largest_layer_counts_own_parameters_only(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Embedding(100, 8, dtype=torch.bfloat16))
        assert largest_layer_bytes(model) == 1600

    def test_shortage_names_keys_and_numbers(self) -> None:
        # Qwen2.5-7B at the default bucket size: the embedding, and buckets of 512 MiB.
        needed = update_memory([1039 * MIB] + [512 * MIB] * 26, layer_bytes=1039 * MIB)
        options = dict(bucket_bytes=512 * MIB, n_sharing_host=1, cache_key=CACHE_KEY, cache_value=0.95)
        assert memory_shortage(needed, needed.in_place, **options) is None  # type: ignore[arg-type]
        error = memory_shortage(needed, 2 * GIB, **options)  # type: ignore[arg-type]
        assert error is not None and error.keys == (BUCKET_KEY, CACHE_KEY)
        for number in ("3.03 GiB", "2.01 for buckets", "1.01 for the largest layer", "28.03 if", "2.00 GiB are free"):
            assert number in error.what
        assert f"{BUCKET_KEY} (now 512)" in error.remedy and f"{CACHE_KEY} (now 0.95)" in error.remedy

    def test_shortage_counts_all_processes_of_a_host(self) -> None:
        needed = update_memory([MIB], layer_bytes=0)
        options = dict(bucket_bytes=MIB, cache_key=CACHE_KEY, cache_value=0.95)
        assert memory_shortage(needed, 3 * MIB, n_sharing_host=3, **options) is None  # type: ignore[arg-type]
        assert memory_shortage(needed, 3 * MIB, n_sharing_host=4, **options) is not None  # type: ignore[arg-type]


def make_receiver(free: int, monkeypatch: pytest.MonkeyPatch, **cache: Any) -> Any:
    """Return a receiver without vLLM's engine, on a device with ``free`` bytes."""
    from recipe_gkd.rollout.vllm import weights as vllm_weights

    receiver: Any = object.__new__(vllm_weights.BucketReceiver)
    receiver.device, receiver._buffered, receiver._reload, receiver.has_mixed_weights = "cuda:0", [], None, False
    receiver.adapter = None
    receiver.model = torch.nn.Linear(4, 4, bias=False)
    receiver.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(gpu_memory_utilization=0.93, **cache))
    plan = SimpleNamespace(buckets=[SimpleNamespace(n_bytes=MIB)] * 4)
    receiver._transport = SimpleNamespace(plan=lambda *_: plan)
    monkeypatch.setattr(vllm_weights, "free_memory", lambda _: free)
    return receiver


class TestReceiver:
    @pytest.mark.parametrize(
        ("cache", "key", "value"),
        [
            ({"kv_cache_memory_bytes": None}, "gpu_memory_utilization", "0.93"),
            ({"kv_cache_memory_bytes": 64 * MIB}, "kv_cache_memory_megabytes", "64"),
        ],
    )
    def test_shortage_names_the_key_of_the_kv_cache(
        self, monkeypatch: pytest.MonkeyPatch, cache: dict[str, Any], key: str, value: str
    ) -> None:
        from recipe_gkd.rollout.vllm.weights import CheckMemory

        request = CheckMemory(meta=[], bucket_bytes=MIB, n_sharing_host=1)
        error = make_receiver(2 * MIB, monkeypatch, **cache).memory_shortage(request)
        assert error.keys == (BUCKET_KEY, f"actor_rollout_ref.rollout.{key}")
        assert error.remedy.endswith(f"{key} (now {value})")
        assert make_receiver(4 * MIB, monkeypatch, **cache).memory_shortage(request) is None

    @pytest.mark.parametrize("end", ["finish_weight_update", "drop"])
    def test_end_of_an_update_frees_its_buckets_before_the_cache_is_emptied(
        self, monkeypatch: pytest.MonkeyPatch, end: str
    ) -> None:
        receiver = make_receiver(GIB, monkeypatch)
        bucket_U = torch.zeros(8)
        alive, seen = weakref.ref(bucket_U), []
        receiver._buffered = [("weight", bucket_U)]
        del bucket_U
        monkeypatch.setattr(receiver, "_load", lambda tensors: None, raising=False)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(alive() is not None))
        getattr(receiver, end)()
        assert seen == [False]


class FakeEngine:
    """Engine of a rollout worker. ``engine`` is its own argument of commands; ``shortage`` answers the memory check."""

    def __init__(self, shortage: ResourceError | None) -> None:
        self.shortage, self.calls, self.resumed = shortage, list[str](), False

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[UpdateOutcome]:
        self.calls.append(method)
        return [UpdateOutcome(shortage=self.shortage)]

    def run(self, command: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(command(self))
        except Exception as error:  # noqa: BLE001 - as the engine's thread does
            done.set_exception(error)
        return done

    def resume(self, failure: Any) -> None:
        self.resumed = True


def begin(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, n: int = 1) -> RolloutWorker:
    monkeypatch.setattr(ray_worker, "check_announced", lambda *_: None)
    worker: Any = RolloutWorker(config_for(Path("none")), rank=0, device="cpu")
    worker._engine = worker._gate._engine = engine
    worker._folder_shapes = {}

    async def run() -> None:
        for version in range(n):
            await worker.begin_weight_update(version, [])

    asyncio.run(run())
    return worker


class TestBegin:
    def test_shortage_is_refused_and_generation_continues(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = FakeEngine(ResourceError("a weight update does not fit", keys=(BUCKET_KEY,)))
        with raises(ResourceError, worker="rollout worker 0", keys=(BUCKET_KEY,)):
            begin(monkeypatch, engine)
        assert engine.resumed

    def test_memory_is_checked_once_for_each_transport(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine: Any = FakeEngine(None)
        worker = begin(monkeypatch, engine, n=2)
        assert engine.calls == ["gkd_check_memory"]
        worker._updates.join(engine, TransportAddress("127.0.0.1", 1, "collective", ()), 1, 1.0)
        worker._updates.check_memory(engine, [], MIB)
        assert engine.calls == ["gkd_check_memory", "gkd_join_transport", "gkd_check_memory"]
