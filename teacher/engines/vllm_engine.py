"""vLLM as a scorer: prompt logprobs, kept as tensors, of sequences that are never continued.

The only file of the service that imports vLLM, public parts and internals alike. What it relies on beyond the public
interface: one method, replaced in `_keep_prompt_logprobs_as_tensors`; one function, replaced in
`vllm_setup.keep_file_store_in`; the layout of the KV cache, read in `_kv_cache_room`; the model's `compute_logits`, see
`vllm_worker`. `VllmEngine._self_check` scores a sequence at start-up and refuses to serve if the result is not what the
rest of this file expects; if only the temperature does not do what it must, requests at another than 1 are refused.

Prefix caching is off: a request for prompt logprobs whose rows come from the cache gets uninitialized memory. So what
outlives a request is the model alone, and a change of temperature leaves nothing stale.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from teacher.engines.admission import Admission, Need
from teacher.engines.base import EngineConfig
from teacher.engines.checkpoint import read_checkpoint
from teacher.engines.sizes import answer_bytes, capacity_tokens, step_size
from teacher.engines.vllm_install import (
    TESTED_VLLM,
    is_cpu_build,
    no_garbage_in_imports,
    prepare_process,
    vllm_version,
)
from teacher.engines.vllm_setup import keep_file_store_in
from teacher.engines.vllm_worker import LogitsCalls
from teacher.errors import TeacherError, TeacherRequestError
from teacher.fingerprint import count_ids, tokenizer_fingerprint
from teacher.records import ModelInfo, ScoredSequence, TeacherSequence

logger = logging.getLogger(__name__)

_CPU_KV_CACHE_MIB = 256


class VllmEngine:
    """In-process `LLMEngine`; see `ScoringEngine` for the contract. Use it from one thread."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises: TeacherError if the checkpoint or the configuration cannot be used."""
        checkpoint = read_checkpoint(Path(config.ckpt_path))
        vocab_size = checkpoint.vocab_size
        self._on_cpu = is_cpu_build()
        prepare_process(on_cpu=self._on_cpu)
        with no_garbage_in_imports():
            from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(config.ckpt_path, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise TeacherError(
                f"the tokenizer in CKPT_PATH={config.ckpt_path} cannot be loaded: {error}; copy the tokenizer files "
                "that the model came with into the folder"
            ) from None
        n_tokens = _n_tokens(tokenizer, vocab_size)
        if not 1 <= config.n_logprobs <= n_tokens:
            raise TeacherError(
                f"N_LOGPROBS must be 1 to the model's vocabulary size {n_tokens} (tokens, without padding), got "
                f"{config.n_logprobs}"
            )
        self._step = step_size(config.logits_mib, vocab_size, config.n_logprobs, on_cpu=self._on_cpu)

        with no_garbage_in_imports():
            from vllm import SamplingParams, __version__
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine.llm_engine import LLMEngine

        _keep_prompt_logprobs_as_tensors()
        self._store = _keep_store_in_own_folder()
        self._k, self._tp_size = config.n_logprobs, config.tp_size
        self._temperature = 1.0
        self._why_only_temperature_1 = ""
        args = self._engine_args(config)
        try:
            self._engine: Any = LLMEngine.from_engine_args(args)
        except ValueError as error:
            if "KV cache" not in str(error) and "cache blocks" not in str(error):
                raise
            raise _no_room_for_one(error, args) from None
        self._params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=self._k,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._max_answer_bytes = config.max_answer_mib * 2**20
        self._admission = Admission(Need(self._kv_cache_room(), self._max_answer_bytes))
        self._sequences: dict[int, TeacherSequence] = {}
        self._info = ModelInfo(
            model_name=config.model_name or Path(config.ckpt_path).resolve().name,
            vocab_size=vocab_size,
            n_tokens=n_tokens,
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            max_model_len=args.max_model_len - 1,
            n_logprobs=self._k,
            engine=f"vllm {__version__} {str(self._engine.model_config.dtype).removeprefix('torch.')}",
            eos_token_ids=checkpoint.eos_token_ids,
        )
        self.capacity_tokens = capacity_tokens(self._step, self._k, self._max_answer_bytes)
        if __version__.partition("+")[0] != TESTED_VLLM:
            logger.warning("vLLM %s is installed, this engine was tested with %s", __version__, TESTED_VLLM)
        self._self_check()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def temperature(self) -> float:
        return self._temperature

    def set_temperature(self, temperature: float) -> None:
        self._set_logits(temperature, self._info.n_tokens)
        self._temperature = temperature

    def _set_logits(self, temperature: float, n_tokens: int) -> None:
        padded = n_tokens < self._info.vocab_size
        self._engine.collective_rpc(LogitsCalls.set_logits.__name__, args=(temperature, n_tokens if padded else None))

    def check(self, sequence: TeacherSequence, temperature: float) -> None:
        if temperature != 1.0 and self._why_only_temperature_1:
            raise TeacherRequestError(
                f"this teacher scores at temperature 1 only, got {temperature:g}: {self._why_only_temperature_1}; "
                f"set gkd.distill_temperature=1, or serve it with vLLM {TESTED_VLLM}"
            )
        ids, info = sequence.token_ids, self._info
        if len(ids) > info.max_model_len:
            raise TeacherRequestError(
                f"{len(ids)} tokens, the teacher takes at most {info.max_model_len}; start it with a larger "
                "MAX_MODEL_LEN, or shorten prompt and response"
            )
        if ids.min() < 0 or ids.max() >= info.n_tokens:
            bad = ids[(ids < 0) | (ids >= info.n_tokens)]
            raise TeacherRequestError(
                f"token id {bad[0]} is outside the teacher's vocabulary of {info.n_tokens}; student and teacher must "
                "share one tokenizer"
            )
        if (n_bytes := answer_bytes(sequence, self._k)) > self._max_answer_bytes:
            raise TeacherRequestError(
                f"the answer to {len(ids)} tokens, {len(ids) - sequence.prompt_len} of them to be scored, takes "
                f"{n_bytes / 2**20:.1f} MiB of the teacher's memory with N_LOGPROBS={self._k}, at most MAX_ANSWER_MIB="
                f"{self._max_answer_bytes >> 20} are allowed; shorten prompt or response, or start the teacher with a "
                "smaller N_LOGPROBS or a larger MAX_ANSWER_MIB (a request's top_k does not change what its engine does)"
            )

    def add(self, key: int, sequence: TeacherSequence) -> None:
        self._sequences[key] = sequence
        need = Need(self._kv_blocks(len(sequence.token_ids)), answer_bytes(sequence, self._k))
        self._admission.queue(key, sequence, need)

    def _admit(self) -> list[tuple[int, TeacherRequestError]]:
        """Hand vLLM the sequences for which there is room. Return those that it refuses, each with its own error."""
        refused = []
        while (admitted := self._admission.admit()) is not None:
            key, sequence = admitted
            try:
                self._engine.add_request(str(key), {"prompt_token_ids": sequence.token_ids.tolist()}, self._params)
            except Exception as error:  # of whatever type: vLLM checks a request before it takes it
                logger.exception("vLLM refused a sequence of %d tokens", len(sequence.token_ids))
                self.discard([key])
                message = f"the engine refused the request: {type(error).__name__}: {error}"
                refused.append((key, TeacherRequestError(message)))
        return refused

    def discard(self, keys: list[int]) -> None:
        self._engine.abort_request([str(key) for key in self._admission.discard(keys)])
        for key in keys:
            self._sequences.pop(key, None)

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[tuple[int, ScoredSequence | TeacherRequestError]]:
        done: list[tuple[int, ScoredSequence | TeacherRequestError]] = [*self._admit()]
        for output in self._engine.step() if self._sequences else []:
            sequence = self._sequences.pop(int(output.request_id), None) if output.finished else None
            if sequence is not None:
                self._admission.leave(int(output.request_id))
                done.append((int(output.request_id), self._answer(sequence, output.prompt_logprobs)))
        return done

    def close(self) -> None:
        # With one rank all there is to end is this process; vLLM's own clean-up first collects garbage for seconds.
        if self._tp_size > 1:
            self._engine.engine_core.shutdown()
        self._store.cleanup()

    def _kv_cache_room(self) -> int:
        """KV blocks for sequences; all groups of layers take theirs from one pool, in which one block is never used."""
        try:
            kv_cache = self._engine.engine_core.engine_core.scheduler.kv_cache_config
            self._block_sizes = [int(group.kv_cache_spec.block_size) for group in kv_cache.kv_cache_groups]
            return int(kv_cache.num_blocks) - 1
        except (AttributeError, TypeError) as error:
            raise TeacherError(
                f"vLLM {vllm_version()} does not say how its KV cache is laid out ({error}); this engine was tested "
                f"with vLLM {TESTED_VLLM}"
            ) from error

    def _kv_blocks(self, n_tokens: int) -> int:
        """That a sequence needs at most; layers that look at a window of it need fewer."""
        return sum(-(-n_tokens // block_size) for block_size in self._block_sizes)

    def _engine_args(self, config: EngineConfig) -> Any:
        from vllm import EngineArgs

        common: dict[str, Any] = {
            "model": config.ckpt_path,
            "dtype": config.dtype,
            "skip_tokenizer_init": True,
            "max_logprobs": self._k,
        }
        # vLLM's own rule says what the model can do, and refuses a longer wish ...
        wish: dict[str, Any] = {"max_model_len": config.max_model_len} if config.max_model_len else {}
        max_model_len = EngineArgs(**common, **wish).create_model_config().max_model_len
        # ... but it also wants room for one generated token, which is never fed back: its position is not computed.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"

        kv_cache_mib = config.kv_cache_mib or (_CPU_KV_CACHE_MIB if self._on_cpu else 0)
        return EngineArgs(
            **common,
            max_model_len=max_model_len + 1,
            max_num_batched_tokens=self._step.tokens,
            max_num_seqs=self._step.sequences,
            long_prefill_token_threshold=min(self._step.long_tokens, max_model_len + 1),
            long_prefill_token_threshold_adaptive=True,  # but never less than a fair share, so that steps are full
            enable_chunked_prefill=True,
            enable_prefix_caching=False,
            enforce_eager=True,  # prefill only: there is no decode loop that a captured graph would speed up
            tensor_parallel_size=config.tp_size,
            distributed_executor_backend="uni" if config.tp_size == 1 else "mp",
            worker_extension_cls=f"{LogitsCalls.__module__}.{LogitsCalls.__name__}",
            kv_cache_memory_bytes=kv_cache_mib * 2**20 or None,
            gpu_memory_utilization=config.gpu_memory_utilization,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
        )

    def _answer(self, sequence: TeacherSequence, tensors: Any) -> ScoredSequence:
        """Response rows of vLLM's [N-1, 1+K] tensors: row i predicts token i+1, column 0 is the token that is there."""
        first, n_tokens, k = sequence.prompt_len - 1, len(sequence.token_ids), self._k
        logps, ids = tensors.logprobs.numpy(), tensors.logprob_token_ids.numpy()
        if logps.shape != (n_tokens - 1, 1 + k) or not np.array_equal(ids[:, 0], sequence.token_ids[1:]):
            raise RuntimeError(
                f"vLLM returned prompt logprobs {logps.shape} that do not belong to the {n_tokens} tokens asked for"
            )
        # Copies: a view would keep the prompt's rows alive, and the wire wants contiguous arrays.
        return ScoredSequence(
            topk_logps_TK=np.ascontiguousarray(logps[first:, 1 : 1 + k], dtype=np.float32),
            topk_ids_TK=np.ascontiguousarray(ids[first:, 1 : 1 + k], dtype=np.int32),
            sampled_logps_T=np.ascontiguousarray(logps[first:, 0], dtype=np.float32),
        )

    def _self_check(self) -> None:
        """Score one short sequence and look at the result, before the first client does."""
        try:
            if self._info.n_tokens < self._info.vocab_size:
                self._check_padding()
            answer = self._score_probe()
            logps_TK = answer.topk_logps_TK
            mass_T = _mass(answer)
            if not (np.diff(logps_TK, axis=1) <= 0).all() or not (mass_T < 1.001).all():
                raise RuntimeError(f"top-k rows are not sorted logprobs; their mass is {mass_T.tolist()}")
        except (RuntimeError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise TeacherError(
                f"vLLM {vllm_version()} failed the start-up check ({type(error).__name__}: {error}); this engine was "
                f"tested with vLLM {TESTED_VLLM}"
            ) from error
        try:
            self._check_temperature(answer)
        except (RuntimeError, AttributeError, TypeError, ValueError, IndexError) as error:
            self._why_only_temperature_1 = f"vLLM {vllm_version()} failed the check of it ({error})"
            logger.warning("requests at another temperature than 1 will be refused: %s", self._why_only_temperature_1)

    def _score_probe(self) -> ScoredSequence:
        n_tokens = min(4, self._info.max_model_len)
        self.add(-1, TeacherSequence(np.arange(n_tokens, dtype=np.int32) % self._info.n_tokens, 1))
        done: list[tuple[int, ScoredSequence | TeacherRequestError]] = []
        while self.has_work() and not done:
            done = self.step()
        result = done[0][1]
        if isinstance(result, TeacherRequestError):
            raise RuntimeError(str(result))
        return result

    def _check_padding(self) -> None:
        """With all ids from K on taken for padding, the top K are the others and their mass is 1; else RuntimeError."""
        self._set_logits(1.0, self._k)
        answer = self._score_probe()
        self._set_logits(1.0, self._info.n_tokens)
        if not (answer.topk_ids_TK < self._k).all() or not (abs(_mass(answer) - 1) < 0.001).all():
            raise RuntimeError(
                f"padding of the output layer is not left out: of ids below {self._k} only, got "
                f"{answer.topk_ids_TK.max()}, and a mass of {_mass(answer).tolist()}"
            )

    def _check_temperature(self, at_1: ScoredSequence) -> None:
        """At temperature T, differences between logprobs are those at 1, divided by T; raise RuntimeError if not."""
        temperature = 1 / 16
        try:
            self.set_temperature(temperature)
            expected, got = _spread(at_1) / temperature, _spread(self._score_probe())
        finally:
            self.set_temperature(1.0)
        # Wide, because bf16 on a GPU need not repeat itself; a temperature that is ignored is off by a factor of 16.
        if not abs(got - expected) <= 0.5 * expected + 1e-3:
            raise RuntimeError(f"logprobs at temperature {temperature:g} differ by {got:.4g}, expected {expected:.4g}")


def _n_tokens(tokenizer: Any, vocab_size: int) -> int:
    """How many ids of the output layer are tokens; the rest is padding."""
    n_ids = count_ids(tokenizer)
    if n_ids > vocab_size:
        logger.warning(
            "the teacher's tokenizer has ids up to %d, its model's output layer %d rows: sequences with ids from %d on "
            "will be refused; is this the tokenizer of this model?",
            n_ids - 1,
            vocab_size,
            vocab_size,
        )
    return min(n_ids, vocab_size)


def _no_room_for_one(error: ValueError, args: Any) -> TeacherError:
    """VLLM's refusal of a KV cache in which a sequence of the longest length does not fit, in the service's words."""
    n_bytes = args.kv_cache_memory_bytes
    size = f"KV_CACHE_MIB={n_bytes >> 20}" if n_bytes else f"GPU_MEMORY_UTILIZATION={args.gpu_memory_utilization:g}"
    fits = re.search(r"estimated maximum model length is (\d+)", str(error))
    shorter = f"MAX_MODEL_LEN to {int(fits[1]) - 1} or less" if fits else "a smaller MAX_MODEL_LEN"
    return TeacherError(
        f"the KV cache ({size}) does not hold one sequence of MAX_MODEL_LEN={args.max_model_len - 1}; set {shorter}, "
        f"or KV_CACHE_MIB (on a GPU also GPU_MEMORY_UTILIZATION) larger; vLLM says: {error}"
    )


def _mass(answer: ScoredSequence) -> np.ndarray:
    """float64 [T], of the top-k."""
    return np.exp(answer.topk_logps_TK.astype(np.float64)).sum(axis=1)


def _spread(answer: ScoredSequence) -> float:
    """By how much the first logprob of each row exceeds the others, in total."""
    logps = np.column_stack([answer.topk_logps_TK, answer.sampled_logps_T]).astype(np.float64)
    below = logps[:, :1] - logps
    return float(below[np.isfinite(below)].sum())


def _keep_store_in_own_folder() -> tempfile.TemporaryDirectory[str]:
    """Keep torch's ``FileStore`` in a folder that is removed with the engine."""
    folder = tempfile.TemporaryDirectory(prefix="teacher_")
    keep_file_store_in(Path(folder.name))
    return folder


def _keep_prompt_logprobs_as_tensors() -> None:
    """Hand out prompt logprobs as the tensors they are, not as one Python object an entry (3 to 5 times faster).

    `vllm/v1/engine/logprobs.py`: LogprobsProcessor gets all rows of a request at once and converts them to dicts;
    RequestOutput passes on whatever it stores. No public option leaves the conversion out.
    """
    from vllm.v1.engine import logprobs

    if not hasattr(logprobs.LogprobsProcessor, "_update_prompt_logprobs"):
        raise TeacherError(
            f"vLLM {vllm_version()} has no LogprobsProcessor._update_prompt_logprobs; install vLLM {TESTED_VLLM}"
        )

    def keep(self: Any, prompt_logprobs_tensors: Any) -> None:
        self.prompt_logprobs = prompt_logprobs_tensors

    logprobs.LogprobsProcessor._update_prompt_logprobs = keep  # type: ignore[method-assign]
