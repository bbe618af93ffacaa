"""Throughput of conversations with tools relative to the same turns without tools, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import virtual_time
from pipeline_stages import BatchTimes, Pools, Stages, drive

from recipe_gkd.pipeline.config import PipelineConfig

TURN_S = 1.0
"""Mean duration of a turn in its slot."""
STALENESS = (0, 1, 2, 4)
RESPONSES_PER_SLOT = (1, 2, 4)
N_STEPS, WARM_UP = 16, 8
SEED = 0


def tables(n_turns: int, max_tool_s: float, pools: Pools) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        n_turns: Number of turns of a conversation.
        max_tool_s: Longest tool call between two turns; they are uniform from 0.
        pools: Sizes of the pools.
    """
    yield (
        f"{n_turns} turns of {TURN_S:g} s on average, tools of 0 to {max_tool_s:g} s: throughput relative to the same "
        "turns without tools"
    )
    columns = "".join(f"{f'{n} per slot':>12}" for n in RESPONSES_PER_SLOT)
    yield f"{'bound of the staleness':<24}{columns}   responses of a batch for each slot of the replicas"
    for staleness in STALENESS:
        shares = [throughput_share(n_turns, max_tool_s, pools, staleness, n) for n in RESPONSES_PER_SLOT]
        yield f"{staleness:<24}" + "".join(f"{share:12.2f}" for share in shares)


def throughput_share(n_turns: int, max_tool_s: float, pools: Pools, staleness: int, per_slot: int) -> float:
    """Return the throughput with tools, divided by the throughput without."""
    rng = random.Random(SEED)
    n_slots = pools.n_replicas * pools.n_slots
    turns = [rng.uniform(0.5, 1.5) * n_turns * TURN_S for _ in range(per_slot * n_slots)]
    tools = [[rng.uniform(0, max_tool_s) for _ in range(n_turns - 1)] for _ in turns]
    plain = BatchTimes(responses=turns, teacher=0.1, update=0.3 * sum(turns) / n_slots, sync=0.02)
    return _step_s(plain, pools, staleness) / _step_s(replace(plain, tools=tools), pools, staleness)


def _step_s(times: BatchTimes, pools: Pools, staleness: int) -> float:
    config = PipelineConfig(
        max_staleness=staleness,
        n_replicas=pools.n_replicas,
        capacity=pools.n_replicas * pools.n_slots,
        requests_per_batch=16,
        inflight_update=staleness > 0,
    )
    record = virtual_time.run(drive(Stages(lambda step: times, pools), config, WARM_UP + N_STEPS + staleness))
    return (record.ended_at[WARM_UP + N_STEPS - 1] - record.ended_at[WARM_UP - 1]) / N_STEPS
