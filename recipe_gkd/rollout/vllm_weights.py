"""The vLLM worker's end of a weight update: a transfer backend of our own, and the calls that reach it.

vLLM owns the lifecycle (start, update, finish), so one code path serves the in-process engine and tensor-parallel
worker processes. Two ways to take an update, chosen anew for each by the memory that is free:

- *staged*: all buckets are kept, and loaded at the end. Until then nothing has changed, so a transfer that fails or is
  dropped leaves the old weights. Needs the weights twice.
- *streamed*: each bucket is loaded when it arrives. A transfer that fails after the first bucket leaves a mixture, and
  the worker is unfit until a full update succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from recipe_gkd.diagnostics.stack_dumps import allow_stack_dumps
from recipe_gkd.errors import WeightSyncError
from recipe_gkd.rollout.device_loss import is_device_loss
from recipe_gkd.rollout.vllm_compat import (
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    finalize_layerwise_reload,
    give_back_expert_kernels,
    initialize_layerwise_reload,
    model_parameter_names,
    refresh_tied_head,
    set_current_vllm_config,
    take_expert_kernels,
)
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.receiver import NamedTensors, receive_weights
from recipe_gkd.weight_sync.transport import Transport, join_store
from recipe_gkd.weight_sync.transport_factory import connect

BACKEND = "recipe_gkd"


@dataclass
class JoinChannel(WeightTransferInitInfo):
    host: str
    port: int
    first_rank: int
    """Channel rank of this engine's first worker."""
    labels: list[str]
    timeout_s: float
    transport: str
    """See ``recipe_gkd.weight_sync.transport_factory.TRANSPORTS``; all ends must be told the same."""


@dataclass
class ReceiveWeights(WeightTransferUpdateInfo):
    version: int
    meta: list[TensorMeta]
    bucket_bytes: int
    staged: bool | None
    """None: if there is room."""
    n_sharing: int
    """Receiving processes that share this one's memory."""


class BucketReceiver(WeightTransferEngine[JoinChannel, ReceiveWeights]):
    """One a vLLM worker. ``dirty`` says that the model may hold a mixture of two versions."""

    init_info_cls = JoinChannel
    update_info_cls = ReceiveWeights

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        allow_stack_dumps()  # here, as vLLM makes this one at the start of each of its worker processes
        self.dirty = False
        self.outcome: dict[str, Any] = {}
        self._channel: Transport | None = None
        self._staged: NamedTensors = []
        self._loading = False
        self._expected: set[str] = set()
        self._loaded: set[str] = set()
        self._expert_kernels: list[tuple[Any, Any]] = []

    def init_transfer_engine(self, init_info: JoinChannel) -> None:
        self.shutdown()
        store = join_store(init_info.host, init_info.port, init_info.timeout_s)
        self._channel = connect(
            init_info.transport,
            store,
            rank=init_info.first_rank + self.parallel_config.rank,
            labels=init_info.labels,
            device=torch.device(self.device),
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Nothing yet: a sender that never comes shall have changed nothing."""
        self._staged = []

    def receive_weights(self, update_info: ReceiveWeights) -> None:
        if self._channel is None:
            raise WeightSyncError("this rollout worker has no weight channel; connect one first")
        staged = update_info.staged
        if staged is None:
            n_bytes = self._channel.plan(update_info.meta, update_info.bucket_bytes).n_bytes
            staged = room_to_stage(n_bytes, torch.device(self.device), update_info.n_sharing)
        try:
            stats = receive_weights(
                self._channel,
                update_info.version,
                update_info.meta,
                update_info.bucket_bytes,
                self._staged.extend if staged else self._load,
            )
        except BaseException:
            self.drop()
            raise
        self.outcome = asdict(stats) | {"staged": staged}

    def finish_weight_update(self) -> None:
        """Load what is staged, and make the model whole. Raises :class:`WeightSyncError` if a weight did not come."""
        staged, self._staged = self._staged, []
        if staged:
            self._load(staged)
        if self._loading:
            self._finalize()
            if missing := sorted(self._expected - self._loaded):
                raise WeightSyncError(
                    f"{len(missing)} weights of the rollout engine did not come, such as {', '.join(missing[:3])}; the "
                    "actor must export every weight of the model under its Hugging Face name"
                )
            self.dirty = False

    def drop(self) -> None:
        """Forget what came. Layers loaded in part leave the meta device again, so that the process survives."""
        self._staged = []
        if self._loading:
            self._finalize()

    def shutdown(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _load(self, tensors: NamedTensors) -> None:
        if not self._loading:
            self._expected, self._loaded = model_parameter_names(self.model), set()
            self._loading = self.dirty = True
            self._expert_kernels = take_expert_kernels(self.model)
            initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(iter(tensors))  # type: ignore[operator]
        self._loaded |= loaded if loaded is not None else self._expected

    def _finalize(self) -> None:
        self._loading = False
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model, self.model_config)
            give_back_expert_kernels(self._expert_kernels)
            refresh_tied_head(self.model)


def room_to_stage(n_bytes: int, device: torch.device, n_sharing: int = 1) -> bool:
    """Return True if the copies of all processes together take at most half of the free memory where they go.

    Args:
        n_bytes: Size of one copy.
        device: CUDA device, of which this process has the memory for itself, or the host.
        n_sharing: Processes that receive the same update into the memory of this host; of no effect on CUDA.
    """
    if device.type == "cuda":
        return 2 * n_bytes <= torch.cuda.mem_get_info(device)[0]
    return 2 * n_bytes * n_sharing <= psutil.virtual_memory().available


class WeightUpdateCalls:
    """Methods added to vLLM's worker class (``worker_extension_cls``), called by ``LLMEngine.collective_rpc``.

    They return what went wrong instead of raising it: with several worker processes vLLM stops at the first exception,
    and takes the answers of the others for those to the next call.
    """

    weight_transfer_engine: Any
    _weight_update_active: bool
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def gkd_join_channel(self, info: dict[str, Any]) -> dict[str, Any]:
        return self._gkd_outcome(lambda: self.init_weight_transfer_engine(info))

    def gkd_receive_weights(self, info: dict[str, Any]) -> dict[str, Any]:
        def receive() -> None:
            self.start_weight_update()
            self.update_weights(info)

        return self._gkd_outcome(receive)

    def gkd_commit_weights(self) -> dict[str, Any]:
        def commit() -> None:
            try:
                self.finish_weight_update()
            except Exception:
                self._gkd_drop()
                raise

        return self._gkd_outcome(commit)

    def gkd_drop_weights(self) -> dict[str, Any]:
        return self._gkd_outcome(self._gkd_drop)

    def _gkd_drop(self) -> None:
        self.weight_transfer_engine.drop()
        if self._weight_update_active:
            self.finish_weight_update()  # of nothing: ends vLLM's own bracket

    def gkd_close_channel(self) -> dict[str, Any]:
        return self._gkd_outcome(self.weight_transfer_engine.shutdown)

    def _gkd_outcome(self, act: Callable[[], None]) -> dict[str, Any]:
        engine: BucketReceiver = self.weight_transfer_engine
        engine.outcome = {}
        error, device_is_lost = None, False
        try:
            act()
        except Exception as caught:  # noqa: BLE001 - raised by WeightUpdates, with the name of the worker
            error, device_is_lost = f"{type(caught).__name__}: {caught}", is_device_loss(caught)
        return {"error": error, "device_is_lost": device_is_lost, "dirty": engine.dirty} | engine.outcome


def register() -> None:
    """Make the backend known to vLLM in this process. Worker processes do it by importing this module."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)


register()
