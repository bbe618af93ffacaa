"""Extrapolation of ``scale.py``: the driver's CPU time per step as a sum of costs, fitted to the measured cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOKENS_PER_RESPONSE = 6000
RESPONSES_PER_GPU = 32
K = 256
ROW_BYTES = K * 6
"""An id of 4 bytes and a float16 log-probability for each of the top k."""
GPUS_PER_NODE = 8
COMPUTE_S = 22.0
NETWORK_GB_PER_S = 25.0
ASSUMPTIONS = f"""\
- {RESPONSES_PER_GPU} responses of {TOKENS_PER_RESPONSE} tokens per rollout GPU and step, k = {K}, float16 rows of
  {ROW_BYTES} bytes; rollout replicas and actor ranks of one GPU each; {GPUS_PER_NODE} GPUs per node.
- A step computes for {COMPUTE_S:g} s on the GPUs (an estimate for a 7B student), whatever the size.
- The driver has one core for its event loop. Its costs per response, token, replica and rank are those measured here,
  and stay the same at any size. Its threads (object store, sockets) share that core in this estimate.
- A scoring worker receives rows at the rate measured here, one worker per actor node.
- {NETWORK_GB_PER_S:g} GB/s of network per node; the teacher service is as fast as needed."""


@dataclass(frozen=True)
class Observation:
    """One measured case.

    Attributes:
        driver_s: CPU time of the driver per step.
        responses: Responses per step.
        tokens: Response tokens per step.
    """

    driver_s: float
    responses: float
    tokens: float
    replicas: int
    ranks: int


@dataclass(frozen=True)
class DriverCosts:
    """Costs of the driver in CPU seconds: per step, response, response token, replica and actor rank."""

    step: float
    response: float
    token: float
    replica: float
    rank: float

    @classmethod
    def fit(cls, observations: Sequence[Observation]) -> DriverCosts:
        """Return the costs with the least squared relative errors. A cost that would be negative is 0."""
        terms = np.array([[1.0, o.responses, o.tokens, o.replicas, o.ranks] for o in observations])
        relative = terms / np.array([[o.driver_s] for o in observations])
        used = list(range(terms.shape[1]))
        while True:
            found = np.linalg.lstsq(relative[:, used], np.ones(len(relative)), rcond=None)[0]
            if found.min() >= 0:
                break
            used.pop(int(found.argmin()))
        costs = np.zeros(terms.shape[1])
        costs[used] = found
        return cls(*map(float, costs))

    def of(self, *, responses: float, tokens: float, replicas: int, ranks: int) -> float:
        """Return the CPU seconds of a step."""
        return self.step + self.response * responses + self.token * tokens + self.replica * replicas + self.rank * ranks


def extrapolate(costs: DriverCosts, worker_gb_per_s: float, n_gpus: int) -> dict[str, float]:
    """Return the durations of a step's parts with ``n_gpus`` rollout GPUs and as many actor GPUs.

    Args:
        worker_gb_per_s: Rate at which a scoring worker receives rows.
        n_gpus: Number of GPUs of each pool.
    """
    responses = n_gpus * RESPONSES_PER_GPU
    tokens = responses * TOKENS_PER_RESPONSE
    gigabytes = tokens * ROW_BYTES / 1e9
    nodes = max(1, n_gpus // GPUS_PER_NODE)
    driver_s = costs.of(responses=responses, tokens=tokens, replicas=n_gpus, ranks=n_gpus)
    return {
        "gpus": float(n_gpus),
        "rows_gb": gigabytes,
        "driver_s": driver_s,
        "scoring_worker_s": gigabytes / nodes / worker_gb_per_s,
        "network_s": gigabytes / nodes / NETWORK_GB_PER_S,
        "step_over_compute": max(driver_s, gigabytes / nodes / worker_gb_per_s, COMPUTE_S) / COMPUTE_S,
    }
