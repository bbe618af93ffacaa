"""vLLM as a scorer: prompt log-probabilities, kept as tensors, of sequences that are never continued.

Of this package, only this module, `vllm_internals`, `vllm_requests`, `vllm_prompt_rows` and `vllm_rank` import vLLM;
`vllm_queue` uses its engine. With `vllm_setup`, `vllm_cpu` and `vllm_worker` of `teacher.common` they depend on these
internals of vLLM:

- one replaced method (`vllm_internals.keep_prompt_logprobs_as_tensors`);
- one replaced function (`vllm_setup.keep_file_store_in`), and on a CPU two methods that are wrong (`vllm_cpu`);
- the layout of the KV cache (`vllm_internals.read_kv_cache`);
- the model's `compute_logits` (`vllm_worker`);
- the lookup in the prefix cache, and with the V1 model runner its rows of prompts (`vllm_prompt_rows`);
- weights and KV cache of the model runner (`vllm_memory`), for `SLEEP_MODE` (`vllm_sleep`);
- on CUDA, the number of rows of logits that the V2 model runner computes at a time (`vllm_worker`).

`VllmEngine._self_check` scores a sequence at start-up, and refuses to serve if the result is not as expected. If only
the temperature has no effect, requests at other temperatures than 1 are rejected. On CUDA these steps also compile the
kernels, because vLLM's own warm-up is off with `enforce_eager`. The time limit of a step does not apply to them.

The prefix cache outlives requests. It depends on the model only: temperature and excluded ids change only logits.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from teacher.common.checkpoint import read_checkpoint
from teacher.common.data_types import engine_dtype
from teacher.common.fingerprint import last_tokens, tokenizer_fingerprint
from teacher.common.sizes import MIB
from teacher.common.tokenizer import count_tokens, load_tokenizer
from teacher.common.vllm_setup import (
    ASYNC_SCHEDULING_DEFECT,
    TESTED_VLLM,
    is_async_scheduling_failure,
    keep_file_store_in,
)
from teacher.engines.base import EngineConfig
from teacher.engines.limits import check_sequence
from teacher.engines.out_of_memory import out_of_memory_explained
from teacher.engines.self_check import PROBE_TEMPERATURE, check_padding, check_temperature, check_top_k, check_unchanged
from teacher.engines.sizes import ResultMemory, StepSize, describe_memory_shortage
from teacher.engines.vllm_install import (
    exempt_imports_from_gc,
    is_cpu_build,
    prepare_process,
    vllm_version,
)
from teacher.engines.vllm_internals import (
    head_dtype_error,
    keep_prompt_logprobs_as_tensors,
    limit_logit_rows,
    make_llm_engine,
    plan_engine,
    read_kv_cache,
    replace_prompt_rows,
)
from teacher.engines.vllm_memory import TeacherCalls
from teacher.engines.vllm_prompt_rows import share_prompts
from teacher.engines.vllm_queue import SequenceQueue
from teacher.engines.vllm_requests import sampling_params, scores_of
from teacher.engines.vllm_sleep import SleepMode
from teacher.errors import TeacherError, TeacherRequestError, TeacherSetupError
from teacher.records import LogitSettings, ModelInfo, ScoredSequence, TeacherSequence

logger = logging.getLogger(__name__)

_CHECK_ERRORS = (RuntimeError, AttributeError, TypeError, ValueError, IndexError)
_PROBE_KEY = -1
_SHARED_TOLERANCE = 0.25
"""Largest difference of log-probabilities with and without cached prompt, in nats. It allows rounding in bfloat16."""


class VllmEngine:
    """In-process `LLMEngine`. Not thread-safe. See `ScoringEngine` for the interface.

    Attributes:
        capacity_tokens: Tokens that a worker should hold.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load the model and score a probe sequence.

        Raises:
            TeacherError: The checkpoint or the configuration cannot be used.
        """
        checkpoint = read_checkpoint(Path(config.ckpt_path))
        checkpoint.check_tp_size(config.tp_size)
        vocab_size = checkpoint.vocab_size
        on_cpu = is_cpu_build()
        prepare_process(on_cpu=on_cpu)
        with exempt_imports_from_gc():
            tokenizer = load_tokenizer(config.ckpt_path)
        n_tokens = count_tokens(tokenizer, vocab_size)
        _check_n_logprobs(config.n_logprobs, n_tokens)
        with exempt_imports_from_gc():
            from vllm import __version__

        dtype = engine_dtype(config.dtype, Path(config.ckpt_path), "cpu" if on_cpu else "cuda")
        args, step, runner = plan_engine(replace(config, dtype=dtype), vocab_size, on_cpu=on_cpu)
        keep_prompt_logprobs_as_tensors()
        self._store = _keep_store_in_own_folder()
        self._k, self._tp_size, self._runner = config.n_logprobs, config.tp_size, runner
        self._logits = LogitSettings()
        self._temperature_error, self._n_ids_error, self._support_error, self._shares_prompts = "", "", "", True
        self._memory = ResultMemory(self._k, 8 if runner == "cuda_v2" else 4, config.max_result_mib * MIB)
        self._sizes = {"logits of a step": config.logits_mib * MIB, "results": config.max_result_mib * MIB}
        with out_of_memory_explained("start", self._sizes):
            self._engine = make_llm_engine(args)
        self._sizes |= self._engine.collective_rpc(TeacherCalls.count_memory.__name__)[0]
        share_prompts(self._engine)
        self._queue = SequenceQueue(self._engine, self._sampling_params, self._memory)
        self._info = ModelInfo(
            model_name=config.model_name or Path(config.ckpt_path).resolve().name,
            vocab_size=vocab_size,
            n_tokens=n_tokens,
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            max_model_len=args.max_model_len - 1,
            n_logprobs=self._k,
            engine=f"vllm {__version__} {_dtypes(self._engine.model_config, checkpoint.dtype)}",
            eos_token_ids=checkpoint.eos_token_ids,
            last_tokens=last_tokens(tokenizer),
        )
        self.capacity_tokens = self._memory.capacity_tokens(step)
        if runner == "cuda_v2":
            limit_logit_rows(self._engine, step)
            self._check_device_memory(config, step)
        else:
            replace_prompt_rows(self._engine)
        served = str(self._engine.model_config.dtype).removeprefix("torch.")
        if config.dtype == "auto" and checkpoint.dtype == "float32" != served:
            logger.warning("DTYPE=auto serves the float32 checkpoint in %s; DTYPE=float32 keeps float32", served)
        _warn_of_other_version(__version__)
        with out_of_memory_explained("start", self._sizes):
            self._self_check()
            score_probe = functools.partial(self._score_probe_with, LogitSettings())
            self._sleep_mode = SleepMode(self._engine, score_probe, on_cpu=on_cpu) if config.sleep_mode else None

    @property
    def has_sleep_mode(self) -> bool:
        """True if the engine was started with `SLEEP_MODE=1`."""
        return self._sleep_mode is not None

    def sleep(self) -> None:
        """Release the memory of the devices. See `vllm_sleep`.

        Raises:
            TeacherError: The engine has no sleep mode, or the host has no memory for the weights.
        """
        with out_of_memory_explained("sleep", self._sizes):
            self._require_sleep_mode().sleep()

    def wake(self) -> None:
        """Restore the model and verify it.

        Raises:
            TeacherError: The model is not the same as before the sleep, or a device has no memory for it.
        """
        with out_of_memory_explained("wake-up", self._sizes):
            self._require_sleep_mode().wake()

    def _require_sleep_mode(self) -> SleepMode:
        if self._sleep_mode is None:
            raise TeacherError(
                "this worker has no sleep mode",
                options=("--sleep-mode",),
                remedy="start it with SLEEP_MODE=1 (--sleep-mode)",
            )
        if self.has_work():
            raise TeacherError(f"{len(self._queue)} sequences are in the engine", remedy="finish them first")
        return self._sleep_mode

    @property
    def info(self) -> ModelInfo:
        """Model and limits."""
        return self._info

    @property
    def logits(self) -> LogitSettings:
        """Settings of the logits."""
        return self._logits

    def set_logits(self, settings: LogitSettings) -> None:
        """Set the settings of the sequences added from now on. The engine must have no work."""
        n_ids = settings.n_ids or self._info.n_tokens
        arguments = settings.temperature, n_ids if n_ids < self._info.vocab_size else None
        self._engine.collective_rpc(TeacherCalls.set_logits.__name__, args=arguments)
        self._logits = settings

    def check(self, sequence: TeacherSequence, settings: LogitSettings) -> None:
        """Validate a sequence.

        Raises:
            TeacherRequestError: This model cannot score the sequence, or not with these settings.
        """
        if settings.temperature != 1.0 and self._temperature_error:
            raise TeacherRequestError(
                f"this teacher scores at temperature 1 only, got {settings.temperature:g}: {self._temperature_error}",
                argument="temperature",
                options=("gkd.distill_temperature",),
                remedy=f"set gkd.distill_temperature=1, or serve it with vLLM {TESTED_VLLM}",
            )
        if settings.n_ids and self._n_ids_error:
            raise TeacherRequestError(
                f"this teacher cannot exclude ids from its distributions: {self._n_ids_error}",
                argument="n_ids",
                remedy=f"use a teacher with the student's vocabulary, or serve it with vLLM {TESTED_VLLM}",
            )
        if sequence.n_support and self._support_error:
            raise TeacherRequestError(
                f"this teacher scores its own top k only: {self._support_error}",
                argument="support_ids_TJ",
                options=("actor_rollout_ref.teacher.support",),
                remedy=f"set actor_rollout_ref.teacher.support=teacher, or serve it with vLLM {TESTED_VLLM}",
            )
        check_sequence(sequence, settings.n_ids, self._info, self._memory)

    def add(self, key: int, sequence: TeacherSequence) -> None:
        """Queue a sequence that `check` accepted."""
        self._queue.add(key, sequence)

    def discard(self, keys: list[int]) -> None:
        """Remove sequences whose requests were canceled or expired."""
        self._queue.discard(keys)

    def has_work(self) -> bool:
        """Return True if a sequence was added and not returned yet."""
        return len(self._queue) > 0

    def step(self) -> list[tuple[int, ScoredSequence | TeacherRequestError]]:
        """Run one step, and return the keys and results of the sequences that it completed."""
        done: list[tuple[int, ScoredSequence | TeacherRequestError]] = [*self._queue.admit()]
        with out_of_memory_explained("engine step", self._sizes):
            outputs = self._step_engine() if self.has_work() else []
        for output in outputs:
            key = int(output.request_id)
            if output.finished and (sequence := self._queue.complete(key)) is not None:
                done.append((key, scores_of(sequence, output, self._k)))
        return done

    def _step_engine(self) -> list[Any]:
        try:
            return list(self._engine.step())
        except AssertionError as error:
            if not is_async_scheduling_failure(error):
                raise
            raise TeacherError(
                ASYNC_SCHEDULING_DEFECT,
                options=("ASYNC_SCHEDULING",),
                remedy="start the worker with ASYNC_SCHEDULING=off",
            ) from error

    def close(self) -> None:
        """End the processes of the other ranks and remove the temporary folder."""
        # With one rank the engine ends with this process. vLLM's own shutdown first collects garbage for seconds.
        if self._tp_size > 1:
            self._engine.engine_core.shutdown()
        self._store.cleanup()

    def _check_device_memory(self, config: EngineConfig, step: StepSize) -> None:
        """Log a warning if a GPU lacks memory for logits and results, which vLLM does not reserve."""
        needed = config.logits_mib * MIB + self._memory.device_bytes(step, self._info.max_model_len)
        free, total = min(self._engine.collective_rpc(TeacherCalls.device_memory.__name__))
        if shortage := describe_memory_shortage(free, needed, total, config.gpu_memory_utilization):
            logger.warning("%s", shortage)

    def _self_check(self) -> None:
        """Score a probe sequence and check the result.

        Raises:
            TeacherError: Log-probabilities or padding are wrong. A wrong temperature is only recorded.
        """
        try:
            if self._info.n_tokens < self._info.vocab_size:
                self._check_excluded_ids()
            unscaled = self._score_probe()
            check_top_k(unscaled)
            self._check_shared_prompt()
        except _CHECK_ERRORS as error:
            raise head_dtype_error(error) or TeacherSetupError(
                f"vLLM {vllm_version()} failed the start-up check ({type(error).__name__}: {error})",
                remedy=f"install vLLM {TESTED_VLLM}, with which this engine was tested",
            ) from error
        try:
            check_temperature(unscaled, self._score_probe_with(LogitSettings(PROBE_TEMPERATURE)))
        except _CHECK_ERRORS as error:
            self._temperature_error = f"vLLM {vllm_version()} failed the temperature check ({error})"
            logger.warning("requests at other temperatures than 1 will be rejected: %s", self._temperature_error)
        try:
            self._check_support_ids(unscaled)
        except _CHECK_ERRORS as error:
            self._support_error = f"vLLM {vllm_version()} failed the check of support ids ({error})"
            logger.warning("requests with support ids will be rejected: %s", self._support_error)
        if self._info.n_tokens == self._info.vocab_size:
            try:
                self._check_excluded_ids()
            except _CHECK_ERRORS as error:
                self._n_ids_error = f"vLLM {vllm_version()} failed the check of excluded ids ({error})"
                logger.warning("requests of students with a smaller vocabulary will be rejected: %s", self._n_ids_error)

    def _check_support_ids(self, scored: ScoredSequence) -> None:
        """Score the probe at the ids of its top k, beside the top k and instead of it."""
        for with_top_k in (True, False):
            found = self._score_probe(support_ids_TJ=scored.topk_ids_TK, with_top_k=with_top_k)
            assert found.support_logps_TJ is not None, "the shapes are checked"
            at_support = ScoredSequence(found.support_logps_TJ, scored.topk_ids_TK, found.sampled_logps_T)
            check_unchanged(scored, at_support, _SHARED_TOLERANCE)

    def _check_shared_prompt(self) -> None:
        """Score a sequence again, when its prompt is in the prefix cache. If the scores differ, use no cache."""
        n_prompt = 1 + max(read_kv_cache(self._engine).block_sizes)
        if n_prompt >= self._info.max_model_len:
            return  # no sequence shares a block
        try:
            self.check(TeacherSequence(np.zeros(n_prompt + 1, np.int32), n_prompt), self._logits)
            before, after = (self._score_probe(n_prompt + 1, n_prompt) for _ in range(2))
            check_unchanged(before, after, _SHARED_TOLERANCE)
        except (TeacherRequestError, *_CHECK_ERRORS) as error:
            self._shares_prompts = False
            logger.warning(
                "prompts will be computed for every response, which takes longer: vLLM %s failed the check of its "
                "prefix cache (%s)",
                vllm_version(),
                error,
            )

    def _sampling_params(self, sequence: TeacherSequence) -> Any:
        return sampling_params(sequence, self._k, self._runner, shares_prompts=self._shares_prompts)

    def _check_excluded_ids(self) -> None:
        check_padding(self._score_probe_with(LogitSettings(n_ids=self._k)), self._k)

    def _score_probe_with(self, settings: LogitSettings) -> ScoredSequence:
        try:
            self.set_logits(settings)
            return self._score_probe()
        finally:
            self.set_logits(LogitSettings())

    def _score_probe(self, n_tokens: int = 4, prompt_len: int = 1, **support: Any) -> ScoredSequence:
        n_tokens = min(n_tokens, self._info.max_model_len)
        ids_N = np.arange(n_tokens, dtype=np.int32) % self._info.n_tokens
        self.add(_PROBE_KEY, TeacherSequence(ids_N, prompt_len, **support))
        done: list[tuple[int, ScoredSequence | TeacherRequestError]] = []
        while self.has_work() and not done:
            done = self.step()
        result = done[0][1]
        if isinstance(result, TeacherRequestError):
            raise RuntimeError(str(result))
        return result


def _check_n_logprobs(n_logprobs: int, n_tokens: int) -> None:
    if not 1 <= n_logprobs <= n_tokens:
        raise TeacherSetupError(
            f"N_LOGPROBS must be 1 to the model's vocabulary size {n_tokens} (tokens, without padding), got "
            f"{n_logprobs}",
            options=("N_LOGPROBS",),
        )


def _warn_of_other_version(version: str) -> None:
    if version.partition("+")[0] != TESTED_VLLM:
        logger.warning("vLLM %s is installed, this engine was tested with %s", version, TESTED_VLLM)


def _dtypes(model_config: Any, stored: str) -> str:
    """Return the data type in which a model is served, and the types of its logits and its files if they differ."""
    dtype, head_dtype = (str(each).removeprefix("torch.") for each in (model_config.dtype, model_config.head_dtype))
    others = {"logits": head_dtype, "checkpoint": stored or dtype}
    differing = [f"{name} {other}" for name, other in others.items() if other != dtype]
    return f"{dtype} ({', '.join(differing)})" if differing else dtype


def _keep_store_in_own_folder() -> tempfile.TemporaryDirectory[str]:
    """Keep torch's ``FileStore`` in a folder that is removed with the engine."""
    folder = tempfile.TemporaryDirectory(prefix="teacher_")
    keep_file_store_in(Path(folder.name))
    return folder
