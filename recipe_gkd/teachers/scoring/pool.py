"""Driver's side of the scoring workers: start, requests in parts, and their conversion into stored scores."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnschedulableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe_gkd.config.support import Support
from recipe_gkd.data.samples import StoredTopK
from recipe_gkd.errors import WorkerDied
from recipe_gkd.ray_cluster.node_probe import locate, node_addresses, own_node, run_on_node
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.runtime import process_trees
from recipe_gkd.runtime.keyed_timeout import with_margin
from recipe_gkd.runtime.run_log import as_event
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup
from recipe_gkd.runtime.wait_log import waiting
from recipe_gkd.teachers.cache.scores import CacheSettings
from recipe_gkd.teachers.scoring.clients import ClientDescription
from recipe_gkd.teachers.scoring.homes import NO_HOME, Homes
from recipe_gkd.teachers.scoring.ray_worker import PartScores, ScoringWorker
from recipe_gkd.teachers.scoring.requests import TeacherRequest
from teacher.errors import TeacherError, TeacherTimeout

log = logging.getLogger(__name__)

PART_BYTES = 32 << 20
"""Largest top-k of a part of a request, except for a single longer response. Parts are scored, moved into the store and
freed independently of each other."""
MARGIN_S = 5.0
"""Time after a request's deadline in which a scoring worker must answer."""
KILL_TIMEOUT_S = 5.0
"""Deadline of the end of a worker's process that does not answer."""
RESTART_TIMEOUT_S = 30.0
"""Time in which Ray must have started a worker again, which then connects and gets a request's own time."""


