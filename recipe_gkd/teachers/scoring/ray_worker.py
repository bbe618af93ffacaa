"""Scoring worker: a Ray actor that sends requests to the teachers and keeps their rows in the store of its node.

Its process imports neither torch nor transformers, so that it starts in a second.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import ray

from recipe_gkd.diagnostics.stack_dumps import enable_stack_dumps
from recipe_gkd.errors import ResourceError
from recipe_gkd.teachers.cache.scores import CacheSettings, ScoreCache
from recipe_gkd.teachers.scoring.checks import check_scores
from recipe_gkd.teachers.scoring.clients import ClientDescription, ScoringClient
from recipe_gkd.teachers.scoring.support import rows_of
from teacher.common.machine_checks import SHARED_MEMORY
from teacher.errors import TeacherChanged, TeacherError, TeacherSetupError, TeacherTimeout, TeacherUnavailable
from teacher.records import ScoredSequence, TeacherSequence

Block = list[tuple[np.ndarray, np.ndarray]]
"""Log-probabilities [T, K] and ids [T, K] of each sequence of a part."""


@dataclass(frozen=True)
class PartScores:
    """Everything about a part of a request that does not grow with K.

    Attributes:
        sampled_logps_T: Log-probabilities of the response tokens of each sequence, float32 [T] each.
        n_bytes: Memory of the top-k of each sequence, in bytes.
        is_cached: True for each sequence whose scores are from ``teacher.cache_dir``.
        pid: Id of the process that sent the request.
    """

    sampled_logps_T: list[np.ndarray]
    n_bytes: list[int]
    is_cached: list[bool]
    pid: int


class ScoringWorker:
    """Clients of all teachers in one process on a node of the actor pool.

    Results belong to the driver, even if this process ends. Ray then starts another one, and sends it the requests
    again.

    Args:
        specs: Client of each teacher, by name.
        node: Address of the node, for messages.
        caches: Cache of each teacher that has one, by name.
    """

    def __init__(
        self, specs: Mapping[str, ClientDescription], node: str, caches: Mapping[str, CacheSettings] | None = None
    ) -> None:
        enable_stack_dumps()
        self._specs, self._node = dict(specs), node
        self._clients: dict[str, ScoringClient] = {}
        for name, spec in self._specs.items():
            same = next((other for other in self._clients if self._specs[other] == spec), None)
            self._clients[name] = spec.open() if same is None else self._clients[same]
        self._caches = {name: ScoreCache(cache) for name, cache in (caches or {}).items() if name in self._specs}

    async def setup(self, timeout_s: float) -> int:
        """Check that each teacher can be reached from this node and serves the expected model.

        Args:
            timeout_s: Time limit, in seconds.

        Returns:
            Free bytes of the shared memory of this node.

        Raises:
            ResourceError: A service cannot be reached from this node, or the node's folder for scores cannot be used.
            TeacherChanged: A service has another model than when the run started.
        """
        await asyncio.gather(*(self._check(name, timeout_s) for name in self._clients))
        for name, cache in self._caches.items():
            try:
                await asyncio.to_thread(cache.open)
            except TeacherSetupError as error:
                what = f"node {self._node} cannot keep scores of teacher {name}: {error.what}"
                raise ResourceError(what, node=self._node, remedy=error.remedy) from error
        return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0

    async def _check(self, name: str, timeout_s: float) -> None:
        client, expected = self._clients[name], self._specs[name].model
        try:
            info = await asyncio.wrap_future(client.submit_hello(timeout_s))
        except (TeacherUnavailable, TeacherTimeout) as error:
            raise ResourceError(
                f"node {self._node} of the actor pool cannot reach teacher {name} at {client.address}, which the "
                f"driver's node reaches: rows go from the service directly to this node",
                node=self._node,
                remedy="give the teacher an address that all nodes reach (actor_rollout_ref.teacher.server_ip or url), "
                "and check firewalls",
                details=(str(error),),
            ) from error
        if expected is not None and info.identity != expected.identity:
            raise TeacherChanged(
                f"the service at {client.address} serves {info.identity} to node {self._node}, expected "
                f"{expected.identity}",
                teacher=name,
                address=client.address,
                remedy="use one service for all nodes",
            )

    @ray.method(num_returns=2)
    async def score(
        self, teacher: str, sequences: Sequence[TeacherSequence], timeout_s: float, temperature: float
    ) -> tuple[PartScores | TeacherError, Block]:
        """Score sequences. The second result stays in the object store of this node.

        An error of the teacher is a result, because Ray would report a raised error once for each of two results.
        """

        async def send(sequences: Sequence[TeacherSequence]) -> list[ScoredSequence]:
            client = self._clients[teacher]
            future = client.submit(sequences, timeout_s, temperature=temperature, as_float32=False)
            scored = await asyncio.wrap_future(future)
            check_scores(teacher, sequences, scored)
            return scored

        cache, is_cached = self._caches.get(teacher), [False] * len(sequences)
        try:
            if cache is None:
                scored = await send(sequences)
            else:
                scored, is_cached = await cache.scores(sequences, send)
        except TeacherError as error:
            return error, []
        block = [rows_of(sequence, result) for sequence, result in zip(sequences, scored, strict=True)]
        n_bytes = [logps_TK.nbytes + ids_TK.nbytes for logps_TK, ids_TK in block]
        return PartScores([result.sampled_logps_T for result in scored], n_bytes, is_cached, os.getpid()), block

    def shutdown(self) -> None:
        """Close all clients."""
        for client in self._clients.values():
            client.close()
