"""Imports of the process from which a :class:`~tests._support.worker_pool.WorkerPool` forks its processes.

A process that had to import these itself would need 2 s of processor time for its first job.
"""

import importlib
import threading

import peft  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401

import recipe_gkd.actor.fsdp.backend
import recipe_gkd.actor.student_actor  # noqa: F401
from recipe_gkd.actor.library_imports import hidden_module, uncompiled

with hidden_module("wandb"), uncompiled():  # as in `build_backend`
    importlib.import_module("recipe_gkd.actor.megatron.backend")

for family in ("llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")
importlib.import_module("transformers.models.auto.modeling_auto")

assert threading.active_count() == 1, "a process with threads must not be forked"
