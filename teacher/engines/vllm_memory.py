"""Extension of vLLM's worker class for a teacher. It runs in the process of each tensor-parallel rank."""

from __future__ import annotations

from typing import Any

from teacher.common.storages import as_bytes, storages_of
from teacher.common.tensor_checksum import tensor_checksums
from teacher.common.vllm_worker import KvCacheCalls, LogitsCalls
from teacher.engines.vllm_prompt_rows import score_responses


class TeacherCalls(LogitsCalls, KvCacheCalls):
    """Methods for `worker_extension_cls` of a teacher, called through `LLMEngine.collective_rpc`."""

    def score_responses(self) -> None:
        """Score the response rows of requests. See `vllm_prompt_rows`."""
        score_responses(self.model_runner)

    def checksum_weights(self) -> dict[str, int]:
        """Return a checksum of the memory of each parameter and buffer, by name. Shared memory is read once.

        Weights that vLLM has packed into other memory, as on a CPU, are not included.
        """
        storages = _weight_storages(self.model_runner.get_model())
        return tensor_checksums({name: as_bytes(storage) for name, storage in storages.items()})

    def count_memory(self) -> dict[str, int]:
        """Return the sizes of weights (parameters and buffers) and KV cache, in bytes."""
        weights = _weight_storages(self.model_runner.get_model()).values()
        caches = storages_of(self.model_runner.kv_caches)
        return {"weights": sum(each.nbytes() for each in weights), "KV cache": sum(each.nbytes() for each in caches)}


def _weight_storages(model: Any) -> dict[str, Any]:
    """Return the storages of parameters and buffers by the name of the first tensor in each."""
    found: dict[int, tuple[str, Any]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), (name, storage))
    return dict(found.values())
