"""HTML page of a report. It loads nothing, and its policy lets the browser run only the two scripts in it."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from recipe_gkd.commands.report.advice import advice_section
from recipe_gkd.commands.report.curves import main_charts, other_charts, validation_rewards
from recipe_gkd.commands.report.history import history_section
from recipe_gkd.commands.report.plots import MAX_POINTS, line_charts, stage_figure, timeline_figure
from recipe_gkd.commands.report.run_files import Run
from recipe_gkd.commands.report.samples import samples_section
from recipe_gkd.commands.report.series import Series, duration, number
from recipe_gkd.commands.report.settings import checkpoints_section, settings_section
from recipe_gkd.commands.report.stages import busy_shares, mean_bars, stage_times, stage_work
from recipe_gkd.commands.report.templates import render
from recipe_gkd.commands.report.trace_spans import find_trace, read_timeline
from recipe_gkd.config.objective import loss_name

N_LAST = 20
"""Number of last steps whose mean the tiles show."""


def render_page(run: Run) -> str:
    """Return the page of a run."""
    scripts = [get_plotlyjs(), _asset("page.js")]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    page = render(
        "page.html",
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}",
        scripts=[Markup(script) for script in scripts],
        style=Markup(_asset("page.css")),
        name=run.setting("trainer.experiment_name") or run.folder.resolve().name,
        project=run.setting("trainer.project_name") or "recipe_gkd",
        facts=_facts(run),
        notes=run.notes,
        tiles=_tiles(run),
        sections=[section for section in _sections(run) if section[2]],
        folder=run.folder,
    )
    return str(page)


def _asset(name: str) -> str:
    return files("recipe_gkd.commands.report").joinpath("assets", name).read_text(encoding="utf-8")


def _sections(run: Run) -> list[tuple[str, str, str]]:
    """Return title, anchor and HTML of each section."""
    return [
        ("Advice", "advice", advice_section(run)),
        ("Curves", "curves", _curves_section(run)),
        ("Time", "time", _time_section(run)),
        ("Responses", "responses", samples_section(run)),
        ("Checkpoints", "checkpoints", checkpoints_section(run)),
        ("Starts and restarts", "events", history_section(run.events)),
        ("Configuration", "configuration", settings_section(run)),
    ]


def _curves_section(run: Run) -> str:
    main = main_charts(run.series, _loss_name(run))
    others = line_charts(other_charts(run.series, main), run.series, MAX_POINTS // 2)
    return render("curves.html", main=line_charts(main, run.series), others=others)


def _time_section(run: Run) -> str:
    if (times := stage_times(run.series)) is None:
        return ""
    trace = find_trace(run)
    timeline = None if trace is None else read_timeline(trace)
    return render(
        "time.html",
        times=times,
        work=stage_work(run.series),
        busy=busy_shares(run.series),
        stages=stage_figure(times),
        per_bar=mean_bars(times)[2],
        timeline=timeline,
        spans=None if timeline is None else timeline_figure(timeline),
    )


def _loss_name(run: Run) -> str | None:
    gkd = run.config.get("gkd")
    return loss_name(gkd) if isinstance(gkd, dict) else None


def _facts(run: Run) -> list[tuple[str, object]]:
    """Return label and value of each fact below the title."""
    model = str(run.setting("actor_rollout_ref.model.path") or "")
    facts = [
        ("strategy", run.setting("actor_rollout_ref.actor.strategy")),
        ("schedule", run.setting("trainer.scheduler")),
        ("loss", _loss_name(run)),
        ("student", model.rstrip("/").rpartition("/")[2]),
    ]
    return [fact for fact in facts if fact[1]]


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """Return title, value and explanation of each figure at the top of the page."""
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
    return tiles


def _last(series: Series) -> float:
    return float(series.values[-N_LAST:].mean())


def _first(series: Series) -> float:
    return float(series.values[0])
