"""States of the actor that leave the memory of its device while no call needs them.

=============  ==========================================================  ====================================
state          tensors of a rank                                           outside of the device
=============  ==========================================================  ====================================
``params``     weights                                                     host copy
``grads``      gradient buffers                                            nothing: they return as zeros
``optimizer``  moments, and the float32 weights of 16-bit training         host copy
=============  ==========================================================  ====================================

A tensor that leaves keeps its shape and its views. Only the memory of its storage is freed, and the storage gets new
memory when it returns. A tensor must not be read meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, UntypedStorage

from recipe_gkd.actor.checkpoint.host_copy import HostCopy, host_copy
from recipe_gkd.config.keys import key_name
from recipe_gkd.config.schema.actor import ActorState
from recipe_gkd.errors import WorkerError
from teacher.common.memory_trim import trim
from teacher.common.out_of_memory import is_out_of_memory, memory_details, reason_of
from teacher.common.storages import as_bytes

NAMES: dict[ActorState, str] = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer state"}
SLEEP_LEVEL = key_name(lambda config: config.actor_rollout_ref.rollout.sleep_level)
KEYS: dict[ActorState, str] = {"params": "param_offload", "grads": "grad_offload", "optimizer": "optimizer_offload"}


class OffloadedStates:
    """The states of one rank. Offloaded ones are on the device inside of :meth:`on_device` and after :meth:`prefetch`.

    Lifecycle::

        states = OffloadedStates(backend.state_tensors, offloaded, device)
        states.leave()                                    # after the model was built
        with states.on_device("params", "optimizer"): ... # any number of times, also nested
        states.close()

    Args:
        tensors_of: Returns the tensors of a state that this rank has now. They may share storages.
        offloaded: States that leave the device. The others always stay.
        device: Device of the tensors. Tensors of other devices are not moved.
    """

    def __init__(
        self,
        tensors_of: Callable[[ActorState], Iterable[Tensor]],
        offloaded: Iterable[ActorState],
        device: torch.device,
    ) -> None:
        self._states = {
            name: _State(name, tensors_of, device, None if name == "grads" else host_copy(device)) for name in offloaded
        }

    def leave(self) -> None:
        """Move the offloaded states off the device. No context of :meth:`on_device` may be open.

        Raises:
            WorkerError: A state cannot be copied to the host.
        """
        for state in self._states.values():
            state.leave()

    def prefetch(self, *names: ActorState) -> None:
        """Begin to move states to the device, where they stay until the next context of :meth:`on_device` ends.

        Args:
            names: States that are needed soon. Those that are not offloaded are ignored.

        Raises:
            WorkerError: The device has no memory for a state. It remains where it is.
        """
        for state in (self._states[name] for name in names if name in self._states):
            state.bring_back()

    @contextmanager
    def on_device(self, *names: ActorState, read_only: bool = False) -> Iterator[None]:
        """Return the context in which the given states are on the device. The outermost one moves them.

        Args:
            names: States that are needed. Those that are not offloaded are ignored.
            read_only: The states are not changed, so their host copies remain valid.

        Raises:
            WorkerError: The device has no memory for a state, or it cannot be copied to the host. Nothing is lost: the
                state remains where it is.
        """
        with ExitStack() as stack:
            for state in (self._states[name] for name in names if name in self._states):
                state.enter(read_only)
                stack.callback(state.exit)
            yield

    def is_offloaded(self, name: ActorState) -> bool:
        """Return True if a state leaves the device."""
        return name in self._states

    def host_copy(self, name: ActorState) -> HostCopy | None:
        """Return the copy of an offloaded state on the host, None if its values are not kept.

        Raises:
            KeyError: The state is not offloaded.
        """
        return self._states[name].copy

    def close(self) -> None:
        """Free the host copies. States that are not on the device are lost."""
        for state in self._states.values():
            state.close()


class _State:
    """One offloaded state; see :class:`OffloadedStates`. ``copy`` is None if its values are not kept."""

    def __init__(
        self,
        name: ActorState,
        tensors_of: Callable[[ActorState], Iterable[Tensor]],
        device: torch.device,
        copy: HostCopy | None,
    ) -> None:
        self._name, self._tensors_of, self._device, self.copy = name, tensors_of, device, copy
        self._n_users = 0
        self._storages: list[tuple[UntypedStorage, int]] = []  # storages of the host copy, with their bytes
        self._is_away, self._is_copied = False, False

    def enter(self, read_only: bool) -> None:
        self.bring_back()
        self._is_copied = self._is_copied and read_only
        self._n_users += 1

    def exit(self) -> None:
        self._n_users -= 1
        if self._n_users == 0:
            self.leave()

    def leave(self) -> None:
        if self._is_away:
            return
        storages = distinct_storages(self._tensors_of(self._name), self._device)
        addresses = [storage._cdata for storage, _ in storages]
        if addresses != [storage._cdata for storage, _ in self._storages]:
            self._is_copied = False
        self._storages = storages
        if not all(storage.resizable() for storage, _ in storages):
            raise WorkerError(
                f"the {self._name} of the actor cannot leave the memory, because a NumPy array shares it",
                remedy=f"copy the tensor first, or set {KEYS[self._name]}=false",
                keys=self._keys,
            )
        _synchronize(self._device)  # other streams may still read or write
        if self.copy is not None and not self._is_copied:
            try:
                self.copy.write(storages)
            except (OSError, RuntimeError, MemoryError) as error:
                raise WorkerError(
                    f"the {self._name} of the actor ({self._n_megabytes} MiB) cannot be copied to {self.copy.place}: "
                    f"{type(error).__name__}: {error}",
                    remedy=f"free space there, or set {KEYS[self._name]}=false in the section "
                    "actor_rollout_ref.actor.megatron or fsdp_config",
                    keys=self._keys,
                ) from error
            self._is_copied = True
        for storage, _ in storages:
            storage.resize_(0)
        self._is_away = True
        _return_memory(self._device)

    def bring_back(self) -> None:
        if not self._is_away:
            return
        try:
            for storage, n_bytes in self._storages:
                storage.resize_(n_bytes)
                if self.copy is None:
                    as_bytes(storage).zero_()
            if self.copy is not None:
                self.copy.read(self._storages)
        except (OSError, RuntimeError, MemoryError) as error:
            is_memory = is_out_of_memory(error)
            reason = f"out of memory ({reason_of(error)})" if is_memory else f"{type(error).__name__}: {error}"
            details = memory_details() if is_memory else ()  # before the memory is freed
            _synchronize(self._device)
            for storage, _ in self._storages:
                storage.resize_(0)
            _return_memory(self._device)
            raise WorkerError(
                f"the {self._name} of the actor ({self._n_megabytes} MiB) cannot return to the memory of "
                f"{self._device}: {reason}",
                remedy="raise trainer.n_gpus_per_node so that more ranks divide the state, and with hybrid_engine set "
                f"{SLEEP_LEVEL}=2 or lower its gpu_memory_utilization",
                keys=("trainer.n_gpus_per_node", SLEEP_LEVEL, "actor_rollout_ref.rollout.gpu_memory_utilization"),
                details=details,
            ) from error
        self._is_away = False

    def close(self) -> None:
        self._storages = []
        if self.copy is not None:
            self.copy.close()

    @property
    def _keys(self) -> tuple[str, ...]:
        """Full names of the key that makes the state leave the device, for each backend."""
        sections = ("megatron",) if self._name == "grads" else ("megatron", "fsdp_config")
        return tuple(f"actor_rollout_ref.actor.{section}.{KEYS[self._name]}" for section in sections)

    @property
    def _n_megabytes(self) -> int:
        return sum(n_bytes for _, n_bytes in self._storages) >> 20


def distinct_storages(tensors: Iterable[Tensor], device: torch.device) -> list[tuple[UntypedStorage, int]]:
    """Return the storages of tensors on a device, each once, with their sizes in bytes.

    Args:
        tensors: Tensors, also views of each other.
        device: Device; storages of others are left out.
    """
    found: dict[int, tuple[UntypedStorage, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes():
            found[storage._cdata] = storage, storage.nbytes()
    return list(found.values())


def state_sizes(tensors_of: Callable[[ActorState], Iterable[Tensor]], device: torch.device) -> dict[str, int]:
    """Return the bytes of each state that is on the device, by name, for out-of-memory messages.

    Args:
        tensors_of: Returns the tensors of a state.
        device: Device of the tensors.
    """
    sizes = {state: sum(n for _, n in distinct_storages(tensors_of(state), device)) for state in KEYS}
    return {NAMES[state]: n_bytes for state, n_bytes in sizes.items() if n_bytes}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _return_memory(device: torch.device) -> None:
    """Return freed memory to the device, where another process needs it, or to the operating system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim()
