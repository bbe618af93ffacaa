"""Numbers that describe one trained batch: lengths, staleness, tokens, memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil

from recipe_gkd.schedule import ReadyBatch

GIB = 1 << 30


@contextmanager
def span(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the body took to ``metrics[name]``."""
    started = time.monotonic()
    try:
        yield
    finally:
        metrics[name] = metrics.get(name, 0.0) + time.monotonic() - started


def describe(batch: ReadyBatch) -> dict[str, float]:
    """Metrics that follow from the samples alone."""
    lengths = np.array([len(sample.answer.ids) for sample in batch.samples])
    cut = np.array([sample.answer.finish_reason == "length" for sample in batch.samples])
    return {
        "response_seq_len/average": float(lengths.mean()),
        "response_seq_len/max": float(lengths.max()),
        "response_seq_len/min": float(lengths.min()),
        "response_seq_len/cut_share": float(cut.mean()),
        "training/epoch": batch.epoch,
        "training/staleness_mean": float(np.mean(batch.staleness)),
        "training/staleness_max": float(max(batch.staleness)),
        "perf/total_num_tokens": float(sum(sample.n_tokens for sample in batch.samples)),
    }


def host_memory_used_gb() -> float:
    """GiB in use on the driver's node, by everything."""
    memory = psutil.virtual_memory()
    return (memory.total - memory.available) / GIB
