"""Extension of vLLM's worker class for sleep and wake-up. It runs in the process of each tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from teacher.common.vllm_worker import LogitsCalls

_CHUNK_WORDS = 1 << 20  # bounds the additional memory of a checksum: four int64 tensors of 8 MiB


class TeacherCalls(LogitsCalls):
    """Methods for `worker_extension_cls` of a teacher, called through `LLMEngine.collective_rpc`.

    Attributes:
        model_runner: vLLM's model runner, from the worker class.
        released_storages: Storages without memory, with their sizes in bytes.
    """

    model_runner: Any
    released_storages: list[tuple[Any, int]]

    def checksum_weights(self) -> dict[str, int]:
        """Return a checksum of the memory of each parameter and buffer, by name. Shared memory is read once.

        Weights that vLLM has packed into other memory, as on a CPU, are not included.
        """
        import torch

        with torch.no_grad():
            sums = {name: _checksum(storage) for name, storage in _weight_storages(self.model_runner.get_model())}
            return {name: int(each) for name, each in sums.items()}

    def count_memory(self) -> dict[str, int]:
        """Return the sizes of weights (parameters and buffers) and KV cache, in bytes."""
        weights = sum(storage.nbytes() for _, storage in _weight_storages(self.model_runner.get_model()))
        return {"weights": weights, "KV cache": sum(each.nbytes() for each in _kv_storages(self.model_runner))}

    def release_kv_cache(self) -> None:
        """Free the memory of the KV cache, but keep its tensors. vLLM on a CPU ignores its own call to sleep."""
        self.released_storages = [(storage, storage.nbytes()) for storage in _kv_storages(self.model_runner)]
        for storage, _ in self.released_storages:
            storage.resize_(0)

    def restore_kv_cache(self) -> None:
        """Allocate a released KV cache and fill it with zeros, as at the start.

        After a wake-up on CUDA its memory has any content, such as NaN.
        """
        for storage, n_bytes in getattr(self, "released_storages", []):
            storage.resize_(n_bytes)
        self.released_storages = []
        for storage in _kv_storages(self.model_runner):
            _bytes_of(storage).zero_()


def _weight_storages(model: Any) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield name, storage


def _kv_storages(model_runner: Any) -> list[Any]:
    """Return the storages behind the KV cache. All layers are views of one of them."""
    storages = {}
    for cache in model_runner.kv_caches:
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
    return list(storages.values())


def _bytes_of(storage: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _checksum(storage: Any) -> Any:
    """Return a 64-bit sum over the words of a storage, as a tensor on its device.

    Word i has the odd weight 2i + 1, so that every change of one word, and most exchanges of words, change the sum.
    """
    import torch

    data_U = _bytes_of(storage)
    n_words = len(data_U) // 8
    words, rest = data_U[: 8 * n_words].view(torch.int64), data_U[8 * n_words :].to(torch.int64)
    total = (rest * (2 * torch.arange(len(rest), device=rest.device) + 1)).sum()
    weights = 2 * torch.arange(min(_CHUNK_WORDS, n_words), device=data_U.device) + 1
    for start in range(0, n_words, _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS]
        total = total + (chunk * (weights[: len(chunk)] + 2 * start)).sum()
    return total
