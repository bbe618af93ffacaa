"""Simultaneous writes on several ranks, with a common result.

The ranks compare their states in short rounds, so no rank waits in a collective while another rank writes. A write may
therefore take longer than the timeout of a collective, and a failure of one rank reaches all ranks within seconds.

States of a rank (the common state is the largest):

=======  ================================================  =========================================
State    Condition                                         Next
=======  ================================================  =========================================
RUNNING  A process of the rank still writes.               DONE or FAILED
DONE     All processes have written.                       none
FAILED   A process failed, was killed, or is overdue.      none; the processes of all ranks are killed
=======  ================================================  =========================================
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recipe_gkd.actor.checkpoint.writer_process import WriterProcess, kill_all, wait_for_any
from recipe_gkd.errors import CheckpointError

FIRST_ROUND_S, LONGEST_ROUND_S = 0.01, 0.5
DONE, RUNNING, FAILED = range(3)


def agree(
    name: str, failure: CheckpointError | None, device: torch.device, *, path: Path, running: bool = False
) -> bool:
    """Return True if no rank is running any more. Collective.

    Args:
        name: Name of the common operation, for the message.
        failure: Failure of this rank; None without one.
        device: Device of the default group's collectives.
        path: Folder of the operation, for a failure without a path.
        running: This rank has not finished.

    Raises:
        CheckpointError: A rank failed. Raised on every rank, with the reasons of all ranks.
    """
    state = torch.tensor(FAILED if failure is not None else RUNNING if running else DONE, device=device)
    dist.all_reduce(state, op=dist.ReduceOp.MAX)
    if state.item() == FAILED:
        failures: list[CheckpointError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        raise _joined(name, {rank: error for rank, error in enumerate(failures) if error is not None}, path)
    return state.item() == DONE


def _joined(name: str, failures: Mapping[int, CheckpointError], path: Path) -> CheckpointError:
    """Return one error for the failures of all ranks, by rank. Equal failures are named once."""
    ranks_of: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        ranks_of.setdefault(failure.what, []).append(rank)
    reasons = [f"actor rank {', '.join(map(str, ranks))}: {reason}" for reason, ranks in ranks_of.items()]
    return CheckpointError(
        f"{name} failed: {'; '.join(reasons)}",
        remedy="; ".join(dict.fromkeys(failure.remedy for failure in failures.values() if failure.remedy)),
        details=tuple(dict.fromkeys(line for failure in failures.values() for line in failure.details)),
        path=next(iter(failures.values())).path or path,
        ranks=tuple(failures),
    )


class ParallelWrite:
    """Processes of all ranks that write files before a common deadline.

    Lifecycle, the same calls on every rank::

        limits = {"deadline": time.monotonic() + 60, "limit_s": 60}
        write = ParallelWrite("the save", [write_file], path=folder, device=device, **limits)
        while not write.poll(): ...   # or write.wait()
        write.results()

    After a failed write no process remains on any rank, except a killed one that waits for a hung disk. It ends when
    the disk answers.

    Args:
        name: Name of the write, for messages.
        functions: Functions of this rank; may be empty. See :class:`WriterProcess`.
        path: Folder that is written.
        deadline: Value of ``time.monotonic()`` after which the write has failed.
        limit_s: Duration from the start of the write to the deadline, in seconds, for the message.
        device: Device of the default group's collectives.
        failure: Failure of this rank if it has failed already; else None.
    """

    def __init__(
        self,
        name: str,
        functions: Sequence[Callable[[], Any]],
        *,
        path: Path,
        deadline: float,
        limit_s: float,
        device: torch.device,
        failure: CheckpointError | None = None,
    ) -> None:
        self._name, self._path, self._device = name, path, device
        self._deadline, self._limit_s = deadline, limit_s
        self._failure = failure
        self._writers: list[WriterProcess] = []
        try:
            for function in functions if failure is None else []:
                self._writers.append(WriterProcess(function))
        except OSError as error:
            self._failure = CheckpointError(f"its writer process could not be started ({error})")

    def poll(self) -> bool:
        """Return True if all ranks have written. Collective.

        Raises:
            CheckpointError: The write of a rank failed or is overdue. The processes of all ranks have been killed, and
                have ended, except those that wait for a hung disk.
        """
        running = bool(self._running())  # read first: a process has a failure only after it has ended
        try:
            return agree(self._name, self._own_failure(), self._device, path=self._path, running=running)
        except BaseException as error:
            kill_all(self._writers)
            if isinstance(error, CheckpointError):  # raised on all ranks
                dist.barrier()  # files must not be removed while another rank still writes
            raise

    def wait(self) -> None:
        """Wait until all ranks have written. Collective. Raises the errors of :meth:`poll`."""
        round_s = FIRST_ROUND_S
        while not self.poll():
            self.pause(round_s)
            round_s = min(2 * round_s, LONGEST_ROUND_S)

    def pause(self, round_s: float) -> None:
        """Wait until a process of this rank ends, at most ``round_s`` seconds."""
        if self._running():
            wait_for_any(self._running(), round_s)

    def results(self) -> list[Any]:
        """Return the results of this rank's functions, in their order, after all ranks have written."""
        return [writer.result() for writer in self._writers]

    def _running(self) -> list[WriterProcess]:
        return [writer for writer in self._writers if not writer.has_ended()]

    def _own_failure(self) -> CheckpointError | None:
        failures = [failure for writer in self._writers if (failure := writer.failure()) is not None]
        if self._failure is None and failures:
            self._failure = failures[0]
        if self._failure is None and self._running() and time.monotonic() > self._deadline:
            self._failure = CheckpointError(
                f"it has not finished within {self._limit_s:g} s",
                remedy="check the disk, or raise actor_rollout_ref.actor.timeout_s",
            )
        return self._failure
