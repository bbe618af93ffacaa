"""Tested release of vLLM; environment variables, messages, files and a known failure of processes that run it.

Imports neither vLLM nor torch at its top.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from pathlib import Path
from uuid import uuid4

TESTED_VLLM = "0.32.0"
"""Release with which this project is tested, on CPU and CUDA."""
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the thread that calls it
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # vLLM forks its tensor-parallel workers. Without NVML, torch.cuda.is_available() initializes CUDA, and a process
    # that is forked afterwards cannot use a GPU ("Cannot re-initialize CUDA in forked subprocess").
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would bind every engine to the same cores
    "OMP_NUM_THREADS": "1",  # two engines with two threads each on two cores are six times slower
    "TORCHDYNAMO_DISABLE": "1",  # compilation would delay the first logprobs by seconds
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
ASYNC_SCHEDULING_DEFECT = "an assertion of vLLM's async scheduler failed (vLLM issue 57562)"


def vllm_environment(*, on_cpu: bool) -> dict[str, str]:
    """Return the environment variables that every vLLM process of this project needs.

    They take effect only if they are set before torch and vLLM are imported.
    """
    return _ENVIRONMENT | (_CPU_ENVIRONMENT if on_cpu else {})


def quiet_import(level: str) -> None:
    """Limit what vLLM logs and warns while it is imported. It applies its own level only when an engine is made.

    Args:
        level: Lowest level that is logged, such as ``"ERROR"``.
    """
    logging.getLogger("vllm").setLevel(level)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


def keep_file_store_in(folder: Path) -> None:
    """Make the engines of this process, and their tensor ranks, keep torch's ``FileStore`` in ``folder``.

    vLLM (``utils/network_utils.py``) puts the store into the temporary folder of the machine, where it stays if the
    process is killed. The store cannot be removed after the ranks have connected, because NCCL reads it again at its
    first collective. Call this before the engine is built.
    """
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    for module in (multiproc_executor, uniproc_executor):
        vars(module)["get_file_store_init_method"] = lambda: f"file://{folder}/vllm_dist_{uuid4().hex}"


def is_async_scheduling_failure(error: Exception) -> bool:
    """Return True for a failed assertion of ``vllm/v1/core/sched/async_scheduler.py``, which has no text."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, AssertionError) and bool(frames) and frames[-1].filename.endswith("async_scheduler.py")
