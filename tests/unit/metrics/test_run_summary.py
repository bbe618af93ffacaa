"""Summary of a run."""

from __future__ import annotations

from pathlib import Path

from recipe_gkd.checkpoints.folders import final_folder
from recipe_gkd.metrics.run_summary import RunSummary
from tests._support.checkpoint_files import write_checkpoints


def make_metrics(kl: float) -> dict[str, float]:
    return {"actor/kl_loss": kl, "timing/step": 2.0, "timing/update_actor": 1.0, "timing/wait_prev_gen": 0.5}


class TestRunSummary:
    def test_rows_have_first_and_last_values_and_shares_of_time(self, tmp_path: Path) -> None:
        summary = RunSummary("jsd")
        summary.observe(4, {"val/math/score": 0.25, "timing/validate": 9.0})
        for step, kl in ((5, 0.5), (6, 0.3), (7, 0.125)):
            summary.observe(step, make_metrics(kl))
        summary.observe(8, {**make_metrics(0.1), "val/math/score": 0.75})
        write_checkpoints(tmp_path, 8)
        model = final_folder(tmp_path, 8) / "huggingface"
        model.mkdir(exist_ok=True)
        assert summary.render(tmp_path).splitlines() == [
            "  steps               4 (5 to 8)",
            "  time                8.0 s, 2.00 s per step",
            "  the trainer's time  updates 50%, waiting for generation 25%, other 25%",
            "  loss (jsd)          0.5000 (step 5) -> 0.1000 (step 8)",
            "  val/math/score      0.2500 (step 4) -> 0.7500 (step 8)",
            f"  checkpoint          {model.parent}",
            f"  trained model       {model}",
        ]

    def test_run_without_steps_and_checkpoints_has_rows(self, tmp_path: Path) -> None:
        assert RunSummary("jsd").render(tmp_path).splitlines() == [
            "  steps       none",
            "  checkpoint  none (trainer.save_freq)",
        ]
