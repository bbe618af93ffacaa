"""Methods that vLLM's worker class gets, in the process of each tensor-parallel rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from recipe_gkd.errors import GkdError, ResourceError, WorkerError
from recipe_gkd.rollout.update_outcome import UpdateOutcome
from recipe_gkd.rollout.vllm.compat import unpinned_nccl_env
from recipe_gkd.rollout.vllm.device_loss import is_device_loss
from recipe_gkd.rollout.vllm.sleep import SleepCalls
from recipe_gkd.rollout.vllm.weights import BucketReceiver, CheckMemory
from teacher.common.vllm_worker import LogitsCalls


class WeightUpdateCalls:
    """Steps of a weight update, called by ``LLMEngine.collective_rpc``.

    They return errors instead of raising them. With several worker processes, vLLM stops at the first exception, and
    takes the results of the other processes for results of the next call.
    """

    # Members of vLLM's worker class.
    weight_transfer_engine: BucketReceiver
    _weight_update_active: bool
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def gkd_activate_adapter(self) -> None:
        """Activate the adapter of an engine that was just built."""
        self.weight_transfer_engine.activate_adapter()

    def gkd_join_transport(self, info: dict[str, Any]) -> UpdateOutcome:
        """Join a transport; ``info`` has the fields of :class:`JoinTransport`.

        With ``VLLM_BATCH_INVARIANT=1`` vLLM sets NCCL variables in this process. They must not apply to a communicator
        with actors, which do not have them: NCCL would then hang.
        """

        def join() -> None:
            with unpinned_nccl_env():
                self.init_weight_transfer_engine(info)

        return self._gkd_outcome(join)

    def gkd_check_memory(self, info: dict[str, Any]) -> UpdateOutcome:
        """Check the memory for an update; ``info`` has the fields of :class:`CheckMemory`."""
        shortage: ResourceError | None = None

        def check() -> None:
            nonlocal shortage
            shortage = self.weight_transfer_engine.memory_shortage(CheckMemory(**info))

        return replace(self._gkd_outcome(check), shortage=shortage)

    def gkd_receive_weights(self, info: dict[str, Any]) -> UpdateOutcome:
        """Receive an update; ``info`` has the fields of :class:`ReceiveUpdate`."""

        def receive() -> None:
            self.start_weight_update()
            self.update_weights(info)

        return replace(self._gkd_outcome(receive), received=self.weight_transfer_engine.received)

    def gkd_commit_weights(self) -> UpdateOutcome:
        """Load the received update."""

        def commit() -> None:
            try:
                self._gkd_finish()
            except Exception:
                self._gkd_drop()
                raise

        return self._gkd_outcome(commit)

    def gkd_drop_weights(self) -> UpdateOutcome:
        """Discard the update."""
        return self._gkd_outcome(self._gkd_drop)

    def gkd_close_transport(self) -> UpdateOutcome:
        """Leave the transport."""
        return self._gkd_outcome(self.weight_transfer_engine.shutdown)

    def _gkd_drop(self) -> None:
        self.weight_transfer_engine.drop()
        if self._weight_update_active:
            self._gkd_finish()  # without tensors: only ends vLLM's own state of an update

    def _gkd_finish(self) -> None:
        self.finish_weight_update()
        self.weight_transfer_engine.activate_adapter()

    def _gkd_outcome(self, action: Callable[[], None]) -> UpdateOutcome:
        receiver = self.weight_transfer_engine
        receiver.received = None
        error: GkdError | None = None
        device_is_lost = False
        try:
            action()
        except Exception as caught:  # noqa: BLE001 - WeightUpdates raises it, with the name of the worker
            # Without traceback and cause, whose frames refer to tensors.
            if isinstance(caught, GkdError):
                error = copy.copy(caught)
            else:
                error = WorkerError(f"{type(caught).__name__}: {caught}")
            device_is_lost = is_device_loss(caught)
        return UpdateOutcome(
            error=error,
            is_unusable=device_is_lost or receiver.reload_failed,
            has_mixed_weights=receiver.has_mixed_weights,
        )


class WorkerCalls(WeightUpdateCalls, SleepCalls, LogitsCalls):
    """Extension class for ``worker_extension_cls``: vLLM adds it to the bases of its worker class."""
