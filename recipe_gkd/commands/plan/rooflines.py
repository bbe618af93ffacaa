"""Time of the stages of a step from rooflines: the larger one of FLOPs over a rate and bytes over a bandwidth.

Roofline model: Williams et al. 2009 (doi:10.1145/1498765.1498785). Decoding reads all weights and the keys and values
of all responses in flight for one token of each: Pope et al. 2022 (arXiv:2211.05102, section 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from recipe_gkd.actor.student_dims import StudentDims
from recipe_gkd.commands.plan.assumptions import (
    DECODE_BANDWIDTH_FRACTION,
    ELEMENTWISE_SHARE,
    ENGINE_STEP_S,
    OPTIMIZER_BANDWIDTH_FRACTION,
    PREFILL_FRACTION,
    REFERENCE_DEVICE,
    TOP_K_PASSES,
    TRAINING_FRACTION,
)
from recipe_gkd.metrics.device_peaks import memory_tb_per_s, peak_tflops
from recipe_gkd.metrics.flops import forward_flops, sample_cost, token_flops

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Peak rates of a device.

    Attributes:
        flops: Matrix products in the data type of a model, in FLOP/s.
        bandwidth: Device memory, in bytes per second.
    """

    name: str
    flops: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Responses of a step.

    Attributes:
        prompt_tokens: Mean length of a prompt, in tokens.
        response_tokens: Mean length of a response, in tokens.
        longest_response: Length of the longest response, in tokens.
    """

    n_responses: int
    prompt_tokens: int
    response_tokens: int
    longest_response: int


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Inference engine.

    Attributes:
        item: Bytes of a weight, and of a number in the KV cache.
        n_gpus: Number of tensor-parallel GPUs.
        max_in_flight: Maximum number of responses at a time.
    """

    dims: StudentDims
    item: int
    n_gpus: int
    max_in_flight: int


@dataclass(frozen=True, kw_only=True)
class GenerationSeconds:
    """Time in which an engine generates its share of a batch, in seconds.

    Attributes:
        prefill: Forward pass over the prompts.
        decode: Decoding with a constant number of responses in flight.
        stragglers: Time by which the longest response ends later.
        in_flight: Number of responses in flight. 0 if no response is sampled.
        decode_bound: ``"memory"`` or ``"compute"``: what bounds a decoding step.
    """

    prefill: float
    decode: float
    stragglers: float
    in_flight: int
    decode_bound: str

    @property
    def work(self) -> float:
        """Time of a batch if the engine always had enough responses, in seconds."""
        return self.prefill + self.decode


def generation_seconds(workload: Workload, engine: Engine, device: DeviceRates) -> GenerationSeconds:
    """Return the time in which an engine generates responses.

    All responses are in flight with the mean context. When responses are missing at the end, a step still reads all
    weights, so the longest response adds the time of reading them for each token beyond the mean length. For lengths
    with a uniform distribution between 0 and twice the mean this is exact, except that longer responses read more keys
    and values, if all responses are in flight at the start and the memory bounds the steps.

    Args:
        workload: Responses of this engine.
        device: Rates of one GPU.
    """
    dims, n = engine.dims, workload.n_responses
    if not n:
        return GenerationSeconds(prefill=0.0, decode=0.0, stragglers=0.0, in_flight=0, decode_bound="memory")
    in_flight = max(1, min(n, engine.max_in_flight))
    context = workload.prompt_tokens + workload.response_tokens // 2
    memory_s, compute_s = decode_step_seconds(engine, device, in_flight, context)
    step_s = max(memory_s, compute_s) + ENGINE_STEP_S
    alone_s = max(decode_step_seconds(engine, device, 1, 0)) + ENGINE_STEP_S
    prefill = forward_flops(dims, [workload.prompt_tokens] * n, n)
    return GenerationSeconds(
        prefill=prefill / (engine.n_gpus * device.flops * PREFILL_FRACTION),
        decode=n * workload.response_tokens / in_flight * step_s,
        stragglers=(workload.longest_response - workload.response_tokens) * alone_s,
        in_flight=in_flight,
        decode_bound="memory" if memory_s >= compute_s else "compute",
    )


