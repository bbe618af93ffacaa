"""Methods that vLLM's worker class gets, in the process of each tensor-parallel rank."""

from __future__ import annotations

from recipe_gkd.rollout.vllm_weights import WeightUpdateCalls
from teacher.engines.vllm_worker import LogitsCalls


class WorkerCalls(WeightUpdateCalls, LogitsCalls):
    """Extension class for ``worker_extension_cls``: vLLM adds it to the bases of its worker class."""
