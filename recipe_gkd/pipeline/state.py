"""State that the parts of the schedule share.

States and transitions. The last column names the part that performs the transition::

    subject           state            event                                     next state        part
    ----------------  ---------------  ----------------------------------------  ----------------  ------------------
    actor             idle             update or checkpoint starts               held              ActorLock
                      held             update ends: actor_version += 1           idle              ActorLock
                      held             other work ends                           idle              ActorLock
                      idle             weight sync starts                        syncing           ActorLock
                      syncing          sync ends: rollout_version is set         idle              ActorLock
                      held, syncing    error, which ends the run                 unchanged         ActorLock
    batch             next             room for rows, weights fresh, capacity    dispatched        StalenessGate
                                       free, no sync
                      dispatched       last response received                    generated         BatchAssembler
                      generated        last sample scored, rewards computed      ready             BatchAssembler
    prompt            in flight        response received                         finished          RolloutSupervisor
                      in flight        replica dead or replacement running       parked            RolloutSupervisor
                      parked           replacement ended                         in flight         RolloutSupervisor
    rollout replica   alive            WorkerDied with unfinished prompts        dead              RolloutSupervisor
                      dead             worker replaced                           without weights   RolloutSupervisor
                      without weights  weight sync ended                         alive             RolloutSupervisor

Invariants:

* The actor does one thing at a time: update, checkpoint or weight sync.
* ``rollout_version <= actor_version``.
* Batch ``i`` is dispatched only if ``rollout_version >= i - max_staleness``.
* No sync starts while responses are in flight, except with ``inflight_update``.
* No batch is dispatched while the rows of others fill the memory, unless there is no other batch.
* No batch is dispatched during a sync or while validation reserves the replicas.
* Every prompt yields exactly one response, even if its replica dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from recipe_gkd.errors import WorkerDied
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.pipeline.row_memory import RowMemory


@dataclass
class PipelineState:
    """State of the schedule, shared by its parts in one event loop.

    Attributes:
        config: Settings of the schedule.
        timeline: Receiver of spans and counters.
        actor_version: Number of optimizer steps of the actor's weights.
        rollout_version: Version of the replicas' weights. None before the first sync.
        next_step: Step of the batch that is dispatched next. None if there is none.
        actor_busy: True while the actor is held or syncing.
        syncing: True during a weight sync.
        reserved: True while validation reserves the rollout replicas.
        n_in_flight: Number of prompts whose responses are being generated.
        n_outside: Number of prompts in flight that wait for something else than their replica, such as a tool.
        n_requested: Number of batches that the trainer has asked for.
        n_parked: Number of unfinished prompts that wait for the replacement of a worker.
        needed_versions: Lowest acceptable versions of the tasks that cannot generate before a sync.
        deaths: Error of each dead replica, also after its replacement until it has weights.
        last_dispatch_at: Time of the last dispatch.
        last_generate_s: Duration of the generation of the last batch, in seconds.
        last_update_s: Duration of the last update, in seconds.
        rows: Memory of the teachers' rows.
        is_dropped: True if the run ends before the next batch, so that nothing waits for stages any more.
    """

    config: PipelineConfig
    timeline: Timeline
    actor_version: int
    rollout_version: int | None = None
    next_step: int | None = None
    actor_busy: bool = False
    syncing: bool = False
    reserved: bool = False
    n_in_flight: int = 0
    n_parked: int = 0
    n_outside: int = 0
    n_requested: int = 0
    needed_versions: list[int] = field(default_factory=list)
    deaths: dict[int, WorkerDied] = field(default_factory=dict)
    last_dispatch_at: float = 0.0
    last_generate_s: float = 0.0
    last_update_s: float = 0.0
    rows: RowMemory = field(init=False)
    is_dropped: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.rows = RowMemory(self.config.max_row_bytes)

    @property
    def sync_is_possible(self) -> bool:
        """True if the actor is idle and responses in flight do not prevent a sync."""
        return not self.actor_busy and (self.config.inflight_update or not self.n_in_flight)

    def add_in_flight(self, n_prompts: int) -> None:
        """Add ``n_prompts``, which may be negative, to the prompts in flight."""
        self.n_in_flight += n_prompts
        self.timeline.count("rollout", "responses in flight", self.n_in_flight)
        self.notify()

    def add_outside(self, n_prompts: int) -> None:
        """Add ``n_prompts``, which may be negative, to the prompts in flight that do not use their replica."""
        self.n_outside += n_prompts
        self.notify()

    def notify(self) -> None:
        """Wake all tasks in :meth:`until`, so that they check their conditions again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` is True. No other task runs between the check and the return."""
        while not condition():
            await self._changed.wait()
