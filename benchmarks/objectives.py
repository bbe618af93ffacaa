"""Train with every objective on the quickstart task, one run after the other, and print the results as a table.

    python benchmarks/objectives.py [--only NAME ...] [--json FILE] [key=value ...]

Each row is one run of ``bash launch/quickstart.sh`` with the overrides of ``OBJECTIVES`` and of the command line, on
the same data, teacher and student. Completed stages are not repeated. A row takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REWARD = ["gkd.use_rl_loss=true", "custom_reward_function.path=recipe_gkd/quickstart/reward.py",
          "actor_rollout_ref.rollout.n=4", "data.train_batch_size=16"]  # fmt: skip
LR = "actor_rollout_ref.actor.optim.lr={}"
OBJECTIVES: dict[str, list[str]] = {
    "forward_kl": [],
    "reverse_kl": ["gkd.distill_loss_type=reverse_kl"],
    "jsd": ["gkd.distill_loss_type=jsd"],
    "kl_rkl": ["gkd.distill_loss_type=kl_rkl"],
    "skewed_forward_kl": ["gkd.distill_loss_type=skewed_forward_kl"],
    "skewed_reverse_kl": ["gkd.distill_loss_type=skewed_reverse_kl"],
    "tvd": ["gkd.distill_loss_type=tvd"],
    "k1, lr 1e-3": ["gkd.distill_loss_type=k1", LR.format("1e-3")],
    "k1, lr 1e-3, no baseline": ["gkd.distill_loss_type=k1", LR.format("1e-3"), "gkd.baseline=none"],
    "k2, lr 5e-4": ["gkd.distill_loss_type=k2", LR.format("5e-4")],
    "k3, lr 5e-4": ["gkd.distill_loss_type=k3", LR.format("5e-4")],
    "forward_kl, temperature 2": ["gkd.distill_temperature=2"],
    "forward_kl, fused head": ["gkd.fuse_lm_head=true"],
    "forward_kl + reward": REWARD,
    "forward_kl + reference responses": ["gkd.sft_share=0.25"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(OBJECTIVES), metavar="NAME", help=", ".join(OBJECTIVES))
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of every run")
    args = parser.parse_args()
    folder = Path(os.environ.get("QUICKSTART_DIR", "outputs/quickstart"))
    rows = []
    for name in args.only or OBJECTIVES:
        overrides = OBJECTIVES[name] + args.overrides
        print(f"{name}: {' '.join(overrides)}", file=sys.stderr, flush=True)
        process = subprocess.run(
            ["bash", "launch/quickstart.sh", *overrides], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=sys.stderr
        )
        if process.returncode:
            print(process.stdout[-3000:], file=sys.stderr)
            return process.returncode
        rows.append({"objective": name, "overrides": overrides} | figures(ROOT / folder / "runs" / run_name(overrides)))
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


def run_name(overrides: list[str]) -> str:
    """Return the name that launch/quickstart.sh gives the run's folder."""
    if not overrides:
        return "default"
    name = re.sub(r"[^A-Za-z0-9=._,-]", "_", ",".join(overrides))
    if len(name) <= 100:
        return name
    checksum = subprocess.run(["cksum"], input=name, text=True, capture_output=True, check=True).stdout.split()[0]
    return f"{name[:89]}-{checksum}"


def figures(run: Path) -> dict[str, Any]:
    """Return the results of a completed run, as means over its last ten steps."""
    report = json.loads((run / "report.json").read_text())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    def mean(name: str, steps: list[dict[str, float]]) -> float | None:
        found = [step[name] for step in steps if name in step]
        return sum(found) / len(found) if found else None

    return {
        "before": report["accuracy"]["student_before"],
        "after": report["accuracy"]["student_after"],
        "loss_first": mean("actor/kl_loss", steps[:1]),
        "loss_last": mean("actor/kl_loss", steps[-10:]),
        "entropy": mean("actor/entropy", steps[-10:]),
        "student_topk_mass": mean("actor/student_topk_mass", steps[-10:]),
        "reward": mean("reward/mean", steps[-10:]),
        "seconds_a_step": mean("timing/step", steps[1:]),
        "update_seconds": mean("timing/update_actor", steps[1:]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| objective | exact answers, before → after | `actor/kl_loss`, first and last | entropy | reward |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['objective']} | {row['before']:.1%} → {row['after']:.1%} | {row['loss_first']:.3f}, "
            f"{row['loss_last']:.4f} | {row['entropy']:.3f} | {formatted(row['reward'])} |"
        )
    return "\n".join(lines)


def formatted(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
