"""A vLLM engine in this process, stepped by one thread. Commands run between its steps, so they need no lock.

======== ================================== ======================================================================
State    Entered by                         Effect
======== ================================== ======================================================================
starting ``start``                          commands wait until the engine is built
running  the engine is built, or ``resume`` steps while there are requests; commands run between two steps
paused   ``pause``                          no steps; requests stay as they are, commands still run
ended    ``close``, an exception of the     all requests and commands, and all later commands, fail with the reason
         engine, or the death of a rank
======== ================================== ======================================================================
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from recipe_gkd.config.keys import ROLLOUT
from recipe_gkd.data.samples import Prompt
from recipe_gkd.errors import GkdError, WorkerDied, WorkerError
from recipe_gkd.rollout.engine_commands import Command, CommandQueue, settle
from recipe_gkd.rollout.engine_factory import build_engine, describe_engine, watch_ranks
from recipe_gkd.rollout.engine_options import EngineOptions
from recipe_gkd.rollout.engine_report import EngineReport
from recipe_gkd.rollout.engine_requests import Deliver, RequestTable, add_log_probs_request, add_request
from recipe_gkd.rollout.vllm.device_loss import is_device_loss
from recipe_gkd.runtime.out_of_memory import MemoryPhase, out_of_memory_error
from teacher.common.out_of_memory import is_out_of_memory
from teacher.common.vllm_setup import ASYNC_SCHEDULING_DEFECT, is_async_scheduling_failure

if TYPE_CHECKING:
    from recipe_gkd.rollout.vllm.compat import LLMEngine, LoRARequest

log = logging.getLogger(__name__)

_FAILED_ENGINE_CLOSE_TIMEOUT_S = 1.0
_RANK_DEATH_NOTICE_S = 0.5
"""Time until the death of a tensor rank is detected, after its peers have lost their connections to it."""


class RolloutEngine:
    """A vLLM engine on a thread.

    Lifecycle::

        engine = RolloutEngine(options)
        description = engine.start().result()
        engine.run(lambda inner: inner.set_weight_version("0")).result()  # before the first request
        ids, accepted = engine.submit(prompts, params, deliver)           # any number of times
        engine.close()

    All methods except ``close`` return at once. All may be called from any thread.

    An exception of the engine itself, the death of a tensor rank, and a command that finds a lost device end the
    engine: every request and every later command then fails with :class:`WorkerDied`, and the worker must be
    replaced. This also holds while the engine's thread hangs because a rank died. Any other exception of a command is
    returned to its caller only.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._commands = CommandQueue()
        self._requests = RequestTable()
        self._failure: GkdError | None = None
        self._failure_lock, self._ended = threading.Lock(), threading.Event()
        self._closing = False
        self._paused = False
        self._thread: threading.Thread | None = None

    def start(self) -> Future[EngineReport]:
        """Build the engine.

        Returns:
            Future of the engine's report. It fails with :class:`ModelError`,
            :class:`ResourceError` or :class:`WorkerError`.
        """
        ready: Future[EngineReport] = Future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="rollout-engine", daemon=True)
        self._thread.start()
        return ready

    def submit(
        self, prompts: Sequence[Prompt], params: Sequence[dict[str, Any]], deliver: Deliver
    ) -> tuple[list[str], Future[None]]:
        """Add a request for each prompt.

        Args:
            params: Keyword arguments of vLLM's ``SamplingParams`` for each prompt.
            deliver: Callback for responses and failures.

        Returns:
            Request ids, and a future that is done when all requests are accepted. It fails with :class:`WorkerError`
            if a prompt is too long; then none is accepted.
        """
        ids = self._requests.new_ids(len(prompts))

        def add(engine: LLMEngine) -> None:
            limit, adapter = self.options.max_model_len, self._adapter()
            try:
                for request_id, prompt, prompt_params in zip(ids, prompts, params, strict=True):
                    add_request(engine, request_id, prompt, prompt_params, limit, adapter)
                    self._requests.add(request_id, prompt.uid, deliver)
            except BaseException:
                self._abort(engine, ids)
                raise

        return ids, self.run(add)

    def log_probs(self, ids: Sequence[int]) -> Future[list[float]]:
        """Compute the log-probability of each token of a sequence after the first; see :func:`add_log_probs_request`.

        Returns:
            Future of the values. It fails with :class:`WorkerError` if the sequence is too short or too long. To cancel
            it drops the request.
        """
        [request_id] = self._requests.new_ids(1)
        done: Future[list[float]] = Future()

        def add(engine: LLMEngine) -> None:
            add_log_probs_request(engine, request_id, ids, self.options.max_model_len, self._adapter())
            self._requests.add_log_probs(request_id, done)

        def fail(added: Future[None]) -> None:
            if (error := added.exception()) is not None:
                settle(done, error=error)

        self.run(add).add_done_callback(fail)
        done.add_done_callback(lambda ended: self.abort([request_id]) if ended.cancelled() else None)
        return done

    def abort(self, request_ids: Sequence[str]) -> Future[None]:
        """Drop requests that are in flight, with their tokens. Their callbacks are not called."""
        return self.run(lambda engine: self._abort(engine, request_ids))

    def run(self, command: Command) -> Future[Any]:
        """Run ``command(engine)`` on the engine's thread between two steps, and return the future of its result."""
        done = self._commands.put(command)
        if self._failure is not None:  # the thread has ended and runs no command
            self._commands.fail_queued(self._failure)
        return done

    def pause(self) -> Future[None]:
        """Stop stepping until :meth:`resume`. Requests stay as they are, and commands still run."""
        return self.run(lambda _: self._set_paused(True))

    def resume(self, failure: GkdError | None = None) -> Future[None]:
        """Continue after :meth:`pause`.

        Args:
            failure: If given, all requests in flight end with it. None continues them.
        """

        def continue_or_fail(engine: LLMEngine) -> None:
            if failure is not None:
                engine.abort_request(self._requests.ids())
                self._requests.fail_all(failure)
            self._set_paused(False)

        return self.run(continue_or_fail)

    def close(self) -> None:
        """Stop the thread and the engine, after the current step or command. Idempotent.

        The thread of a failed engine may hang, so ``close`` waits for it for at most 1 s.
        """
        self._closing = True
        self._commands.wake()
        if self._thread is not None:
            self._thread.join(None if self._failure is None else _FAILED_ENGINE_CLOSE_TIMEOUT_S)

    # On the engine's thread.

    def _adapter(self) -> LoRARequest | None:
        """Return the adapter of all requests; None if the engine has none."""
        if self.options.adapters is None:
            return None
        from recipe_gkd.rollout.vllm.adapters import adapter_request

        return adapter_request()

    def _main(self, ready: Future[EngineReport]) -> None:
        try:
            engine = build_engine(self.options)
        except GkdError as error:
            self._end(error)
            ready.set_exception(error)
            return
        try:
            watch_ranks(engine, self._rank_died)
            ready.set_result(describe_engine(engine))
            while not self._closing and self._failure is None:
                self._run_commands(engine)
                if not self._paused and engine.has_unfinished_requests():
                    self._deliver(engine.step(), engine)
            self._end(WorkerError("the rollout engine is closed"))
        except Exception as error:
            log.exception("the rollout engine failed")
            self._end(_to_worker_died(error))
            if self._failure is not None:
                settle(ready, error=self._failure.located())  # has no effect if the engine was ready
        finally:
            engine.engine_core.shutdown()

    def _run_commands(self, engine: LLMEngine) -> None:
        """Run all queued commands. Wait for one if there is nothing to generate."""
        wait = self._paused or not engine.has_unfinished_requests()
        for command, done in self._commands.take(wait=wait):
            self._run_command(engine, command, done)
            if self._closing:
                return

    def _run_command(self, engine: LLMEngine, command: Command, done: Future[Any]) -> None:
        if self._failure is not None:
            settle(done, error=self._failure.located())
            return
        try:
            result = command(engine)
        except Exception as error:
            if isinstance(error, WorkerDied) or is_device_loss(error):
                raise  # ends the engine
            # The peers of a dead rank may fail shortly before its death is detected. `_end` then settles this future.
            if self.options.tensor_parallel_size == 1 or not self._ended.wait(_RANK_DEATH_NOTICE_S):
                settle(done, error=error)
        else:
            settle(done, result=result)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _deliver(self, outputs: Sequence[Any], engine: LLMEngine) -> None:
        if finished := [output for output in outputs if output.finished]:
            self._requests.deliver_finished(finished, int(engine.get_weight_version()))

    def _abort(self, engine: LLMEngine, request_ids: Sequence[str]) -> None:
        engine.abort_request(self._requests.remove(request_ids))

    # On any thread.

    def _rank_died(self, name: str) -> None:
        """Fail the engine from another thread, because the engine's own may hang in a call to the dead rank."""
        self._end(
            WorkerDied(
                f"the rollout engine failed: its process {name} died",
                remedy="the kernel's log on its node shows if it was killed because memory ran out",
                process=name,
            )
        )
        self._commands.wake()

    def _end(self, failure: GkdError) -> None:
        """Fail everything in flight and everything later with copies of the first failure."""
        with self._failure_lock:
            if self._failure is None:
                self._failure = failure
            failure = self._failure
        self._ended.set()
        self._requests.fail_all(failure)
        self._commands.fail_all(failure)


def _to_worker_died(error: Exception) -> WorkerDied:
    if isinstance(error, WorkerDied):
        return error
    if is_out_of_memory(error):
        calls = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        # Commands that allocate memory belong to a weight update; `step` generates.
        phase: MemoryPhase = "weight sync" if RolloutEngine._run_command.__name__ in calls else "generate"
        return out_of_memory_error(error, WorkerDied, pool="rollout", phase=phase)
    text = f"the rollout engine failed: {type(error).__name__}: {error}"
    if is_async_scheduling_failure(error):
        key = f"{ROLLOUT}.async_scheduling"
        return WorkerDied(f"{text}{ASYNC_SCHEDULING_DEFECT}", remedy=f"set {key}=false", keys=(key,))
    return WorkerDied(text)
