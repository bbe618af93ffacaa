"""What computes the logprobs: a worker knows an engine as `base.ScoringEngine`, and loads one by its name."""

from __future__ import annotations

from teacher.engines.base import EngineConfig, ScoringEngine
from teacher.errors import TeacherError

__all__ = ["EngineConfig", "ScoringEngine", "load_engine"]


def load_engine(backend: str, config: EngineConfig) -> ScoringEngine:
    """Load the model; returns when it has scored a first sequence.

    Raises: TeacherError if `backend` is unknown or the checkpoint cannot be used as configured.
    """
    if backend != "vllm":
        raise TeacherError(f"BACKEND must be vllm, got {backend!r}; it is the only engine there is")
    from teacher.engines.vllm_engine import VllmEngine  # vLLM takes seconds to import: only where it is used

    return VllmEngine(config)
