"""Sleep of vLLM's worker, in the process of each tensor-parallel rank: what vLLM's own sleep mode leaves to do.

On CUDA, vLLM's sleep mode releases the memory of weights and KV cache, and allocates it again at the same addresses,
which CUDA graphs need. A reload of the weights copies into the same tensors (``model_loader/reload/layerwise.py``), so
it needs no memory pool, as in vLLM's own ``reload_weights``. At level 2 vLLM restores the named buffers. The other
constants of the model, which are tensors in plain attributes, are restored here.

On a CPU, vLLM ignores sleep (``cpu_worker.py``). The KV cache is released here. The weights stay in memory at all
levels: oneDNN has packed copies of them, which torch cannot release.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch import Tensor

from recipe_gkd.rollout.vllm.compat import is_released_with_weights
from recipe_gkd.runtime.phase_memory import peak_bytes, reset_peak
from teacher.common.tensor_checksum import tensor_checksums
from teacher.common.vllm_worker import KvCacheCalls

_HELPER_OBJECTS = ("impl", "quant_method")
"""Attributes of vLLM's layers with objects that are no modules, but may have tensors."""


class SleepCalls(KvCacheCalls):
    """Methods for ``worker_extension_cls``, called by ``LLMEngine.collective_rpc``.

    Attributes:
        device: Device of the rank, from the worker class.
    """

    device: torch.device

    def gkd_prepare_sleep(self, level: int) -> dict[str, Any]:
        """Save the constants that vLLM would not restore, and describe what must not change.

        Returns:
            ``bytes_in_use`` (see :func:`bytes_in_use`), and ``checksums`` (see :meth:`gkd_checksums`).
        """
        constants = _plain_tensors(self.model_runner.model) if level == 2 else ()
        self._gkd_constants = {name: tensor.cpu() for name, tensor in constants}
        return {"bytes_in_use": bytes_in_use(self.device), "checksums": self.gkd_checksums(level)}

    def gkd_checksums(self, level: int) -> dict[str, dict[str, int]]:
        """Return the checksums by name of all tensors of the model that a sleep level keeps.

        On a CPU they do not include oneDNN's packed weights.

        Returns:
            ``parameters`` (empty at level 2) and ``constants`` (buffers, and tensors in plain attributes).
        """
        model = self.model_runner.model
        parameters = dict(model.named_parameters()) if level == 1 else {}
        constants = dict(model.named_buffers()) | dict(_plain_tensors(model))
        return {"parameters": tensor_checksums(parameters), "constants": tensor_checksums(constants)}

    def gkd_release_cache(self) -> int:
        """Release the KV cache on a CPU, and return the memory in use; see :func:`bytes_in_use`."""
        if self._gkd_is_cpu():
            self.release_kv_cache()
        return bytes_in_use(self.device)

    @torch.inference_mode()  # vLLM may have created the tensors in this mode
    def gkd_restore_constants(self) -> None:
        """Restore the constants that :meth:`gkd_prepare_sleep` saved."""
        tensors = dict(_plain_tensors(self.model_runner.model))
        for name, saved in self._gkd_constants.items():
            tensors[name].copy_(saved)
        self._gkd_constants = {}

    def gkd_reset_cache(self) -> int:
        """Fill the KV cache with zeros, as at the start of vLLM. On a CPU, allocate it first.

        Returns:
            Memory in use; see :func:`bytes_in_use`.
        """
        self.reset_kv_cache()
        return bytes_in_use(self.device)

    def gkd_reset_peak_memory(self) -> None:
        """Start a phase; see :func:`reset_peak`."""
        reset_peak(str(self.device))

    def gkd_peak_memory(self) -> int:
        """Return the memory of a phase in bytes; see :func:`peak_bytes`."""
        return peak_bytes(str(self.device))

    def _gkd_is_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"


def bytes_in_use(device: torch.device | str) -> int:
    """Return the resident memory of this process on a CPU, or the used memory of the whole GPU, in bytes."""
    if torch.device(device).type == "cpu":
        return int(psutil.Process().memory_info().rss)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _plain_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in plain attributes of a model that vLLM's sleep mode releases together with the weights."""
    seen = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    for module_name, module in model.named_modules():
        owners = [("", module), *((f"{name}.", getattr(module, name, None)) for name in _HELPER_OBJECTS)]
        for prefix, owner in owners:
            for name, value in getattr(owner, "__dict__", {}).items():
                if (
                    isinstance(value, Tensor)
                    and value.untyped_storage()._cdata not in seen
                    and is_released_with_weights(value)
                ):
                    yield f"{module_name}.{prefix}{name}", value
