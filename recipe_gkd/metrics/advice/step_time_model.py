"""Model of the step time as a function of the stage times of a batch.

A batch is generated (``g`` seconds), scored by the teacher (``t``) and trained on (``u``), and the weights are sent
(``w``). With staleness bound ``s``, batch ``i`` may be generated with the weights of version ``i - s``. Between the end
of update ``i - s - 1`` and the end of update ``i`` there are ``s + 1`` steps, in which the weights are sent once and
batch ``i`` passes all stages.
"""

from __future__ import annotations

from dataclasses import dataclass


def step_bound(g: float, t: float, u: float, w: float, staleness: int) -> float:
    """Return a lower bound on the step time of any schedule that passes whole batches between stages.

    No stage takes less than its own time per step, and a batch has ``s + 1`` steps to pass all of them::

        max(g, t, u, (g + t + u + w) / (s + 1))

    A real step can take longer than the bound. The bound counts ``w`` only for the batch. A sync also keeps the actor
    busy, so a step takes at least ``u + w``. Without in-flight updates it also stops the rollout workers, so a step
    takes at least ``g + w``.

    A real step can also be shorter than the bound. With streaming, the teacher scores the first responses while the
    last ones are generated, so a batch passes both stages in less than ``g + t``. If ``g`` is the time of a batch
    alone, batches that share the workers take less than ``g`` each.

    Args:
        g: Generation time of a batch, in seconds.
        t: Teacher time of a batch, in seconds.
        u: Update time, in seconds.
        w: Time of a weight sync, in seconds.
        staleness: Maximum policy lag in optimizer steps.

    Returns:
        Time per step in seconds.
    """
    return max(g, t, u, (g + t + u + w) / (staleness + 1))


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Stage times per step, in seconds: the work of each pool, and the latency of a batch.

    Attributes:
        generate: Work of the rollout pool: the time of a batch if its workers always had enough responses to generate.
        latency: Time from the dispatch of a batch to its last response. It exceeds ``generate`` if workers wait for
            stragglers.
        teacher: Work of the teacher with all its workers in parallel.
        tail: Time from the last response of a batch to its last score. Equal to ``teacher`` without streaming.
        head_start: Time from the first responses that the teacher receives to the last response of the batch. 0
            without streaming.
        update: Work of the trainer, including checkpoints and logs.
        sync: Time of a weight sync.
    """

    generate: float
    latency: float
    teacher: float
    tail: float
    head_start: float = 0.0
    update: float
    sync: float

    def scaled(
        self, *, rollout: float = 1.0, teacher: float = 1.0, actor: float = 1.0, sync: float = 1.0
    ) -> StageSeconds:
        """Return the stage times with pools that are larger by these factors, if work is divided without loss.

        The teacher's tail consists of the work that did not fit into its head start, and of its last requests.
        """
        work, head_start = self.teacher / teacher, self.head_start / rollout
        last_requests = max(0.0, self.tail - max(0.0, self.teacher - self.head_start))
        return StageSeconds(
            generate=self.generate / rollout,
            latency=self.latency / rollout,
            teacher=work,
            tail=max(0.0, work - head_start) + last_requests / teacher,
            head_start=head_start,
            update=self.update / actor,
            sync=self.sync / sync,
        )


def step_time_bounds(stages: StageSeconds, staleness: int, *, inflight: bool = False) -> dict[str, float]:
    """Return the lower bounds on the step time by cause, in seconds. The largest one determines the step time.

    - ``rollout``: a sync stops generation. Without in-flight updates it first waits for the stragglers. With a bound of
      2 or more one sync may serve several batches, which then overlap.
    - ``actor``: updates and syncs.
    - ``teacher``: its work.
    - ``staleness``: a batch passes all stages within ``s + 1`` steps.
    """
    straggler_wait = 0.0 if inflight else max(0.0, stages.latency - stages.generate) / max(1, staleness)
    batch_time = stages.sync + stages.latency + stages.tail + stages.update
    return {
        "rollout": stages.generate + straggler_wait + stages.sync,
        "actor": stages.update + stages.sync,
        "teacher": stages.teacher,
        "staleness": batch_time / (staleness + 1),
    }


def step_seconds(stages: StageSeconds, staleness: int, *, inflight: bool = False) -> float:
    """Return the expected step time in seconds."""
    return max(step_time_bounds(stages, staleness, inflight=inflight).values())
