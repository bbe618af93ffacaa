"""Environment variables of an actor process. They take effect only if they are set before torch is imported."""

from __future__ import annotations

from recipe_gkd.diagnostics.stack_dumps import nccl_environment


def worker_environment(device: str, strategy: str = "megatron") -> dict[str, str]:
    """Return the ``env_vars`` of an actor worker's Ray ``runtime_env``.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        strategy: ``actor.strategy``.
    """
    common = {"PYTHONWARNINGS": "ignore"}  # Megatron warns about each optional package that is not installed
    if device == "cpu":
        return common | {
            "OMP_NUM_THREADS": "1",  # ranks share the cores; more threads than cores are many times slower
            # Megatron and its patches test whether torch finds a GPU. A CPU worker must find none, also on a machine
            # with GPUs.
            "CUDA_VISIBLE_DEVICES": "",
        }
    # With one connection, kernels start in the order of their launch, as Megatron's overlap of communication requires.
    # FSDP's overlap requires the opposite: a gather starts beside the kernels that were launched before it.
    return common | nccl_environment() | ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if strategy == "megatron" else {})
