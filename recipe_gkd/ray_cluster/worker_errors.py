"""Conversion of Ray's errors into errors that name the worker, the phase and the reason.

Nothing here calls Ray.
"""

from __future__ import annotations

import re

from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayTaskError

from recipe_gkd.errors import GkdError, SecondaryFailure, WorkerDied, WorkerError
from recipe_gkd.ray_cluster.node_probe import ActorLocation

_DEVICE_MEMORY_ADVICE = {
    "actor": (
        "lower actor_rollout_ref.actor.max_token_len (or micro_batch_size without use_dynamic_bsz), set "
        "gkd.fuse_lm_head=true, raise the number of actor GPUs, recompute activations or divide the model further: "
        "with strategy=megatron set actor_rollout_ref.actor.megatron.override_transformer_config."
        "{recompute_granularity=full,recompute_method=uniform,recompute_num_layers=1} or raise "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size; with strategy=fsdp set "
        "actor_rollout_ref.actor.fsdp_config.{gradient_checkpointing=true,reshard_after_forward=true,fsdp_size=-1}; "
        "docs/operations.md has a table of the memory that an actor needs"
    ),
    "rollout": (
        "lower actor_rollout_ref.rollout.gpu_memory_utilization, max_num_seqs, max_num_batched_tokens or "
        "update_weights_bucket_megabytes, or raise actor_rollout_ref.rollout.tensor_model_parallel_size"
    ),
}
"""Pool -> keys to change when a GPU of the pool has no memory left."""

_MAX_REASON_CHARS = 1000
"""Ray's text about a lack of memory lists the processes of the node."""


def unwrap(error: BaseException) -> BaseException:
    """Return the exception that a worker raised, without Ray's wrapper."""
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error


def is_death(error: BaseException) -> bool:
    """Return True if Ray reports that a worker's process has ended. Ray's memory monitor has an error of its own."""
    return isinstance(error, RayActorError | OutOfMemoryError)


def lacks_device_memory(error: BaseException) -> bool:
    """Return True if torch, CUDA or NCCL reports that a GPU has no memory left.

    torch raises ``torch.OutOfMemoryError`` for its own allocations. Libraries that allocate by themselves are reported
    as ``torch.AcceleratorError`` or ``torch.distributed.DistBackendError``. torch is not imported for this test.
    """
    is_torch = any(base.__module__.split(".")[0] == "torch" for base in type(error).__mro__)
    return is_torch and ("OutOfMemory" in type(error).__name__ or "out of memory" in str(error).lower())


def root_cause(failures: dict[int, BaseException]) -> tuple[int, BaseException]:
    """Return the rank and the error of the failure that explains the others.

    A lack of device memory comes first, then errors that a worker raised on purpose, then deaths. Other errors come
    last, because they may only be consequences, such as a broken collective. Equal failures are taken in rank order.
    """

    def order(error: BaseException) -> int:
        cause = unwrap(error)
        if lacks_device_memory(cause):
            return 0
        if isinstance(cause, GkdError):
            return 3 if isinstance(cause, SecondaryFailure) else 1
        return 2 if is_death(cause) else 3

    return min(failures.items(), key=lambda item: order(item[1]))


def with_label(error: GkdError, phase: str, label: str) -> GkdError:
    """Return an error of the same class whose message names the worker.

    Args:
        error: Error that a worker raised.
        phase: Phase of the call.
        label: Label of the worker, such as ``rollout worker 1 of 2``.
    """
    short = label.partition(" of ")[0]
    # The word boundary matters: a message about worker 12 does not name worker 1.
    is_named = re.search(rf"\b{re.escape(short)}\b", str(error))
    return error if is_named else type(error)(f"{phase}: {label}: {error}")


def to_worker_error(error: BaseException, phase: str, label: str, location: ActorLocation | None) -> WorkerError:
    """Convert an exception that the project did not raise on purpose.

    Args:
        error: The exception, unwrapped.
        phase: Phase of the call.
        label: Label of the worker.
        location: Location of the worker. None if the exception is not Ray's, so that it cannot be a death.

    Returns:
        :class:`WorkerDied` if the worker's process has ended or cannot be reached, else a :class:`WorkerError`.
    """
    if location is None or not (is_death(error) or location.dead):
        advice = _DEVICE_MEMORY_ADVICE.get(label.partition(" worker ")[0]) if lacks_device_memory(error) else None
        remedy = f"\n{advice}" if advice else ""
        return WorkerError(f"{phase}: {label} failed: {type(error).__name__}: {error}{remedy}")
    # ActorUnavailableError does not prove that the process has ended. Ray raises it when a whole node dies.
    event = "died or cannot be reached" if isinstance(error, ActorUnavailableError) else "died"
    return WorkerDied(
        f"{phase}: {label} {event}, on node {location.node_ip or '(none yet)'} {location.node_id[:8]} "
        f"({_reason(error)}); its log is in /tmp/ray/session_latest/logs on that node{_advice(error)}"
    )


def _reason(error: BaseException) -> str:
    """Return Ray's reason as one sentence.

    In the error of a death, the reason is the last line, followed by a page of advice. In the error of the memory
    monitor, the first lines list the node's memory and the processes that used it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, OutOfMemoryError):
        return " ".join(lines).split(" Refer to the documentation")[0][:_MAX_REASON_CHARS].rstrip(".")
    return lines[-1].split(" Some common causes")[0].rstrip(".")


def _advice(error: BaseException) -> str:
    if isinstance(error, OutOfMemoryError):
        return "; use fewer or smaller workers on that node, or give it more memory"
    return ", and the kernel's log shows if it was killed for lack of memory"
