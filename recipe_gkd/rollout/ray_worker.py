"""One rollout worker: an engine, its sampling, and its weights, as an asynchronous class that Ray can run as an actor.

Nothing here imports Ray: the caller decorates and places the class, with ``environment.worker_environment(device)`` as
``env_vars`` of its ``runtime_env``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, get_args

from recipe_gkd.config import Config
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.diagnostics.stack_dumps import enable_stack_dumps
from recipe_gkd.errors import DeadlineError, GkdError, WeightSyncError
from recipe_gkd.ray_cluster.placement import device_report
from recipe_gkd.rollout.checkpoint_names import check_announced, folder_shapes
from recipe_gkd.rollout.engine import EngineOptions, RolloutEngine
from recipe_gkd.rollout.sampling import SamplingName, sampling_from
from recipe_gkd.rollout.weight_updates import WeightUpdates
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.weight_sync.bucket_plan import TensorMeta

T = TypeVar("T")


class RolloutWorker:
    """Worker ``rank`` of the rollout pool, on ``device`` (`cpu` or `cuda`).

    Answers end at ``stop_token_ids``, too, beside the model's own; see :func:`sampling_from`. Ids from ``n_tokens`` on
    are padding of the output layer: never sampled, and without a share in logprobs. The weights of the model
    folder count as ``folder_version``; without one they are no version of a training run, whose first update must come
    before the first ``generate``.

    Lifecycle: ``setup`` -> any number of ``generate`` at a time, and now and then an update (``begin_weight_update``
    -> ``receive_weights`` -> ``commit_weights`` or ``drop_weights``) -> ``shutdown``. Between begin and commit or drop,
    new calls of ``generate`` wait; those that run end before it begins, or are paused where they are (``inflight``).
    """

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        device: str,
        stop_token_ids: Sequence[int] = (),
        n_tokens: int | None = None,
        folder_version: int | None = None,
    ) -> None:
        enable_stack_dumps()
        self._config, self._device, self._stop_token_ids = config, device, stop_token_ids
        self._folder_version = folder_version
        self._name = f"rollout worker {rank}"
        self._engine = RolloutEngine(EngineOptions.from_config(config, device, n_tokens))
        # Every slot of a node's pool is a process that receives all weights; on CUDA each has a device of its own.
        self._updates = WeightUpdates(self._name, n_sharing=config.rollout.n_gpus_per_node if device == "cpu" else 1)
        self._n_generating = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        self._open.set()
        self._paused = False
        self._unfit_before: str | None = None

    async def where(self) -> dict[str, Any]:
        return device_report(self._device)

    async def setup(self) -> dict[str, Any]:
        """Start the engine; what it is, and how long the start took."""
        started = time.monotonic()
        folder = self._config.actor_rollout_ref.model.path
        self._sampling = {
            name: sampling_from(self._config, name, also_stop_at=self._stop_token_ids)
            for name in get_args(SamplingName)
        }
        described = await _on_engine(self._engine.start())
        if (version := self._folder_version) is not None:
            await _on_engine(self._engine.run(lambda eng: self._updates.set_version(eng, version)))
        self._folder_shapes = folder_shapes(folder)
        return described | {"seconds": time.monotonic() - started}

    async def generate(
        self, prompts: list[Prompt], step: int, sampling: SamplingName = "train", timeout_s: float | None = None
    ) -> AsyncIterator[list[Response]]:
        """Answer ``prompts``; yields, each time, all answers that finished since the last time.

        ``timeout_s``: instead of ``rollout.timeout_s``, which is meant for a share of a training batch.

        Closing the iterator early drops what is unfinished. Who calls through Ray closes it by ``ray.cancel`` of the
        ``ObjectRefGenerator``, again and again until its ``completed()`` is ready: Ray loses a cancel that overtakes
        the call, and lets a generator that is merely deleted run on. Raises :class:`WeightSyncError` if this worker has
        no weights version or a failed update made it unfit, :class:`DeadlineError` after ``timeout_s``, and
        :class:`WorkerError` if the engine fails.
        """
        timeout_s = timeout_s or self._config.actor_rollout_ref.rollout.timeout_s
        started = time.monotonic()
        await self._in_time(self._open.wait(), started, timeout_s, "the weight update before it did not end")
        self._updates.ensure_valid()
        loop = asyncio.get_running_loop()
        finished: asyncio.Queue[list[Response] | GkdError] = asyncio.Queue()

        def deliver(result: list[Response] | GkdError) -> None:
            loop.call_soon_threadsafe(finished.put_nowait, result)

        params = [self._sampling[sampling].for_request(prompt.uid, step) for prompt in prompts]
        n_left = len(prompts)
        self._n_generating += 1
        self._idle.clear()
        request_ids, accepted = self._engine.submit(prompts, params, deliver)
        try:
            late = "the engine, busy with a step or a weight update, did not take the prompts"
            await self._in_time(_on_engine(accepted), started, timeout_s, late)
            while n_left:
                late = f"{n_left} of {len(prompts)} answers of step {step} are unfinished"
                results = [await self._in_time(finished.get(), started, timeout_s, late)]
                while not finished.empty():
                    results.append(finished.get_nowait())
                if failure := next((result for result in results if isinstance(result, GkdError)), None):
                    raise type(failure)(f"{self._name}: {failure}")
                responses = [response for result in results if not isinstance(result, GkdError) for response in result]
                n_left -= len(responses)
                yield responses
        finally:
            if n_left:
                self._engine.abort(request_ids)
            self._n_generating -= 1
            if not self._n_generating:
                self._idle.set()

    # Weight updates.

    async def open_weight_channel(
        self, host: str, port: int, first_rank: int, labels: list[str], transport: str
    ) -> None:
        """Join a new channel; blocks until all others, named in ``labels``, have joined."""
        timeout_s = self._config.actor_rollout_ref.nccl_timeout
        await _on_engine(
            self._engine.run(lambda eng: self._updates.join(eng, host, port, first_rank, labels, transport, timeout_s))
        )

    async def begin_weight_update(self, version: int, meta: Sequence[TensorMeta], inflight: bool = False) -> None:
        """Check that the announced weights fit, hold new requests back, and wait until the running ones have ended.

        ``inflight``: pause those that run instead. After a commit they go on with the new weights, after a drop with
        the old ones. If the drop leaves this worker unfit they stay paused, as the next update may repair it; if that
        fails, too, they end with :class:`WeightSyncError`.
        """
        check_announced(meta, self._config.actor_rollout_ref.model.path, self._folder_shapes)
        self._open.clear()
        self._paused, self._unfit_before = inflight or self._paused, self._updates.unfit
        started, timeout_s = time.monotonic(), self._config.actor_rollout_ref.nccl_timeout
        quiet = _on_engine(self._engine.pause()) if self._paused else self._idle.wait()
        try:
            await self._in_time(quiet, started, timeout_s, f"v{version} cannot be loaded: it still generates")
        except DeadlineError:
            self._end_update()
            raise

    async def receive_weights(
        self, version: int, meta: Sequence[TensorMeta], bucket_bytes: int, staged: bool | None = None
    ) -> dict[str, Any]:
        """Receive and verify an update; ``staged`` overrides whether it is kept aside or loaded at once."""
        return await _on_engine(
            self._engine.run(lambda eng: self._updates.receive(eng, version, meta, bucket_bytes, staged))
        )

    async def commit_weights(self, version: int) -> None:
        try:
            await _on_engine(self._engine.run(lambda eng: self._updates.commit(eng, version)))
        finally:
            self._end_update()

    async def drop_weights(self) -> str | None:
        """Give up an update; why this worker is now unfit, or None if it still has its old version."""
        try:
            await _on_engine(self._engine.run(self._updates.drop))
        finally:
            self._end_update()
        return self._updates.unfit

    def _end_update(self) -> None:
        unfit = self._updates.unfit
        if self._paused and unfit and not self._unfit_before:
            return  # the sync that repairs it comes next
        failure = WeightSyncError(f"the answers under way were given up: {unfit}") if unfit else None
        self._engine.resume(failure)
        self._paused = False
        self._open.set()

    async def shutdown(self) -> None:
        """End the engine. Waits for the step or update in progress, which have their own deadlines."""
        await in_thread(self._engine.close)

    async def _in_time(self, wait: Awaitable[T], started: float, timeout_s: float, late: str) -> T:
        try:
            async with asyncio.timeout(max(0.0, started + timeout_s - time.monotonic())):
                return await wait
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._name}: {late} after {timeout_s:g} s; raise "
                "actor_rollout_ref.rollout.timeout_s (generation) or nccl_timeout (weights), or look at its log"
            ) from error


async def _on_engine(done: Future[T]) -> T:
    return await asyncio.wrap_future(done)
