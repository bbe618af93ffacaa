"""Metrics of a step: times, idle fractions of the pools, and statistics of its samples."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import psutil

from recipe_gkd.config import Config
from recipe_gkd.data.batches import ReadyBatch
from recipe_gkd.data.parts import by_response
from recipe_gkd.data.samples import Sample
from recipe_gkd.metrics.advice.advice import Advisor
from recipe_gkd.metrics.advice.measured_stages import WAITS
from recipe_gkd.metrics.advice.resource_layout import PoolSize, ResourceLayout
from recipe_gkd.metrics.loggers.loggers import Loggers
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.metrics.trace import TraceFile
from recipe_gkd.metrics.utilization import ActorUtilization
from recipe_gkd.rewards.reporting import mean_numbers
from recipe_gkd.runtime.clock import now
from teacher.common.sizes import GIB

log = logging.getLogger(__name__)

TRAINER_WORK = ("timing/update_actor", "timing/validate", "timing/save_checkpoint", "timing/log")
PARTS_OF_STEP = [*(name for names in WAITS.values() for name in names), *TRAINER_WORK]


class Capacity(Protocol):
    """Part of :class:`recipe_gkd.ray_cluster.capacity.ClusterCapacity` that the advice needs."""

    @property
    def cores(self) -> float | None:
        """Number of CPU cores that the pools share. None: the pools have their own devices."""

    def grants(self, actor: PoolSize, rollout: PoolSize) -> bool:
        """Return True if the cluster has room for an actor pool and a rollout pool of these sizes."""


@contextmanager
def span(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Add the duration of the body, in seconds, to ``metrics[name]``."""
    began = now()
    try:
        yield
    finally:
        metrics[name] = metrics.get(name, 0.0) + now() - began


