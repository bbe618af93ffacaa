"""Asynchronous on-policy knowledge distillation: Megatron-core actor, vLLM rollout, ZeroMQ teacher, Ray pools."""

__version__ = "0.1.0"
