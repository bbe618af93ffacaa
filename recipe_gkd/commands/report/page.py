"""HTML page of a report. It loads nothing, and its policy lets the browser run no script but its own."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from recipe_gkd.commands.report.advice import advice_section
from recipe_gkd.commands.report.curves import curves_section, validation_rewards
from recipe_gkd.commands.report.history import history_section
from recipe_gkd.commands.report.markup import text
from recipe_gkd.commands.report.run_files import Run
from recipe_gkd.commands.report.samples import samples_section
from recipe_gkd.commands.report.series import Series, duration, number
from recipe_gkd.commands.report.settings import checkpoints_section, settings_section
from recipe_gkd.commands.report.stage_charts import stage_chart, stage_summary, stage_times, stage_work
from recipe_gkd.commands.report.trace_chart import find_trace, trace_chart
from recipe_gkd.config.objective import loss_name

N_LAST = 20
"""Number of last steps whose mean the tiles show."""


def render_page(run: Run) -> str:
    """Return the page of a run."""
    script, style = _asset("page.js"), _asset("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    name = run.setting("trainer.experiment_name") or run.folder.resolve().name
    parts = [(title, anchor, content) for title, anchor, content in _sections(run) if content]
    links = "".join(f'<a href="#{anchor}">{text(title)}</a>' for title, anchor, _ in parts)
    body = "".join(
        f'<section id="{anchor}"><h2>{text(title)}</h2>{content}</section>' for title, anchor, content in parts
    )
    notes = "".join(f'<p class="note">{text(note)}</p>' for note in run.notes)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{text(name)} · recipe_gkd</title><style>{style}</style></head><body>"
        f"<header><div><p>Training report · {_project(run)}</p><h1>{text(name)}</h1>{_subtitle(run)}</div></header>"
        f"<nav>{links}</nav><main>{notes}{_tiles(run)}{body}</main>"
        f"<footer>Made by <code>python -m recipe_gkd report</code> from <code>{text(run.folder)}</code></footer>"
        f"<script>{script}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return files("recipe_gkd.commands.report").joinpath("assets", name).read_text(encoding="utf-8")


def _sections(run: Run) -> list[tuple[str, str, str]]:
    """Return title, anchor and HTML of each section."""
    main, others = curves_section(run.series, _loss_name(run))
    more = (
        f'<details class="more"><summary>All other metrics</summary><div class="grid three">{others}</div></details>'
        if others
        else ""
    )
    return [
        ("Advice", "advice", advice_section(run)),
        ("Curves", "curves", f'<div class="grid">{main}</div>{more}'),
        ("Time", "time", _time_section(run)),
        ("Responses", "responses", samples_section(run)),
        ("Checkpoints", "checkpoints", checkpoints_section(run)),
        ("Starts and restarts", "events", history_section(run.events)),
        ("Configuration", "configuration", settings_section(run)),
    ]


def _time_section(run: Run) -> str:
    times = stage_times(run.series)
    if times is None:
        return ""
    trace = find_trace(run.folder, run.setting("trainer.trace_file"))
    gantt = trace_chart(trace) if trace is not None else ""
    summary, work = stage_summary(times), stage_work(run.series)
    return f'<div class="grid">{summary}{work}{stage_chart(times)}</div>{gantt}'


def _project(run: Run) -> str:
    return text(run.setting("trainer.project_name") or "recipe_gkd")


def _loss_name(run: Run) -> str | None:
    gkd = run.config.get("gkd")
    return loss_name(gkd) if isinstance(gkd, dict) else None


def _subtitle(run: Run) -> str:
    facts = [
        ("strategy", run.setting("actor_rollout_ref.actor.strategy")),
        ("schedule", run.setting("trainer.scheduler")),
        ("loss", _loss_name(run)),
    ]
    shown = [f"{label} <b>{text(value)}</b>" for label, value in facts if value]
    if model := run.setting("actor_rollout_ref.model.path"):
        shown.append(f"student <b>{text(str(model).rstrip('/').rpartition('/')[2])}</b>")
    return f'<p class="facts">{" · ".join(shown)}</p>' if shown else ""


def _tiles(run: Run) -> str:
    """Return the figures at the top of the page."""
    series, total = run.series, run.setting("trainer.total_training_steps")
    of_total = f"of {total:,}" if isinstance(total, int) and total > 0 else "completed"
    tiles = [("Steps", f"{run.last_step:,}", of_total)]
    if (loss := series.get("actor/kl_loss")) is not None:
        n_last = min(N_LAST, len(loss.values))
        below = f"mean of the last {n_last} steps, first step {number(_first(loss))}"
        name = _loss_name(run)
        title = "Distillation loss" if name is None else f"Loss: {name}"
        tiles.append((title, number(_last(loss)), below))
    if rewards := validation_rewards(series):
        one = series[next(iter(rewards))]
        tiles.append(("Validation", number(float(one.values[-1])), f"from {number(_first(one))}"))
    elif (reward := series.get("reward/mean")) is not None:
        tiles.append(("Reward", number(_last(reward)), f"from {number(_first(reward))}"))
    if (times := series.get("timing/step")) is not None:
        median = float(sorted(times.values)[len(times.values) // 2])
        tiles.append(("Time", duration(float(times.values.sum())), f"median step {duration(median)}"))
    if (tokens := series.get("perf/total_num_tokens")) is not None:
        rate = series.get("perf/tokens_per_second")
        below = f"{number(_last(rate))} per second" if rate is not None else "prompt and response"
        tiles.append(("Tokens", number(float(tokens.values.sum())), below))
    return (
        '<div class="tiles">'
        + "".join(
            f"<div><h3>{text(title)}</h3><p>{text(value)}</p><small>{text(below)}</small></div>"
            for title, value, below in tiles
        )
        + "</div>"
    )


def _last(series: Series) -> float:
    return float(series.values[-N_LAST:].mean())


def _first(series: Series) -> float:
    return float(series.values[0])
