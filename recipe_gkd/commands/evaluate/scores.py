"""Statistics of the rewards of several models on the same prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from recipe_gkd.commands.model_folder import short_names
from recipe_gkd.rewards.reporting import mean_numbers
from teacher.common.display_text import count_columns, make_visible, pad_left, pad_right

ALL = "all"
"""Name of the group of all prompts."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Responses of a model, and their rewards.

    Attributes:
        model: Folder of the model.
        sources: Data source of each prompt, [P].
        rows: Row of each prompt in the data, [P].
        rewards_PN: Reward of each response, [P, N]. NaN for a response whose call of the reward function failed. None
            without a reward function.
        lengths_PN: Tokens of each response, [P, N]. NaN for conversations that are left out.
        truncated_PN: 1 for responses that were truncated, 0 for others, [P, N]. NaN likewise.
        seconds: Time of generation, without loading.
        numbers: Other numbers that the reward function returned for each response, by name, [P * N]. Empty without one.
    """

    model: str
    sources: Sequence[str]
    rows: Sequence[int]
    rewards_PN: Floats | None
    lengths_PN: Floats
    truncated_PN: Floats
    seconds: float
    numbers: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True, kw_only=True)
class ScoreSummary:
    """Statistics of a model on the prompts of a data source.

    Attributes:
        mean: Mean over the prompts of the mean reward of their responses, ``avg@n``. Failed calls are left out. None
            without rewards.
        mean_error: Standard error of ``mean`` over the prompts. None for fewer than two prompts.
        best: Mean over the prompts of the best response, ``best@n``. Prompts with a failed call are left out.
        best_error: Standard error of ``best``.
        response_len: Mean number of tokens of a response. 0 if all conversations are left out.
        truncated_fraction: Share of truncated responses, likewise.
        n_failed: Number of responses without a reward, because the call of the reward function failed.
        numbers: Means of the other numbers that the reward function returned, by name.
    """

    n_prompts: int
    mean: float | None
    mean_error: float | None
    best: float | None
    best_error: float | None
    response_len: float
    truncated_fraction: float
    n_failed: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict)


def scores_of(evaluation: Evaluation) -> dict[str, ScoreSummary]:
    """Return the score of each data source, and of all prompts together under :data:`ALL`."""
    sources = np.array(evaluation.sources)
    groups = {str(source): sources == source for source in np.unique(sources)}
    if len(groups) != 1:
        groups[ALL] = np.full(len(sources), True)
    return {name: _score(evaluation, rows) for name, rows in groups.items()}


def _score(evaluation: Evaluation, rows: npt.NDArray[np.bool_]) -> ScoreSummary:
    mean: tuple[float | None, float | None] = (None, None)
    best, n_failed = mean, 0
    if evaluation.rewards_PN is not None:
        rewards_PN = evaluation.rewards_PN[rows]
        is_failed_PN = np.isnan(rewards_PN)
        n_failed = int(is_failed_PN.sum())
        mean = mean_and_error(np.nanmean(rewards_PN[~is_failed_PN.all(axis=1)], axis=1))
        best = mean_and_error(rewards_PN[~is_failed_PN.any(axis=1)].max(axis=1))
    n = evaluation.lengths_PN.shape[1]
    numbers = [numbers for index, numbers in enumerate(evaluation.numbers) if rows[index // n]]
    return ScoreSummary(
        n_prompts=int(rows.sum()),
        mean=mean[0],
        mean_error=mean[1],
        best=best[0],
        best_error=best[1],
        response_len=_mean_of_kept(evaluation.lengths_PN[rows]),
        truncated_fraction=_mean_of_kept(evaluation.truncated_PN[rows]),
        n_failed=n_failed,
        numbers=mean_numbers(numbers),
    )


def _mean_of_kept(values_PN: Floats) -> float:
    kept = values_PN[~np.isnan(values_PN)]
    return float(kept.mean()) if len(kept) else 0.0


def mean_and_error(values_P: Floats) -> tuple[float | None, float | None]:
    """Return the mean over prompts, None without any, and its standard error, None for fewer than two prompts."""
    n = len(values_P)
    if n == 0:
        return None, None
    error = float(values_P.std(ddof=1)) / math.sqrt(n) if n > 1 else None
    return float(values_P.mean()), error


def difference(first: Evaluation, other: Evaluation) -> tuple[float | None, float | None] | None:
    """Return the mean difference of the rewards of two models and its standard error, paired by prompt.

    Prompts with a failed call of the reward function are left out.

    Returns:
        ``other`` minus ``first``. None without rewards, or if the models answered different rows.
    """
    if first.rewards_PN is None or other.rewards_PN is None or list(first.rows) != list(other.rows):
        return None
    gains_P = other.rewards_PN.mean(axis=1) - first.rewards_PN.mean(axis=1)
    return mean_and_error(gains_P[~np.isnan(gains_P)])


def as_json(evaluations: Sequence[Evaluation], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the results of all models for a JSON file."""
    models = []
    for evaluation in evaluations:
        result: dict[str, Any] = {
            "model": evaluation.model,
            "seconds": round(evaluation.seconds, 3),
            "scores": {name: asdict(score) for name, score in scores_of(evaluation).items()},
        }
        if evaluation is not evaluations[0] and (gained := difference(evaluations[0], evaluation)):
            result["difference"] = {"to": evaluations[0].model, "mean": gained[0], "error": gained[1]}
        models.append(result)
    return settings | {"models": models}


