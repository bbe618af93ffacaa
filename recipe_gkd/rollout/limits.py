"""Checks of the rollout engine's settings against the model, which vLLM makes only after its workers have started.

The driver runs them before it starts any process, so this module does not import vLLM.
"""

from __future__ import annotations

from recipe_gkd.actor.student_dims import StudentDims
from recipe_gkd.config.keys import ROLLOUT
from recipe_gkd.config.schema import Config
from recipe_gkd.errors import ConfigError

VLLM_VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this (``DEFAULT_VOCAB_PADDING_SIZE`` of ``vocab_parallel_embedding``)."""


def check_engine_fits(dims: StudentDims, config: Config) -> None:
    """Check lengths, parallelism and KV cache of ``actor_rollout_ref.rollout`` against the model and the device.

    Raises:
        ConfigError: vLLM would reject this combination.
    """
    _check_length(dims, config)
    rollout = config.actor_rollout_ref.rollout
    if config.trainer.device == "cpu" and rollout.max_num_batched_tokens is not None:
        check_cpu_budget(rollout.max_num_batched_tokens, engine_length(config))
    _check_parallelism(dims, rollout.tensor_model_parallel_size)
    _check_cache(dims, config)


def engine_length(config: Config) -> int:
    """Return the maximum length of a sequence in the engine, in tokens."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    return config.actor_rollout_ref.rollout.max_model_len or longest


def check_cpu_budget(tokens: int, max_model_len: int) -> None:
    """Check that a step on a CPU holds a whole sequence, because vLLM cannot split a seeded prompt there.

    Args:
        tokens: ``max_num_batched_tokens``.
        max_model_len: Maximum length of a sequence in the engine, in tokens.

    Raises:
        ConfigError: It does not.
    """
    if tokens < max_model_len:
        raise ConfigError(
            f"{ROLLOUT}.max_num_batched_tokens={tokens} is less than the longest sequence of {max_model_len} tokens, "
            "and prompts are not split on a CPU",
            remedy=f"set it to {max_model_len} or more, or to null",
            keys=(f"{ROLLOUT}.max_num_batched_tokens",),
        )


def _check_length(dims: StudentDims, config: Config) -> None:
    length = engine_length(config)
    if length > dims.max_positions:
        raise ConfigError(
            f"{ROLLOUT}.max_model_len={length} is more than the {dims.max_positions} positions of the student "
            "(max_position_embeddings or n_positions in its config.json)",
            remedy="lower it, or set it to null",
            keys=(f"{ROLLOUT}.max_model_len",),
        )


def _check_parallelism(dims: StudentDims, tp: int) -> None:
    """Check that each rank gets whole heads, and an equal share of each layer's columns and of the vocabulary.

    vLLM repeats key/value heads if there are fewer heads than ranks. Unknown dimensions are 0, which each size divides.
    """
    kv_fits = dims.kv_heads % tp == 0 or tp % dims.kv_heads == 0
    padded = -(-dims.vocab_size // VLLM_VOCAB_MULTIPLE) * VLLM_VOCAB_MULTIPLE
    moe = dims.moe
    widths = [
        (dims.heads, "heads"),
        (dims.ffn if moe is None or not all(moe.layers) else 0, "feed-forward columns"),
        (moe.ffn if moe else 0, "feed-forward columns of an expert"),
        (moe.shared_ffn or 0 if moe else 0, "feed-forward columns of the shared expert"),
        (padded, f"ids (padded to a multiple of {VLLM_VOCAB_MULTIPLE})"),
    ]
    indivisible = [f"{width} {unit}" for width, unit in widths if width % tp]
    if indivisible or not kv_fits:
        kv = f"{dims.kv_heads} key/value heads (or be a multiple of them)"
        raise ConfigError(
            f"{ROLLOUT}.tensor_model_parallel_size is {tp}; it must divide the model's "
            f"{', '.join(indivisible + ([] if kv_fits else [kv]))}",
            keys=(f"{ROLLOUT}.tensor_model_parallel_size",),
        )


def _check_cache(dims: StudentDims, config: Config) -> None:
    """Check that the KV cache holds the longest sequence. ``dtype=auto`` counts as two bytes, its minimum."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.kv_cache_memory_megabytes is None:
        return
    n_bytes = 4 if rollout.dtype == "float32" else 2
    needed = engine_length(config) * dims.cached_numbers(rollout.tensor_model_parallel_size) * n_bytes
    if needed > rollout.kv_cache_memory_megabytes << 20:
        raise ConfigError(
            f"{ROLLOUT}.kv_cache_memory_megabytes={rollout.kv_cache_memory_megabytes} does not hold one sequence of "
            f"{engine_length(config)} tokens, which takes {-(-needed >> 20)} MB",
            remedy="raise it, or set it to null",
            keys=(f"{ROLLOUT}.kv_cache_memory_megabytes",),
        )
