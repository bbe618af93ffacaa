"""Choice of the curves of a report."""

from __future__ import annotations

import re
from collections.abc import Mapping

from recipe_gkd.commands.report.line_charts import Chart, line_chart
from recipe_gkd.commands.report.series import Series

MAX_OTHER_CHARTS = 160
MAX_LINES = 8
_NO_REWARD = re.compile(r"val/.*/(response_len|truncated_fraction|kl|reverse_kl)")


def main_charts(series: Mapping[str, Series], loss_name: str | None = None) -> list[Chart]:
    """Return the charts of the first section, in order. Charts without a metric of the run draw nothing."""
    return [
        Chart(
            "Distillation loss",
            "Mean over the response tokens that a teacher scored.",
            {"actor/kl_loss": loss_name or "distillation loss"} | _other_losses(series) | _teacher_losses(series),
            can_be_log=True,
            from_zero=True,
        ),
        Chart("Validation", "Mean reward on held-out prompts.", validation_rewards(series)),
        Chart(
            "Validation loss",
            "KL to the teacher on held-out prompts, in nats.",
            _validation_loss(series),
            from_zero=True,
        ),
        Chart(
            "Reward",
            "Reward of sampled training responses.",
            {"reward/mean": "mean", "reward/std": "standard deviation"},
            from_zero=True,
        ),
        Chart(
            "Response length",
            "Tokens per sampled response.",
            {"response_seq_len/average": "mean", "response_seq_len/max": "longest", "response_seq_len/min": "shortest"},
            from_zero=True,
        ),
        Chart(
            "Gradient norm",
            "Norm before clipping.",
            {"actor/grad_norm": "gradient norm"},
            can_be_log=True,
            from_zero=True,
        ),
        Chart(
            "Entropy",
            "Entropy over top-k and tail, in nats.",
            {"actor/student_topk_entropy": "student", "actor/teacher_topk_entropy": "teacher"},
            from_zero=True,
        ),
        *_run_charts(),
    ]


def _run_charts() -> list[Chart]:
    """Return the charts of optimizer, speed and policy lag."""
    return [
        Chart(
            "Learning rate", "Of the optimizer, after warm-up and decay.", {"actor/lr": "learning rate"}, from_zero=True
        ),
        Chart(
            "Throughput",
            "Prompt and response tokens per second of wall clock.",
            {"perf/tokens_per_second": "tokens per second"},
            from_zero=True,
        ),
        Chart(
            "Policy lag",
            "Optimizer steps between sampling and training.",
            {"training/staleness_mean": "mean", "training/staleness_max": "largest"},
            from_zero=True,
        ),
        Chart(
            "Rollout and trainer",
            "Estimated KL between rollout engine and trainer at the sampled tokens, in nats.",
            {"actor/rollout_kl": "KL(rollout ‖ trainer)"},
            can_be_log=True,
            from_zero=True,
        ),
    ]


def curves_section(series: Mapping[str, Series], loss_name: str | None = None) -> tuple[str, str]:
    """Return the main charts, and the charts of all other metrics, as HTML."""
    charts = main_charts(series, loss_name)
    shown = {name for chart in charts for name in chart.lines}
    main = "".join(line_chart(chart, series) for chart in charts)
    others = [name for name in sorted(series) if name not in shown and not name.startswith("timing/wait")]
    small = "".join(
        line_chart(Chart(name, "", {name: "value"}, can_be_log=True), series, is_small=True)
        for name in others[:MAX_OTHER_CHARTS]
    )
    return main, small


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
