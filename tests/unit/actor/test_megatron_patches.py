"""Redirection of CUDA devices to the CPU, and what a CPU need not do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_gkd.actor.megatron.optimizer import set_hyperparameters
from recipe_gkd.actor.megatron.patches import install, on_host
from tests._support.base_config import base_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the redirection has no effect with a GPU")


class TestOnHost:
    def test_on_host_redirects_devices_and_type_names(self) -> None:
        with on_host():
            assert torch.zeros(2, device="cuda").device.type == torch.ones(2).cuda().device.type == "cpu"
            assert torch.zeros(2, device=torch.device("cuda", 1)).device.type == "cpu"
            assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
            assert torch.zeros(2).type(torch.float64).dtype == torch.float64
            with on_host():
                assert torch.zeros(2).type() == "torch.cuda.FloatTensor"


class Group:
    """A process group with a size and no ranks: a collective in it fails."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class Operations(TorchDispatchMode):
    """Names of the operations that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("n_tokens", [7, 0])
def test_gradient_of_transposed_logits_is_one_product_with_a_frozen_weight(n_tokens: int) -> None:
    """A batched product would read the output layer once for each token."""
    from megatron.core.tensor_parallel.layers import LinearWithFrozenWeight

    install()
    hidden, weight = torch.randn(n_tokens, 1, 4, requires_grad=True), torch.randn(9, 4)
    gradient = torch.randn(1, n_tokens, 9)
    logits = LinearWithFrozenWeight.apply(hidden, weight, None, False, None).transpose(0, 1)
    with Operations() as operations:
        logits.backward(gradient)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad[:, 0], gradient[0] @ weight)
    assert "mm.default" in operations.names and "bmm.default" not in operations.names


def test_bias_of_a_router_is_added_in_the_type_of_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's function would pass it to cuBLASLt without its type."""
    from megatron.core.transformer.moe import moe_utils

    def te_general_gemm(
        weight: torch.Tensor, rows: torch.Tensor, out_dtype: torch.dtype, *, layout: str, bias: None = None
    ) -> tuple[torch.Tensor, None]:
        assert layout == "TN" and bias is None
        return rows.to(out_dtype) @ weight.to(out_dtype).T, None

    monkeypatch.setattr(moe_utils, "te_general_gemm", te_general_gemm, raising=False)
    install()
    rows, weight, bias = (torch.randn(shape).bfloat16() for shape in ((5, 8), (4, 8), (4,)))
    scores = moe_utils.RouterGatingLinearFunction.apply(rows, weight, bias, torch.float32)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, rows.float() @ weight.float().T + bias.float())


def test_shards_of_a_single_rank_are_not_sent() -> None:
    from megatron.core.distributed import param_and_grad_buffer as buffers

    install()
    whole = torch.arange(4.0)
    shard, total = whole[:], torch.distributed.ReduceOp.SUM
    assert buffers.dist_all_gather_func(whole, shard, group=Group(1), async_op=False) is None
    assert buffers.dist_reduce_scatter_func(shard, whole, op=total, group=Group(1), async_op=False) is None
    assert whole.tolist() == [0, 1, 2, 3]
    for size, is_async in ((2, False), (1, True)):
        with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError)):
            buffers.dist_all_gather_func(whole, shard, group=Group(size), async_op=is_async)


def test_adamw_on_a_cpu_is_fused_and_computes_the_same() -> None:
    optim, weights = replace(base_config().actor_rollout_ref.actor.optim, weight_decay=0.01), []
    for is_prepared in (False, True):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = torch.optim.AdamW([{"params": [parameter], "wd_mult": 1.0}], lr=0.1)
        for step in range(3):
            if is_prepared:
                set_hyperparameters(cast(Any, optimizer), 0.1, optim)
                assert optimizer.param_groups[0]["fused"]
            parameter.grad = torch.sin(torch.arange(7.0) + step)
            optimizer.step()
        weights.append(parameter.detach())
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-7)
