"""Transport of the weights from the actor to the rollout workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from recipe_gkd.config.hybrid_engine import hybrid_cuda_problems
from recipe_gkd.config.keys import HYBRID
from recipe_gkd.config.schema import Config
from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.worker_variables import forwarded_variables

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables from which torch reads the settings of its CUDA allocator."""


def weight_transport(config: Config) -> str:
    """Return the transport. ``auto`` avoids NCCL on shared GPUs, because it allows one rank per GPU."""
    transport = config.actor_rollout_ref.rollout.weight_transport
    if transport == "auto":
        return "ipc" if config.actor_rollout_ref.hybrid_engine and config.trainer.nnodes == 1 else "collective"
    return transport


def cuda_problems(config: Config, environment: Mapping[str, str]) -> Iterator[ConfigError]:
    """Yield an error for each value or variable with which weights cannot be sent between CUDA devices.

    Args:
        environment: Environment of the driver.
    """
    yield from hybrid_cuda_problems(config)
    # Only ranks on one GPU send CUDA handles. Others share host memory.
    n_gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if not config.actor_rollout_ref.hybrid_engine or n_gpus > 1:
        return
    variables = forwarded_variables(environment, config.ray_init.env_vars)
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in variables.get(name, "").replace(" ", "").lower():
            yield ConfigError(
                f"{name}={variables[name]} with {HYBRID}=true on one GPU: actor and rollout engine exchange weights "
                "through CUDA IPC, which expects memory without expandable segments",
                remedy=f"unset {name}, or remove expandable_segments from it",
                keys=(HYBRID, f"ray_init.env_vars.{name}") if name in config.ray_init.env_vars else (HYBRID,),
            )
