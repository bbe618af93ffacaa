"""Megatron's DistributedDataParallel: its options, and the communication that it overlaps with computation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from recipe_gkd.actor.megatron.overrides import checked_overrides
from recipe_gkd.config.keys import MEGATRON
from recipe_gkd.config.schema import MegatronConfig
from recipe_gkd.errors import ConfigError

log = logging.getLogger(__name__)

SECTION = "override_ddp_config"

_FSDP = "Megatron's FSDP is not supported"
_FP8 = "weights in 8 bits are not supported"
_NAN = "the actor checks the gradient itself, with the same result on all ranks"
# Fields that must not be overridden, each with the reason.
FIXED_DDP_FIELDS = {
    "use_distributed_optimizer": f"it is the key {MEGATRON}.use_distributed_optimizer",
    "num_distributed_optimizer_instances": "checkpoints need one instance",
    "average_in_collective": "the gradient is divided once, by the global number of tokens",
    "check_for_nan_in_grad": _NAN,
    "check_for_large_grads": _NAN,
    "align_param_gather": "the pipeline schedules do not start the gathers of this actor",
    "delay_wgrad_compute": "the pipeline schedules of this actor do not compute delayed gradients",
    "fp8_param_gather": _FP8,
    "reuse_grad_buf_for_mxfp8_param_ag": _FP8,
    **dict.fromkeys(
        (
            "use_megatron_fsdp",
            "use_custom_fsdp",
            "data_parallel_sharding_strategy",
            "outer_dp_sharding_strategy",
            "suggested_communication_unit_size",
            "preserve_fp32_weights",
            "keep_fp8_transpose_cache",
            "fsdp_double_buffer",
            "fsdp_manual_registration",
        ),
        _FSDP,
    ),
}


def ddp_config(config: MegatronConfig, *, overlaps: bool) -> DistributedDataParallelConfig:
    """Return Megatron's options, with ``override_ddp_config`` applied last.

    ``overlap_param_gather`` is off by default. The weights are exported after most updates, and the export needs the
    complete weights at once, so that there is no computation to overlap with.

    Args:
        config: Section ``actor.megatron``.
        overlaps: Default of ``overlap_grad_reduce``.

    Raises:
        ConfigError: An override is unknown, not allowed, or does not fit the others.
    """
    overrides = checked_overrides(SECTION, config.override_ddp_config, DistributedDataParallelConfig, FIXED_DDP_FIELDS)
    bucket_size = overrides.get("bucket_size")
    if bucket_size is not None and bucket_size < 1:
        key = f"{MEGATRON}.{SECTION}.bucket_size"
        raise ConfigError(f"{key}={bucket_size}: expected a number of parameters, or null", keys=(key,))
    values = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.use_distributed_optimizer,
        "overlap_grad_reduce": overlaps,
    }
    options = DistributedDataParallelConfig(**values | overrides)
    if options.overlap_param_gather and not (options.use_distributed_optimizer and options.overlap_grad_reduce):
        raise ConfigError(
            f"{MEGATRON}.{SECTION}.overlap_param_gather=true needs {MEGATRON}.use_distributed_optimizer=true and "
            f"{SECTION}.overlap_grad_reduce=true",
            remedy="set both, or remove it",
            keys=(
                f"{MEGATRON}.{SECTION}.overlap_param_gather",
                f"{MEGATRON}.use_distributed_optimizer",
                f"{MEGATRON}.{SECTION}.overlap_grad_reduce",
            ),
        )
    if bucket_size is not None and not options.overlap_grad_reduce:
        log.warning(f"{MEGATRON}.{SECTION}.bucket_size has no effect without overlap_grad_reduce=true")
    return options


def enable_overlap(config: TransformerConfig, wrapped: Sequence[DistributedDataParallel]) -> None:
    """Make the pipeline schedules reduce the gradient in the backward pass of the last micro-batch only.

    Without ``overlap_grad_reduce`` it is reduced after all backward passes, and this function has no effect.

    Args:
        config: Configuration whose callback is set.
        wrapped: Model chunks with their gradient buffers.
    """
    if wrapped[0].ddp_config.overlap_grad_reduce:
        callbacks = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = callbacks if len(callbacks) > 1 else callbacks[0]


@contextmanager
def reduced_after(
    wrapped: Sequence[DistributedDataParallel], before_reduction: Callable[[], None] | None
) -> Iterator[None]:
    """Let the pipeline schedule of a model without pipeline stages reduce the gradient after all backward passes.

    In the context, data-parallel ranks do not communicate before ``before_reduction``. The price is that no
    communication overlaps with the last backward pass, or with the first forward pass.

    Args:
        wrapped: Model chunks with their gradient buffers.
        before_reduction: Called after the last backward pass. An error in it, or before it, leaves no communication in
            flight; the gradient buffers must then be set to zero. None: the context has no effect.
    """
    if before_reduction is None:
        yield
        return
    complete_weights(wrapped)  # `overlap_param_gather` would gather them in the forward pass
    config = wrapped[0].config
    no_sync, finalize = config.no_sync_func, config.finalize_model_grads_func

    def reduce(*args: object, **kwargs: object) -> None:
        before_reduction()
        for chunk in wrapped:
            if chunk.ddp_config.overlap_grad_reduce:
                chunk.start_grad_sync()  # else `finalize` starts it
        finalize(*args, **kwargs)

    with ExitStack() as stack:
        for chunk in wrapped:
            stack.enter_context(chunk.no_sync())
        # The schedule would leave its callback's context before the last backward pass.
        config.no_sync_func, config.finalize_model_grads_func = None, reduce
        try:
            yield
        finally:
            config.no_sync_func, config.finalize_model_grads_func = no_sync, finalize


def complete_weights(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Gather the weights that the last optimizer step changed. Collective, and without effect if they are complete.

    With ``overlap_param_gather`` a step leaves each data-parallel rank with its own part of the new weights, and the
    next forward pass gathers the rest. All other code that reads or writes weights calls this function first.

    Args:
        wrapped: Model chunks with their gradient buffers.
    """
    for chunk in wrapped:
        if not chunk.ddp_config.overlap_param_gather:
            continue
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)
