"""The metrics of a step, complete: what it took, what each pool idled, and numbers that follow from its samples."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import psutil

from recipe_gkd.config import Config
from recipe_gkd.data.batches import ReadyBatch
from recipe_gkd.data.samples import Sample
from recipe_gkd.metrics.advice import Advisor
from recipe_gkd.metrics.changes import WAITS, ResourceLayout
from recipe_gkd.metrics.loggers import Loggers
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.metrics.trace import TraceFile
from recipe_gkd.runtime.clock import now

log = logging.getLogger(__name__)

GIB = 1 << 30
DONE = ("timing/update_actor", "timing/validate", "timing/save_checkpoint", "timing/log")
OF_A_STEP = [*(name for names in WAITS.values() for name in names), *DONE]


class Capacity(Protocol):
    """Interface of :class:`recipe_gkd.ray_cluster.capacity.ClusterCapacity` that advice needs."""

    @property
    def cores(self) -> float | None: ...

    def grants(self, actor: tuple[int, int], rollout: tuple[int, int]) -> bool: ...


@contextmanager
def span(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the body took to ``metrics[name]``."""
    began = now()
    try:
        yield
    finally:
        metrics[name] = metrics.get(name, 0.0) + now() - began


class StepMetrics:
    """From the timeline that the schedule writes to the numbers of each step; a context manager that ends the trace.

    A step lasts from the end of the last one to the moment when its metrics are complete: ``timing/step`` is the sum of
    what the trainer waited for (``wait_*``), what it did (``update_actor``, ``validate``, ``save_checkpoint``,
    ``log``), and what is left between these (``other``: its own bookkeeping, and whatever the machine did instead).
    """

    def __init__(self, config: Config, *, n_rollouts: int, capacity: Capacity | None = None) -> None:
        """Open the trace file. ``capacity``: of the cluster, for advice; None if it is unknown."""
        trainer = config.trainer
        self._trace = TraceFile(trainer.trace_file) if trainer.trace_file else None
        self.timeline = Timeline(now, sink=self._trace)
        setup = ResourceLayout.of(config) if capacity is None else ResourceLayout.of(config, capacity.grants, capacity.cores)
        self._advisor = Advisor(setup)
        self._pools = {
            "actor": ["actor"],
            "rollout": [f"rollout {rank}" for rank in range(n_rollouts)],
            "teacher": ["teacher"],
        }
        self._answers_per_prompt = config.actor_rollout_ref.rollout.n
        self._n_teachers = config.actor_rollout_ref.teacher.n_server_workers
        self._began = now()
        self._log_s = 0.0

    def __enter__(self) -> StepMetrics:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._trace is not None:
            self._trace.close()

    def log(self, loggers: Loggers, batch: ReadyBatch, step: int) -> None:
        """Of the step that has just ended; ``step`` is its number from 1. Its own time counts to the next step."""
        metrics = self._complete(batch)
        loggers.log(metrics, step)
        if advice := self._advisor.observe(metrics, step):
            log.info("%s", advice)
        self._log_s = now() - self._began

    def log_validation(self, loggers: Loggers, metrics: dict[str, float], step: int) -> None:
        """Of the weights that the training starts from, which have seen ``step`` steps; the first step begins now."""
        ended = now()
        loggers.log(metrics | {"timing/validate": ended - self._began}, step)
        self.timeline.forget(ended)
        self._began, self._log_s = ended, now() - ended

    def _complete(self, batch: ReadyBatch) -> dict[str, float]:
        ended = now()
        seconds = ended - self._began
        metrics = batch.metrics
        metrics.setdefault("timing/sync_rollout_weights", 0.0)
        metrics |= {"timing/step": seconds, "timing/log": self._log_s}
        metrics["timing/other"] = seconds - sum(metrics.get(name, 0.0) for name in OF_A_STEP)
        metrics |= self._idle(ended) | describe(batch, self._answers_per_prompt)
        metrics["perf/cpu_memory_used_gb"] = host_memory_used_gb()
        metrics["perf/tokens_per_second"] = metrics["perf/total_num_tokens"] / seconds
        self.timeline.forget(ended)
        self._began = ended
        return metrics

    def _idle(self, ended: float) -> dict[str, float]:
        widths = {"teacher": self._n_teachers}
        return {
            f"perf/idle_{pool}": self.timeline.idle(tracks, self._began, ended, widths.get(pool, 1))
            for pool, tracks in self._pools.items()
        }


def describe(batch: ReadyBatch, responses_per_prompt: int = 1) -> dict[str, float]:
    """Metrics that follow from the samples alone; what is said of answers is said of the sampled ones."""
    metrics = {
        "training/epoch": batch.epoch,
        "training/sft_share": float(np.mean([sample.is_reference for sample in batch.samples])),
        "perf/total_num_tokens": float(sum(sample.n_tokens for sample in batch.samples)),
    }
    sampled = [sample for sample in batch.samples if not sample.is_reference]
    if not sampled:
        return metrics
    lengths = np.array([len(sample.response.ids) for sample in sampled])
    cut = np.array([sample.response.finish_reason == "length" for sample in sampled])
    staleness = np.array(batch.staleness)[[not sample.is_reference for sample in batch.samples]]
    versions = [sample.response.versions_T for sample in sampled]  # ascending
    metrics |= {
        "response_seq_len/average": float(lengths.mean()),
        "response_seq_len/max": float(lengths.max()),
        "response_seq_len/min": float(lengths.min()),
        "response_seq_len/truncated_fraction": float(cut.mean()),
        "training/staleness_mean": float(staleness.mean()),
        "training/staleness_max": float(staleness.max()),
        "training/mixed_version_fraction": float(np.mean([len(own) > 0 and own[0] != own[-1] for own in versions])),
    }
    return metrics | _rewards(sampled, responses_per_prompt)


def _rewards(sampled: list[Sample], responses_per_prompt: int) -> dict[str, float]:
    """Empty if no reward function was asked."""
    groups: dict[int, list[float]] = {}
    for sample in sampled:
        if sample.reward is not None:
            groups.setdefault(sample.prompt.uid // responses_per_prompt, []).append(sample.reward)
    if not groups:
        return {}
    rewards = np.concatenate(list(groups.values()))
    return {
        "reward/mean": float(rewards.mean()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/std": float(rewards.std()),
        "reward/zero_std_group_fraction": float(np.mean([min(group) == max(group) for group in groups.values()])),
    }


def host_memory_used_gb() -> float:
    """GiB in use on the driver's node, by everything."""
    memory = psutil.virtual_memory()
    return (memory.total - memory.available) / GIB
