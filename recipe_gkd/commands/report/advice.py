"""Advice of a report: lasting bottlenecks, and metrics that leave their usual range."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from recipe_gkd.commands.report.run_files import Run
from recipe_gkd.commands.report.series import Series, number
from recipe_gkd.commands.report.templates import render
from recipe_gkd.metrics.advice.advice import describe, find_bottleneck
from recipe_gkd.metrics.advice.measured_stages import NEEDED, usual
from recipe_gkd.metrics.repetition import LOOPING

N_STEPS = 200
"""Number of last steps that the advice is about."""
MAX_TRUNCATED = 0.05
"""Largest usual fraction of truncated responses."""
TOPK_MASS = "actor/teacher_topk_mass"
"""Metric of the ids that the distillation loss compares. Most losses on the sampled token compare none."""
ZERO_STD = "reward/zero_std_group_fraction"
"""Metric that is always 1 with one response per prompt."""


@dataclass(frozen=True)
class Rule:
    """A metric with a limit.

    Attributes:
        is_bad: Function of its mean over the last :data:`N_STEPS` steps.
        finding: Sentence about the value, with ``{value}``.
        remedy: What to do.
    """

    metric: str
    is_bad: Callable[[float], bool]
    finding: str
    remedy: str


CHECKS = (
    Rule(
        ZERO_STD,
        lambda value: value > 0.9,
        "All responses to a prompt have the same reward for {value:.0%} of the prompts.",
        "With gkd.use_rl_loss they carry no signal: larger rollout.n, or prompts of another difficulty.",
    ),
    Rule(
        TOPK_MASS,
        lambda value: value < 0.95,
        "The ids that the divergence compares one by one have {value:.1%} of the teacher's probability.",
        "With teacher.support=teacher use a larger N_LOGPROBS. With support=student this is usual while the student "
        "differs from the teacher; support=union adds the teacher's ids.",
    ),
    Rule(
        "actor/above_importance_cap",
        lambda value: value > 0.1,
        "{value:.0%} of the sampled tokens have a probability ratio above gkd.importance_cap.",
        "Use a schedule with a smaller staleness bound, or a lower learning rate.",
    ),
    Rule(
        "teacher/skipped_samples",
        lambda value: value > 0,
        "{value:.3g} samples per step were not scored by a teacher.",
        "Read the warnings in run.log, and python -m teacher status.",
    ),
    Rule(
        "checkpoint/failed_saves",
        lambda value: value > 0,
        "Saves of checkpoints failed.",
        "Read the warnings in run.log; check disk space and host memory.",
    ),
    Rule(
        "weights/retries",
        lambda value: value > 0,
        "Weight syncs were repeated ({value:.3g} per step).",
        "run.log names the cause.",
    ),
)


def advice_section(run: Run) -> str:
    """Return the advice as HTML."""
    items = [("bottleneck", *found) for found in bottlenecks(run)]
    items += [("check", *found) for found in truncations(run)]
    for check in CHECKS:
        if (series := run.series.get(check.metric)) is not None:
            value = float(series.values[-N_STEPS:].mean())
            if check.is_bad(value) and not _is_trivial(check.metric, run):
                items.append(("check", check.finding.format(value=value), check.remedy))
    items += [("check", *found) for found in trends(run)]
    items = items or [("fine", "No lasting bottleneck, and no metric outside its usual range.", "")]
    return render("advice.html", items=items)


def _is_trivial(metric: str, run: Run) -> bool:
    """Return True if no value of the metric is a fault with the settings of the run."""
    if metric == ZERO_STD:
        return run.setting("actor_rollout_ref.rollout.n") == 1
    if metric == TOPK_MASS and run.setting("gkd.custom_loss.path") is None:
        from recipe_gkd.losses.registry import get_sampled_token_loss, sampled_token_loss_names  # they import torch

        kind = str(run.setting("gkd.distill_loss_type"))
        if kind in sampled_token_loss_names():
            has_baseline = "baseline_T" in get_sampled_token_loss(kind).parameters
            return not has_baseline or run.setting("gkd.baseline") != "expected"
    return False


def bottlenecks(run: Run) -> list[tuple[str, str]]:
    """Return finding and remedy of each lasting bottleneck: as logged, or for the last steps."""
    latest: dict[str, tuple[str, str]] = {}
    for time, line in run.advice:
        kind = re.sub(r"[\d.]+(e-?\d+)?", "#", line.partition(" (idle")[0])
        finding, _, remedy = line.partition("; ")
        latest.pop(kind, None)  # the latest advice of a kind is last
        latest[kind] = (f"{_sentence(finding)} (run.log, {time})", remedy)
    if latest:
        return list(latest.values())
    steps = [step for step in run.recent[-N_STEPS:] if all(name in step for name in NEEDED)]
    if len(steps) < 2:
        return []
    bottleneck = find_bottleneck(steps := usual(steps))
    if bottleneck is None:
        return []
    return [(_sentence(describe(bottleneck, steps)), "docs/metrics.md lists the settings that change it.")]


def truncations(run: Run) -> list[tuple[str, str]]:
    """Return findings about truncated responses, and about responses that repeat themselves until then.

    The training responses are those of the last :data:`N_STEPS` steps, the validation responses those of the last
    validation of each data source.
    """

    def mean(name: str, n_last: int) -> float:
        series = run.series.get(name)
        return 0.0 if series is None else float(series.values[-n_last:].mean())

    truncated = mean("response_seq_len/truncated_fraction", N_STEPS)
    found = _truncation("responses", truncated, mean(f"response/{LOOPING}", N_STEPS))
    for name in sorted(run.series):
        if source := re.fullmatch(r"val/(.+)/truncated_fraction", name):
            of = f"last validation responses of {source[1]}"
            found += _truncation(of, mean(name, 1), mean(f"val/{source[1]}/{LOOPING}", 1))
    return found


def _truncation(of: str, truncated: float, looping: float) -> list[tuple[str, str]]:
    """Return finding and remedy. A larger limit does not help responses that loop."""
    mostly_loop = looping > truncated / 2
    found = []
    if truncated > MAX_TRUNCATED and not mostly_loop:
        remedy = "Raise data.max_response_length: loss and rewards belong to unfinished responses."
        found.append((f"{truncated:.0%} of the {of} are truncated.", remedy))
    if truncated > MAX_TRUNCATED and (mostly_loop or looping > MAX_TRUNCATED):
        finding = f"{looping:.0%} of the {of} repeat themselves until they are truncated."
        remedy = "A larger limit gives longer loops only. Lower actor.optim.lr, or use another divergence."
        found.append((finding, remedy))
    return found


def trends(run: Run) -> list[tuple[str, str]]:
    """Return findings about the course of the loss and of the gradient norm."""
    found = []
    loss, norm = run.series.get("actor/kl_loss"), run.series.get("actor/grad_norm")
    if loss is not None and len(loss.values) >= 40:
        part = len(loss.values) // 4
        lowest, last = _lowest_mean(loss, part // 2 or 1), float(loss.values[-part:].mean())
        if lowest > 0 and last > 1.5 * lowest:
            found.append(
                (
                    f"The distillation loss rose from {number(lowest)} to {number(last)} (mean of the last quarter).",
                    "Lower actor.optim.lr; check staleness and the teacher's prompts.",
                )
            )
    if norm is not None and len(norm.values) >= 40:
        tail = norm.values[len(norm.values) // 4 :]
        spikes = int((tail > 20 * np.median(tail)).sum())
        if spikes:
            found.append(
                (
                    f"The gradient norm exceeds 20 times its median in {spikes} step(s) after the first quarter.",
                    "More warm-up steps, or a lower actor.optim.lr.",
                )
            )
    return found


def _lowest_mean(series: Series, window: int) -> float:
    """Return the lowest mean over ``window`` consecutive values."""
    sums = np.cumsum(np.concatenate([[0.0], series.values]))
    return float(((sums[window:] - sums[:-window]) / window).min())


def _sentence(line: str) -> str:
    return line[:1].upper() + line[1:]
