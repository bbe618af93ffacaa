"""Metrics of an update: quotients of two sums over the global batch, which the ranks add up, and maxima over it."""

from __future__ import annotations

from collections.abc import Sequence

from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.errors import ConfigError
from recipe_gkd.losses.custom import load_custom_loss

# ``actor/kl_loss_at/N`` is the mean over response positions from N to the next of these numbers.
POSITION_BUCKETS = (0, 32, 128, 512, 2048)

MAXIMA = ("actor/rollout_probs_diff_max",)
"""Metrics that are maxima over the sampled tokens of the global batch, all at least 0."""

# Metrics of an update that are not quotients.
OTHER_METRICS = (
    "actor/n_tokens",
    "actor/distill_coef",
    "actor/grad_norm",
    "actor/lr",
    "actor/micro_batches",
    "actor/oom_splits",
    "actor/max_token_len",
    *MAXIMA,
)


def quotients(gkd: GkdConfig, teachers: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the numerator and the denominator of each metric, as names of the objective's sums.

    ``docs/objectives.md`` explains the metrics.

    Args:
        gkd: Configuration of the objective.
        teachers: Names of the teachers, by number.

    Raises:
        ConfigError: A metric of the custom loss has the name of another metric.
    """
    found = {
        "actor/loss": ("loss", "n_tokens"),
        "actor/kl_loss": ("kl", "n_scored"),
        "actor/distill_loss": ("distill", "n_tokens"),
        "actor/entropy": ("entropy", "n_sampled"),
        "actor/topk_overlap": ("overlap", "n_overlap"),
        "actor/above_importance_cap": ("above_cap", "n_sampled"),
        "actor/rollout_probs_diff_mean": ("rollout_probs_diff", "n_sampled"),
        "actor/rollout_kl": ("rollout_kl", "n_sampled"),
        "actor/rollout_kl_capped": ("rollout_kl_capped", "n_sampled"),
        "actor/rollout_log_prob_diff": ("rollout_current_diff", "n_current"),
    }
    for model in ("teacher", "student"):
        for measure in ("topk_mass", "tail_mass", "topk_entropy"):
            found[f"actor/{model}_{measure}"] = (f"{model}_{measure}", "n_scored")
    if gkd.use_rl_loss:
        found |= {"actor/pg_loss": ("pg", "n_tokens"), "actor/pg_clipfrac": ("clipped", "n_sampled")}
    if gkd.sft_share:
        found["actor/sft_loss"] = ("sft", "n_tokens")
    for number, name in enumerate(teachers):
        found[f"teacher/{name}/kl_loss"] = (f"kl_of_{number}", f"n_of_{number}")
    found |= {f"actor/kl_loss_at/{start}": (f"kl_at_{start}", f"n_at_{start}") for start in POSITION_BUCKETS}
    return found | _custom_quotients(gkd, reserved={*found, *OTHER_METRICS})


def _custom_quotients(gkd: GkdConfig, reserved: set[str]) -> dict[str, tuple[str, str]]:
    if gkd.custom_loss.path is None or gkd.custom_loss.name is None:
        return {}
    loss = load_custom_loss(gkd.custom_loss.path, gkd.custom_loss.name)
    found = {f"actor/{name}": (f"custom/{name}", "n_scored") for name in loss.metric_names}
    if taken := sorted(reserved & found.keys()):
        raise ConfigError(f"{loss.label} returned metrics whose names are in use: {', '.join(taken)}; rename them")
    return found


def sum_names(gkd: GkdConfig, teachers: Sequence[str]) -> list[str]:
    """Return the names of the objective's sums, in the same order on every rank."""
    return sorted({name for quotient in quotients(gkd, teachers).values() for name in quotient})


def compute_loss_metrics(
    gkd: GkdConfig, teachers: Sequence[str], sums: dict[str, float], maxima: dict[str, float]
) -> dict[str, float]:
    """Return the metrics of an update. A mean or maximum over no tokens is omitted.

    Args:
        gkd: Configuration of the objective.
        teachers: Names of the teachers, by number.
        sums: Sums over the global batch, by name.
        maxima: Maxima over the global batch or the ranks, by name.
    """
    found = {name: value for name, value in maxima.items() if name not in MAXIMA or sums["n_sampled"]}
    found |= {
        name: sums[numerator] / sums[denominator]
        for name, (numerator, denominator) in quotients(gkd, teachers).items()
        if sums[denominator]
    }
    return found | {"actor/n_tokens": sums["n_tokens"], "actor/distill_coef": gkd.distill_loss_coef}
