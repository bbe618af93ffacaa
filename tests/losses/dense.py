"""The same objectives, written the obvious way on whole float64 distributions, for autograd to differentiate."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_gkd.losses import forward_kl


def dense_forward_kl(logits_TV: Tensor, logps_TK: Tensor, ids_TK: Tensor, vocab_size: int) -> Tensor:
    """[T], one position after the other, with python sets for the support."""
    losses = []
    for logits_V, logps_K, ids_K in zip(logits_TV[:, :vocab_size].double(), logps_TK.double(), ids_TK, strict=True):
        log_q_V = logits_V.log_softmax(0)
        support = [k for k, id in enumerate(ids_K.tolist()) if 0 <= id < vocab_size and logps_K[k] > -torch.inf]
        ids = ids_K[support]
        p_K = logps_K[support].exp()
        off = sorted(set(range(vocab_size)) - set(ids.tolist()))
        p_tail = (1 - p_K.sum()).clamp(min=0) if off else p_K.new_zeros(())
        total = p_K.sum() + p_tail
        loss = (p_K / total * (logps_K[support] - total.log() - log_q_V[ids])).sum()
        if p_tail > 0:
            loss = loss + p_tail / total * ((p_tail / total).log() - log_q_V[off].logsumexp(0))
        losses.append(loss)
    return torch.stack(losses) if losses else logits_TV.double().sum(1)


def random_case(
    rows: int, columns: int, k: int, *, vocab_size: int, teacher_vocab: int, scale: float, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, columns], and the top-k of a random teacher over ``teacher_vocab`` ids."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator) * scale
    teacher = (torch.randn(rows, teacher_vocab, generator=generator) * 2).log_softmax(1)
    top = teacher.topk(k, dim=1)
    return logits, top.values, top.indices


def check_shard(
    rank: int, world_size: int, port: int, cases: list[tuple[Tensor, Tensor, Tensor, int]]
) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Run in one process of a tensor-parallel group: loss, this rank's gradient and diagnostics of every case."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    results = []
    for logits, logps, ids, vocab_size in cases:
        shard = logits.chunk(world_size, 1)[rank].clone().requires_grad_()
        loss, diagnostics = forward_kl(shard, logps, ids, vocab_size=vocab_size, tp_group=dist.group.WORLD)
        (loss * row_weights(loss)).sum().backward()
        results.append((loss.detach(), shard.grad, diagnostics))
    dist.destroy_process_group()
    return results


def row_weights(loss_T: Tensor) -> Tensor:
    """Uneven, so that a gradient that forgets the incoming one is noticed."""
    return torch.linspace(0.5, 2, len(loss_T), dtype=loss_T.dtype)
