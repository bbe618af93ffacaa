"""Extensions of vLLM's worker class. They run in the process of each tensor-parallel rank.

Temperature and excluded ids are applied to the output of the model's `compute_logits`. Both of vLLM's model runners
compute prompt log-probabilities from it, by a float32 log_softmax. At that point the model has applied its soft cap and
scale, gathered the parts of all ranks, and removed the rows that vLLM adds to the output layer. The `scale` of the
model's `logits_processor` is not used: it divides in the model's dtype, which rounds bfloat16 logits again, and some
models do not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from teacher.common.cuda_memory import free_cuda_memory
from teacher.common.storages import as_bytes, storages_of


class LogitsCalls:
    """Methods for `worker_extension_cls`, called through `LLMEngine.collective_rpc`.

    vLLM adds this class to the bases of its worker class.

    Attributes:
        model_runner: vLLM's model runner, from the worker class.
    """

    model_runner: Any

    def set_logits(self, temperature: float, n_tokens: int | None) -> None:
        """Change all further logits of the model.

        With a temperature of 1 and no excluded ids the model's own method is restored, without any overhead.

        Args:
            temperature: Divisor of the logits, applied in float32.
            n_tokens: Number of ids with a probability. Logits from this index on become -inf. None excludes none.
        """
        model = self.model_runner.model
        of_model = getattr(model.compute_logits, "of_model", model.compute_logits)
        is_unchanged = temperature == 1.0 and n_tokens is None
        model.compute_logits = of_model if is_unchanged else _changed(of_model, temperature, n_tokens)

    def set_logit_rows(self, n_rows: int) -> None:
        """Set the number of rows of logits that vLLM's V2 model runner computes at a time.

        It reads the constant in each step, and has no option for it.

        Raises:
            RuntimeError: The installed vLLM has no such constant.
        """
        from vllm.v1.worker.gpu.sample import prompt_logprob

        if not hasattr(prompt_logprob, "CHUNK_SIZE"):
            raise RuntimeError("vLLM has no v1.worker.gpu.sample.prompt_logprob.CHUNK_SIZE")
        prompt_logprob.CHUNK_SIZE = n_rows

    def device_memory(self) -> tuple[int, int]:
        """Return the memory of this rank's GPU that torch can still use, and its total memory, in bytes."""
        import torch

        return free_cuda_memory(), torch.cuda.mem_get_info()[1]


class KvCacheCalls:
    """Methods for `worker_extension_cls` about the memory of the KV cache. All layers are views of few storages.

    Attributes:
        model_runner: vLLM's model runner, from the worker class.
        released_caches: Storages without memory, with their sizes in bytes.
    """

    model_runner: Any
    released_caches: list[tuple[Any, int]]

    def release_kv_cache(self) -> None:
        """Free the memory of the KV cache, but keep its tensors. vLLM on a CPU ignores its own call to sleep."""
        in_use = [storage for storage in storages_of(self.model_runner.kv_caches) if storage.nbytes()]
        self.released_caches = getattr(self, "released_caches", []) + [(each, each.nbytes()) for each in in_use]
        for storage in in_use:
            storage.resize_(0)

    def reset_kv_cache(self) -> None:
        """Allocate a released KV cache and fill it with zeros, as at the start.

        After a wake-up on CUDA its memory has any content, such as NaN.
        """
        for storage, n_bytes in getattr(self, "released_caches", []):
            storage.resize_(n_bytes)
        self.released_caches = []
        for storage in storages_of(self.model_runner.kv_caches):
            as_bytes(storage).zero_()


def _changed(compute_logits: Callable[..., Any], temperature: float, n_tokens: int | None) -> Callable[..., Any]:
    def changed(*args: Any, **kwargs: Any) -> Any:
        logits = compute_logits(*args, **kwargs)
        if logits is None:  # another rank has them
            return None
        # In place, as in vLLM's sampler: these logits have no other user.
        if temperature != 1.0:
            logits = logits.float().div_(temperature)
        if n_tokens is not None:
            logits[..., n_tokens:] = float("-inf")
        return logits

    changed.of_model = compute_logits  # type: ignore[attr-defined]
    return changed
