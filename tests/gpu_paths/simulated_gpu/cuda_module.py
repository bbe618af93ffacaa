"""Functions of ``torch.cuda`` for the simulated GPU. Those of a CPU build raise an error."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.gpu_paths.simulated_gpu.build import LIBRARY

CAPABILITY = (9, 0)
TOTAL_MEMORY = 16 << 30


class Stream(torch.Stream):
    """Stream of the device. ``torch.Stream`` selects the device by its first argument."""

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        return super().__new__(cls, device="cuda", priority=priority)  # type: ignore[call-overload,no-any-return]

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    """Event of the device."""

    def __new__(cls, *_: Any, **__: Any) -> Event:
        return super().__new__(cls, device="cuda")  # type: ignore[call-overload,no-any-return]

    def __init__(self, *_: Any, **__: Any) -> None: ...


class Device:
    """The functions of ``device.cpp``. Sizes are in bytes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[LIBRARY])
        for name in ("gpu_allocated", "gpu_peak"):
            getattr(self._library, name).restype = ctypes.c_size_t

    def count(self) -> int:
        """Return the number of GPUs."""
        return int(self._library.gpu_n_devices())

    def select(self, device: torch.types.Device) -> None:
        """Make a GPU the only one that this process uses. No index has no effect."""
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        if index is not None and index >= 0:
            self._library.gpu_set_device(index)

    def allocated(self, device: Any = None) -> int:
        """Return the size of all device memory."""
        return int(self._library.gpu_allocated())

    def peak(self, device: Any = None) -> int:
        """Return the largest size since the last reset."""
        return int(self._library.gpu_peak())

    def reset_peak(self, device: Any = None) -> None:
        """Forget the peak."""
        self._library.gpu_reset_peak()

    def limit(self, n_bytes: int) -> None:
        """Set the size beyond which an allocation is an ``OutOfMemoryError``."""
        self._library.gpu_set_limit(ctypes.c_size_t(n_bytes))

    def stats(self, device: Any = None) -> dict[str, int]:
        """Return the statistics that the project reads."""
        counts = {"current": self.allocated(), "peak": self.peak()}
        return {f"{kind}_bytes.all.{name}": n for kind in ("allocated", "reserved") for name, n in counts.items()}

    def wait_for_device(self, device: Any = None) -> None:
        """Execute the copies of all streams."""
        self._library.gpu_wait_for_device()

    def pin(self, start: int, n_bytes: int) -> int:
        """Register memory of the host as pinned; with 0 bytes it is not any more. Returns CUDA's code of success."""
        self._library.gpu_pin(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes))
        return 0

    def is_pinned(self, address: int) -> bool:
        """Return True if memory of the host is pinned."""
        return bool(self._library.gpu_is_pinned(ctypes.c_void_p(address)))

    def set_wait_mode(self, mode: str) -> None:
        """Make each wait of the host for the device an error, with the mode ``error``; allow it with ``default``."""
        self._library.gpu_refuse_waits({"default": 0, "error": 1}[mode])

    def info(self, device: Any = None) -> tuple[int, int]:
        """Return the free and the total memory."""
        return TOTAL_MEMORY - self.allocated(), TOTAL_MEMORY


def current_stream(device: Any = None) -> torch.Stream:
    """Return the current stream of this thread."""
    return torch.accelerator.current_stream()


@contextlib.contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Return the context in which a stream is the current one. None has no effect, as on a GPU."""
    with stream or contextlib.nullcontext():
        yield


def _properties(device: Any = None) -> SimpleNamespace:
    major, minor = CAPABILITY
    return SimpleNamespace(
        name="simulated GPU",
        major=major,
        minor=minor,
        total_memory=TOTAL_MEMORY,
        multi_processor_count=4,
        warp_size=32,
        uuid=uuid.UUID(int=torch.accelerator.current_device_index() + 1),
    )


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _nothing() -> Callable[..., None]:
    """Return a new function: torch's compiler requires that functions are different objects."""
    return lambda *_, **__: None


@contextlib.contextmanager
def _no_context(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _resize_storage(storage: torch.UntypedStorage, n_bytes: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _resize_host_storage(storage, n_bytes)
    torch.ops.simulated_gpu.resize_storage(_whole(storage), n_bytes)
    return storage


_resize_host_storage = torch.UntypedStorage.resize_


def _share_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Return device, IPC handle, size, offset, reference counter, its offset, event, and if it is waited for."""
    path = torch.ops.simulated_gpu.share_storage(_whole(storage))
    return storage.device.index, path.encode(), storage.nbytes(), 0, b"", 0, b"", False


def _open_shared_storage(device: int, handle: bytes, n_bytes: int, *_: Any) -> torch.UntypedStorage:
    tensor: torch.Tensor = torch.ops.simulated_gpu.open_shared(handle.decode(), n_bytes)
    return tensor.untyped_storage()


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (0,), (1,))


def replace_functions() -> None:
    """Replace the functions."""
    gpu = Device()
    functions = {
        "_is_compiled": lambda: True,
        "_lazy_init": _nothing(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": gpu.count,
        "current_device": torch.accelerator.current_device_index,
        "set_device": gpu.select,
        "device": _no_context,
        "_exchange_device": lambda device: torch.accelerator.current_device_index(),
        "_maybe_exchange_device": lambda device: torch.accelerator.current_device_index(),
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: _properties().name,
        "get_device_properties": _properties,
        "is_bf16_supported": lambda *_, **__: True,
        "set_sync_debug_mode": gpu.set_wait_mode,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda start, n_bytes, flags: gpu.pin(start, n_bytes),
            cudaHostUnregister=lambda start: gpu.pin(start, 0),
        ),
        "is_current_stream_capturing": lambda: False,
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: torch.Stream(device="cuda", stream_id=0),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": gpu.wait_for_device,
        "memory_allocated": gpu.allocated,
        "memory_reserved": lambda device=None: gpu.allocated(),
        "max_memory_allocated": gpu.peak,
        "max_memory_reserved": lambda device=None: gpu.peak(),
        "reset_peak_memory_stats": gpu.reset_peak,
        "mem_get_info": gpu.info,
        "memory_snapshot": lambda *_: [],
        "memory_stats": gpu.stats,
        "nccl": SimpleNamespace(version=lambda: (2, 29, 0)),
        "empty_cache": _nothing(),
        "ipc_collect": _nothing(),
        # Random numbers of the device are those of the host's generator.
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": _set_rng_state,
        "default_generators": (torch.default_generator,) * gpu.count(),
        "manual_seed": _seed,
        "manual_seed_all": lambda seed: _seed(seed),
    }
    for name, function in functions.items():
        _replace_everywhere(name, function)
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
    torch.version.cuda = "13.0"
    torch.UntypedStorage.resize_ = _resize_storage  # type: ignore[method-assign]
    torch.UntypedStorage._share_cuda_ = _share_storage  # type: ignore[method-assign]
    torch.UntypedStorage._new_shared_cuda = staticmethod(_open_shared_storage)  # type: ignore[method-assign]


def _replace_everywhere(name: str, function: Any) -> None:
    """Replace a member of ``torch.cuda`` also in the modules that have imported it."""
    replaced = getattr(torch.cuda, name)
    for module in [module for key, module in sys.modules.items() if key.startswith("torch.")]:
        if vars(module).get(name) is replaced:
            setattr(module, name, function)
