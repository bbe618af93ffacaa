"""Bounds of numeric keys. ``tests/unit/config/test_limits.py`` runs the consumers of each key at both bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from recipe_gkd.errors import ConfigError

# torch reads a timeout of zero as "use the default".
MIN_TIMEOUT_S = 1e-3
# The maximum of one request in teacher.wire.messages. poll() takes at most 24 days.
MAX_TIMEOUT_S = 7 * 24 * 3600.0
# Maximum time over which a request to a teacher is repeated.
MAX_TEACHER_WAIT_S = 30 * 24 * 3600.0
# Accepted by every random generator, after Megatron has added its offset per rank.
MAX_SEED = 2**32 - 1
# The maximum sequence length in teacher.wire.messages.
MAX_TOKENS = 1 << 20
# Positions, offsets and top_k are int32 in Megatron and vLLM.
MAX_INT32 = 2**31 - 1
# Sizes of the largest machines. A machine that is too small is reported later, with its own numbers.
MAX_NODES, MAX_DEVICES, MAX_CPUS = 4096, 1024, 4096
# Their product must fit into int64, because samples are numbered over the whole run. MAX_STEPS also bounds keys that
# are only compared with a count: intervals of saves and validations, checkpoints to keep, allowed failures, restarts
# and skipped samples, and logged responses.
MAX_BATCH, MAX_GROUP, MAX_STEPS, MAX_EPOCHS = 1 << 20, 1 << 12, 10**9, 10**6
# Turns of a conversation. Each has at least one token.
MAX_TURNS = 1 << 14
# Requests to a remote service that one process has open at a time.
MAX_CALLS = 1 << 14
# Losses and gradient norms stay finite in float32 even if all coefficients have this value.
MAX_COEFFICIENT = 1e6
# Differences of log-probabilities are capped there (``losses.sampled_token.MAX_LOG_RATIO``).
MAX_MISMATCH = 20.0
# vLLM raises lower temperatures to 0.01 and rejects higher ones.
LOWEST_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0


def _check_temperature(temperature: float) -> float:
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ConfigError(
            f"got {temperature}, but vLLM would sample at {LOWEST_TEMPERATURE:g} instead",
            remedy=f"set 0 (greedy) or at least {LOWEST_TEMPERATURE:g}",
        )
    return temperature


Temperature = Annotated[float, AfterValidator(_check_temperature)]  # 0, or LOWEST_TEMPERATURE to MAX_TEMPERATURE
Beta = Annotated[float, Field(ge=0, le=1 - 1e-6)]  # decay rate of a moving average; below 1 in float32 too
