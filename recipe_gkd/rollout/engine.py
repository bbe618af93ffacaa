"""A vLLM engine inside this process, stepped by one thread. Commands run between its steps, so they need no lock."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe_gkd.config import Config
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import GkdError, ModelError, WorkerDied, WorkerError
from recipe_gkd.rollout.device_loss import is_device_loss
from recipe_gkd.runtime.scratch import scratch_folder

if TYPE_CHECKING:
    from recipe_gkd.rollout.vllm_compat import LLMEngine, RequestOutput

log = logging.getLogger(__name__)

Deliver = Callable[[list[Response] | GkdError], None]
"""Called on the engine's thread with what has just finished, or once with the error that ended everything."""

_CPU_KV_CACHE_MEGABYTES = 256
_CPU_BATCHED_TOKENS = 4096
_CUDA_BATCHED_TOKENS = 2048
"""vLLM's ``SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS``."""
_FAILED_ENGINE_CLOSE_S = 1.0
_NOTICE_S = 0.5
"""Time that the end of a tensor rank may take to be noticed, after its peers have lost their connections to it."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What an engine is built from."""

    model_path: str
    device: str
    """`cpu` or `cuda`."""
    dtype: str
    tensor_parallel_size: int
    max_num_seqs: int
    max_model_len: int
    kv_cache_bytes: int | None
    """None: what ``gpu_memory_utilization`` leaves."""
    gpu_memory_utilization: float
    enforce_eager: bool
    trust_remote_code: bool
    n_tokens: int | None = None
    """Ids from there on are padding of the output layer, and get no probability; None: none is."""

    @classmethod
    def from_config(cls, config: Config, device: str, n_tokens: int | None = None) -> EngineOptions:
        rollout, model, data = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, config.data
        megabytes = rollout.kv_cache_memory_megabytes or (_CPU_KV_CACHE_MEGABYTES if device == "cpu" else None)
        return cls(
            model_path=model.path,
            device=device,
            dtype=rollout.dtype,
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=rollout.max_model_len or data.max_prompt_length + data.max_response_length,
            kv_cache_bytes=None if megabytes is None else megabytes << 20,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager or device == "cpu",
            trust_remote_code=model.trust_remote_code,
            n_tokens=n_tokens,
        )