class StepMetrics:
    """Computation of the metrics of each step. A context manager that closes the trace file.

    A step lasts from the end of the previous one until its metrics are complete. ``timing/step`` is the sum of the
    trainer's waits (``wait_*``), its work (``update_actor``, ``validate``, ``save_checkpoint``, ``log``), and the
    remaining time (``other``).

    Attributes:
        timeline: Record of the spans of all pools, which the pipeline writes.
    """

    def __init__(
        self,
        config: Config,
        *,
        n_rollouts: int,
        capacity: Capacity | None = None,
        utilization: ActorUtilization | None = None,
    ) -> None:
        """Open the trace file.

        Args:
            n_rollouts: Number of rollout replicas.
            capacity: Free resources of the cluster, for the advice. None: unknown.
            utilization: Computation of ``perf/mfu/actor``. None: the metric is omitted.
        """
        trainer = config.trainer
        self._trace = TraceFile(trainer.trace_file) if trainer.trace_file else None
        self.timeline = Timeline(now, sink=self._trace)
        grants, cores = (capacity.grants, capacity.cores) if capacity is not None else (None, None)
        layout = ResourceLayout.of(config, grants, cores)
        self._advisor = Advisor(layout)
        self._tracks = {
            "actor": ["actor"],
            "rollout": [f"rollout {rank}" for rank in range(n_rollouts)],
            "teacher": ["teacher"],
        }
        self._responses_per_prompt = config.actor_rollout_ref.rollout.n
        self._n_teachers, self._n_devices = layout.n_teachers, layout.n_slots
        self._utilization = utilization
        self._began = now()
        self._log_s = 0.0

    def __enter__(self) -> StepMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        if self._trace is not None:
            self._trace.close()

    def log(self, loggers: Loggers, batch: ReadyBatch, step: int) -> None:
        """Complete and log the metrics of the step that has just ended.

        The duration of this call is part of the next step.

        Args:
            loggers: Destinations.
            batch: Batch of the step, with the metrics so far.
            step: Number of the step, starting at 1.
        """
        metrics = self._complete(batch)
        loggers.log(step, metrics)
        if advice := self._advisor.observe(metrics, step):
            log.info("%s", advice)
        self._log_s = now() - self._began

    def log_validation(self, loggers: Loggers, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a validation before the first step. The first step begins now.

        Args:
            loggers: Destinations.
            metrics: Validation metrics.
            step: Number of steps that the weights were trained for.
        """
        ended = now()
        loggers.log(step, {**metrics, "timing/validate": ended - self._began})
        self.timeline.forget(ended)
        self._began, self._log_s = ended, now() - ended

    def _complete(self, batch: ReadyBatch) -> dict[str, float]:
        ended = now()
        step_s = ended - self._began
        metrics = batch.metrics
        metrics.setdefault("timing/sync_rollout_weights", 0.0)
        metrics |= {"timing/step": step_s, "timing/log": self._log_s}
        metrics["timing/other"] = step_s - sum(metrics.get(name, 0.0) for name in PARTS_OF_STEP)
        metrics |= self._idle(ended) | describe(batch, self._responses_per_prompt)
        metrics["perf/cpu_memory_used_gb"] = host_memory_used_gb()
        metrics["perf/tokens_per_second"] = metrics["perf/total_num_tokens"] / step_s
        metrics["perf/throughput"] = metrics["perf/tokens_per_second"] / self._n_devices
        if self._utilization is not None:
            metrics |= self._utilization.metrics(batch.samples, metrics.get("timing/update_actor", 0.0))
        self.timeline.forget(ended)
        self._began = ended
        return metrics

    def _idle(self, ended: float) -> dict[str, float]:
        widths = {"teacher": self._n_teachers}
        return {
            f"perf/idle_{pool}": self.timeline.idle(tracks, self._began, ended, widths.get(pool, 1))
            for pool, tracks in self._tracks.items()
        }


def describe(batch: ReadyBatch, responses_per_prompt: int = 1) -> dict[str, float]:
    """Return statistics of the responses of a batch: lengths, staleness and rewards.

    Statistics of responses are over sampled responses. Reference responses are excluded.

    Args:
        batch: Batch of at least one sample.
        responses_per_prompt: Number of responses per prompt.
    """
    metrics = {
        "training/epoch": batch.epoch,
        "training/sft_share": float(np.mean([sample.is_reference for sample in batch.samples])),
        "training/samples": float(len(batch.samples)),
        "perf/total_num_tokens": float(sum(sample.n_tokens for sample in batch.samples)),
    }
    sampled = [sample for sample in batch.samples if not sample.is_reference]
    if not sampled:
        return metrics
    responses = [[sample.response for sample in parts] for parts in by_response(sampled)]
    lengths = np.array([sum(len(part.ids) for part in parts) for parts in responses])
    truncated = np.array([parts[-1].finish_reason == "length" for parts in responses])
    staleness = np.array(batch.staleness)[[not sample.is_reference for sample in batch.samples]]
    versions = [np.concatenate([part.versions_T for part in parts]) for parts in responses]  # ascending
    metrics |= {
        "response_seq_len/average": float(lengths.mean()),
        "response_seq_len/max": float(lengths.max()),
        "response_seq_len/min": float(lengths.min()),
        "response_seq_len/truncated_fraction": float(truncated.mean()),
        "training/staleness_mean": float(staleness.mean()),
        "training/staleness_max": float(staleness.max()),
        "training/mixed_version_fraction": float(
            np.mean([len(versions_T) > 0 and versions_T[0] != versions_T[-1] for versions_T in versions])
        ),
    }
    return metrics | _reward_statistics([parts[0] for parts in by_response(sampled)], responses_per_prompt)


def _reward_statistics(sampled: list[Sample], responses_per_prompt: int) -> dict[str, float]:
    groups: dict[int, list[tuple[float, tuple[float, ...]]]] = {}
    for sample in sampled:
        if sample.reward is not None:
            found = sample.reward, sample.turn_rewards
            groups.setdefault(sample.prompt.uid // responses_per_prompt, []).append(found)
    if not groups:
        return {}
    rewards = np.array([reward for group in groups.values() for reward, _ in group])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/std": float(rewards.std()),
        "reward/zero_std_group_fraction": float(np.mean([len(set(group)) == 1 for group in groups.values()])),
    } | mean_numbers([sample.reward_numbers for sample in sampled], "reward/")


def host_memory_used_gb() -> float:
    """Return the memory in use on the driver's node by all processes, in GiB."""
    memory = psutil.virtual_memory()
    return (memory.total - memory.available) / GIB
