"""Sleep and wake-up of an engine that shares its device with an actor.

======= ============================================ ===================================================================
State   Entered by                                   Memory and allowed calls
======= ============================================ ===================================================================
awake   construction, ``wake("kv_cache")``           weights and KV cache; generation and weight updates
asleep  ``sleep`` at level 1 or 2                    neither; only ``wake("weights")``
weights ``wake("weights")``                          weights; weight updates, ``wake("kv_cache")``, and ``sleep``
======= ============================================ ===================================================================

At level 1 the weights are in host memory meanwhile, and must have the same checksum after the wake-up. At level 2 they
are lost, and the engine is invalid from ``sleep`` until a complete weight update; only the model's constants are
compared. At level 0 nothing happens. On a CPU the states are the same, but the weights stay in memory; see
:mod:`recipe_gkd.rollout.vllm.sleep`.

A call that fails for another reason than a wrong checksum ends the engine, because its memory is then unknown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

from recipe_gkd.errors import GkdError, WeightSyncError, WorkerDied, WorkerError
from recipe_gkd.rollout.weight_updates import Invalidity, WeightUpdates
from recipe_gkd.runtime.out_of_memory import out_of_memory_error
from teacher.common.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from recipe_gkd.rollout.vllm.compat import LLMEngine

Part = Literal["weights", "kv_cache"]
Checksums = Mapping[str, Mapping[str, int]]
"""``parameters`` and ``constants`` -> name of a tensor -> checksum, of one tensor-parallel rank."""

_REMEDY = "set actor_rollout_ref.rollout.sleep_level=0, start the run again, and report this"
_RELEASED = Invalidity("its weights were released", "run a weight sync")


@dataclass(frozen=True, kw_only=True)
class SleepReport:
    """Effect of :meth:`EngineSleep.sleep`.

    Attributes:
        level: Sleep level.
        released_bytes: Memory that all ranks released. Other processes of a GPU change the measured value.
        seconds: Duration.
    """

    level: int
    released_bytes: int
    seconds: float


class EngineSleep:
    """Sleep of one engine.

    Lifecycle::

        state = EngineSleep(name, updates)
        state.refuse_requests(2)         # before `sleep` is queued on the engine's thread
        state.sleep(engine, 2)
        state.wake(engine, "weights")    # then a weight update
        state.wake(engine, "kv_cache")

    ``sleep`` and ``wake`` run on the engine's thread (``RolloutEngine.run``), the other methods on any thread.

    Args:
        name: Label of the worker, for errors.
        updates: State of the engine's weights.
    """

    def __init__(self, name: str, updates: WeightUpdates) -> None:
        self._name, self._updates = name, updates
        self._state: Literal["awake", "asleep", "weights"] = "awake"
        self._level = 0
        self._accepts_requests = True
        self._checksums: Sequence[Checksums] = ()

    def refuse_requests(self, level: int) -> None:
        """Refuse new requests, if ``level`` is not 0, until the engine is awake again."""
        self._accepts_requests = self._accepts_requests and level == 0

    def ensure_awake(self) -> None:
        """Raise :class:`WorkerError` if the engine cannot generate because it sleeps."""
        if not self._accepts_requests:
            missing = "KV cache" if self._state == "weights" else "weights and KV cache"
            raise WorkerError(
                f"the engine rejects requests: it sleeps without {missing}",
                remedy="call wake('weights'), sync the weights if it slept at level 2, and call wake('kv_cache')",
                worker=self._name,
            )

    def ensure_weights_are_allocated(self) -> None:
        """Raise :class:`WeightSyncError` if the engine has no memory for weights because it sleeps."""
        if self._state == "asleep":
            raise WeightSyncError(
                "the engine rejects the weight update: it sleeps", remedy="call wake('weights')", worker=self._name
            )

    def sleep(self, engine: LLMEngine, level: int) -> SleepReport:
        """Release the memory of the engine. Without effect if it sleeps already.

        Args:
            level: ``rollout.sleep_level``.

        Raises:
            WorkerError: A request is in flight.
            WorkerDied: The engine failed.
        """
        started, released = time.monotonic(), 0
        if level and self._state != "asleep":
            if n := engine.get_num_unfinished_requests():
                self._accepts_requests = self._state == "awake"
                raise WorkerError(
                    f"the engine cannot sleep: {n} requests are in flight",
                    remedy="wait for them or abort them",
                    worker=self._name,
                )
            with self._fatal("sleep"):
                before = engine.collective_rpc("gkd_prepare_sleep", args=(level,))
                engine.sleep(level)  # also resets the prefix cache
                after = engine.collective_rpc("gkd_release_cache")
            self._checksums = [rank["checksums"] for rank in before]
            self._state, self._level = "asleep", level
            released = sum(rank["bytes_in_use"] for rank in before) - sum(after)
            if level == 2:
                self._updates.invalidate(_RELEASED)
        return SleepReport(level=level, released_bytes=released, seconds=time.monotonic() - started)

    def wake(self, engine: LLMEngine, part: Part) -> None:
        """Allocate a part of the memory again. Without effect if it is allocated.

        Args:
            part: ``"weights"``, or then ``"kv_cache"``.

        Raises:
            WeightSyncError: The engine woke with other weights or constants, or kept its prefix cache. It is invalid.
            WorkerError: The weights must wake first.
            WorkerDied: The engine failed, for example because the device has no memory left.
        """
        if part == "weights" and self._state == "asleep":
            self._wake_weights(engine)
        elif part == "kv_cache" and self._state == "asleep":
            raise WorkerError(
                "the engine cannot wake its KV cache without weights",
                remedy="call wake('weights') first",
                worker=self._name,
            )
        elif part == "kv_cache" and self._state == "weights":
            self._wake_cache(engine)

    def _wake_weights(self, engine: LLMEngine) -> None:
        with self._fatal("wake-up of the weights"):
            engine.wake_up(["weights"])
            engine.collective_rpc("gkd_restore_constants")
            found = engine.collective_rpc("gkd_checksums", args=(self._level,))
        self._state = "weights"
        expected, self._checksums = self._checksums, ()
        for kind in ("constants", "parameters"):
            changed = [
                name
                for was, now in zip(expected, found, strict=True)
                for name in was[kind]
                if now[kind].get(name) != was[kind][name]
            ]
            if changed:
                self._refuse_changed(kind, list(dict.fromkeys(changed)))

    def _refuse_changed(self, kind: str, changed: list[str]) -> None:
        """Invalidate the engine. A weight sync repairs parameters only."""
        count = f" and {len(changed) - 1} other {kind}" if len(changed) > 1 else f" ({kind})"
        reason = f"after sleep level {self._level}, {changed[0]}{count} differs from before the sleep"
        self._invalidate(Invalidity(reason, _REMEDY, tuple(changed)), permanently=kind == "constants")

    def _invalidate(self, invalidity: Invalidity, *, permanently: bool) -> NoReturn:
        self._updates.invalidate(invalidity, permanently=permanently)
        raise invalidity.error(self._name, "the engine is invalid")

    def _wake_cache(self, engine: LLMEngine) -> None:
        with self._fatal("wake-up of the KV cache"):
            engine.wake_up(["kv_cache"])
            engine.collective_rpc("gkd_reset_cache")
            is_reset = engine.reset_prefix_cache()
        if not is_reset:
            reason = "vLLM did not empty its prefix cache after a sleep"
            self._invalidate(Invalidity(reason, _REMEDY), permanently=True)
        self._state, self._accepts_requests = "awake", True

    @contextmanager
    def _fatal(self, action: str) -> Iterator[None]:
        """Convert an exception of vLLM into :class:`WorkerDied`, which ends the engine."""
        try:
            yield
        except GkdError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                failure = out_of_memory_error(error, WorkerDied, pool="rollout", phase="wake-up", worker=self._name)
                raise failure.replaced(phase=action) from error
            text = f"the call failed: {type(error).__name__}: {error}"
            raise WorkerDied(text, phase=action, worker=self._name) from error
