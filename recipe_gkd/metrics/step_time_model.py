"""How long a step must take: the model behind the advice. Pure functions of a batch's stage times.

A batch is generated (``g`` seconds), scored by the teacher (``t``), trained on (``u``), and the weights are sent
(``w``). With staleness bound ``s``, batch ``i`` may be generated with the weights of version ``i - s``: from the end of
update ``i - s - 1`` to the end of update ``i``, which is ``s + 1`` steps, the weights are sent once and batch ``i``
passes all its stages.
"""

from __future__ import annotations

from dataclasses import dataclass


def step_bound(g: float, t: float, u: float, w: float, staleness: int) -> float:
    """Seconds a step that no schedule can beat which gives whole batches from stage to stage, if stages work evenly.

    No stage takes a step faster than its own time, and a batch that passes all of them has ``s + 1`` steps for it::

        max(g, t, u, (g + t + u + w) / (s + 1))

    It counts ``w`` for the batch only, although a sync keeps both the actor and, unless weights are updated in flight,
    the rollout workers from anything else: where one of these two is the slowest stage, a real step takes at least
    ``g + w`` or ``u + w``. Streaming can beat the bound where the last term decides: the teacher scores the first
    answers while the last are generated, so that a batch passes both in less than ``g + t``. And where ``g`` is that of
    a batch alone, which leaves places idle while its last answers are generated, batches that share the workers take
    less than ``g`` each.
    """
    return max(g, t, u, (g + t + u + w) / (staleness + 1))


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Seconds a step that each pool works, and that a batch needs from stage to stage."""

    generate: float
    """Work of the rollout pool: what a batch would take if its workers were never short of answers to generate."""
    latency: float
    """From a batch's admission to its last answer; more than ``generate`` where workers wait for stragglers."""
    teacher: float
    """Work of the teacher: with all its workers at once."""
    tail: float
    """From a batch's last answer to its last score; ``teacher`` if nothing is streamed."""
    head_start: float = 0.0
    """From the teacher's first answers of a batch to the batch's last one; 0 if nothing is streamed."""
    update: float
    """Of the trainer, with all that it does beside updates: checkpoints, logs."""
    sync: float

    def scaled(
        self, *, rollout: float = 1.0, teacher: float = 1.0, actor: float = 1.0, sync: float = 1.0
    ) -> StageSeconds:
        """With pools this many times as large, each of whose work is shared out without loss.

        The teacher's tail is what it could not do in its head start, and its last requests.
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


def limits(stages: StageSeconds, staleness: int, *, inflight: bool = False) -> dict[str, float]:
    """What holds a step up, and the seconds that it takes therefore at least; the largest decides.

    - ``rollout``: a sync stops generation, and unless weights are updated in flight it waits for the stragglers first.
      With a bound of two or more one sync may serve several batches, which then overlap.
    - ``actor``: it is busy with updates and syncs.
    - ``teacher``: its work.
    - ``staleness``: a batch passes all stages within ``s + 1`` steps.
    """
    stragglers = 0.0 if inflight else max(0.0, stages.latency - stages.generate) / max(1, staleness)
    passes = stages.sync + stages.latency + stages.tail + stages.update
    return {
        "rollout": stages.generate + stragglers + stages.sync,
        "actor": stages.update + stages.sync,
        "teacher": stages.teacher,
        "staleness": passes / (staleness + 1),
    }


def step_seconds(stages: StageSeconds, staleness: int, *, inflight: bool = False) -> float:
    """Seconds that a step is expected to take."""
    return max(limits(stages, staleness, inflight=inflight).values())