class RolloutEngine:
    """A vLLM engine on a thread: start it, submit prompts, run commands, close it.

    All methods return at once and may be called from any thread.

    An exception out of the engine fails every request and every later command with :class:`WorkerDied`: it cannot be
    trusted any more, and its worker has to be replaced. So does the death of a tensor rank, even while the engine's
    thread hangs because of it, and a command that finds that the device is lost. Any other exception of a command
    concerns its caller alone. The weights need a version (``LLMEngine.set_weight_version``, a number) before the first
    request.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._commands: queue.SimpleQueue[tuple[Callable[[LLMEngine], Any], Future[Any]]] = queue.SimpleQueue()
        self._command: Future[Any] = Future()  # the one in progress, or the last one
        self._running: dict[str, tuple[int, Deliver]] = {}
        self._ids = itertools.count()
        self._failure: GkdError | None = None
        self._ending, self._ended = threading.Lock(), threading.Event()
        self._closing = False
        self._paused = False
        self._thread: threading.Thread | None = None

    def start(self) -> Future[dict[str, Any]]:
        """Build the engine; the result describes it. Fails with :class:`ModelError` or :class:`WorkerError`."""
        ready: Future[dict[str, Any]] = Future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="rollout-engine", daemon=True)
        self._thread.start()
        return ready

    def submit(
        self, prompts: Sequence[Prompt], params: Sequence[dict[str, Any]], deliver: Deliver
    ) -> tuple[list[str], Future[None]]:
        """Queue a request for each prompt, with these ``SamplingParams``; their ids, and when they are accepted."""
        ids = [str(next(self._ids)) for _ in prompts]

        def add(engine: LLMEngine) -> None:
            try:
                for request_id, prompt, own in zip(ids, prompts, params, strict=True):
                    _add_request(engine, request_id, prompt, own, self.options.max_model_len)
                    self._running[request_id] = prompt.uid, deliver
            except BaseException:
                self._abort(engine, ids)
                raise

        return ids, self.run(add)

    def abort(self, request_ids: Sequence[str]) -> Future[None]:
        """Drop those of these requests that still run, and what they have generated; nobody is told."""
        return self.run(lambda engine: self._abort(engine, request_ids))

    def run(self, command: Callable[[LLMEngine], Any]) -> Future[Any]:
        """Run ``command(engine)`` on the engine's thread between two steps."""
        done: Future[Any] = Future()
        self._commands.put((command, done))
        if self._failure is not None:
            self._drain_commands(self._failure)  # the thread is gone: nobody else would answer
        return done

    def pause(self) -> Future[None]:
        """Take no further step until :meth:`resume`: requests stay as they are, commands still run."""
        return self.run(lambda _: self._set_paused(True))

    def resume(self, failure: GkdError | None = None) -> Future[None]:
        """Go on with the requests under way, or end all of them with ``failure``. Does nothing to a running engine."""

        def go_on(engine: LLMEngine) -> None:
            if failure is not None:
                engine.abort_request(list(self._running))
                self._fail_requests(failure)
            self._set_paused(False)

        return self.run(go_on)

    def close(self) -> None:
        """Stop the thread and the engine; waits for the step or command in progress. Idempotent.

        The thread of an engine that has failed may hang: it gets a second.
        """
        self._closing = True
        self._commands.put((lambda _: None, Future()))
        if self._thread is not None:
            self._thread.join(None if self._failure is None else _FAILED_ENGINE_CLOSE_S)

    # On the engine's thread.

    def _main(self, ready: Future[dict[str, Any]]) -> None:
        try:
            engine = _build(self.options)
        except GkdError as error:
            self._end(error)
            ready.set_exception(error)
            return
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for the start
            failure = WorkerError(
                f"vLLM could not be started on {self.options.model_path}: {type(error).__name__}: {error}; its options "
                "are the keys of actor_rollout_ref.rollout"
            )
            failure.__cause__ = error
            self._end(failure)
            ready.set_exception(failure)
            return
        try:
            _watch_ranks(engine, self._rank_died)
            ready.set_result(_describe(engine))
            while not self._closing and self._failure is None:
                self._run_commands(engine)
                if not self._paused and engine.has_unfinished_requests():
                    self._deliver(engine.step(), engine)
            self._end(WorkerError("the rollout engine is closed"))
        except Exception as error:
            log.exception("the rollout engine failed")
            self._end(_failed(error))
            _settle(ready, error=self._failure)  # if it failed before it was ready
        finally:
            engine.engine_core.shutdown()

    def _run_commands(self, engine: LLMEngine) -> None:
        """All that are queued; waits for one only if nothing can be generated."""
        wait = self._paused or not engine.has_unfinished_requests()
        while not self._closing:
            try:
                command, done = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if done.set_running_or_notify_cancel():
                self._run_command(engine, command, done)

    def _run_command(self, engine: LLMEngine, command: Callable[[LLMEngine], Any], done: Future[Any]) -> None:
        self._command = done
        if self._failure is not None:
            _settle(done, error=self._failure)
            return
        try:
            result = command(engine)
        except Exception as error:
            if isinstance(error, WorkerDied) or is_device_loss(error):
                raise  # it ends the engine
            # The peers of a rank that died may fail a moment before its end is noticed, which settles this, too.
            if self.options.tensor_parallel_size == 1 or not self._ended.wait(_NOTICE_S):
                _settle(done, error=error)
        else:
            _settle(done, result=result)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _deliver(self, outputs: Sequence[Any], engine: LLMEngine) -> None:
        finished: dict[Deliver, list[Response]] = {}
        for output in outputs:
            if output.finished and (owner := self._running.pop(output.request_id, None)):
                uid, deliver = owner
                finished.setdefault(deliver, []).append(_response(uid, output, int(engine.get_weight_version())))
        for deliver, responses in finished.items():
            deliver(responses)

    def _abort(self, engine: LLMEngine, request_ids: Sequence[str]) -> None:
        engine.abort_request([request_id for request_id in request_ids if self._running.pop(request_id, None)])

    def _rank_died(self, name: str) -> None:
        """Fail the engine, on another thread than its own, which may hang in a call that waits for that rank."""
        self._end(
            WorkerDied(
                f"the rollout engine failed: its process {name} died; the kernel's log on its node shows if it was "
                "killed for lack of memory"
            )
        )
        self._commands.put((lambda _: None, Future()))  # wakes the engine's thread, which then ends

    def _end(self, failure: GkdError) -> None:
        """Fail everything that is in flight and that comes later. The first failure counts."""
        with self._ending:
            if self._failure is None:
                self._failure = failure
            failure = self._failure
        self._ended.set()
        self._fail_requests(failure)
        self._drain_commands(failure)
        _settle(self._command, error=failure)

    def _fail_requests(self, failure: GkdError) -> None:
        owners: dict[Deliver, None] = {}
        while self._running:  # taken one by one: another thread may deliver meanwhile
            with suppress(KeyError):
                owners[self._running.popitem()[1][1]] = None
        for deliver in owners:
            deliver(failure)

    def _drain_commands(self, failure: GkdError) -> None:
        while True:
            try:
                _, done = self._commands.get_nowait()
            except queue.Empty:
                return
            if done.set_running_or_notify_cancel():
                done.set_exception(failure)


