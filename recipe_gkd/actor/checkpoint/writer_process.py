"""Writing of files in a fork of the actor, which can fail, hang or be killed without an effect on the actor.

The fork shares the actor's memory as of the time of the fork. It therefore writes a consistent snapshot without a copy.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import select
import signal
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from recipe_gkd.errors import CheckpointError

log = logging.getLogger(__name__)

# Deadline for all killed processes to end. A process that waits for a hung disk ends only when the disk answers.
KILL_DEADLINE_S = 5.0
# Interval of the check for a dead parent, on kernels without `pidfd_open`.
PARENT_POLL_S = 1.0


class WriterProcess:
    """A forked process that runs one function and reports its result or its error.

    The process ends when the actor's process ends, independently of the thread that forked it. It holds no connections
    of the actor, so that peers detect the death of the actor while a writer still runs.

    Lifecycle::

        writer = WriterProcess(write_file)  # starts it
        while not writer.has_ended(): ...
        if (failure := writer.failure()) is None:
            value = writer.result()
        kill_all([writer])                  # always; has no effect on a process that has ended

    Args:
        function: Called without arguments in the fork. It must not use CUDA. Its result must be picklable.

    Raises:
        OSError: The process could not be forked.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._status: int | None = None
        self._report: tuple[bool, Any] | None = None
        self._report_fd = os.memfd_create("recipe_gkd_writer")
        self._sentinel, held_by_writer = os.pipe()
        actor_pid = os.getpid()
        gc_was_enabled = gc.isenabled()
        gc.disable()  # a collection in the fork could free CUDA tensors of the actor
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _run(function, self._report_fd, held_by_writer, actor_pid)
        except OSError:
            os.close(self._sentinel)
            os.close(self._report_fd)
            raise
        finally:
            os.close(held_by_writer)
            if gc_was_enabled:
                gc.enable()

    def has_ended(self) -> bool:
        """Return True if the process has ended or was killed."""
        if self._status is not None:
            return True
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # another thread has reaped it; its report contains the result
            pid, status = self.pid, 0
        if pid:
            self._status = status
            self._report = self._read_report()
            os.close(self._report_fd)
            os.close(self._sentinel)
        return bool(pid)

    def failure(self) -> CheckpointError | None:
        """Return the failure. None if the process has succeeded or still runs."""
        if self._status is None:
            return None
        if self._report is not None:
            succeeded, value = self._report
            return None if succeeded else CheckpointError(str(value))
        if os.WIFSIGNALED(self._status):
            number = os.WTERMSIG(self._status)
            return CheckpointError(
                f"its writer process {self.pid} was killed by {signal.Signals(number).name} (the kernel's log shows if "
                "memory was exhausted)"
            )
        return CheckpointError(
            f"its writer process {self.pid} ended with status {os.waitstatus_to_exitcode(self._status)}"
        )

    def result(self) -> Any:
        """Return the result of the function. The process must have ended without a failure."""
        assert self._report is not None and self._report[0]
        return self._report[1]

    def _read_report(self) -> tuple[bool, Any] | None:
        size = os.fstat(self._report_fd).st_size
        try:  # unpickling is safe: the file has no name, and only the fork of this process has written to it
            return pickle.loads(os.pread(self._report_fd, size, 0))
        except (EOFError, pickle.UnpicklingError):  # it ended before it wrote its report
            return None


def kill_all(writers: Sequence[WriterProcess]) -> bool:
    """Kill processes and wait until they have ended.

    Args:
        writers: Processes to kill. They have one common deadline, :data:`KILL_DEADLINE_S`.

    Returns:
        True if all have ended before the deadline.
    """
    for writer in writers:
        if not writer.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(writer.pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_DEADLINE_S
    while running := [writer for writer in writers if not writer.has_ended()]:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            pids = ", ".join(str(writer.pid) for writer in running)
            log.warning("writer processes were killed but have not ended, because they wait for a disk: %s", pids)
            return False
        wait_for_any(running, min(remaining_s, 0.1))
    return True


def wait_for_any(writers: Sequence[WriterProcess], timeout_s: float) -> None:
    """Wait until one of the running ``writers`` ends, at most ``timeout_s`` seconds.

    If none runs, wait ``timeout_s`` seconds.
    """
    _wait_for([writer._sentinel for writer in writers if writer._status is None], timeout_s)


def _wait_for(descriptors: Sequence[int], timeout_s: float | None) -> None:
    # `poll` is used because `select` fails for descriptors above 1023.
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(None if timeout_s is None else timeout_s * 1000)


def _run(function: Callable[[], Any], report_fd: int, sentinel: int, actor_pid: int) -> NoReturn:
    """Run the function in the fork and exit. Never returns to the code of the actor."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C, and may still complete the save
        _exit_when_process_ends(actor_pid)
        _release_connections(keep=sentinel)
        torch.set_num_threads(1)  # the threads of the actor's pool do not exist in a fork
        report: tuple[bool, Any]
        try:
            report = (True, function())
        except Exception as error:  # noqa: BLE001  # the actor reports any error
            report = (False, f"{type(error).__name__}: {error}")
        left = memoryview(pickle.dumps(report))
        while left:
            left = left[os.write(report_fd, left) :]
        status = 0
    finally:
        os._exit(status)


def _exit_when_process_ends(actor_pid: int) -> None:
    """Exit this process when the process ``actor_pid`` ends.

    ``PR_SET_PDEATHSIG`` is not used: it would kill this process when the forking thread ends, and Ray runs methods on
    threads that end.
    """
    try:
        watched = os.pidfd_open(actor_pid)
    except OSError:
        watched = None
    if os.getppid() != actor_pid:
        os._exit(1)

    def exit_with_actor() -> None:
        if watched is not None:
            _wait_for([watched], None)
        else:
            timer = threading.Event()
            while os.getppid() == actor_pid:
                timer.wait(PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=exit_with_actor, daemon=True).start()


def _release_connections(keep: int) -> None:
    """Replace all inherited sockets and pipes except ``keep`` and the standard streams with ``/dev/null``.

    They are not closed, because a new file could get the descriptor of a connection that other code still writes to.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd <= 2 or fd == keep:
            continue
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            mode = os.fstat(fd).st_mode
            if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                os.dup2(null, fd, inheritable=False)
    os.close(null)
