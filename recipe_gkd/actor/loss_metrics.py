"""Metrics of an update: each is a quotient of two sums over the global batch, which the ranks add up."""

from __future__ import annotations

from collections.abc import Sequence

from recipe_gkd.config.schema import GkdConfig

POSITION_BUCKETS = (0, 32, 128, 512, 2048)
"""``actor/kl_loss_at/N``: the mean over response positions from N to the next of these."""


def quotients(gkd: GkdConfig, teachers: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Metric -> numerator and denominator, names of what the objective sums. docs/objectives.md says what each is.

    ``teachers``: their names, by number.
    """
    found = {
        "actor/loss": ("loss", "n_tokens"),
        "actor/kl_loss": ("kl", "n_asked"),
        "actor/distill_loss": ("distill", "n_tokens"),
        "actor/entropy": ("entropy", "n_sampled"),
        "actor/topk_overlap": ("overlap", "n_overlap"),
        "actor/above_importance_cap": ("above_cap", "n_sampled"),
    }
    for whose in ("teacher", "student"):
        for what in ("topk_mass", "tail_mass", "topk_entropy"):
            found[f"actor/{whose}_{what}"] = (f"{whose}_{what}", "n_asked")
    if gkd.use_rl_loss:
        found |= {"actor/pg_loss": ("pg", "n_tokens"), "actor/pg_clipfrac": ("clipped", "n_sampled")}
    if gkd.sft_share:
        found["actor/sft_loss"] = ("sft", "n_tokens")
    for number, name in enumerate(teachers):
        found[f"teacher/{name}/kl_loss"] = (f"kl_of_{number}", f"n_of_{number}")
    return found | {f"actor/kl_loss_at/{start}": (f"kl_at_{start}", f"n_at_{start}") for start in POSITION_BUCKETS}


def names_of_sums(gkd: GkdConfig, teachers: Sequence[str]) -> list[str]:
    """In an order that every rank knows, also those that have no loss to compute."""
    return sorted({name for both in quotients(gkd, teachers).values() for name in both})


def metrics(gkd: GkdConfig, teachers: Sequence[str], sums: dict[str, float]) -> dict[str, float]:
    """A mean over nothing is left out."""
    found = {name: sums[over] / sums[under] for name, (over, under) in quotients(gkd, teachers).items() if sums[under]}
    return found | {"actor/n_tokens": sums["n_tokens"], "actor/distill_coef": gkd.distill_loss_coef}
