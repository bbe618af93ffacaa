"""Module that each tensor-parallel rank imports for its worker extension, which corrects vLLM's CPU build there.

On a CPU, vLLM spawns the ranks, so that corrections in the worker's process would not apply to them.
"""

from __future__ import annotations

from teacher.common.vllm_cpu import correct_cpu_build
from teacher.engines.vllm_memory import TeacherCalls

__all__ = ["TeacherCalls"]

correct_cpu_build()
