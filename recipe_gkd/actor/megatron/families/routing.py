"""Choice of experts from groups, and the cases in which Megatron's router differs from transformers'."""

from __future__ import annotations

from typing import Any

Problem = tuple[str, tuple[str, ...]]
"""Reason, and the names of the configuration fields."""


def expert_groups(hf: Any) -> tuple[int, int] | None:
    """Return the number of groups of experts and the number of groups that a token uses; None without a choice."""
    if not hf.n_group or not hf.topk_group or hf.n_group == hf.topk_group:
        return None
    return hf.n_group, hf.topk_group


def single_expert_problem(hf: Any) -> Problem | None:
    """Return why a model with normalized weights and one expert for each token is not supported."""
    if hf.num_experts_per_tok != 1 or not getattr(hf, "norm_topk_prob", True):
        return None
    return "Megatron cannot normalize the weight of a single expert", ("num_experts_per_tok",)


def sigmoid_problem(hf: Any) -> Problem | None:
    """Return why a model whose groups are chosen by their two best experts is not supported.

    Megatron adds as many of the best scores of a group as a token has experts for each group
    (moe_utils.py ``group_limited_topk``).
    """
    if (problem := single_expert_problem(hf)) is not None:
        return problem
    return _groups_problem(hf, n_best=2)


def softmax_problem(hf: Any) -> Problem | None:
    """Return why a model whose groups are chosen by their best expert is not supported."""
    if hf.topk_method == "greedy":
        return None
    return _groups_problem(hf, n_best=1)


def _groups_problem(hf: Any, n_best: int) -> Problem | None:
    groups = expert_groups(hf)
    if groups is None or hf.num_experts_per_tok // groups[1] == n_best:
        return None
    return (
        f"Megatron chooses groups by their {hf.num_experts_per_tok // groups[1]} best experts (num_experts_per_tok / "
        f"topk_group), and this model by their {n_best} best",
        ("num_experts_per_tok", "topk_group"),
    )
