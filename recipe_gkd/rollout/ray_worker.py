"""Rollout worker: an engine, its sampling parameters and its weights, as an asynchronous class for a Ray actor.

This module does not import Ray. The caller decorates and places the class, and passes
``environment.worker_environment(device)`` as ``env_vars`` of its ``runtime_env``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from recipe_gkd.config import Config
from recipe_gkd.config.conditions import has_conversations, sends_adapters
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.diagnostics.stack_dumps import enable_stack_dumps
from recipe_gkd.errors import DeadlineError, GkdError, WorkerError
from recipe_gkd.ray_cluster.placement import DeviceReport, device_report
from recipe_gkd.rollout.checkpoint_names import check_announced, folder_shapes
from recipe_gkd.rollout.engine import RolloutEngine
from recipe_gkd.rollout.engine_options import EngineOptions
from recipe_gkd.rollout.engine_report import EngineReport
from recipe_gkd.rollout.engine_sleep import EngineSleep, Part, SleepReport
from recipe_gkd.rollout.sampling import SamplingName, sampling_from
from recipe_gkd.rollout.turns import Turn, TurnRequest
from recipe_gkd.rollout.update_gate import UpdateGate
from recipe_gkd.rollout.vllm.tool_calls import message_parser
from recipe_gkd.rollout.weight_updates import WeightUpdates
from recipe_gkd.runtime.phase_memory import peak_bytes, reset_peak
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.spec import TransportAddress
from recipe_gkd.weight_sync.stats import ReceivedUpdate
from teacher.common.sizes import MIB

if TYPE_CHECKING:
    from recipe_gkd.rollout.vllm.compat import LLMEngine

T = TypeVar("T")


class RolloutWorker:
    """One worker of the rollout pool.

    Lifecycle::

        await worker.setup()
        async for responses in worker.generate(prompts, step): ...  # several calls at a time
        async for turns in worker.generate_turns(requests, step): ...  # or the turns of conversations
        await worker.open_weight_transport(...)                     # together with the actor's rank 0
        await worker.begin_weight_update(version, meta)             # new calls of generate wait from here ...
        await worker.receive_weights(version, meta, bucket_bytes)
        await worker.commit_weights(version)                        # ... to here, or to drop_weights()
        await worker.sleep(); await worker.wake("weights"); await worker.wake("kv_cache")  # with hybrid_engine
        await worker.shutdown()

    Args:
        rank: Rank in the rollout pool.
        device: ``"cpu"`` or ``"cuda"``.
        stop_token_ids: Ids that end a response, in addition to the model's own; see :func:`sampling_from`.
        n_tokens: See :class:`EngineOptions`.
        folder_version: Version of the weights in the model folder. If it is None, :meth:`generate` needs a weight
            update first.
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
        # On a CPU each slot of the node's pool is a process that receives all weights; on CUDA each has its own memory.
        n_sharing_host = config.rollout_pool[1] if device == "cpu" else 1
        self._updates = WeightUpdates(self._name, n_sharing_host)
        self._gate = UpdateGate(self._engine, self._updates)
        self._sleep = EngineSleep(self._name, self._updates)

    def device_report(self) -> DeviceReport:
        """Return the node and the device of this worker; see :func:`device_report`."""
        return device_report(self._device)

    async def setup(self) -> EngineReport:
        """Start the engine.

        Raises:
            ModelError: The model folder cannot be used.
            ResourceError: The installed vLLM does not support the device.
            WorkerError: vLLM could not start.
            ConfigError: The parser of tool calls cannot be used.
        """
        started = time.monotonic()
        folder = self._config.actor_rollout_ref.model.path
        self._sampling = {
            name: sampling_from(self._config, name, also_stop_at=self._stop_token_ids)
            for name in get_args(SamplingName)
        }
        report = await asyncio.wrap_future(self._engine.start())
        if has_conversations(self._config):
            end_ids, model = self._sampling["train"].stop_token_ids, self._config.actor_rollout_ref.model
            self._messages = message_parser(
                folder, self._config.rollout.tool_parser, end_ids, trust_remote_code=model.trust_remote_code
            )
        if (version := self._folder_version) is not None:
            await self._run(lambda engine: self._updates.set_version(engine, version))
        self._folder_shapes = folder_shapes(folder)
        return replace(report, seconds=time.monotonic() - started)

    async def generate(
        self, prompts: list[Prompt], step: int, sampling: SamplingName = "train", timeout_s: float | None = None
    ) -> AsyncIterator[list[Response]]:
        """Generate a response to each prompt.

        Closing the iterator drops unfinished requests. Through Ray, close it by ``ray.cancel`` of the
        ``ObjectRefGenerator``, repeated until its ``completed()`` is ready: Ray loses a cancel that arrives before the
        call, and a generator that is only deleted keeps running.

        Args:
            step: Training step, for the seeds.
            sampling: Name of the sampling parameters.
            timeout_s: Deadline of the call; None for ``rollout.timeout_s``, which suits a share of a training batch.

        Yields:
            Responses that have finished since the last time.

        Raises:
            WeightSyncError: This worker has no weights version, or a failed update made it invalid.
            DeadlineError: ``timeout_s`` has passed.
            WorkerError: The engine failed, or sleeps.
        """
        params = (self._sampling[sampling].for_request(prompt.uid, step) for prompt in prompts)
        async for responses in self._generate(prompts, params, step, timeout_s):
            yield responses

    async def generate_turns(
        self, requests: list[TurnRequest], step: int, sampling: SamplingName = "train", timeout_s: float | None = None
    ) -> AsyncIterator[list[Turn]]:
        """Generate the next turn of each conversation; see :meth:`generate`."""
        prompts, tools = [request.prompt for request in requests], {each.prompt.uid: each.tools for each in requests}
        params = (
            self._sampling[sampling].for_request(each.prompt.uid, step, turn=each.number, max_tokens=each.max_tokens)
            for each in requests
        )
        async for responses in self._generate(prompts, params, step, timeout_s):
            yield [
                Turn(response=response, message=self._messages.message(response, tools[response.uid]))
                for response in responses
            ]

    async def _generate(
        self, prompts: list[Prompt], params: Iterable[dict[str, Any]], step: int, timeout_s: float | None
    ) -> AsyncIterator[list[Response]]:
        """Generate with these parameters, which are read once the engine is ready."""
        timeout_s = timeout_s or self._config.actor_rollout_ref.rollout.timeout_s
        started = time.monotonic()
        await self._ensure_ready(started, timeout_s)
        loop = asyncio.get_running_loop()
        finished: asyncio.Queue[list[Response] | GkdError] = asyncio.Queue()

        def deliver(result: list[Response] | GkdError) -> None:
            loop.call_soon_threadsafe(finished.put_nowait, result)

        n_left = len(prompts)
        with self._gate.generation():
            request_ids, accepted = self._engine.submit(prompts, list(params), deliver)
            try:
                problem = "the engine did not accept the prompts, because it was busy with a step or a weight update"
                await self._wait(asyncio.wrap_future(accepted), started, timeout_s, problem)
                while n_left:
                    problem = f"{n_left} of {len(prompts)} responses of step {step} are unfinished"
                    responses = self._merge(await self._wait(finished.get(), started, timeout_s, problem), finished)
                    n_left -= len(responses)
                    yield responses
            finally:
                if n_left:
                    self._engine.abort(request_ids)

    def _merge(
        self, first: list[Response] | GkdError, more: asyncio.Queue[list[Response] | GkdError]
    ) -> list[Response]:
        """Return the responses of ``first`` and of all queued results; raise the first error among them."""
        results = [first]
        while not more.empty():
            results.append(more.get_nowait())
        if failure := next((result for result in results if isinstance(result, GkdError)), None):
            raise failure.located(worker=self._name)
        return [response for result in results if not isinstance(result, GkdError) for response in result]

    async def log_probs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of a sequence after the first under the current weights.

        Args:
            ids: Token ids, at least two.

        Returns:
            Values at temperature 1 over all tokens of the tokenizer, one less than ``ids``.

        Raises:
            WeightSyncError: This worker has no weights version, or is invalid.
            DeadlineError: ``rollout.timeout_s`` has passed.
            WorkerError: The engine failed or sleeps, or the sequence is too short or too long.
        """
        started, timeout_s = time.monotonic(), self._config.actor_rollout_ref.rollout.timeout_s
        await self._ensure_ready(started, timeout_s)
        with self._gate.generation():
            done = asyncio.wrap_future(self._engine.log_probs(ids))
            return await self._wait(done, started, timeout_s, f"{len(ids)} log-probabilities were not computed")

    async def _ensure_ready(self, started: float, timeout_s: float) -> None:
        """Wait for the end of the current weight update, and ensure that the engine can generate."""
        await self._wait(
            self._gate.wait_until_open(), started, timeout_s, "the weight update before this call did not end"
        )
        self._updates.ensure_valid()
        self._sleep.ensure_awake()

    # Sleep.

    async def sleep(self) -> SleepReport:
        """Release the memory of the engine, as ``rollout.sleep_level`` requires; see :meth:`EngineSleep.sleep`.

        Without ``hybrid_engine`` nothing happens.

        Raises:
            WorkerError: A call of :meth:`generate` or :meth:`log_probs` is in flight.
            WorkerDied: The engine failed.
        """
        settings = self._config.actor_rollout_ref
        level = settings.rollout.sleep_level if settings.hybrid_engine else 0
        if level and (n := self._gate.n_generating):
            raise WorkerError(
                f"the engine cannot sleep: {n} calls of generate or log_probs are in flight",
                remedy="wait for them or cancel them",
                worker=self._name,
            )
        self._sleep.refuse_requests(level)
        return await self._run(lambda engine: self._sleep.sleep(engine, level))

    async def wake(self, part: Part) -> None:
        """Allocate the weights or the KV cache again; see :meth:`EngineSleep.wake`."""
        await self._run(lambda engine: self._sleep.wake(engine, part))

    async def reset_peak_memory(self) -> None:
        """Start a phase on all processes of the engine; see :func:`reset_peak`."""
        reset_peak(self._device)
        await self._run(lambda engine: engine.collective_rpc("gkd_reset_peak_memory"))

    async def peak_memory(self) -> int:
        """Return the memory of a phase in bytes; see :func:`peak_bytes`.

        On a CPU it is the sum of all processes of the engine, on CUDA the maximum of its GPUs.
        """
        ranks = await self._run(lambda engine: engine.collective_rpc("gkd_peak_memory"))
        if self._device != "cpu":
            return int(max(ranks))
        # With one rank, vLLM's worker is in this process.
        return int(sum(ranks)) + (peak_bytes(self._device) if len(ranks) > 1 else 0)

    # Weight updates.

    async def open_weight_transport(self, address: TransportAddress, first_rank: int) -> None:
        """Join a new transport, and wait until all other ranks have joined; see :meth:`WeightUpdates.join`."""
        timeout_s = self._config.actor_rollout_ref.nccl_timeout
        await self._run(lambda engine: self._updates.join(engine, address, first_rank, timeout_s))

    async def begin_weight_update(self, version: int, meta: Sequence[TensorMeta], inflight: bool = False) -> None:
        """Check the announced weights, hold back new calls of ``generate``, and stop generating.

        Args:
            version: Version of the weights.
            meta: Tensors of the update.
            inflight: If False, wait until running requests have finished. If True, pause them: after a commit they
                continue with the new weights, after a drop with the old ones. If the drop leaves this worker invalid,
                they stay paused for the next update, and end with :class:`WeightSyncError` if that fails too.

        Raises:
            WeightSyncError: The announced weights do not match the rollout model, or the engine sleeps.
            ResourceError: The update does not fit into the memory.
            DeadlineError: The running requests did not finish in time.
        """
        self._sleep.ensure_weights_are_allocated()
        if not sends_adapters(self._config):  # the engine itself knows which layers can have an adapter
            check_announced(meta, self._config.actor_rollout_ref.model.path, self._folder_shapes)
        started, timeout_s = time.monotonic(), self._config.actor_rollout_ref.nccl_timeout
        stopped = self._gate.begin(inflight=inflight)
        try:
            await self._wait(stopped, started, timeout_s, f"v{version} cannot be loaded: it still generates")
            megabytes = self._config.actor_rollout_ref.rollout.update_weights_bucket_megabytes
            await self._run(lambda engine: self._updates.check_memory(engine, meta, int(megabytes * MIB)))
        except GkdError:
            self._gate.end()
            raise

    async def receive_weights(
        self, version: int, meta: Sequence[TensorMeta], bucket_bytes: int, double_buffered: bool | None = None
    ) -> ReceivedUpdate:
        """Receive and verify an update; see :meth:`WeightUpdates.receive`."""
        return await self._run(
            lambda engine: self._updates.receive(engine, version, meta, bucket_bytes, double_buffered)
        )

    async def commit_weights(self, version: int) -> None:
        """Load the received update, and generate again; see :meth:`WeightUpdates.commit`."""
        try:
            await self._run(lambda engine: self._updates.commit(engine, version))
        finally:
            self._gate.end()

    async def drop_weights(self) -> str | None:
        """Discard an update.

        Returns:
            Reason why this worker is now invalid, None if it has a complete version.
        """
        try:
            await self._run(self._updates.drop)
        finally:
            self._gate.end()
        return self._updates.invalid_because

    async def shutdown(self) -> None:
        """Close the engine, after the current step or update, which have their own deadlines."""
        await in_thread(self._engine.close)

    async def _run(self, command: Callable[[LLMEngine], T]) -> T:
        """Run a command on the engine's thread."""
        return await asyncio.wrap_future(self._engine.run(command))

    async def _wait(self, awaitable: Awaitable[T], started: float, timeout_s: float, problem: str) -> T:
        """Await with a deadline ``timeout_s`` after ``started``; ``problem`` is the reason in the error."""
        try:
            async with asyncio.timeout(max(0.0, started + timeout_s - time.monotonic())):
                return await awaitable
        except TimeoutError as error:
            raise DeadlineError(
                f"{problem} after {timeout_s:g} s",
                remedy="raise actor_rollout_ref.rollout.timeout_s (generation) or nccl_timeout (weights), or look at "
                "the worker's log",
                worker=self._name,
                waited_s=timeout_s,
            ) from error
