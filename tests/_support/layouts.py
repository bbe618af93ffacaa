"""Configuration overrides of parallel layouts."""

from __future__ import annotations

from tests._support.tiny_models import ACTOR, MEGATRON

TP2 = f"{MEGATRON}.tensor_model_parallel_size=2"
SP = f"{MEGATRON}.sequence_parallel=true"
PP2 = f"{MEGATRON}.pipeline_model_parallel_size=2"
VPP2 = f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"
CP2 = f"{MEGATRON}.context_parallel_size=2"
EP2 = f"{MEGATRON}.expert_model_parallel_size=2"
ETP1 = f"{MEGATRON}.expert_tensor_parallel_size=1"
BF16 = f"{MEGATRON}.dtype=bfloat16"
FLOAT32_HEAD = "actor_rollout_ref.model.head_dtype=float32"
PLAIN_OPTIMIZER = f"{MEGATRON}.use_distributed_optimizer=false"
BY_SAMPLES = f"{ACTOR}.use_dynamic_bsz=false"
OVERLAP = [
    *(f"{MEGATRON}.override_ddp_config.overlap_{key}=true" for key in ("grad_reduce", "param_gather")),
    f"{MEGATRON}.override_ddp_config.bucket_size=2000",  # several buckets
    f"{ACTOR}.max_token_len=32",  # several micro-batches
]
OVERRIDE = f"{MEGATRON}.override_transformer_config"
RECOMPUTE = [f"{OVERRIDE}.recompute_{key}" for key in ("granularity=full", "method=uniform", "num_layers=1")]
