"""Runs, scores and tables of the published curves of examples/smollm2."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests._support.repository import REPO


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a script of the example."""
    monkeypatch.syspath_prepend(str(REPO / "examples/smollm2"))
    return importlib.import_module


def test_runs_have_distinct_names_and_first_seeds_come_first(scripts: Any) -> None:
    runs = scripts("curve_runs")
    ordered = list(runs.ordered_runs())
    assert len({runs.run_name(*run) for run in ordered}) == len(ordered)
    assert [seed for _, seed in ordered] == sorted(seed for _, seed in ordered)
    assert {variant.group for variant in runs.VARIANTS} == set(runs.GROUPS)


def test_only_a_run_with_the_same_configuration_is_skipped(scripts: Any) -> None:
    curves, variant = scripts("curves"), scripts("curve_runs").VARIANTS[0]
    name = f"{variant.name}-1"
    assert curves.is_done({name: {"arguments": variant.arguments}}, variant, 1)
    assert not curves.is_done({name: {"arguments": variant.arguments}}, variant, 2)
    assert not curves.is_done({name: {"arguments": [*variant.arguments, "x=1"]}}, variant, 1)


def test_tables_of_the_page_are_those_of_the_results(scripts: Any) -> None:
    figures, curves = scripts("curve_figures"), scripts("curves")
    page = (REPO / "docs/results.md").read_text(encoding="utf-8")
    assert figures.with_tables(page, curves.read_results()) == page
    assert page.count("<!-- table ") == page.count("](figures/curves_") > 0


def test_series_of_a_run_exclude_pauses_and_count_tokens(scripts: Any, tmp_path: Path) -> None:
    lines = (
        '{"training/global_step": 0, "val/instructions/kl": 0.7, "val/instructions/reverse_kl": 0.8,'
        ' "val/instructions/truncated_fraction": 0.5}',
        '{"training/global_step": 1, "timing/step": 10.0, "actor/n_tokens": 70.0, "actor/loss": 0.6}',
        '{"training/global_step": 2, "timing/step": 40.0, "timing/validate": 25.0, "timing/save_checkpoint": 4.0,'
        ' "actor/n_tokens": 50.0, "actor/loss": 0.5, "val/instructions/kl": 0.4, "val/instructions/reverse_kl": 0.5,'
        ' "val/instructions/truncated_fraction": 0.25}',
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = scripts("curves").curves_of(tmp_path)
    assert found["training"] == {"loss": [0.6, 0.5], "seconds": [10.0, 21.0], "tokens": [70, 120]}
    assert found["validation"]["seconds"] == [0.0, 21.0] and found["validation"]["kl"] == [0.7, 0.4]
    assert found["validation"]["ended"] == [0.5, 0.75]


class Fixed(torch.nn.Module):
    """A model whose logits depend on nothing but the position."""

    def __init__(self, logits_TV: torch.Tensor) -> None:
        super().__init__()
        self.logits_TV = logits_TV

    def forward(self, ids_1T: torch.Tensor, logits_to_keep: int) -> Any:
        n_tokens = ids_1T.shape[1]
        return type("Output", (), {"logits": self.logits_TV[None, n_tokens - logits_to_keep : n_tokens]})()


def test_scores_are_those_of_the_response_tokens(scripts: Any) -> None:
    curve_scores, turn = scripts("curve_scores"), scripts("compare").Turn([0, 1, 2, 3], 2)
    p_TV, q_TV = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    student, teacher = Fixed(q_TV), Fixed(p_TV)
    found = curve_scores.divergences(student, teacher, [turn])
    rows_p, rows_q = p_TV[1:3], q_TV[1:3]  # the rows that predict the tokens 2 and 3
    assert found["forward_kl"] == pytest.approx(float((rows_p.exp() * (rows_p - rows_q)).sum() / 2), rel=1e-5)
    assert found["reverse_kl"] == pytest.approx(float((rows_q.exp() * (rows_q - rows_p)).sum() / 2), rel=1e-5)
    expected = -float(rows_q[0, 2] + rows_q[1, 3]) / 2
    assert curve_scores.likelihood(student, [turn])["teacher_nll"] == pytest.approx(expected, rel=1e-5)
    greedy = scripts("compare").Turn([0, 1, *rows_q.argmax(-1).tolist()], 2)
    assert curve_scores.likelihood(student, [greedy])["agreement"] == 1.0
