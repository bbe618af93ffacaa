"""Environment variables of the driver and of ``ray_init.env_vars`` that every worker gets.

Workers of a running cluster inherit the environment of ``ray start`` on their node, not the driver's. Therefore
the variables of the libraries below are sent with each worker.
"""

from __future__ import annotations

from collections.abc import Mapping

FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "VLLM_", "RES_OPTIONS")
"""Prefixes, and a whole name, of the driver's variables that are sent to all workers."""

RES_OPTIONS = "timeout:1 attempts:3"
"""Default of ``RES_OPTIONS``, see resolv.conf(5). torch looks up the host name of each address that it connects to, for
its log, and by default the C library waits 5 s for each answer of a DNS server, twice."""

PER_NODE = (
    "NCCL_COMM_ID",  # address of one process; NCCL would use it for every communicator
    "NCCL_HOSTID",
    "VLLM_DP_MASTER_IP",
    "VLLM_DP_MASTER_PORT",
    "VLLM_DP_RANK",
    "VLLM_DP_RANK_LOCAL",
    "VLLM_HOST_IP",
    "VLLM_LOOPBACK_IP",
    "VLLM_PORT",
)
"""Variables that have another value on each node or in each process. The driver's values are not sent, so that the
node's values, from ``ray start``, apply."""

FIXED = (
    "CUDA_VISIBLE_DEVICES",  # Ray's
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)
"""Variables that Ray or this project sets for each worker. The driver's values are not sent, and ``ray_init.env_vars``
must not contain them."""


def forwarded_variables(environment: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for all workers.

    Args:
        environment: Environment of the driver. Only variables with :data:`FORWARDED_PREFIXES` are used.
        extra: ``ray_init.env_vars``. They take precedence, and may have any name.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name.startswith(FORWARDED_PREFIXES) and name not in PER_NODE and name not in FIXED
    }
    return kept | dict(extra)


def worker_variables(
    defaults: Mapping[str, str], environment: Mapping[str, str], extra: Mapping[str, str]
) -> dict[str, str]:
    """Return the ``env_vars`` of a worker's Ray ``runtime_env``.

    Args:
        defaults: Variables that this project sets for workers of this kind.
        environment: Environment of the driver.
        extra: ``ray_init.env_vars``.
    """
    return {**defaults, **forwarded_variables(environment, extra)}
