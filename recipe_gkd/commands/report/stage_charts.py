"""Time of the steps by stage, as stacked bars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from recipe_gkd.commands.report.line_charts import plot
from recipe_gkd.commands.report.markup import VIEW, data_script, rounded, table, text
from recipe_gkd.commands.report.series import Floats, Series, duration, number, step_ticks, ticks
from recipe_gkd.metrics.steps import PARTS_OF_STEP

MAX_BARS = 80
STAGES = {
    "timing/update_actor": ("update of the student", 1),
    "timing/wait_prev_gen": ("waiting for generation", 2),
    "timing/wait_prev_teacher": ("waiting for the teacher", 3),
    "timing/wait_prev_prev_teacher": ("waiting for the teacher", 3),
    "timing/wait_sync": ("waiting for a weight sync", 4),
    "timing/wait_reward": ("waiting for rewards", 5),
    "timing/validate": ("validation", 6),
    "timing/save_checkpoint": ("checkpoints", 7),
    "timing/log": ("loggers and other", 8),
    "timing/other": ("loggers and other", 8),
}
"""Label and color of each part of ``timing/step``."""
POOLS = {"actor": "student (actor)", "rollout": "rollout engines", "teacher": "teacher"}


@dataclass(frozen=True)
class StageTimes:
    """Time of the steps by stage.

    Attributes:
        steps: Step numbers, [N].
        seconds: Seconds of each step by label, [N] each, without stages that took no time.
        colors: Number of the color by label.
    """

    steps: Floats
    seconds: dict[str, Floats]
    colors: dict[str, int]

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        return float(sum(values.sum() for values in self.seconds.values()))


def stage_times(series: Mapping[str, Series]) -> StageTimes | None:
    """Return the parts of all steps, None if the run has no ``timing/step``."""
    if (whole := series.get("timing/step")) is None:
        return None
    seconds: dict[str, Floats] = {}
    colors: dict[str, int] = {}
    for name in [*PARTS_OF_STEP, "timing/other"]:
        if (part := series.get(name)) is None:
            continue
        label, color = STAGES.get(name, (name.removeprefix("timing/"), 8))
        values = np.zeros(len(whole.steps))
        index = np.searchsorted(whole.steps, part.steps)
        is_known = index < len(whole.steps)
        is_known[is_known] = whole.steps[index[is_known]] == part.steps[is_known]
        values[index[is_known]] = np.maximum(part.values[is_known], 0)
        seconds[label] = seconds.get(label, 0) + values
        colors[label] = color
    if not any(values.sum() for values in seconds.values()):
        return StageTimes(whole.steps, {"not divided": whole.values}, {"not divided": 8})
    ordered = sorted(seconds, key=lambda label: colors[label])
    return StageTimes(whole.steps, {label: seconds[label] for label in ordered if seconds[label].sum()}, colors)


def stage_chart(times: StageTimes) -> str:
    """Return the mean seconds per step by stage over the course of the run, as HTML."""
    n = len(times.steps)
    starts = np.unique(np.linspace(0, n, min(n, MAX_BARS), endpoint=False).astype(int))
    counts = np.diff([*starts, n])
    means = {label: np.add.reduceat(values, starts) / counts for label, values in times.seconds.items()}
    totals = np.sum(list(means.values()), axis=0)
    top = float(totals.max())
    if len(totals) > 10:  # a slow first step or a checkpoint must not flatten all other bars
        top = min(top, 2.5 * float(np.percentile(totals, 90)))
    y_ticks = ticks(0.0, top)
    width = VIEW / len(starts)
    gap = min(0.18 * width, 4)
    shapes, bottom = [], np.zeros(len(starts))
    for label, values in means.items():
        tops = bottom + values
        shapes.append(_bars(times.colors[label], width, gap, bottom / y_ticks[-1], tops / y_ticks[-1]))
        bottom = tops
    centers = np.add.reduceat(times.steps, starts) / counts
    edges = (float(times.steps[0]), float(times.steps[-1]))
    x_ticks = step_ticks(*edges)

    def place_x(steps: Floats) -> Floats:
        return np.asarray((np.interp(steps, centers, np.arange(len(centers))) + 0.5) / len(centers), np.float64)

    lines = [{"label": label, "color": times.colors[label], "y": rounded(values)} for label, values in means.items()]
    data = {"unit": "step", "bars": rounded(centers), "lines": lines, "per_bar": int(counts.max()), "suffix": " s"}
    frame = plot(shapes, y_ticks, x_ticks, place_x, lambda v: v / y_ticks[-1], "seconds per step by stage")
    return (
        '<figure class="card chart wide bars"><figcaption><h3>Seconds per step</h3>'
        f"<p>{_bars_explanation(int(counts.max()))}</p></figcaption>{frame}{data_script(data)}</figure>"
    )


def _bars_explanation(per_bar: int) -> str:
    what = "a step" if per_bar == 1 else f"the mean of up to {per_bar:,} steps"
    return (
        f"Each bar is {what}, divided by what the trainer did or waited for. Work of other stages that the trainer "
        "did not wait for takes no time here."
    )


def _bars(color: int, width: float, gap: float, bottoms: Floats, tops: Floats) -> str:
    parts = [
        f"M{index * width + gap / 2:.1f} {VIEW * (1 - low):.1f}V{VIEW * (1 - high):.1f}h{width - gap:.1f}"
        f"V{VIEW * (1 - low):.1f}Z"
        for index, (low, high) in enumerate(zip(bottoms.tolist(), np.minimum(tops, 1.02).tolist(), strict=True))
        if high > low
    ]
    return f'<path class="bar" style="--c:var(--s{color})" d="{"".join(parts)}"/>'


def stage_summary(times: StageTimes) -> str:
    """Return one bar with the share of each stage of the whole run, and its legend, as HTML."""
    total_s = times.total_s or 1.0
    shares = {label: float(values.sum()) / total_s for label, values in times.seconds.items()}
    bar = "".join(
        f'<i style="--c:var(--s{times.colors[label]});width:{100 * share:.2f}%" title="{text(label)}: {share:.1%}"></i>'
        for label, share in shares.items()
    )
    by_share = sorted(shares, key=lambda label: -shares[label])
    legend = "".join(
        f'<li><i style="--c:var(--s{times.colors[label]})"></i><span>{text(label)}</span>'
        f"<b>{100 * shares[label]:.1f}%</b><small>{duration(float(times.seconds[label].sum()))}</small></li>"
        for label in by_share
    )
    return (
        '<figure class="card"><figcaption><h3>Where the time of the steps went</h3>'
        f"<p>{duration(times.total_s)} in {len(times.steps):,} steps. Larger shares first.</p></figcaption>"
        f'<div class="share" role="img" aria-label="share of each stage">{bar}</div>'
        f'<ul class="shares">{legend}</ul></figure>'
    )


def stage_work(series: Mapping[str, Series]) -> str:
    """Return a table of the work of each stage and the busy share of each pool. Empty without these metrics."""
    work = {
        "generation": "timing/generate_sequences",
        "teacher": "timing/get_teacher_knowledge",
        "weight sync": "timing/sync_rollout_weights",
        "update of the student": "timing/update_actor",
    }
    rows = [
        [text(label), number(float(np.median(one.values))) + " s", number(float(np.percentile(one.values, 95))) + " s"]
        for label, name in work.items()
        if (one := series.get(name)) is not None
    ]
    idle = [
        f'<li><span>{text(label)}</span><span class="meter"><i style="width:{100 * busy:.1f}%"></i></span>'
        f"<b>{100 * busy:.0f}%</b></li>"
        for pool, label in POOLS.items()
        if (one := series.get(f"perf/idle_{pool}")) is not None
        for busy in [float(np.clip(1 - one.values.mean(), 0, 1))]
    ]
    if not rows:
        return ""
    meters = f'<h4>Busy share of each pool</h4><ul class="meters">{"".join(idle)}</ul>' if idle else ""
    return (
        '<figure class="card"><figcaption><h3>Work of each stage</h3><p>Time for one batch, waited for or not. '
        "Stages overlap, so the sum may exceed the time of a step.</p></figcaption>"
        + table(["stage", ">median", ">95th percentile"], rows)
        + meters
        + "</figure>"
    )