class ScoringPool:
    """Scoring workers of a run: an implementation of :class:`~recipe_gkd.teachers.scoring.requests.Requests`.

    A request is divided by the homes of its samples, and into parts of limited size. Each part is one call of a scoring
    worker on the home's node. The driver gets what does not grow with K, and a reference to the rest. Ray restarts a
    scoring worker that died, on the same node, and repeats the calls that it had not completed. A worker that does not
    answer is killed, once per request, and so restarted too.

    Lifecycle::

        pool = ScoringPool.start(specs, nodes, per_node=1, max_restarts=3)
        await pool.connect(timeout_s)
        pool.homes = Homes.of(ranks, node_ids)
        scores = await pool.scores(request, timeout_s)      # concurrently
        await pool.move(homes, timeout_s)                   # after the actor ranks were started again
        await pool.group.stop(timeout_s=10)

    Attributes:
        group: The workers.
        nodes: Nodes of the workers: Ray's id -> address.
        free_shared_memory: Free shared memory of each node in bytes, when the workers connected.
        homes: Nodes of the data-parallel ranks, which must be set before the first request.
        n_restarts: Number of restarts of workers that have been noticed.
    """

    def __init__(
        self,
        specs: Mapping[str, ClientDescription],
        own_node: str,
        start_worker: Callable[..., Any],
        *,
        per_node: int,
        max_restarts: int = 0,
        support: Support | None = None,
    ) -> None:
        """Create a pool without workers.

        Args:
            specs: Client of each teacher, by name.
            own_node: Ray's id of the driver's node.
            start_worker: Function that starts a worker with the clients of ``specs`` on a node, given by its id and
                address, and returns its handle.
            per_node: Number of workers on each node.
            max_restarts: Number of restarts that Ray may make of each worker.
            support: Ids of a row. None: the teacher's top k.
        """
        self._max_restarts, self._support = max_restarts, support or Support()
        self.group: WorkerGroup[ScoringWorker] = WorkerGroup("scoring", [])
        self.homes, self.n_restarts = Homes((), ()), 0
        self.nodes: dict[str, str] = {}
        self.free_shared_memory: dict[str, int] = {}
        self._specs, self._own_node, self._start_worker, self._per_node = specs, own_node, start_worker, per_node
        self._is_loopback = {name: spec.is_loopback for name, spec in specs.items()}
        self._node_of: list[str] = []
        self._workers_of: dict[str, Iterator[int]] = {}
        self._pids: dict[int, int] = {}
        self._kill_locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._killed_at: defaultdict[int, float] = defaultdict(lambda: -math.inf)

    @classmethod
    def start(
        cls,
        specs: Mapping[str, ClientDescription],
        nodes: Mapping[str, str],
        *,
        per_node: int,
        max_restarts: int,
        support: Support | None = None,
        caches: Mapping[str, CacheSettings] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ScoringPool:
        """Start the workers, without waiting for them.

        Args:
            specs: Client of each teacher, by name.
            nodes: Nodes of the actor pool: Ray's id -> address.
            per_node: Number of workers on each node.
            max_restarts: Number of restarts that Ray may make of each worker.
            support: Ids of a row. None: the teacher's top k.
            caches: Cache of each teacher that has one, by name.
            env: Environment variables of the workers.
        """
        nodes = dict(nodes)
        if any(spec.is_loopback for spec in specs.values()):
            nodes.setdefault(own_node(), "of the driver")
        start_worker = partial(_start_worker, caches=dict(caches or {}), max_restarts=max_restarts, env=dict(env or {}))
        pool = cls(specs, own_node(), start_worker, per_node=per_node, max_restarts=max_restarts, support=support)
        pool.start_on(nodes)
        return pool

    def start_on(self, nodes: Mapping[str, str]) -> list[int]:
        """Start workers on nodes that have none, and return their ranks.

        Clients of loopback services are started on the driver's node only.
        """
        first = len(self.group)
        for node, address in nodes.items():
            specs = {name: spec for name, spec in self._specs.items() if not spec.is_loopback or node == self._own_node}
            if node in self._workers_of or not specs:
                continue
            ranks = range(len(self.group), len(self.group) + self._per_node)
            self.group.handles += [self._start_worker(specs, node, address) for _ in ranks]
            self.nodes[node], self._workers_of[node] = address, itertools.cycle(ranks)
            self._node_of += [node] * len(ranks)
        return list(range(first, len(self.group)))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, of the teacher with the largest rows."""
        return max(map(self._row_bytes, self._specs.values()))

    def _row_bytes(self, spec: ClientDescription) -> int:
        return self._support.max_ids(spec.n_columns) * spec.entry_bytes

    def node_shares(self) -> dict[str, float]:
        """Return the largest part of a batch's rows that each node may get, by its id. The homes must be set."""
        of_ranks = [self.homes.nodes[home] for home in self.homes.of_ranks]
        shares = {node: of_ranks.count(node) / len(of_ranks) for node in self.homes.nodes}
        return shares | ({self._own_node: 1.0} if any(self._is_loopback.values()) else {})

    async def connect(self, timeout_s: float) -> None:
        """Wait until all workers have reached the teachers.

        Args:
            timeout_s: Time limit, in seconds.

        Raises:
            ResourceError: A node cannot reach a teacher.
            WorkerError: A worker failed to start.
            DeadlineError: A worker did not answer.
        """
        await self._connect(range(len(self.group)), timeout_s)

    async def move(self, homes: Homes, timeout_s: float) -> None:
        """Use other homes, after the actor ranks were started again. Start workers on nodes that have none.

        Args:
            homes: Nodes of the new ranks.
            timeout_s: Time limit, in seconds. Errors: see :meth:`connect`.
        """
        addresses = node_addresses()
        await self._connect(self.start_on({node: addresses[node] for node in homes.nodes}), timeout_s)
        self.homes = homes

    async def _connect(self, ranks: Sequence[int], timeout_s: float) -> None:
        phase, deadline_s = "start, connect to the teachers", with_margin(timeout_s, MARGIN_S)
        async with FirstErrorTaskGroup() as tasks:
            calls = {
                rank: tasks.start(
                    self.group.call_one(rank, ScoringWorker.setup, timeout_s, timeout_s=deadline_s, phase=phase)
                )
                for rank in ranks
            }
            for rank, call in calls.items():
                self.free_shared_memory[self._node_of[rank]] = await call

    async def scores(self, request: TeacherRequest, timeout_s: float) -> list[StoredTopK]:
        """Return the scores of a request; see :meth:`recipe_gkd.teachers.scoring.requests.Requests.scores`."""
        parts = self._parts(request)
        async with FirstErrorTaskGroup() as tasks:
            calls = [tasks.start(self._score_part(request, home, indices, timeout_s)) for home, indices in parts]
            found = {index: scores for call in calls for index, scores in (await call).items()}
        return [found[index] for index in range(len(request.sequences))]

    def _parts(self, request: TeacherRequest) -> list[tuple[int, list[int]]]:
        """Divide the sequences of a request. Return the home of each part, and the indices of its sequences."""
        of_home: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for index, uid in enumerate(request.uids):  # by the reading node too, so that it fetches no rows of others
            of_home[self._home_of(request.teacher, uid), self.homes.of_uid(uid)].append(index)
        spec = self._specs[request.teacher]
        parts: list[tuple[int, list[int]]] = []
        for (home, _), indices in of_home.items():
            part: list[int] = []
            n_bytes = 0
            for index in indices:
                sequence = request.sequences[index]
                n_columns = sequence.n_support + (spec.n_columns if sequence.with_top_k else 0)
                needed = sequence.n_scored * n_columns * spec.entry_bytes
                if part and n_bytes + needed > PART_BYTES:
                    parts.append((home, part))
                    part, n_bytes = [], 0
                part.append(index)
                n_bytes += needed
            parts.append((home, part))
        return parts

    def _home_of(self, teacher: str, uid: int) -> int:
        """Return the home of a sample. Rows of a loopback service arrive on the driver's node."""
        home, nodes = self.homes.of_uid(uid), self.homes.nodes
        if self._is_loopback[teacher] and nodes[home] != self._own_node:
            return nodes.index(self._own_node) if self._own_node in nodes else NO_HOME
        return home

    async def _score_part(
        self, request: TeacherRequest, home: int, indices: Sequence[int], timeout_s: float
    ) -> dict[int, StoredTopK]:
        node = self._own_node if home == NO_HOME else self.homes.nodes[home]
        rank = next(self._workers_of[node])
        sequences = [request.sequences[index] for index in indices]
        answer, block = self.group.handles[rank].score.remote(
            request.teacher, sequences, timeout_s, request.temperature
        )
        part = await self._answer(rank, answer, request, len(indices), timeout_s)
        if isinstance(part, TeacherError):
            raise _with_uid(part, request.uids, indices)
        self._note_process(rank, part.pid)
        return {
            index: StoredTopK(
                block=block,
                index=position,
                n_bytes=part.n_bytes[position],
                home=home,
                n_scored=len(part.sampled_logps_T[position]),
                sampled_logps_T=part.sampled_logps_T[position],
                is_cached=part.is_cached[position],
            )
            for position, index in enumerate(indices)
        }

    async def _answer(
        self,
        rank: int,
        answer: ray.ObjectRef[PartScores | TeacherError],
        request: TeacherRequest,
        n_samples: int,
        timeout_s: float,
    ) -> PartScores | TeacherError:
        """Await the first result of a call. Cancel the call if the caller is canceled or the deadline passes.

        If the worker does not answer, its process is killed. Ray then starts another and repeats the call, which has
        its time once more.

        Raises:
            TeacherTimeout: The worker did not answer twice.
            WorkerDied: The worker died, and Ray may not restart it again.
        """
        is_done, sent_at = False, time.monotonic()
        try:
            part = await self._first_answer(rank, answer, request, n_samples, timeout_s)
            if part is None:
                await self._kill_silent(rank, sent_at)
                part = await self._first_answer(rank, answer, request, n_samples, timeout_s + RESTART_TIMEOUT_S)
            is_done = part is not None
        except RayError as error:
            is_done = True
            known = await self.group.as_worker_error(rank, f"score, {request}", error)
            if isinstance(known, WorkerDied):
                why = f"it is not restarted: {await self._why_not_restarted(rank, error)}"
                raise known.replaced(details=(*known.details, why)) from error
            raise known from error
        finally:
            if not is_done:
                ray.cancel(answer)
        if part is None:
            raise TeacherTimeout(
                f"did not answer within {timeout_s + MARGIN_S:g} s, and not after a restart: its node cannot be "
                "reached, or cannot start processes",
                phase="score",
                worker=self.group.label(rank),
            )
        return part

    async def _why_not_restarted(self, rank: int, error: RayError) -> str:
        if isinstance(error, ActorUnschedulableError):
            return "its node is lost"
        [at] = await locate([self.group.handles[rank]])
        limit = f"trainer.max_worker_restarts={self._max_restarts}"
        if at.n_restarts >= self._max_restarts:
            return f"{limit} is used up"
        return f"Ray could not start it again, although {at.n_restarts} restarts were made and {limit} allows more"

    async def _first_answer(
        self,
        rank: int,
        answer: ray.ObjectRef[PartScores | TeacherError],
        request: TeacherRequest,
        n_samples: int,
        timeout_s: float,
    ) -> PartScores | TeacherError | None:
        """Return the first result of a call, or None if the worker does not answer in time."""
        phase, deadline_s = f"score, step {request.step}", with_margin(timeout_s, MARGIN_S)
        missing = {f"teacher {request.teacher}, by scoring worker {rank}": n_samples}
        try:
            with waiting(phase, deadline_s, lambda: missing, "samples"):
                async with asyncio.timeout(deadline_s):
                    part: PartScores | TeacherError = await answer
                    return part
        except RayError:  # must precede TimeoutError: a TimeoutError that a worker raised is both
            raise
        except TimeoutError:
            return None

    async def _kill_silent(self, rank: int, sent_at: float) -> None:
        """Kill the process of a worker that has not answered a call, except if it is newer than the call.

        The age of a process does not suffice to tell: Ray may restart the worker in an idle process.
        """
        label = self.group.label(rank)
        async with self._kill_locks[rank]:  # the calls of a batch have the same deadline
            if self._killed_at[rank] > sent_at:
                return
            try:
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    [at] = await locate([self.group.handles[rank]])
                    if at.dead or not at.pid or not at.node_id:
                        return  # Ray is starting another process
                    age_s = time.monotonic() - sent_at
                    if await run_on_node(at.node_id, process_trees.kill_older, at.pid, age_s, KILL_TIMEOUT_S):
                        self._killed_at[rank] = time.monotonic()
                        log.warning("%s does not answer; its process was killed", label)
            except (RayError, TimeoutError) as error:
                log.warning("%s does not answer, and was not killed: %s", label, str(error) or "no answer of its node")

    def _note_process(self, rank: int, pid: int) -> None:
        if (known := self._pids.setdefault(rank, pid)) != pid:
            self._pids[rank] = pid
            self.n_restarts += 1
            log.warning(
                "%s died (process %d); Ray has started another and repeated its requests",
                self.group.label(rank),
                known,
                extra=as_event("scoring_restart"),
            )


def _with_uid(error: TeacherError, uids: Sequence[int], indices: Sequence[int]) -> TeacherError:
    """Return the error of a part of a request as an error of the request, with the uid of the sequence.

    Args:
        error: Error of the part.
        indices: Indices of the part's sequences in the request.
    """
    if error.sequence is None:
        return error
    if error.sequence >= len(indices):  # the error may come from another program
        return error.replaced(sequence=None)
    index = indices[error.sequence]
    return error.replaced(sequence=index, uid=uids[index])


def _start_worker(
    specs: Mapping[str, ClientDescription],
    node_id: str,
    address: str,
    *,
    caches: dict[str, CacheSettings],
    max_restarts: int,
    env: dict[str, str],
) -> ActorHandle:
    """Start a worker, and return its handle.

    ``specs`` must stay below 100 KiB. Ray stores larger arguments as objects, and deletes them a second after the
    start, so that it cannot start the worker again (ray-project/ray#53727).
    """
    on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    remote: Any = ray.remote(ScoringWorker)
    options = dict(num_cpus=0, max_restarts=max_restarts, max_task_retries=-1, scheduling_strategy=on_node)
    return remote.options(**options, runtime_env={"env_vars": env}).remote(dict(specs), address, caches)
