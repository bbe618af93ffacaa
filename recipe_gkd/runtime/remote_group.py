"""Typed calls to a group of workers in other processes: a call names the worker's method, not a string."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar, TypeVarTuple, overload

W_co = TypeVar("W_co", covariant=True)
R = TypeVar("R")
Ts = TypeVarTuple("Ts")
OnResult = Callable[[int], None]
"""Function that is called with the rank of each worker that has returned its result."""


class RemoteGroup(ABC, Generic[W_co]):
    """Workers of class ``W_co``, ordered by rank.

    Type checkers compare the arguments and the results of a call with the method's::

        stats = await actors.call(ActorWorker.send_weights, version, bucket_bytes, timeout_s=60, phase="send")

    A group of a class is also a group of each protocol that the class implements.
    :class:`~recipe_gkd.ray_cluster.worker_group.WorkerGroup` is the implementation. It documents the errors.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of workers."""

    @abstractmethod
    def label(self, rank: int) -> str:
        """Return the name of a worker in error messages, such as ``rollout worker 0 of 2``."""

    @abstractmethod
    async def _call_ranks(
        self,
        method: str,
        args: Mapping[int, Sequence[object]],
        *,
        timeout_s: float,
        phase: str,
        on_result: OnResult | None = None,
    ) -> list[Any]:
        """Call a method with the arguments of each rank. Return the results in the order of ``args``."""

    @overload
    async def call(
        self,
        method: Callable[[W_co, *Ts], Coroutine[Any, Any, R]],
        *args: *Ts,
        timeout_s: float,
        phase: str,
        on_result: OnResult | None = None,
    ) -> list[R]: ...

    @overload
    async def call(
        self,
        method: Callable[[W_co, *Ts], R],
        *args: *Ts,
        timeout_s: float,
        phase: str,
        on_result: OnResult | None = None,
    ) -> list[R]: ...

    async def call(
        self,
        method: Callable[..., Any],
        *args: object,
        timeout_s: float,
        phase: str,
        on_result: OnResult | None = None,
    ) -> list[Any]:
        """Call a method with the same arguments on every worker.

        Args:
            method: Method of the class, such as ``ActorWorker.update``.
            timeout_s: Deadline of the whole call.
            phase: Name of the phase, for errors.
            on_result: See :data:`OnResult`.

        Returns:
            Results in rank order.
        """
        by_rank = dict.fromkeys(range(len(self)), args)
        return await self._call_ranks(method.__name__, by_rank, timeout_s=timeout_s, phase=phase, on_result=on_result)

    @overload
    async def call_each(
        self,
        method: Callable[[W_co, *Ts], Coroutine[Any, Any, R]],
        args: Sequence[tuple[*Ts]],
        *,
        timeout_s: float,
        phase: str,
    ) -> list[R]: ...

    @overload
    async def call_each(
        self, method: Callable[[W_co, *Ts], R], args: Sequence[tuple[*Ts]], *, timeout_s: float, phase: str
    ) -> list[R]: ...

    async def call_each(
        self, method: Callable[..., Any], args: Sequence[tuple[Any, ...]], *, timeout_s: float, phase: str
    ) -> list[Any]:
        """Call a method on every worker, with arguments for each rank. Return the results in rank order."""
        if len(args) != len(self):
            raise ValueError(f"got arguments for {len(args)} workers, expected {len(self)}")
        return await self._call_ranks(method.__name__, dict(enumerate(args)), timeout_s=timeout_s, phase=phase)

    @overload
    async def call_one(
        self,
        rank: int,
        method: Callable[[W_co, *Ts], Coroutine[Any, Any, R]],
        *args: *Ts,
        timeout_s: float,
        phase: str,
    ) -> R: ...

    @overload
    async def call_one(
        self, rank: int, method: Callable[[W_co, *Ts], R], *args: *Ts, timeout_s: float, phase: str
    ) -> R: ...

    async def call_one(
        self, rank: int, method: Callable[..., Any], *args: object, timeout_s: float, phase: str
    ) -> object:
        """Call a method on one worker. Return its result."""
        return (await self._call_ranks(method.__name__, {rank: args}, timeout_s=timeout_s, phase=phase))[0]
