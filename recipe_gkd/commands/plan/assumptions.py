"""Named assumptions of the predicted stage times. The docstring of each constant states where it comes from.

"Measured" refers to one NVIDIA H200, see the section "On a GPU" of docs/performance.md. All others are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass

REFERENCE_DEVICE = "NVIDIA H200"
"""Device of the measured constants."""

TRAINING_FRACTION = {"megatron": 0.493, "fsdp": 0.367}
"""Model FLOP/s of the forward and backward pass over the peak rate of :data:`REFERENCE_DEVICE`, by backend.

Measured: the updates of a 1.5B student took 1.33 s (Megatron with the layers of torch) and 1.78 s (FSDP), which is an
MFU of 48.7 % and 36.5 %. The predicted optimizer step is not part of the fraction.
"""

ELEMENTWISE_SHARE = {"megatron": 0.3, "fsdp": 0.5}
"""Share of the time of the forward and backward pass that the memory bounds, on :data:`REFERENCE_DEVICE`.

Norms, activation functions, rotary embedding and losses. On another device this share is scaled by the bandwidth
instead of the peak rate. FSDP: measured. Megatron: estimate, the rest if matrix products reach 70 % of the peak.
"""

PREFILL_FRACTION = 0.5
"""Fraction of the peak rate in the engines: prompts, the teacher's forward pass, and decoding of large batches.

Estimate: the fraction that training reaches with the layers of torch.
"""

DECODE_BANDWIDTH_FRACTION = 0.6
"""Fraction of the memory bandwidth in a decoding step. Estimate."""

ENGINE_STEP_S = 1e-3
"""Time per decoding step for scheduling and sampling, in seconds. Estimate for vLLM with CUDA graphs."""

OPTIMIZER_BANDWIDTH_FRACTION = 0.8
"""Fraction of the memory bandwidth in the optimizer step. Estimate for a fused AdamW, which only streams its state."""

MEAN_RESPONSE_FRACTION = 0.5
"""Mean response length over ``data.max_response_length``. Estimate. The longest response has the maximum length."""

MEAN_PROMPT_FRACTION = 0.5
"""Mean prompt length over ``data.max_prompt_length``. Estimate."""

TOP_K_PASSES = 16
"""Number of passes over the teacher's float32 logits for the softmax and the top-k, at the full bandwidth. Estimate."""

SCORING_WORKER_GB_PER_S = 0.7
"""Rate at which a scoring worker receives rows, in GB/s.

Measured on two CPU cores that all processes shared (docs/performance.md, section "Scale"), so a lower bound.
"""

RECORDED_TOKEN_S = 21e-6
"""Time in which the driver reads a token's scores from a recording, in seconds. Measured on a CPU core."""

NETWORK_GB_PER_S = 25.0
"""Rate of a weight sync or of the teacher's rows between nodes, in GB/s. Estimate: one port of 200 Gbit/s."""

NODE_GB_PER_S = 100.0
"""Rate of an NCCL broadcast within a node, in GB/s. Estimate for NVLink."""

SYNC_OVERHEAD = 1.3
"""Time of a weight sync over the time of its copies. Measured with CUDA IPC: 1.22 and 1.31; estimate for NCCL."""

IPC_GB_PER_S = 196.0
"""Rate of the CUDA IPC transport for large buckets, in GB/s.

Measured, overhead included: the line through 57 GB/s with buckets of 64 MB and 150 GB/s with 512 MB has this rate and
the fixed time :data:`IPC_BUCKET_S`.
"""

IPC_BUCKET_S = 0.8e-3
"""Fixed time of a bucket of the CUDA IPC transport, in seconds. Measured, see :data:`IPC_GB_PER_S`."""

HOST_GB_PER_S = 25.0
"""Rate of copies of offloaded states between host and device, in GB/s. Estimate for PCIe 5.0 x16."""


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """An assumption as it is printed.

    Attributes:
        name: Name of the constant in this module.
        text: Meaning and unit.
        is_measured: True if the value was measured on :data:`REFERENCE_DEVICE` or, for scoring workers and recordings,
            on a CPU.
    """

    name: str
    value: float
    text: str
    is_measured: bool


def list_assumptions(backend: str, transport: str, *, reads_recording: bool = False) -> list[Assumption]:
    """Return the assumptions that a prediction uses.

    Args:
        backend: ``"megatron"`` or ``"fsdp"``.
        transport: ``"ipc"``, ``"node"`` (NCCL within a node) or ``"network"``.
        reads_recording: True if scores are read from a recording.
    """
    rows: list[tuple[str, float, str, bool]] = [
        ("TRAINING_FRACTION", TRAINING_FRACTION[backend], f"of the peak rate in updates ({backend}, H200)", True),
        (
            "ELEMENTWISE_SHARE",
            ELEMENTWISE_SHARE[backend],
            "of the time of updates that the memory bounds, on an H200",
            backend == "fsdp",
        ),
        ("OPTIMIZER_BANDWIDTH_FRACTION", OPTIMIZER_BANDWIDTH_FRACTION, "of the bandwidth in optimizer steps", False),
        ("PREFILL_FRACTION", PREFILL_FRACTION, "of the peak rate in the engines", False),
        ("DECODE_BANDWIDTH_FRACTION", DECODE_BANDWIDTH_FRACTION, "of the bandwidth in decoding", False),
        ("ENGINE_STEP_S", ENGINE_STEP_S, "s per decoding step for scheduling and sampling", False),
        ("MEAN_RESPONSE_FRACTION", MEAN_RESPONSE_FRACTION, "mean over maximum response length", False),
        ("MEAN_PROMPT_FRACTION", MEAN_PROMPT_FRACTION, "mean over maximum prompt length", False),
        ("TOP_K_PASSES", TOP_K_PASSES, "passes over the teacher's float32 logits", False),
        ("SCORING_WORKER_GB_PER_S", SCORING_WORKER_GB_PER_S, "GB/s received by a scoring worker (2 CPU cores)", True),
        ("NETWORK_GB_PER_S", NETWORK_GB_PER_S, "GB/s between nodes", False),
        ("HOST_GB_PER_S", HOST_GB_PER_S, "GB/s between host and device, for offloaded states", False),
    ]
    if reads_recording:
        rows += [("RECORDED_TOKEN_S", RECORDED_TOKEN_S, "s per token whose scores are read (1 CPU core)", True)]
    if transport == "ipc":
        rows += [
            ("IPC_GB_PER_S", IPC_GB_PER_S, "GB/s of CUDA IPC for large buckets", True),
            ("IPC_BUCKET_S", IPC_BUCKET_S, "s per bucket of CUDA IPC", True),
        ]
    else:
        rows += [("SYNC_OVERHEAD", SYNC_OVERHEAD, "time of a weight sync over its copies", False)]
    if transport == "node":
        rows += [("NODE_GB_PER_S", NODE_GB_PER_S, "GB/s of an NCCL broadcast within a node", False)]
    return [Assumption(name=name, value=value, text=text, is_measured=known) for name, value, text, known in rows]
