"""Everything that is patched in megatron-core 0.16.1, in one place.

Megatron has no device abstraction: it spells the device as ``torch.cuda.current_device()``, as the literal ``"cuda"``,
or asks ``tensor.type() == "torch.cuda.FloatTensor"``. Where CUDA is absent, ``install`` and ``on_host`` take those
assumptions back. ``_mend_optimizer_checkpoints`` mends a gap of any installation without Transformer Engine and Apex,
so it applies on a GPU too. Places named are files of ``megatron/core``.

    install()          # once a process, before a model is built
    with on_host():    # around every call into Megatron; it is per thread, and Ray may run methods on any thread
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")


def install() -> None:
    """Idempotent."""
    _mend_optimizer_checkpoints()
    if not torch.cuda.is_available():
        _take_host_for_device()


def on_host() -> contextlib.AbstractContextManager[Any]:
    """The context that every call into Megatron needs where CUDA is absent; does nothing where it is present."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _OnHost()


class _OnHost(TorchFunctionMode):
    """The device literals, by the same public mechanism as ``torch.set_default_device``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # optimizer/optimizer.py:596, optimizer/distrib_optimizer.py:361 and optimizer/clip_grads.py:103 compare
            # this name with that of a CUDA tensor. (The contexts may nest.)
            name = func(*args)
            return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            # pipeline_parallel/schedules.py:596, optimizer/clip_grads.py:90, ...
            kwargs = {**kwargs, "device": HOST}
        return func(*args, **kwargs)


def _take_host_for_device() -> None:
    import megatron.core.tensor_parallel.random as megatron_random

    def seed_host(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    # About forty `device=torch.cuda.current_device()` (rotary embedding, DDP buffers, point-to-point, ...).
    torch.cuda.current_device = lambda: HOST  # type: ignore[assignment,return-value]
    # pipeline_parallel/p2p_communication.py:242, dist_checkpointing/strategies/async_utils.py:161: nothing to wait for.
    torch.cuda.synchronize = lambda device=None: None
    # tensor_parallel/random.py forks "the" device generator, which is torch's CPU generator here.
    torch.cuda.manual_seed = seed_host
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    megatron_random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # `jit_fuser` is torch.compile, which would start a C++ compiler for each fused operation.
    torch.compiler.set_stance("force_eager")


def _mend_optimizer_checkpoints() -> None:
    """torch's AdamW keeps ``step`` per parameter; optimizer/distrib_optimizer.py expects Apex's single one.

    The loaders leave ``step`` out of what they restore (:2101) although the copy loop asks for it (:940), and
    ``load_state_dict`` gives all parameters the same tensor (:825), which AdamW then advances once for each of them:
    a resumed run would be wrong without any error.
    """
    from megatron.core.optimizer import distrib_optimizer

    cls = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HAVE_APEX_OR_TE or hasattr(cls, "_steps_are_mended"):
        return
    original_set, original_load = cls._set_main_param_and_optimizer_states, cls.load_state_dict

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        original_set(self, model_param, {**tensors, "step": state.get("step")})

    @torch.no_grad()
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original_load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    cls._set_main_param_and_optimizer_states = set_states
    cls.load_state_dict = load_state_dict
    cls._steps_are_mended = True
