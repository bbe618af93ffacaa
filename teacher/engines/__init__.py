"""Engines that compute the log-probabilities. A worker loads one by name and uses it as a `base.ScoringEngine`."""

from __future__ import annotations

from teacher.engines.base import EngineConfig, ScoringEngine
from teacher.errors import TeacherSetupError

__all__ = ["EngineConfig", "ScoringEngine", "load_engine"]


def load_engine(backend: str, config: EngineConfig) -> ScoringEngine:
    """Load the model and return the engine after it has scored a first sequence.

    Args:
        backend: Name of the engine: ``"vllm"``.
        config: Model and limits.

    Raises:
        TeacherError: The backend is unknown, or the checkpoint cannot be used as configured.
    """
    if backend != "vllm":
        raise TeacherSetupError(
            f"BACKEND must be vllm, got {backend!r}", options=("BACKEND",), remedy="vllm is the only engine"
        )
    from teacher.engines.vllm_engine import VllmEngine  # importing vLLM takes seconds

    return VllmEngine(config)
