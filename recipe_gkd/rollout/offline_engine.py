"""A vLLM engine in this process, for evaluation. It generates with fixed weights and reports no progress."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe_gkd.errors import ModelError
from recipe_gkd.rollout.cpu_engine import CPU_BATCHED_TOKENS, exact_arguments, unsplit_prompts
from recipe_gkd.rollout.environment import worker_environment
from teacher.common.data_types import engine_dtype
from teacher.common.vllm_setup import quiet_import

if TYPE_CHECKING:
    from vllm import LLM

log = logging.getLogger(__name__)

# Read when torch and vLLM are imported: the environment of a rollout worker, without messages below an error.
_ENVIRONMENT = worker_environment("cuda") | {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, kw_only=True)
class OfflineEngineOptions:
    """Settings of an engine.

    Attributes:
        dtype: Data type of the weights; ``"auto"``: see :func:`teacher.common.data_types.engine_dtype`.
        max_model_len: Maximum tokens of a prompt with its response. None: the model's maximum.
        tensor_parallel_size: Number of GPUs.
        gpu_memory_utilization: Share of each GPU's memory for the engine.
        cpu_cache_bytes: Size of the KV cache on a CPU, in bytes.
        trust_remote_code: Allow code from the folder.
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.8
    cpu_cache_bytes: int = 1 << 30
    trust_remote_code: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class OfflineSampling:
    """Settings of sampling.

    Attributes:
        n: Number of responses to each prompt.
        max_tokens: Maximum number of tokens of a response.
        temperature: 0 for greedy decoding.
        top_p: Probability mass that tokens are sampled from.
        top_k: Number of most likely tokens that are sampled from; -1 for all tokens.
        seed: Seed of the first prompt. Each prompt has its own seed.
    """

    n: int = 1
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0


@dataclass(frozen=True)
class Generated:
    """A response.

    Attributes:
        ids: Token ids, int32 [T].
        finish_reason: ``"stop"``, or ``"length"`` if the response was truncated.
    """

    ids: np.ndarray
    finish_reason: str


def limit_to_model(n_tokens: int, folder: Path) -> int:
    """Return ``n_tokens``, or the number of positions of the model if that is smaller."""
    try:
        positions = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder}/config.json cannot be read ({error})",
            remedy="copy the folder again",
            path=folder / "config.json",
        ) from error
    return min(n_tokens, positions) if isinstance(positions, int) and positions > 0 else n_tokens


def limit_torch_logs() -> None:
    """Hide warnings of C++ code, such as vLLM's about the memory that it binds. Call it before torch is imported.

    A command calls it first, because the configuration imports torch. :func:`prepare_environment` comes later: its
    variables would also hold for reward functions.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def prepare_environment() -> bool:
    """Set the environment that torch and vLLM read at import. Call it before they are imported.

    Returns:
        True if there is a GPU.
    """
    os.environ.update(_ENVIRONMENT)
    import torch

    on_gpu = bool(torch.cuda.is_available())
    if not on_gpu:
        os.environ.update(worker_environment("cpu"))
    return on_gpu


@contextmanager
def vllm_engine(folder: Path, options: OfflineEngineOptions, *, n_tokens: int) -> Iterator[Any]:
    """Start an engine, and shut it down at the end.

    Args:
        folder: Hugging Face folder with a tokenizer.
        options: Settings of the engine.
        n_tokens: Number of ids of the tokenizer. Larger ids are padding of the output layer and get probability 0, as
            in training.
    """
    on_gpu = prepare_environment()
    quiet_import("ERROR")
    from vllm import LLM

    from recipe_gkd.rollout.vllm.calls import WorkerCalls  # its import corrects the CPU build, in each rank
    from recipe_gkd.rollout.vllm.compat import EngineArgs

    model: dict[str, Any] = {
        "model": str(folder),
        "dtype": engine_dtype(options.dtype, folder, "cuda" if on_gpu else "cpu"),
        "max_model_len": options.max_model_len,
        "trust_remote_code": options.trust_remote_code,
    }
    if on_gpu:
        device: dict[str, Any] = {"gpu_memory_utilization": options.gpu_memory_utilization}
    else:
        config = EngineArgs(**model).create_model_config()
        steps = unsplit_prompts(max(CPU_BATCHED_TOKENS, config.max_model_len))
        device = {"kv_cache_memory_bytes": options.cpu_cache_bytes, **exact_arguments(config), **steps}
    engine = LLM(
        **model,
        **device,
        tensor_parallel_size=options.tensor_parallel_size,
        seed=options.seed,
        enforce_eager=True,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        worker_extension_cls=f"{WorkerCalls.__module__}.{WorkerCalls.__name__}",
    )
    try:
        n_rows = engine.llm_engine.model_config.get_vocab_size()
        if n_padding := max(0, n_rows - n_tokens):
            log.info("%s: %d of %d ids are padding of the output layer, not sampled", folder, n_padding, n_rows)
            engine.collective_rpc(WorkerCalls.set_logits.__name__, args=(1.0, n_tokens))
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


def generate(
    engine: LLM, prompts: Sequence[Sequence[int] | np.ndarray], sampling: OfflineSampling
) -> list[list[Generated]]:
    """Return ``n`` responses to each prompt.

    Args:
        engine: Engine of :func:`vllm_engine`.
        prompts: Token ids of each prompt.
        sampling: Settings of sampling.
    """
    n = sampling.n
    each = [replace(sampling, seed=sampling.seed + index * n) for index in range(len(prompts))]
    return generate_each(engine, list(zip(prompts, each, strict=True)))


def generate_each(
    engine: LLM, requests: Sequence[tuple[Sequence[int] | np.ndarray, OfflineSampling]]
) -> list[list[Generated]]:
    """Return the responses to token ids that have their own settings, whose seed is that of the prompt."""
    from vllm import SamplingParams, TokensPrompt

    params = [
        SamplingParams(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=None if sampling.temperature == 0 else sampling.seed,
            detokenize=False,
        )
        for _, sampling in requests
    ]
    tokens = [TokensPrompt(prompt_token_ids=[int(token) for token in prompt]) for prompt, _ in requests]
    return [
        [Generated(np.asarray(out.token_ids, np.int32), str(out.finish_reason)) for out in request.outputs]
        for request in engine.generate(tokens, params, use_tqdm=False)
    ]
