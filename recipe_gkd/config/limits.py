"""Bounds of numeric keys: values that the code that consumes them can hold, as ``tests/test_limits.py`` shows."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

MIN_TIMEOUT_S = 1e-3
"""Shortest deadline: a timeout of zero means "the default" to torch."""
MAX_TIMEOUT_S = 7 * 24 * 3600.0
"""Longest deadline of one call: that of a request in ``teacher.wire.messages``. ``poll`` takes at most 24 days."""
MAX_TEACHER_WAIT_S = 30 * 24 * 3600.0
"""Longest time over which a request is repeated."""
MAX_SEED = 2**32 - 1
"""Largest seed that every generator takes, also after Megatron has added its offset of the rank."""
MAX_TOKENS = 1 << 20
"""Longest sequence that travels to a teacher (``teacher.wire.messages``)."""
MAX_INT32 = 2**31 - 1
"""Positions, offsets and ``top_k`` are int32 in Megatron and vLLM."""
MAX_NODES, MAX_DEVICES, MAX_CPUS = 4096, 1024, 4096
"""Nodes of a pool, devices of a node, CPUs of a local cluster. Sizes that the largest machines have; the code compares
and multiplies them, and a machine that is too small is refused."""
MAX_BATCH, MAX_GROUP, MAX_STEPS, MAX_EPOCHS = 1 << 20, 1 << 12, 10**9, 10**6
"""Prompts of a step, responses to a prompt, steps and epochs of a run: a sample's number is an int64.

``MAX_STEPS`` also bounds keys that are only compared with a count of the run, and that any integer would suit: the
intervals of saves and validations, checkpoints to keep, failures, restarts and skipped samples that are allowed, and
answers shown in the log.
"""
MAX_COEFFICIENT = 1e6
"""Weights of losses and bounds of probability ratios: with all of them this large, losses and the norms of their
gradients remain finite in float32."""
LOWEST_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""Range in which vLLM samples as asked: it raises lower temperatures to 0.01 and refuses higher ones."""


def _can_be_sampled_at(temperature: float) -> float:
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"vLLM would sample at {LOWEST_TEMPERATURE:g} instead; set 0 (greedy) or at least {LOWEST_TEMPERATURE:g}"
        )
    return temperature


Temperature = Annotated[float, AfterValidator(_can_be_sampled_at)]
"""0, or within :data:`LOWEST_TEMPERATURE` and :data:`MAX_TEMPERATURE`."""
Beta = Annotated[float, Field(ge=0, le=1 - 1e-6)]
"""Decay rate of a moving average, below 1 in float32 too."""
