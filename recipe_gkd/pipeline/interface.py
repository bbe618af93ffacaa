"""What flows through the schedule, and the stages that it flows through: records, signatures, the one clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from recipe_gkd.data.samples import Prompt, Response, Sample
from recipe_gkd.errors import WorkerDied

Generate = Callable[[int, Sequence[Prompt], int], AsyncIterator[list[Response]]]
"""(lane, prompts, step) -> their answers, in any order, as they finish. A lane is a rollout worker, by rank."""
Score = Callable[[Sequence[tuple[Prompt, Response]], int], Awaitable[list[Sample]]]
"""(some answers, step) -> what their teachers think of them: one request to each teacher."""
ComputeRewards = Callable[[Sequence[tuple[Prompt, Response]]], Awaitable[dict[int, float]]]
"""By uid: the rewards of those of some answers that are given one."""
Sync = Callable[[int], Awaitable[dict[str, float]]]
"""Send the actor's weights, which have this version, to every lane; returns metrics."""
Replace = Callable[[WorkerDied], Awaitable[None]]
"""See to it that every lane has a living worker, which may have no weights; raise if that is not to be."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How samples flow through the stages; every field is a number or a switch of the configuration."""

    max_staleness: int
    n_replicas: int = 1
    capacity: int = 1
    """Answers that all lanes together can have under way; the next batch is handed out when there are fewer."""
    responses_per_prompt: int = 1
    """Prompts that follow each other and go to the same lane."""
    requests_per_batch: int = 1
    """Groups of equally many answers that go to the teachers; fewer if a batch does not have so many, and the last is
    smaller."""
    inflight_update: bool = False
    """Weights may be sent while answers are under way."""


@dataclass
class ReadyBatch:
    """A batch that can be trained on, and what it took to get there. Times are the event loop's."""

    step: int
    epoch: float
    dispatched_at: float
    generated_at: float = 0.0
    """When its last answer was there."""
    scored_at: float = 0.0
    """When the teacher had said what it thinks of them."""
    samples: list[Sample] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def staleness(self) -> list[int]:
        """Of each sample: updates between the weights that began to generate it and those that it will update."""
        return [self.step - sample.response.weights_version for sample in self.samples]


def assign_prompts(prompts: Sequence[Prompt], n_replicas: int, responses_per_prompt: int) -> list[list[Prompt]]:
    """A share for each lane: round in turn, all answers to one prompt to the same lane, which then reads it once.

    Prompts with a given answer, which cost a lane nothing, are dealt after the others: those are shared out evenly.
    """
    groups: dict[int, list[Prompt]] = {}
    for prompt in sorted(prompts, key=lambda prompt: prompt.reference_ids is not None):
        groups.setdefault(prompt.uid // responses_per_prompt, []).append(prompt)
    dealt = list(groups.values())
    return [[prompt for group in dealt[replica::n_replicas] for prompt in group] for replica in range(n_replicas)]
