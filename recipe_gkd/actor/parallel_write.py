"""Write files on several ranks at the same time, and agree on the outcome.

No rank waits in a collective while another one writes: ranks compare their states in short rounds. So a write may take
longer than a collective may, and a failure on one rank reaches all ranks within seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from recipe_gkd.actor.writer_process import WriterProcess, kill_all, wait_for_any
from recipe_gkd.errors import CheckpointError

FIRST_ROUND_S, LONGEST_ROUND_S = 0.01, 0.5
DONE, RUNNING, FAILED = range(3)
"""States of a rank. The state of all ranks is the largest of them."""


def agree(what: str, failure: str | None, device: torch.device, *, running: bool = False) -> bool:
    """Return True if no rank is ``running``. Collective.

    Args:
        what: What the ranks do, for the message.
        failure: Why it failed on this rank; None if it did not.
        device: Device of the default group's collectives.

    Raises:
        CheckpointError: It failed on a rank. Raised on every rank, with the reasons of all.
    """
    state = torch.tensor(FAILED if failure is not None else RUNNING if running else DONE, device=device)
    dist.all_reduce(state, op=dist.ReduceOp.MAX)
    if state.item() == FAILED:
        failures: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        ranks_of: dict[str, list[str]] = {}
        for rank, reason in enumerate(failures):
            if reason is not None:
                ranks_of.setdefault(reason, []).append(str(rank))
        reasons = [f"actor rank {', '.join(ranks)}: {reason}" for reason, ranks in ranks_of.items()]
        raise CheckpointError(f"{what} failed: {'; '.join(reasons)}")
    return state.item() == DONE


class ParallelWrite:
    """Processes of all ranks that write files, until a common deadline.

    Lifecycle, the same calls on every rank::

        write = ParallelWrite("the save", [write_file], deadline=time.monotonic() + 60, limit_s=60, device=device)
        while not write.poll(): ...   # or write.wait()
        write.results()

    A failed write leaves no process behind on any rank, except a killed one that waits for a hung disk: it ends when
    the disk answers.

    Args:
        what: What is written, for messages.
        functions: Functions of this rank, which may be none; see :class:`WriterProcess`.
        deadline: ``time.monotonic()`` after which the write has failed.
        limit_s: Seconds that the write could take in all, for the message.
        device: Device of the default group's collectives.
        failure: Why this rank has failed already; None if it has not.
    """

    def __init__(
        self,
        what: str,
        functions: Sequence[Callable[[], Any]],
        *,
        deadline: float,
        limit_s: float,
        device: torch.device,
        failure: str | None = None,
    ) -> None:
        self._what, self._device = what, device
        self._deadline, self._limit_s = deadline, limit_s
        self._failure = failure
        self._writers: list[WriterProcess] = []
        try:
            for function in functions if failure is None else []:
                self._writers.append(WriterProcess(function))
        except OSError as error:
            self._failure = f"its writing process could not be started ({error})"

    def poll(self) -> bool:
        """Return True if all ranks have written. Collective.

        Raises:
            CheckpointError: The write of a rank failed, or is overdue. The processes of all ranks have been killed, and
                have ended, except those that wait for a hung disk.
        """
        running = bool(self._running())  # first: the failure of a process is there only once it has ended
        try:
            return agree(self._what, self._own_failure(), self._device, running=running)
        except BaseException as error:
            kill_all(self._writers)
            if isinstance(error, CheckpointError):  # raised on all ranks
                dist.barrier()  # the files must not be removed while another rank still writes
            raise

    def wait(self) -> None:
        """Wait until all ranks have written. Collective. Raises as :meth:`poll` does."""
        round_s = FIRST_ROUND_S
        while not self.poll():
            self.pause(round_s)
            round_s = min(2 * round_s, LONGEST_ROUND_S)

    def pause(self, round_s: float) -> None:
        """Wait until a process of this rank ends, at most ``round_s``."""
        if self._running():
            wait_for_any(self._running(), round_s)

    def results(self) -> list[Any]:
        """Return the results of this rank's functions, in their order, after all ranks have written."""
        return [writer.result() for writer in self._writers]

    def _running(self) -> list[WriterProcess]:
        return [writer for writer in self._writers if not writer.has_ended()]

    def _own_failure(self) -> str | None:
        failures = [failure for writer in self._writers if (failure := writer.failure()) is not None]
        if self._failure is None and failures:
            self._failure = failures[0]
        if self._failure is None and self._running() and time.monotonic() > self._deadline:
            self._failure = (
                f"it has not finished within {self._limit_s:g} s; look at the disk, or raise "
                "actor_rollout_ref.actor.timeout_s"
            )
        return self._failure
