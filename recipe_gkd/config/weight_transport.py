"""Transport of the weights from the actor to the rollout workers."""

from __future__ import annotations

from recipe_gkd.config.schema import Config


def weight_transport(config: Config) -> str:
    """Return the transport. ``auto`` avoids NCCL on shared GPUs, because it allows one rank per GPU."""
    transport = config.actor_rollout_ref.rollout.weight_transport
    if transport == "auto":
        return "ipc" if config.actor_rollout_ref.hybrid_engine and config.trainer.nnodes == 1 else "collective"
    return transport
