"""Patches of megatron-core 0.16.1 and 0.19.0.

Some patches repair errors that occur on every device. The others remove Megatron's assumption that the device is a GPU:
it obtains the device from ``torch.cuda.current_device()``, uses the literal ``"cuda"``, or compares ``tensor.type()``
with ``"torch.cuda.FloatTensor"``. They are applied only if torch finds no GPU.
(:func:`~recipe_gkd.actor.environment.worker_environment` hides the GPUs of the machine from a CPU worker.)

Usage::

    install()          # once per process, before a model is built
    with on_host():    # around every call into Megatron; per thread, because Ray may run methods on any thread

=============================  ====================================================================================
Patch                          Place in ``megatron/core``
=============================  ====================================================================================
``_patch_adam_steps``          optimizer/distrib_optimizer.py ``DistributedOptimizer.load_state_dict``
``_patch_group_keys``          optimizer/optimizer.py ``param_group_identifier_keys``
``_patch_optimizer_shards``    optimizer/distrib_optimizer.py ``sharded_param_state_fully_reshardable``,
                               ``load_parameter_state_from_fully_reshardable``
``_patch_frozen_linear``       tensor_parallel/layers.py ``LinearWithFrozenWeight``
``_patch_router_gemm``         transformer/moe/moe_utils.py ``RouterGatingLinearFunction``
``_patch_latent_attention``    transformer/multi_latent_attention.py ``HAVE_TE``, ``Linear``
``_patch_results_queue``       dist_checkpointing/strategies/filesystem_async.py ``_results_queue``
``_patch_rotary_embedding``    transformer/attention.py and transformer/multi_latent_attention.py
                               ``apply_rotary_pos_emb``
``_patch_cuda_functions``      tensor_parallel/random.py, pipeline_parallel/p2p_communication.py and others
``_patch_moe_dispatcher``      transformer/moe/token_dispatcher.py ``MoEAlltoAllTokenDispatcher``
``_patch_single_rank_groups``  distributed/param_and_grad_buffer.py ``dist_all_gather_func``,
                               ``dist_reduce_scatter_func``
``_patch_uneven_collectives``  tensor_parallel/mappings.py ``_gather_along_first_dim``,
                               ``_reduce_scatter_along_first_dim``
``on_host``                    optimizer/optimizer.py, pipeline_parallel/schedules.py and others
=============================  ====================================================================================
"""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from recipe_gkd.actor.megatron.rotary import is_gathered, rotate_channels

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    from recipe_gkd.actor.megatron.optimizer_shards import ParamState

HOST = torch.device("cpu")
_CUDA, _TYPE = torch.Tensor.cuda, torch.Tensor.type
_IS_PATCHED = "_is_patched_by_recipe_gkd"


def install() -> None:
    """Apply all patches that this machine needs. Further calls have no effect."""
    _patch_adam_steps()
    _patch_group_keys()
    _patch_optimizer_shards()
    _patch_frozen_linear()
    _patch_router_gemm()
    _patch_latent_attention()
    _patch_results_queue()
    _patch_rotary_embedding()
    if not torch.cuda.is_available():
        _patch_cuda_functions()
        _patch_moe_dispatcher()
        _patch_single_rank_groups()
        _patch_uneven_collectives()
        # `jit_fuser` is torch.compile, which would start a C++ compiler for each fused operation, unless Megatron was
        # imported without it.
        if "torch._dynamo" in sys.modules:
            torch.compiler.set_stance("force_eager")


def on_host() -> contextlib.AbstractContextManager[Any]:
    """Return the context for calls into Megatron. It redirects CUDA to the CPU, or has no effect with a GPU."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _OnHost()


# ---- errors on every device


def _patch_adam_steps() -> None:
    """Restore torch AdamW's ``step`` of each parameter; DistributedOptimizer expects Apex's single ``step``.

    ``load_state_dict`` assigns the same tensor to all parameters, and AdamW then increments it once per parameter.
    Without the patch a resumed run is wrong without any error.
    """
    from megatron.core.optimizer import distrib_optimizer

    cls = distrib_optimizer.DistributedOptimizer
    original = cls.load_state_dict
    if distrib_optimizer.HAVE_APEX_OR_TE or hasattr(original, _IS_PATCHED):
        return

    @torch.no_grad()
    def load_state_dict(self: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    cls.load_state_dict = _patched(load_state_dict)


def _patch_group_keys() -> None:
    """Find the parameter groups of a checkpoint without their learning rates.

    Megatron 0.19 finds a group of a checkpoint only if its ``max_lr`` and ``min_lr`` are equal to those of the run.
    Only Megatron's scheduler reads them, which is not used here. A run with another ``optim.lr`` could not resume.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer

    keys = tuple(key for key in optimizer.param_group_identifier_keys if key not in ("max_lr", "min_lr"))
    optimizer.param_group_identifier_keys = distrib_optimizer.param_group_identifier_keys = keys


