"""Choice of the curves of a report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from recipe_gkd.commands.report.series import Series
from recipe_gkd.config.reward_functions import VALIDATION_METRICS

MAX_OTHER_CHARTS = 160
MAX_LINES = 8
_NO_REWARD = re.compile(rf"val/.*/({'|'.join(VALIDATION_METRICS)})")


@dataclass(frozen=True)
class Chart:
    """Curves that share an axis.

    Attributes:
        title: Title of the chart.
        explanation: One sentence about its content.
        lines: Label of each curve by the name of its metric. Metrics that the run lacks are left out.
        can_be_log: Choose a logarithmic axis for positive values that differ by orders of magnitude.
        from_zero: Include 0 in the axis.
    """

    title: str
    explanation: str
    lines: Mapping[str, str]
    can_be_log: bool = False
    from_zero: bool = True


def main_charts(series: Mapping[str, Series], loss_name: str | None = None) -> list[Chart]:
    """Return the charts of the first section, in order."""
    lengths = {"average": "mean", "max": "longest", "min": "shortest"}
    loss = {"actor/kl_loss": loss_name or "distillation loss"} | _other_losses(series) | _teacher_losses(series)
    kl = {"actor/rollout_kl": "KL(rollout ‖ trainer)"}
    return [
        Chart("Distillation loss", "Mean over the response tokens that a teacher scored.", loss, can_be_log=True),
        Chart("Validation", "Mean reward on held-out prompts.", validation_rewards(series), from_zero=False),
        Chart("Validation loss", "KL to the teacher on held-out prompts, in nats.", _validation_loss(series)),
        Chart(
            "Reward",
            "Reward of sampled training responses.",
            {"reward/mean": "mean", "reward/std": "standard deviation"},
        ),
        Chart(
            "Response length",
            "Tokens per sampled response.",
            {f"response_seq_len/{name}": label for name, label in lengths.items()},
        ),
        Chart("Gradient norm", "Norm before clipping.", {"actor/grad_norm": "gradient norm"}, can_be_log=True),
        Chart(
            "Entropy",
            "Entropy over top-k and tail, in nats.",
            {f"actor/{name}_topk_entropy": name for name in ("student", "teacher")},
        ),
        Chart("Learning rate", "Of the optimizer, after warm-up and decay.", {"actor/lr": "learning rate"}),
        Chart(
            "Throughput",
            "Prompt and response tokens per second of wall clock.",
            {"perf/tokens_per_second": "tokens per second"},
        ),
        Chart(
            "Policy lag",
            "Optimizer steps between sampling and training.",
            {"training/staleness_mean": "mean", "training/staleness_max": "largest"},
        ),
        Chart(
            "Rollout and trainer",
            "Estimated KL between rollout engine and trainer at the sampled tokens, in nats.",
            kl,
            can_be_log=True,
        ),
    ]


def other_charts(series: Mapping[str, Series], shown: Iterable[Chart]) -> list[Chart]:
    """Return a chart of each metric that no other chart shows, at most :data:`MAX_OTHER_CHARTS`."""
    names = {name for chart in shown for name in chart.lines}
    others = [name for name in sorted(series) if name not in names and not name.startswith("timing/wait")]
    return [Chart(name, "", {name: "value"}, can_be_log=True, from_zero=False) for name in others[:MAX_OTHER_CHARTS]]


def _other_losses(series: Mapping[str, Series]) -> dict[str, str]:
    return {
        name: label
        for name, label in {"actor/sft_loss": "SFT loss", "actor/pg_loss": "policy loss"}.items()
        if name in series
    }


def _teacher_losses(series: Mapping[str, Series]) -> dict[str, str]:
    """Return the loss of each teacher, if there are several."""
    found = [name for name in sorted(series) if re.fullmatch(r"teacher/[^/]+/kl_loss", name)]
    return {name: f"teacher {name.split('/')[1]}" for name in found[: MAX_LINES - 3]} if len(found) > 1 else {}


def validation_rewards(series: Mapping[str, Series]) -> dict[str, str]:
    """Return the label of each validation metric that is a reward, by name."""
    names = [name for name in sorted(series) if name.startswith("val/") and not _NO_REWARD.fullmatch(name)]
    return {name: name.removeprefix("val/") for name in names[:MAX_LINES]}


def _validation_loss(series: Mapping[str, Series]) -> dict[str, str]:
    names = [name for name in sorted(series) if name.startswith("val/") and name.endswith("/kl")]
    return {name: name.removeprefix("val/").removesuffix("/kl") for name in names[:MAX_LINES]}
