r"""Figures and tables of docs/results.md, from docs/results/curves.json.

Usage::

    python -m pip install matplotlib
    python examples/smollm2/curve_figures.py

Writes ``docs/figures/curves_GROUP.svg`` and replaces the tables of the page, which lie between the lines
``<!-- table GROUP -->`` and ``<!-- end -->``. Runs that are missing are left out.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from curve_runs import FORWARD_KL, GROUPS, UNTRAINED, VARIANTS, Variant, run_name
from curves import REPO, RESULTS, read_results

PAGE = REPO / "docs/results.md"
AXES = {"step": "steps", "tokens": "response tokens", "seconds": "seconds of training"}
COLUMNS = {
    "forward_kl": ("forward KL", "{:.3f}"),
    "reverse_kl": ("reverse KL", "{:.3f}"),
    "teacher_nll": ("NLL of the teacher's responses", "{:.3f}"),
    "agreement": ("greedy agreement", "{:.1%}"),
    "ended": ("responses that end", "{:.0%}"),
}
"""Title and format of each score in the tables."""
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


def seeds_of(results: Mapping[str, Any], variant: Variant) -> list[dict[str, Any]]:
    """Return the results of the seeds that have run with the present configuration."""
    found = (results.get(run_name(variant, seed)) for seed in range(1, variant.n_seeds + 1))
    return [one for one in found if one is not None and one["arguments"] == variant.arguments]


def variants_of(group: str) -> list[Variant]:
    """Return the variants of a figure: the default first."""
    default = [variant for variant in VARIANTS if variant.name == FORWARD_KL]
    return default + [variant for variant in VARIANTS if variant.group == group and variant.name != FORWARD_KL]


def seconds_per_step(result: Mapping[str, Any]) -> float:
    """Return the median duration of a step."""
    seconds = [0.0, *result["training"]["seconds"]]
    return statistics.median(after - before for before, after in itertools.pairwise(seconds))


def cell(values: Sequence[float], form: str) -> str:
    """Return the mean of the seeds and their range."""
    mean = form.format(statistics.mean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ({form.format(min(values))} to {form.format(max(values))})"


def table(results: Mapping[str, Any], group: str) -> str:
    """Return the table of a group in Markdown."""
    lines = [
        f"| run | seeds | {' | '.join(title for title, _ in COLUMNS.values())} | s per step |",
        "|---|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    if UNTRAINED in results:
        final = results[UNTRAINED]["final"]
        cells = [cell([final[key]], form) for key, (_, form) in COLUMNS.items()]
        lines.append(f"| before training | | {' | '.join(cells)} | |")
    for variant in variants_of(group):
        if seeds := seeds_of(results, variant):
            cells = [cell([one["final"][key] for one in seeds], form) for key, (_, form) in COLUMNS.items()]
            timed = [seconds_per_step(one) for one in seeds if one["timed"]]
            cells.append(cell(timed, "{:.1f}") if timed else "")
            lines.append(f"| `{variant.name}` | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_tables(page: str, results: Mapping[str, Any]) -> str:
    """Return the page with tables of these results."""

    def replace(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n\n{table(results, match[1])}\n\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->.*?<!-- end -->", replace, page, flags=re.DOTALL)


def draw(results: Mapping[str, Any], group: str) -> None:
    """Write the figure of a group: validation KL against steps, response tokens and seconds."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams.update({"svg.hashsalt": "recipe_gkd", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    figure, axes = pyplot.subplots(1, len(AXES), figsize=(10, 3.2), sharey=True, layout="constrained")
    for color, variant in zip(COLORS, variants_of(group), strict=False):
        seeds = seeds_of(results, variant)
        for axis, key in zip(axes, AXES, strict=True):
            for number, one in enumerate(seeds):
                if key == "seconds" and not one["timed"]:
                    continue
                label = f"{variant.name} ({len(seeds)} seeds)" if len(seeds) > 1 else variant.name
                points = one["validation"]
                axis.plot(points[key], points["kl"], color=color, marker=".", lw=1.2, label=None if number else label)
    for axis, title in zip(axes, AXES.values(), strict=True):
        axis.set_xlabel(title)
    axes[0].set_ylabel("validation KL, nats per token")
    axes[0].legend(fontsize=8)
    figure.suptitle(GROUPS[group], fontsize=10)
    figure.savefig(REPO / f"docs/figures/curves_{group}.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Run the command."""
    results = read_results()
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    for group in GROUPS:
        if any(seeds_of(results, variant) for variant in variants_of(group)[1:]):
            draw(results, group)
    print(f"wrote the tables of {PAGE} and the figures from {RESULTS}")


if __name__ == "__main__":
    main()
