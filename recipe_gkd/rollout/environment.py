"""Environment variables of a rollout process. They count only if they are set before torch and vLLM are imported."""

from __future__ import annotations

from recipe_gkd.diagnostics.stack_dumps import nccl_environment

_ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in our thread: commands run between its steps
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",  # deprecations inside the engine: nobody here can act on them
}

_CPU = {
    "OMP_NUM_THREADS": "1",  # two engines with two threads each on two cores are six times slower
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would bind every engine to the same cores
    "TORCHDYNAMO_DISABLE": "1",  # else the first logprobs wait seconds for a C++ compiler
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",  # models are folders
    "CUDA_VISIBLE_DEVICES": "",  # Ray leaves a worker that asked for no GPU all of them
}


def worker_environment(device: str) -> dict[str, str]:
    """For the ``env_vars`` of a rollout worker's Ray ``runtime_env``; ``device`` is `cpu` or `cuda`.

    What it says for `cuda` holds on every device.
    """
    return _ALWAYS | (_CPU if device == "cpu" else nccl_environment())
