"""Weight transfer backend for vLLM, on one tensor-parallel rank.

vLLM drives the lifecycle (start, update, finish), so the in-process engine and tensor-parallel worker processes share
one code path. An update is received in one of two ways. The rank chooses for each update, by its free memory:

- *double-buffered*: all buckets are kept, and loaded at the end. A failed or dropped transfer leaves the old weights.
  It needs memory for the weights twice.
- *in place*: each bucket is loaded when it arrives. A transfer that fails after the first bucket leaves mixed weights,
  and the engine is invalid until a complete update succeeds.

With ``lora.sync=adapter`` an update has the factors of an adapter only. They are always kept until the end, and the
weights of the model stay those of its folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from recipe_gkd.diagnostics.stack_dumps import allow_stack_dumps
from recipe_gkd.errors import ResourceError, WeightSyncError
from recipe_gkd.rollout.update_memory import (
    UpdateMemory,
    free_memory,
    largest_layer_bytes,
    memory_shortage,
    update_memory,
)
from recipe_gkd.rollout.vllm.adapters import ReceivedAdapter
from recipe_gkd.rollout.vllm.compat import (
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from recipe_gkd.rollout.vllm.reload import ModelReload
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.receiver import NamedTensors, receive_weights
from recipe_gkd.weight_sync.spec import TransportAddress
from recipe_gkd.weight_sync.stats import ReceivedUpdate
from recipe_gkd.weight_sync.store import join_store
from recipe_gkd.weight_sync.transport import Transport
from recipe_gkd.weight_sync.transport_factory import open_transport

BACKEND = "recipe_gkd"


@dataclass
class JoinTransport(WeightTransferInitInfo):
    """Arguments for joining a transport; equal on all ranks of an engine.

    Attributes:
        first_rank: Transport rank of the engine's first tensor-parallel rank.
        timeout_s: Deadline of each update.
    """

    address: TransportAddress
    first_rank: int
    timeout_s: float


@dataclass
class ReceiveUpdate(WeightTransferUpdateInfo):
    """Arguments for receiving one update.

    Attributes:
        version: Version of the weights.
        meta: Tensors of the update, in order.
        bucket_bytes: Maximum size of a bucket.
        double_buffered: True or False to choose the method; None chooses by free memory.
        n_sharing_host: Processes that receive the same update into the memory of this host.
    """

    version: int
    meta: list[TensorMeta]
    bucket_bytes: int
    double_buffered: bool | None
    n_sharing_host: int


@dataclass
class CheckMemory:
    """Arguments for the check of the memory for an update.

    Attributes:
        meta: Tensors of the update, in order.
        bucket_bytes: Maximum size of a bucket.
        n_sharing_host: Processes that receive the same update into the memory of this host.
    """

    meta: list[TensorMeta]
    bucket_bytes: int
    n_sharing_host: int


class BucketReceiver(WeightTransferEngine[JoinTransport, ReceiveUpdate]):
    """Receiver of weight updates on one tensor-parallel rank.

    Attributes:
        has_mixed_weights: True if the model may have weights of two versions.
        reload_failed: True after an error of a reload. vLLM then leaves layers without memory, or in other memory than
            CUDA graphs read, and a later update would seem to succeed.
        received: Measurements of the last received update; None before it.
        adapter: Adapter that updates replace; None if they replace the weights of the model.
    """

    init_info_cls = JoinTransport
    update_info_cls = ReceiveUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        allow_stack_dumps()  # vLLM constructs this class at the start of each of its worker processes
        self.has_mixed_weights = self.reload_failed = False
        self.received: ReceivedUpdate | None = None
        self._transport: Transport | None = None
        self._buffered: NamedTensors = []
        self._reload: ModelReload | None = None
        self.adapter = None if self.vllm_config.lora_config is None else ReceivedAdapter()

    def init_transfer_engine(self, init_info: JoinTransport) -> None:
        """Join a new transport, and leave the previous one."""
        self.shutdown()
        address = init_info.address
        store = join_store(address.host, address.port, init_info.timeout_s)
        self._transport = open_transport(
            address.transport,
            store,
            rank=init_info.first_rank + self.parallel_config.rank,
            labels=address.labels,
            device=torch.device(self.device),
            timeout_s=init_info.timeout_s,
        )

    def memory_shortage(self, request: CheckMemory) -> ResourceError | None:
        """Return an error if an update cannot fit into the free memory; None if it may fit.

        Raises:
            WeightSyncError: There is no transport.
        """
        cache = self.vllm_config.cache_config
        size = getattr(cache, "kv_cache_memory_bytes", None)
        key = "gpu_memory_utilization" if size is None else "kv_cache_memory_megabytes"
        now = cache.gpu_memory_utilization if size is None else size >> 20
        return memory_shortage(
            self._update_memory(request.meta, request.bucket_bytes),
            free_memory(torch.device(self.device)),
            bucket_bytes=request.bucket_bytes,
            n_sharing_host=request.n_sharing_host,
            cache_key=f"actor_rollout_ref.rollout.{key}",
            cache_value=now,
        )

    def start_weight_update(self) -> None:
        """Reset the buffers. The model stays unchanged, because the sender may never connect."""
        self._buffered = []

    def receive_weights(self, update_info: ReceiveUpdate) -> None:
        """Receive and verify all buckets; see :func:`recipe_gkd.weight_sync.receiver.receive_weights`.

        Raises:
            WeightSyncError: There is no transport, or the transfer failed.
            DeadlineError: The sender did not answer.
        """
        transport = self._joined()
        double_buffered = True if self.adapter is not None else update_info.double_buffered
        if double_buffered is None:
            needed = self._update_memory(update_info.meta, update_info.bucket_bytes)
            free = free_memory(torch.device(self.device))
            double_buffered = needed.fits_double_buffered(free, update_info.n_sharing_host)
        try:
            stats = receive_weights(
                transport,
                update_info.version,
                update_info.meta,
                update_info.bucket_bytes,
                self._buffered.extend if double_buffered else self._load,
            )
        except BaseException:
            self.drop()
            raise
        self.received = ReceivedUpdate(**asdict(stats), double_buffered=double_buffered)

    def finish_weight_update(self) -> None:
        """Load the buffered tensors, and finalize the model. An adapter is effective after :meth:`activate_adapter`.

        Raises:
            WeightSyncError: A weight was not received, or the engine has no layer for a factor of an adapter.
        """
        buffered, self._buffered = self._buffered, []
        if buffered and self.adapter is not None:
            self.adapter.replace(self.model, buffered)
        elif buffered:
            self._load(buffered)
        del buffered
        if (reload := self._finalize()) is not None:
            with self._reloading():
                reload.check_memory()
            reload.check_complete()
            self.has_mixed_weights = False
        self._release_cached_memory()

    def activate_adapter(self) -> None:
        """Make the model compute with the adapter. Call it after vLLM's end of an update, which removes adapters."""
        if self.adapter is not None:
            self.adapter.activate(self.model)

    def drop(self) -> None:
        """Discard the update. Layers that were loaded in part are finalized, so that the process survives."""
        self._buffered = []
        self._finalize()
        self._release_cached_memory()

    def shutdown(self) -> None:
        """Leave the transport. Idempotent."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _joined(self) -> Transport:
        if self._transport is None:
            raise WeightSyncError("this rollout worker has no weight transport", remedy="join one first")
        return self._transport

    def _update_memory(self, meta: Sequence[TensorMeta], bucket_bytes: int) -> UpdateMemory:
        """Return the memory that an update needs on this rank."""
        plan = self._joined().plan(meta, bucket_bytes)
        layer_bytes = largest_layer_bytes(self.model) if self.adapter is None else 0
        return update_memory([bucket.n_bytes for bucket in plan.buckets], layer_bytes)

    def _release_cached_memory(self) -> None:
        """Return the memory of the buckets to the device, where other processes may need it."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()

    def _load(self, tensors: NamedTensors) -> None:
        with self._reloading():
            if self._reload is None:
                self._reload = ModelReload(self.model, self.vllm_config, self.model_config)
                self.has_mixed_weights = True
                self._reload.start()
            self._reload.load(tensors)

    def _finalize(self) -> ModelReload | None:
        """Finalize the reload if there is one, and return it."""
        reload, self._reload = self._reload, None
        if reload is not None:
            with self._reloading():
                reload.finalize()
        return reload

    @contextmanager
    def _reloading(self) -> Iterator[None]:
        """Note an error of a reload, whatever its type."""
        try:
            yield
        except BaseException:
            self.reload_failed = True
            raise


def register() -> None:
    """Register the backend in vLLM. Importing this module does so in every process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)


register()
