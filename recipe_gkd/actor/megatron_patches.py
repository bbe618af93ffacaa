"""Patches of megatron-core 0.16.1.

Megatron has no device abstraction: it spells the device as ``torch.cuda.current_device()``, as the literal ``"cuda"``,
or asks ``tensor.type() == "torch.cuda.FloatTensor"``. Where CUDA is absent, ``install`` and ``on_host`` take those
assumptions back. (A worker on the CPU of a machine with GPUs sees none: ``environment.worker_environment``.) The
``_mend`` functions repair what is wrong on a GPU as well.
Places named are files of ``megatron/core``.

    install()          # once a process, before a model is built
    with on_host():    # around every call into Megatron; it is per thread, and Ray may run methods on any thread
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")


def install() -> None:
    """Idempotent."""
    _patch_adam_steps()
    _patch_bucket_padding()
    _patch_router()
    _patch_results_queue()
    if not torch.cuda.is_available():
        _take_host_for_device()


def on_host() -> contextlib.AbstractContextManager[Any]:
    """The context that every call into Megatron needs where CUDA is absent; does nothing where it is present."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _OnHost()


class _OnHost(TorchFunctionMode):
    """The device literals, by the same public mechanism as ``torch.set_default_device``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # optimizer/optimizer.py:596, optimizer/distrib_optimizer.py:361 and optimizer/clip_grads.py:103 compare
            # this name with that of a CUDA tensor. (The contexts may nest.)
            name = func(*args)
            return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            # pipeline_parallel/schedules.py:596, optimizer/clip_grads.py:90, ...
            kwargs = {**kwargs, "device": HOST}
        return func(*args, **kwargs)


def _take_host_for_device() -> None:
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def seed_host(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    # About forty `device=torch.cuda.current_device()` (rotary embedding, DDP buffers, point-to-point, ...).
    torch.cuda.current_device = lambda: HOST  # type: ignore[assignment,return-value]
    # pipeline_parallel/p2p_communication.py:242, dist_checkpointing/strategies/async_utils.py:161: nothing to wait for.
    torch.cuda.synchronize = lambda device=None: None
    # tensor_parallel/random.py forks "the" device generator, which is torch's CPU generator here.
    torch.cuda.manual_seed = seed_host
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    megatron_random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # transformer/moe/token_dispatcher.py:445 makes a stream for copies to the host, and waits for it at :862.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = False
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _splits_on_host
    _exchange_unequal_parts_with_gloo()
    # `jit_fuser` is torch.compile, which would start a C++ compiler for each fused operation.
    torch.compiler.set_stance("force_eager")


def _splits_on_host(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
    """The copies to the host, where all is there already.

    transformer/moe/moe_utils.py:1093 makes what ``all_to_all_single`` takes as splits of tensors on a GPU alone.
    """
    if point == self.cuda_dtoh_point and not self.drop_and_pad:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(splits := getattr(self, name), torch.Tensor):
                setattr(self, name, splits.numpy())
    return tokens_per_expert


def _exchange_unequal_parts_with_gloo() -> None:
    """Ranks that share experts gather and reduce parts of different length, which gloo does only in an all-to-all.

    tensor_parallel/mappings.py:150 and :194, reached when expert tensor parallel meets different numbers of tokens.
    """
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    if gather.__module__ == __name__:
        return

    def gather_parts(
        part: torch.Tensor, group: ProcessGroup, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, output_split_sizes, use_global_buffer)
        whole = part.new_empty(sum(output_split_sizes), *part.shape[1:])
        copies = torch.cat([part] * group.size())
        dist.all_to_all_single(whole, copies, output_split_sizes, [len(part)] * group.size(), group=group)
        return whole

    def reduce_parts(
        whole: torch.Tensor, group: ProcessGroup, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(whole, group, input_split_sizes, use_global_buffer)
        own = input_split_sizes[group.rank()]
        addends = whole.new_empty(group.size() * own, *whole.shape[1:])
        dist.all_to_all_single(addends, whole.contiguous(), [own] * group.size(), input_split_sizes, group=group)
        return addends.unflatten(0, (group.size(), own)).sum(0)

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = reduce_parts


def _patch_router() -> None:
    """transformer/moe/moe_utils.py:34 binds this name only with Transformer Engine installed; :1192 reads it always."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _patch_results_queue() -> None:
    """Replace the queue for which dist_checkpointing/strategies/filesystem_async.py:55 would start a process.

    The process, a multiprocessing manager, outlives an actor that is killed, and leaves a folder ``pymp-*``. The
    writers of ``writer_process`` report without a queue.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()  # only ever stored


def _patch_adam_steps() -> None:
    """Torch's AdamW keeps ``step`` per parameter; optimizer/distrib_optimizer.py expects Apex's single one.

    The loaders leave ``step`` out of what they restore (:2101) although the copy loop asks for it (:940), and
    ``load_state_dict`` gives all parameters the same tensor (:825), which AdamW then advances once for each of them:
    a resumed run would be wrong without any error.
    """
    from megatron.core.optimizer import distrib_optimizer

    cls = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HAVE_APEX_OR_TE or hasattr(cls, "_steps_are_mended"):
        return
    original_set, original_load = cls._set_main_param_and_optimizer_states, cls.load_state_dict

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        original_set(self, model_param, {**tensors, "step": state.get("step")})

    @torch.no_grad()
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original_load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    cls._set_main_param_and_optimizer_states = set_states
    cls.load_state_dict = load_state_dict
    cls._steps_are_mended = True


def _patch_bucket_padding() -> None:
    """Optimizer state of a parameter behind a padded bucket would be saved shifted, with no more than a warning.

    A tied embedding on pipeline stages has a bucket of its own, and buckets are padded to a multiple of the
    data-parallel size and 128 elements. optimizer/distrib_optimizer.py:1120 gathers them without that padding, and
    :1480 then looks for the parameters where they are with it.
    """
    from megatron.core.optimizer import distrib_optimizer

    cls = distrib_optimizer.DistributedOptimizer
    if hasattr(cls, "_padding_is_mended"):
        return
    original = cls.sharded_param_state_fully_reshardable

    def sharded_param_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        padded_maps = [buffer.param_index_map for buffer in self.buffers]
        try:
            for buffer in self.buffers:
                buffer.param_index_map = _index_without_padding(buffer)
            return original(self, *args, **kwargs)
        finally:
            for buffer, padded_map in zip(self.buffers, padded_maps, strict=True):
                buffer.param_index_map = padded_map

    cls.sharded_param_state_fully_reshardable = sharded_param_state
    cls._padding_is_mended = True


def _index_without_padding(buffer: Any) -> dict[torch.nn.Parameter, tuple[int, int, int]]:
    shifts, unpadded = [], 0
    for bucket in buffer.buckets:
        shifts.append(bucket.offset - unpadded)
        unpadded += bucket.numel_unpadded
    return {
        parameter: (start - shifts[bucket], end - shifts[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }
