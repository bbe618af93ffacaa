"""Environment variables of an actor process. They count only if they are set before torch is imported."""

from __future__ import annotations

from recipe_gkd.diagnostics.stack_dumps import nccl_environment


def worker_environment(device: str) -> dict[str, str]:
    """For the ``env_vars`` of an actor worker's Ray ``runtime_env``; ``device`` is `cpu` or `cuda`."""
    quiet = {"PYTHONWARNINGS": "ignore"}  # Megatron warns at import of each optional package that is not there
    if device == "cpu":
        return quiet | {
            "OMP_NUM_THREADS": "1",  # ranks share the cores; more threads than cores are many times slower
            # Megatron, and what we mend of it, ask torch whether there is a GPU; on a machine that has some, a worker
            # on the CPU must hear no from all of them.
            "CUDA_VISIBLE_DEVICES": "",
        }
    # Megatron orders communication and compute by the number of connections.
    return quiet | nccl_environment() | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