def _build(options: EngineOptions) -> LLMEngine:
    folder = Path(options.model_path)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; actor_rollout_ref.model.path must be a Hugging Face folder")
    # Late: it takes seconds, and only this process needs it.
    from recipe_gkd.rollout import vllm_calls, vllm_weights
    from recipe_gkd.rollout import vllm_compat as vllm

    vllm.check_platform(options.device)
    vllm.keep_files_in(scratch_folder())
    vllm_weights.register()
    arguments = vllm.EngineArgs(
        options.model_path,
        dtype=options.dtype,  # type: ignore[arg-type]
        trust_remote_code=options.trust_remote_code,
        tensor_parallel_size=options.tensor_parallel_size,
        distributed_executor_backend="uni" if options.tensor_parallel_size == 1 else "mp",
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        kv_cache_memory_bytes=options.kv_cache_bytes,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
        **_whole_prompts(options),
        skip_tokenizer_init=True,
        logprobs_mode="raw_logprobs",  # at temperature 1 and over all tokens, however they are sampled
        disable_log_stats=True,
        use_tqdm_on_load=False,
        weight_transfer_config=vllm.WeightTransferConfig(backend=vllm_weights.BACKEND),
        worker_extension_cls=f"{vllm_calls.__name__}.{vllm_calls.WorkerCalls.__name__}",
    )
    engine = vllm.LLMEngine.from_engine_args(arguments)
    if options.n_tokens is not None and options.n_tokens < engine.model_config.get_vocab_size():
        engine.collective_rpc("set_logits", args=(1.0, options.n_tokens))
    return engine


def _failed(error: Exception) -> WorkerDied:
    text = str(error) if isinstance(error, WorkerDied) else f"{type(error).__name__}: {error}"
    return WorkerDied(f"the rollout engine failed: {text}")


def _settle(done: Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:
    """Set the outcome, unless there is one already: two threads may do so when the engine fails."""
    with suppress(InvalidStateError):
        done.set_result(result) if error is None else done.set_exception(error)


def _watch_ranks(engine: LLMEngine, died: Callable[[str], None]) -> None:
    from recipe_gkd.rollout import vllm_compat

    vllm_compat.watch_ranks(engine, died)


def _whole_prompts(options: EngineOptions) -> dict[str, Any]:
    """Return the engine arguments that bound the tokens of a step.

    On a CPU, vLLM ends with `CPU Generator does not use offset` when a seeded request's prompt is cut in chunks. On
    CUDA, its default of 2048 tokens would refuse a larger ``max_num_seqs``.
    """
    if options.device != "cpu":
        more = options.max_num_seqs > _CUDA_BATCHED_TOKENS
        return {"max_num_batched_tokens": options.max_num_seqs} if more else {}
    budget = max(_CPU_BATCHED_TOKENS, options.max_model_len, options.max_num_seqs)
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": budget}


def _describe(engine: LLMEngine) -> dict[str, Any]:
    from recipe_gkd.rollout import vllm_compat

    return {
        "vllm": vllm_compat.vllm.__version__,
        "dtype": str(engine.model_config.dtype).removeprefix("torch."),
        "max_model_len": engine.model_config.max_model_len,
        "kv_cache_tokens": vllm_compat.kv_cache_tokens(engine),
    }


def _add_request(engine: LLMEngine, request_id: str, prompt: Prompt, params: dict[str, Any], limit: int) -> None:
    from recipe_gkd.rollout.vllm_compat import RequestOutputKind, SamplingParams

    if not 0 < len(prompt.ids) < limit:
        raise WorkerError(
            f"prompt {prompt.uid} (row {prompt.row}) has {len(prompt.ids)} tokens; expected 1 to {limit - 1}, which "
            "leaves room for one token of the answer; raise actor_rollout_ref.rollout.max_model_len, or drop the row"
        )
    sampling = SamplingParams(
        **params,
        detokenize=False,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request(request_id, {"prompt_token_ids": prompt.ids.tolist()}, sampling)


def _response(uid: int, output: RequestOutput, version: int) -> Response:
    """``version``: that of the engine now, which an answer without tokens carries."""
    from recipe_gkd.rollout.vllm_compat import FlatLogprobs

    completion = output.outputs[0]
    assert isinstance(completion.logprobs, FlatLogprobs)
    spans = completion.weight_versions or []
    versions_T = np.repeat([int(span.version) for span in spans], [span.end - span.start for span in spans])
    return Response(
        uid=uid,
        ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),
        finish_reason=completion.finish_reason or "length",
        weights_version=min(versions_T.tolist(), default=version),
        versions_T=versions_T.astype(np.int32),
    )
