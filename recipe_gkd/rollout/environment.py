"""Environment variables of a rollout process. They take effect only if set before torch and vLLM are imported."""

from __future__ import annotations

from recipe_gkd.diagnostics.stack_dumps import nccl_environment
from teacher.common.vllm_setup import vllm_environment

_ALWAYS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONWARNINGS": "ignore",  # deprecations inside vLLM, which a user cannot fix
}

_CPU = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",  # models are local folders
    "CUDA_VISIBLE_DEVICES": "",  # Ray leaves all GPUs visible to a worker that requests none
}


def worker_environment(device: str) -> dict[str, str]:
    """Return the environment variables of a rollout worker, for ``env_vars`` of its Ray ``runtime_env``.

    Args:
        device: ``"cpu"`` or ``"cuda"``. The variables for ``"cuda"`` are harmless on a CPU.
    """
    on_cpu = device == "cpu"
    return vllm_environment(on_cpu=on_cpu) | _ALWAYS | (_CPU if on_cpu else nccl_environment())