def _patch_optimizer_shards() -> None:
    """Save and load the optimizer state without gathering it.

    ``get_parameter_state_dp_zero`` allocates three complete float32 copies of the model-parallel shard on every
    data-parallel rank, for a save and for a load. It gathers buckets without their padding, but
    ``sharded_param_state_fully_reshardable`` uses offsets that include it: the state of a parameter behind a padded
    bucket, such as a tied embedding on pipeline stages, would be shifted with only a warning in the log.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from recipe_gkd.actor.megatron.optimizer_shards import load_param_state, sharded_param_state

    original = DistributedOptimizer.sharded_param_state_fully_reshardable
    if hasattr(original, _IS_PATCHED):
        return

    @functools.wraps(original)
    def sharded(
        self: DistributedOptimizer,
        model_state: dict[str, Any],
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> ParamState:
        return sharded_param_state(self, model_state)

    DistributedOptimizer.sharded_param_state_fully_reshardable = _patched(sharded)
    DistributedOptimizer.load_parameter_state_from_fully_reshardable = load_param_state


def _patch_frozen_linear() -> None:
    """Compute the gradient of the input of a frozen layer as one matrix product.

    The gradient of the logits, [S, 1, V], is a transposed tensor. For such strides ``torch.matmul`` multiplies each
    row with the weight by itself, and reads the weight S times, if the weight needs no gradient.
    """
    from megatron.core.tensor_parallel.layers import LinearWithFrozenWeight

    original = LinearWithFrozenWeight.backward
    if hasattr(original, _IS_PATCHED):
        return

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_input, *others = original(ctx, grad_output.flatten(end_dim=-2))
        return (grad_input.view(*grad_output.shape[:-1], grad_input.shape[-1]), *others)

    LinearWithFrozenWeight.backward = staticmethod(_patched(backward))


def _patch_router_gemm() -> None:
    """Define ``te_general_gemm``, which the module always reads but imports only with Transformer Engine; add biases.

    Transformer Engine tells cuBLASLt the data type of a bias only with FP8 inputs. The bias of a 16-bit router would
    be read as float32, the type of the scores.
    """
    from megatron.core.transformer.moe import moe_utils

    original = getattr(moe_utils, "te_general_gemm", None)
    if original is None:
        moe_utils.te_general_gemm = None
        return
    if hasattr(original, _IS_PATCHED):
        return

    @functools.wraps(original)
    def general_gemm(
        weight: Tensor, rows: Tensor, out_dtype: torch.dtype, *args: Any, bias: Tensor | None = None, **options: Any
    ) -> tuple[Any, ...]:
        output, *rest = original(weight, rows, out_dtype, *args, **options)
        return (output if bias is None else output + bias.to(out_dtype), *rest)

    moe_utils.te_general_gemm = _patched(general_gemm)


def _patch_latent_attention() -> None:
    """Correct names that the module does not define properly without Transformer Engine.

    In Megatron 0.16 ``HAVE_TE`` is true, because the module imports placeholders. In 0.19 ``Linear`` is None, although
    it does not need the package, and the module refuses it as a down projection.
    """
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
        multi_latent_attention.Linear = Linear


def _patch_results_queue() -> None:
    """Replace the queue of write results, for which Megatron would start a multiprocessing manager.

    The manager process outlives a killed actor and leaves a folder ``pymp-*``. The processes of ``writer_process`` do
    not use the queue.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()  # Megatron stores it in the writer and does not read it


def _patch_rotary_embedding() -> None:
    """Let the attention layers rotate by the cosines and sines that ``PackedRotaryEmbedding`` gathered.

    Megatron's function for packed rows copies the sequence boundaries to the host in each call.
    """
    from megatron.core.transformer import attention, multi_latent_attention

    original = attention.apply_rotary_pos_emb
    if hasattr(original, _IS_PATCHED):
        return

    def apply_rotary(
        t: torch.Tensor, freqs: torch.Tensor, config: TransformerConfig, *args: Any, **options: Any
    ) -> Any:
        if is_gathered(freqs):
            return rotate_channels(t, freqs, interleaved=config.rotary_interleaved or config.multi_latent_attention)
        return original(t, freqs, config, *args, **options)

    for module in (attention, multi_latent_attention):
        module.apply_rotary_pos_emb = _patched(apply_rotary)


def _patched(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, _IS_PATCHED, True)
    return function


