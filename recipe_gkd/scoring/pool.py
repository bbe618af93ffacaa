"""Driver's side of the scoring workers: start, requests in parts, and their conversion into stored scores."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe_gkd.data.samples import StoredTopK
from recipe_gkd.errors import WorkerDied
from recipe_gkd.ray_cluster.node_probe import own_node
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup
from recipe_gkd.scoring.homes import NO_HOME, Homes
from recipe_gkd.scoring.ray_worker import PartScores, ScoringWorker
from recipe_gkd.scoring.requests import TeacherRequest
from teacher.client import ClientSpec
from teacher.errors import TeacherError, TeacherTimeout

log = logging.getLogger(__name__)

PART_BYTES = 32 << 20
"""Largest top-k of a part of a request, except for a single longer response. Parts are scored, moved into the store and
freed independently of each other."""
MARGIN_S = 5.0
"""Time after a request's deadline in which a scoring worker must answer."""
_BYTES_OF_ID = 4
_BYTES_OF_LOGP = {"float32": 4, "float16": 2}


class ScoringPool:
    """Scoring workers of a run: an implementation of :class:`~recipe_gkd.scoring.requests.Requests`.

    A request is divided by the homes of its samples, and into parts of limited size. Each part is one call of a scoring
    worker on the home's node. The driver gets what does not grow with K, and a reference to the rest. Ray restarts a
    scoring worker that died, on the same node, and repeats the calls that it had not completed.

    Lifecycle::

        pool = ScoringPool.start(specs, nodes, per_node=1, max_restarts=3)
        await pool.connect(timeout_s)
        pool.homes = Homes.of(ranks, node_ids)
        scores = await pool.scores(request, timeout_s)      # concurrently
        await pool.group.stop(timeout_s=10)

    Attributes:
        group: The workers.
        nodes: Nodes of the workers: Ray's id -> address.
        free_shared_memory: Free shared memory of each node in bytes, when the workers connected.
        homes: Nodes of the data-parallel ranks, which must be set before the first request.
        n_restarts: Number of restarts of workers that have been noticed.
    """

    def __init__(
        self, specs: Mapping[str, ClientSpec], group: WorkerGroup, nodes: Mapping[str, str], own_node: str
    ) -> None:
        """Create the pool of started workers.

        Args:
            specs: Client of each teacher, by name.
            group: Workers, equally many on each node, node after node.
            nodes: Nodes of the workers: Ray's id -> address.
            own_node: Ray's id of the driver's node.
        """
        self.group, self.nodes, self.homes, self.n_restarts = group, nodes, Homes((), ()), 0
        self.free_shared_memory: dict[str, int] = {}
        self._specs, self._own_node = specs, own_node
        self._is_loopback = {name: spec.is_loopback for name, spec in specs.items()}
        self._node_of = [node for node in nodes for _ in range(len(group) // len(nodes))]
        self._workers_of = {
            node: itertools.cycle([rank for rank, at in enumerate(self._node_of) if at == node]) for node in nodes
        }
        self._pids: dict[int, int] = {}

    @classmethod
    def start(
        cls, specs: Mapping[str, ClientSpec], nodes: Mapping[str, str], *, per_node: int, max_restarts: int
    ) -> ScoringPool:
        """Start the workers, without waiting for them.

        Args:
            specs: Client of each teacher, by name.
            nodes: Nodes of the actor pool: Ray's id -> address.
            per_node: Number of workers on each node.
            max_restarts: Number of restarts that Ray may make of each worker.
        """
        nodes = dict(nodes)
        if any(spec.is_loopback for spec in specs.values()):
            nodes.setdefault(own_node(), "of the driver")  # the only node that reaches the service
        handles = [_start_worker(specs, node, nodes[node], max_restarts) for node in nodes for _ in range(per_node)]
        return cls(specs, WorkerGroup("scoring", handles), nodes, own_node())

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the top-k, of the teacher with the largest rows."""
        return max(map(self._row_bytes, self._specs))

    async def connect(self, timeout_s: float) -> None:
        """Wait until all workers have reached the teachers.

        Args:
            timeout_s: Time limit, in seconds.

        Raises:
            ResourceError: A node cannot reach a teacher.
            WorkerError: A worker failed to start.
            DeadlineError: A worker did not answer.
        """
        free = await self.group.call(
            "setup", timeout_s, timeout_s=timeout_s + MARGIN_S, phase="start, connect to the teachers"
        )
        self.free_shared_memory = dict(zip(self._node_of, free, strict=True))

    async def scores(self, request: TeacherRequest, timeout_s: float) -> list[StoredTopK]:
        """Return the scores of a request; see :meth:`recipe_gkd.scoring.requests.Requests.scores`."""
        parts = self._parts(request)
        async with FirstErrorTaskGroup() as tasks:
            calls = [tasks.start(self._score_part(request, home, indices, timeout_s)) for home, indices in parts]
            found = {index: scores for call in calls for index, scores in (await call).items()}
        return [found[index] for index in range(len(request.sequences))]

    def _parts(self, request: TeacherRequest) -> list[tuple[int, list[int]]]:
        """Divide the sequences of a request. Return the home of each part, and the indices of its sequences."""
        of_home: defaultdict[int, list[int]] = defaultdict(list)
        for index, uid in enumerate(request.uids):
            of_home[self._home_of(request.teacher, uid)].append(index)
        row_bytes = self._row_bytes(request.teacher)
        parts: list[tuple[int, list[int]]] = []
        for home, indices in of_home.items():
            part: list[int] = []
            n_bytes = 0
            for index in indices:
                sequence = request.sequences[index]
                needed = (len(sequence.token_ids) - sequence.prompt_len) * row_bytes
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

    def _row_bytes(self, teacher: str) -> int:
        spec = self._specs[teacher]
        k = spec.options.get("top_k") or (spec.model.n_logprobs if spec.model is not None else 1)
        return k * (_BYTES_OF_ID + _BYTES_OF_LOGP[spec.options.get("wire_dtype", "float32")])

    async def _score_part(
        self, request: TeacherRequest, home: int, indices: Sequence[int], timeout_s: float
    ) -> dict[int, StoredTopK]:
        node = self._own_node if home == NO_HOME else self.homes.nodes[home]
        # Actor ranks that were started again may be on a node without a worker.
        rank = next(self._workers_of.get(node) or self._workers_of[self._node_of[0]])
        sequences = [request.sequences[index] for index in indices]
        answer, block = self.group.handles[rank].score.remote(
            request.teacher, sequences, timeout_s, request.temperature
        )
        part = await self._answer(rank, answer, request, timeout_s)
        self._note_process(rank, part.pid)
        return {
            index: StoredTopK(
                block=block,
                index=position,
                n_bytes=part.n_bytes[position],
                home=home,
                n_scored=len(part.sampled_logps_T[position]),
                sampled_logps_T=part.sampled_logps_T[position],
            )
            for position, index in enumerate(indices)
        }

    async def _answer(self, rank: int, answer: Any, request: TeacherRequest, timeout_s: float) -> PartScores:
        """Await the first result of a call, and cancel the call if the caller is canceled or the deadline passes.

        Raises:
            TeacherError: The request failed.
            WorkerDied: The worker died, and Ray may not restart it again.
        """
        is_done = False
        try:
            async with asyncio.timeout(timeout_s + MARGIN_S):
                part: PartScores | TeacherError = await answer
            is_done = True
        except RayError as error:  # must precede TimeoutError: a TimeoutError that a worker raised is both
            is_done = True
            known = await self.group.as_worker_error(rank, f"score, {request}", error)
            if isinstance(known, WorkerDied):
                raise WorkerDied(f"{known}; it is not restarted: trainer.max_worker_restarts is used up") from error
            raise known from error
        except TimeoutError as error:
            raise TeacherTimeout(
                f"score, {request}: {self.group.label(rank)} did not answer within {timeout_s + MARGIN_S:g} s; its "
                "process hangs, or its node cannot be reached"
            ) from error
        finally:
            if not is_done:
                ray.cancel(answer)
        if isinstance(part, TeacherError):
            raise part
        return part

    def _note_process(self, rank: int, pid: int) -> None:
        if (known := self._pids.setdefault(rank, pid)) != pid:
            self._pids[rank] = pid
            self.n_restarts += 1
            log.warning(
                "%s died (process %d); Ray has started another and repeated its requests", self.group.label(rank), known
            )


def _start_worker(specs: Mapping[str, ClientSpec], node_id: str, address: str, max_restarts: int) -> Any:
    on_node: Any = NodeAffinitySchedulingStrategy(node_id, soft=False)
    remote: Any = ray.remote(ScoringWorker)
    options = dict(num_cpus=0, max_restarts=max_restarts, max_task_retries=-1, scheduling_strategy=on_node)
    return remote.options(**options).remote(dict(specs), address)
