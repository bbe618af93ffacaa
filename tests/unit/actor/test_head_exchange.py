"""Exchange of rows for attention heads: attention and its gradient equal those of one rank with all rows and heads.

The ranks are threads; the all-to-all is replaced by an exchange of their tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from recipe_gkd.actor.batch.context_parallel import zigzag_rows
from recipe_gkd.actor.head_exchange import RowOrder, gather_rows, scatter_rows

LENGTHS = [24, 12, 36]
N_HEADS, HEAD_DIM = 12, 5
DEADLINE_S = 30


@dataclass
class ThreadGroup:
    """Process group whose ranks are threads."""

    n_ranks: int
    barrier: threading.Barrier = field(init=False)
    sent: dict[int, Tensor] = field(default_factory=dict)
    local: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.n_ranks, timeout=DEADLINE_S)

    def size(self) -> int:
        return self.n_ranks

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        def run_rank(rank: int) -> Any:
            self.local.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self.n_ranks) as pool:
            return list(pool.map(run_rank, range(self.n_ranks)))


@pytest.fixture(autouse=True)
def thread_collectives(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def all_to_all_single(received: Tensor, parts: Tensor, group: ThreadGroup) -> None:
        assert parts.is_contiguous() and parts.size(0) == group.size()
        group.sent[group.local.rank] = parts.detach()
        group.barrier.wait()
        received.copy_(torch.stack([group.sent[peer][group.local.rank] for peer in range(group.size())]))
        group.barrier.wait()

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    yield


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention within each sequence, [N, H, D]."""
    outputs = []
    for q, k, v in zip(*(x.transpose(0, 1).split(LENGTHS, dim=1) for x in (query, key, value)), strict=True):
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1))
    return torch.cat(outputs)


class TestExchange:
    @pytest.mark.parametrize(("cp_size", "kv_heads"), [(2, 12), (2, 2), (2, 1), (3, 3), (3, 1), (6, 3), (6, 2)])
    def test_attention_between_exchanges_equals_attention_of_one_rank(self, cp_size: int, kv_heads: int) -> None:
        torch.manual_seed(0)
        n_rows = sum(LENGTHS)
        whole = [torch.randn(n_rows, heads, HEAD_DIM).double() for heads in (N_HEADS, kv_heads, kv_heads)]
        weights = torch.randn(n_rows, N_HEADS, HEAD_DIM).double()
        leaves = [tensor.clone().requires_grad_() for tensor in whole]
        want = attend(*leaves)
        (want * weights).sum().backward()

        group: Any = ThreadGroup(cp_size)
        rows = [torch.from_numpy(zigzag_rows(LENGTHS, cp_rank, cp_size)) for cp_rank in range(cp_size)]
        by_rank_N = torch.cat(rows)
        order = RowOrder(by_rank_N=by_rank_N, by_sequence_N=by_rank_N.argsort())

        def run_rank(cp_rank: int) -> tuple[Tensor, list[Tensor]]:
            own = [tensor[rows[cp_rank]].requires_grad_() for tensor in whole]
            gathered = gather_rows(own[0], own[1], own[2], order, group)
            assert [len(heads) for heads in gathered] == [n_rows] * 3
            assert gathered[0].size(1) == N_HEADS // cp_size
            output = scatter_rows(attend(*gathered), order, group)
            (output * weights[rows[cp_rank]]).sum().backward()
            return output.detach(), [tensor.grad for tensor in own if tensor.grad is not None]

        for cp_rank, (output, gradients) in enumerate(group.run(run_rank)):
            torch.testing.assert_close(output, want[rows[cp_rank]])
            for gradient, leaf in zip(gradients, leaves, strict=True):
                assert leaf.grad is not None
                torch.testing.assert_close(gradient, leaf.grad[rows[cp_rank]])