def render(evaluations: Sequence[Evaluation], n: int) -> str:
    """Return a table with one column for each model."""
    names = [make_visible(name) for name in short_names([evaluation.model for evaluation in evaluations])]
    scores = [scores_of(evaluation) for evaluation in evaluations]
    rows: list[tuple[str, list[str]]] = []
    for source in scores[0]:
        found = [score.get(source) for score in scores]
        label = f"{make_visible(source)}, {scores[0][source].n_prompts:,} prompts"
        rows.append((label, [""] * len(names)))
        if any(s is not None and s.mean is not None for s in found):
            title = "mean reward, greedy" if n == 1 else f"avg@{n}"
            rows.append((f"  {title}", [_with_error(s.mean, s.mean_error) if s else "" for s in found]))
            if n > 1:
                rows.append((f"  best@{n}", [_with_error(s.best, s.best_error) if s else "" for s in found]))
        if any(s is not None and s.n_failed for s in found):
            rows.append(("  responses without reward", [f"{s.n_failed:,}" if s else "" for s in found]))
        for name in dict.fromkeys(name for s in found if s is not None for name in s.numbers):
            rows.append(
                (
                    f"  {make_visible(name)}",
                    [f"{s.numbers[name]:.4f}" if s and name in s.numbers else "" for s in found],
                )
            )
        rows.append(("  response tokens", [f"{s.response_len:,.1f}" if s else "" for s in found]))
        rows.append(("  truncated", [f"{s.truncated_fraction:.1%}" if s else "" for s in found]))
    if len(evaluations) > 1 and evaluations[0].rewards_PN is not None:
        gains = [None, *(difference(evaluations[0], other) for other in evaluations[1:])]
        rows.append((f"difference to {names[0]}", ["" if gain is None else _with_error(*gain, "+") for gain in gains]))
    label_width = max(count_columns(label) for label, _ in rows)
    widths = [max(count_columns(name), *(count_columns(cells[i]) for _, cells in rows)) for i, name in enumerate(names)]
    lines = [
        _line("", names, label_width, widths),
        *(_line(label, cells, label_width, widths) for label, cells in rows),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _line(label: str, cells: Sequence[str], label_width: int, widths: Sequence[int]) -> str:
    values = "  ".join(pad_left(cell, width) for cell, width in zip(cells, widths, strict=True))
    return f"{pad_right(label, label_width)}  {values}"


def _with_error(mean: float | None, error: float | None, sign: str = "") -> str:
    if mean is None:
        return ""
    return f"{mean:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")