# ---- a machine without a GPU


class _OnHost(TorchFunctionMode):
    """Replacement of CUDA devices in torch calls, with the mechanism of ``torch.set_default_device``."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Every operation of a step calls this function, so the common case has few instructions.
        if func is _CUDA:
            return args[0]
        if not kwargs:
            if func is _TYPE and len(args) == 1:
                # optimizer/{optimizer,distrib_optimizer,clip_grads}.py compare this name with a CUDA tensor's.
                # The name is unchanged if an outer context has replaced it already.
                name = func(*args)
                return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)
            return func(*args)
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            # pipeline_parallel/schedules.py `forward_backward_no_pipelining`, optimizer/clip_grads.py, ...
            kwargs = {**kwargs, "device": HOST}
        return func(*args, **kwargs)


def _patch_cuda_functions() -> None:
    import megatron.core.tensor_parallel.random as megatron_random

    def seed_host(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    # About 40 calls use `device=torch.cuda.current_device()` (rotary embedding, DDP buffers, point-to-point, ...).
    torch.cuda.current_device = lambda: HOST  # type: ignore[assignment,return-value]
    # dist_checkpointing/strategies/async_utils.py synchronizes the device, as does
    # pipeline_parallel/p2p_communication.py with `batch_p2p_sync`.
    torch.cuda.synchronize = lambda device=None: None
    # distributed/param_and_grad_buffer.py `start_grad_sync` uses the stream only to wait for CUDA graphs.
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment,return-value]
    # tensor_parallel/random.py forks the generator of the device, which is torch's CPU generator here.
    torch.cuda.manual_seed = seed_host
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    megatron_random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _patch_moe_dispatcher() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    # The constructor creates a CUDA stream for copies to the host if this attribute is None.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = False
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _convert_splits


def _convert_splits(
    self: MoEAlltoAllTokenDispatcher, point: str, tokens_per_expert: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Convert the splits for ``all_to_all_single`` to arrays; moe_utils.py ``maybe_move_tensor_to_cpu`` needs a GPU."""
    if point == self.cuda_dtoh_point and not self.drop_and_pad:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(splits := getattr(self, name), torch.Tensor):
                setattr(self, name, splits.numpy())
    return tokens_per_expert


def _patch_single_rank_groups() -> None:
    """Omit collectives of the distributed optimizer in groups of one rank, whose input is a view of the output.

    NCCL does nothing in this case. Gloo copies all gradients and all weights, twice each.
    """
    from megatron.core.distributed import param_and_grad_buffer as buffers

    gather, reduce_scatter = buffers.dist_all_gather_func, buffers.dist_reduce_scatter_func
    if hasattr(gather, _IS_PATCHED):
        return

    def gather_shards(whole: torch.Tensor, shard: torch.Tensor, *, group: ProcessGroup, async_op: bool) -> Any:
        if group.size() == 1 and not async_op:
            return None
        return gather(whole, shard, group=group, async_op=async_op)

    def reduce_shards(shard: torch.Tensor, whole: torch.Tensor, *, op: Any, group: ProcessGroup, async_op: bool) -> Any:
        if group.size() == 1 and not async_op:
            return None
        return reduce_scatter(shard, whole, op=op, group=group, async_op=async_op)

    buffers.dist_all_gather_func, buffers.dist_reduce_scatter_func = _patched(gather_shards), reduce_shards


def _patch_uneven_collectives() -> None:
    """Gather and reduce parts of different lengths with an all-to-all, the only such collective of gloo.

    The parts differ if expert tensor parallelism is used and ranks have different numbers of tokens.
    """
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    if hasattr(gather, _IS_PATCHED):
        return

    def gather_parts(
        part: torch.Tensor,
        group: ProcessGroup,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, output_split_sizes, use_global_buffer)
        whole = part.new_empty(sum(output_split_sizes), *part.shape[1:])
        copies = torch.cat([part] * group.size())
        dist.all_to_all_single(whole, copies, output_split_sizes, [len(part)] * group.size(), group=group)
        return whole

    def reduce_parts(
        whole: torch.Tensor,
        group: ProcessGroup,
        input_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(whole, group, input_split_sizes, use_global_buffer)
        n_rows = input_split_sizes[group.rank()]
        addends = whole.new_empty(group.size() * n_rows, *whole.shape[1:])
        dist.all_to_all_single(addends, whole.contiguous(), [n_rows] * group.size(), input_split_sizes, group=group)
        return addends.unflatten(0, (group.size(), n_rows)).sum(0)

    mappings._gather_along_first_dim = _patched(gather_parts)
    mappings._reduce_scatter_along_first_dim = reduce_parts
