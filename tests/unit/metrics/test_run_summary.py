"""Summary of a run."""

from __future__ import annotations

from pathlib import Path

from recipe_gkd.metrics.run_summary import RunSummary


def make_metrics(kl: float) -> dict[str, float]:
    return {"actor/kl_loss": kl, "timing/step": 2.0, "timing/update_actor": 1.0, "timing/wait_prev_gen": 0.5}


class TestRunSummary:
    def test_rows_have_first_and_last_values_and_shares_of_time(self, tmp_path: Path) -> None:
        summary = RunSummary("jsd")
        summary.observe(4, {"val/math/score": 0.25, "timing/validate": 9.0})
        for step, kl in ((5, 0.5), (6, 0.3), (7, 0.125)):
            summary.observe(step, make_metrics(kl))
        summary.observe(8, {**make_metrics(0.1), "val/math/score": 0.75})
        model = tmp_path / "global_step_8" / "huggingface"
        model.mkdir(parents=True)
        assert summary.render(saved=model.parent, resumed_from=tmp_path / "global_step_4").splitlines() == [
            "  steps               4 (5 to 8)",
            "  time                8.0 s, 2.00 s per step",
            "  the trainer's time  updates 50%, waiting for generation 25%, other 25%",
            "  loss (jsd)          0.5000 (step 5) -> 0.1000 (step 8)",
            "  val/math/score      0.2500 (step 4) -> 0.7500 (step 8)",
            f"  checkpoint          {model.parent}",
            f"  trained model       {model}",
        ]

    def test_restart_continues_the_summary_and_names_what_it_resumed_from(self, tmp_path: Path) -> None:
        summary = RunSummary("jsd")
        for step in (5, 6, 7, 6, 7, 8):
            summary.observe(step, make_metrics(1 / step))
        checkpoint = tmp_path / "global_step_5"
        lines = summary.render(saved=None, resumed_from=checkpoint).splitlines()
        assert lines[0].split(maxsplit=1) == ["steps", "6 (5 to 8, 2 repeated)"]
        assert lines[1].split(maxsplit=1) == ["time", "12.0 s, 2.00 s per step"]
        assert lines[-1].split(maxsplit=1) == ["checkpoint", f"{checkpoint} (resumed from)"]

    def test_run_without_steps_and_checkpoints_has_rows(self) -> None:
        assert RunSummary("jsd").render(saved=None, resumed_from=None).splitlines() == [
            "  steps       none",
            "  checkpoint  none (trainer.save_freq)",
        ]