def decode_step_seconds(engine: Engine, device: DeviceRates, batch: int, context: int) -> tuple[float, float]:
    """Return the time of a decoding step if the memory bounds it, and if matrix products bound it, in seconds.

    Args:
        engine: Engine that decodes.
        device: Rates of one GPU.
        batch: Number of responses in flight.
        context: Tokens before the decoded one, for each response.
    """
    cost = sample_cost(engine.dims)
    flops = batch * (cost(context + 1, 1) - cost(context, 0))
    n_bytes = weight_bytes(engine.dims, engine.item, batch) + batch * context * cache_bytes(engine.dims, engine.item)
    memory_s = n_bytes / (engine.n_gpus * device.bandwidth * DECODE_BANDWIDTH_FRACTION)
    return memory_s, flops / (engine.n_gpus * device.flops * PREFILL_FRACTION)


def weight_bytes(dims: StudentDims, item: int, batch: int) -> float:
    """Return the bytes of the weights that a decoding step reads: matrices of all layers, and the output layer.

    Of a mixture-of-experts layer, the expected number of different experts is read: ``E (1 - (1 - k / E)^batch)`` with
    ``k`` of ``E`` experts per token, chosen independently.

    Args:
        item: Bytes of a weight.
        batch: Number of tokens in the step.
    """
    # A product with a matrix of n weights has 2 n FLOPs per token.
    n_weights: float = token_flops(dims) / 2 + dims.hidden * dims.vocab_size
    if dims.moe is not None:
        moe = dims.moe
        n_used = moe.experts * (1 - (1 - moe.top_k / moe.experts) ** batch)
        n_weights += sum(moe.layers) * (n_used - moe.top_k) * 3 * dims.hidden * moe.ffn
    return n_weights * item


def cache_bytes(dims: StudentDims, item: int) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    return dims.cached_numbers() * item


def scoring_seconds(workload: Workload, dims: StudentDims, device: DeviceRates, n_gpus: int) -> tuple[float, float]:
    """Return the times of the teacher's forward pass, and of the softmax and top-k of its logits, in seconds.

    Args:
        workload: Responses of the step.
        device: Rates of one GPU.
        n_gpus: Number of GPUs of all teacher workers together.
    """
    n, tokens = workload.n_responses, workload.response_tokens
    flops = forward_flops(dims, [workload.prompt_tokens + tokens] * n, n * tokens)
    top_k_bytes = n * tokens * dims.vocab_size * _FLOAT32 * TOP_K_PASSES
    return flops / (n_gpus * device.flops * PREFILL_FRACTION), top_k_bytes / (n_gpus * device.bandwidth)


def pass_seconds(flops: float, backend: str, dtype: str, device: DeviceRates, n_gpus: int) -> float:
    """Return the time of the forward and backward pass of an update, in seconds.

    Args:
        flops: FLOPs of the update, computed twice ones included.
        backend: ``"megatron"`` or ``"fsdp"``.
        dtype: ``"bfloat16"`` or ``"float32"``.
        device: Rates of one GPU for ``dtype``.
        n_gpus: Number of actor ranks.
    """
    reference_flops = (peak_tflops(REFERENCE_DEVICE, "bfloat16") or math.nan) * 1e12
    reference_bandwidth = (memory_tb_per_s(REFERENCE_DEVICE) or math.nan) * 1e12
    share, own = ELEMENTWISE_SHARE[backend], flops / n_gpus / TRAINING_FRACTION[backend]
    wider = 2 if dtype == "float32" else 1
    elementwise = share * own / reference_flops * reference_bandwidth / device.bandwidth * wider
    return (1 - share) * own / device.flops + elementwise


def optimizer_seconds(n_bytes: float, device: DeviceRates) -> float:
    """Return the time of an optimizer step that reads and writes ``n_bytes``, in seconds."""
    return n_bytes / (device.bandwidth * OPTIMIZER_BANDWIDTH_FRACTION)
