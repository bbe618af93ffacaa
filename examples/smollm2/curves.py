r"""Runs of the published curves (docs/results.md), one after the other.

Usage::

    python examples/smollm2/curves.py --models outputs/smollm2 --dir outputs/curves [--only NAME ...] [--max-runs N]
        [--untimed]
    python examples/smollm2/curves.py --list

MODELS is the folder of launch/example_smollm2.sh with both models and the data; ``models.py`` and ``data.py`` make
them. A run that docs/results/curves.json has with the same configuration is skipped, and an interrupted one continues
from its checkpoint, so that the series can be stopped (Ctrl-C) and started again at any time. After each run its
results are added to the file and its checkpoints are removed.

A run takes 8 to 10 minutes on two cores. Times are comparable only if nothing else runs; with ``--untimed`` they are
left out of the tables and figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from curve_runs import N_LOGPROBS, N_PROMPTS, UNTRAINED, VARIANTS, Variant, ordered_runs, run_name

from recipe_gkd.commands.model_folder import model_folder
from recipe_gkd.commands.report.run_files import METRICS, find_validations

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
RESULTS = REPO / "docs/results/curves.json"
PORT, BACKEND_PORT = 15575, 15576
SOURCE = "instructions"
FLOAT32 = ("actor_rollout_ref.actor.megatron.dtype=float32", "actor_rollout_ref.rollout.dtype=float32")
"""Overrides with which all runs compute in the same data type, on each CPU."""
MAX_TEACHER_TOKENS = 128
"""Longest generated response of the teacher. A longer one than the runs train on has no end-of-sequence token there."""


def read_results() -> dict[str, Any]:
    """Return the results by name of the run."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def is_done(results: dict[str, Any], variant: Variant, seed: int) -> bool:
    """Return True if the results have this run with the same configuration."""
    found = results.get(run_name(variant, seed))
    return found is not None and found["arguments"] == variant.arguments


def generate(models: Path, data: Path, responses: Path, *options: str) -> list[dict[str, Any]]:
    """Return the teacher's responses to the prompts of a file, generated once."""
    if not responses.exists():
        draft = responses.with_suffix(".draft")
        command = [sys.executable, "-m", "recipe_gkd", "evaluate", str(models / "teacher"), "--data", str(data)]
        command += ["--responses", str(draft), "--dtype", "float32", "--cpu-cache-gb", "0.25", *options]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}, cwd=REPO)
        draft.rename(responses)
    return [json.loads(line) for line in responses.read_text(encoding="utf-8").splitlines()]


def prepare(models: Path, folder: Path) -> tuple[Path, Path]:
    """Write training data with sampled responses of the teacher. Return its file and the teacher's greedy responses."""
    prompts, train = folder / "prompts.jsonl", folder / "train.jsonl"
    lines = (models / "train.jsonl").read_text(encoding="utf-8").splitlines()[: N_PROMPTS + 32]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    length = f"data.max_response_length={MAX_TEACHER_TOKENS}"
    sampled = generate(models, prompts, folder / "teacher_samples.jsonl", "--temperature", "1", length)
    rows = [
        {"data_source": SOURCE, "prompt": record["prompt"], "response": record["response"]}
        for record in sampled
        if record["response"].strip()
    ][:N_PROMPTS]
    if len(rows) < N_PROMPTS:
        raise SystemExit(
            f"error: {models}/train.jsonl has {len(rows)} prompts that the teacher answered, expected "
            f"{N_PROMPTS}; run examples/smollm2/data.py again"
        )
    train.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    greedy = folder / "teacher_answers.jsonl"
    generate(models, models / "val.jsonl", greedy, "data.val_max_samples=64", "data.max_response_length=48")
    return train, greedy


@contextmanager
def teacher_service(models: Path, folder: Path) -> Iterator[None]:
    """Run the teacher service during the context."""
    environment = os.environ | {
        "CKPT_PATH": str(models / "teacher"),
        "RUN_DIR": str(folder),
        "N_LOGPROBS": str(N_LOGPROBS),
        "DTYPE": "float32",
        "MAX_MODEL_LEN": "512",
        "PROXY_FRONTEND_PORT": str(PORT),
        "PROXY_BACKEND_PORT": str(BACKEND_PORT),
    }
    stop = ["bash", str(REPO / "teacher/stop_server.sh"), "--run-dir", str(folder)]
    if folder.exists():  # left by a killed series
        subprocess.run(stop, check=False, stdout=subprocess.DEVNULL)
    subprocess.run(["bash", str(REPO / "teacher/start_server.sh")], check=True, env=environment)
    try:
        yield
    finally:
        subprocess.run(stop, check=True, stdout=subprocess.DEVNULL)


def train(variant: Variant, seed: int, models: Path, data: Path, folder: Path) -> None:
    """Run one training, or the rest of an interrupted one."""
    command = [sys.executable, "-m", "recipe_gkd.main_gkd", "--config-path", str(HERE), "--config-name", "smollm2"]
    command += [f"data.train_files={data}", f"data.seed={seed}", f"trainer.default_local_dir={folder}"]
    command += [f"actor_rollout_ref.teacher.server_port={PORT}", *FLOAT32, *variant.arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "EXAMPLE_DIR": str(models)}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.log").open("a") as log:
        subprocess.run(command, check=True, env=environment, cwd=REPO, stdout=log, stderr=subprocess.STDOUT)


def curves_of(folder: Path) -> dict[str, Any]:
    """Return the series of a run: validations, and loss, seconds and response tokens of every step."""
    records = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    by_step = {int(record["training/global_step"]): record for record in records}
    seconds, tokens = 0.0, 0
    validation: dict[str, list[float]] = {key: [] for key in ("step", "seconds", "tokens", "kl", "reverse_kl", "ended")}
    training: dict[str, list[float]] = {key: [] for key in ("loss", "seconds", "tokens")}
    for step, record in sorted(by_step.items()):
        if step:
            pauses = record.get("timing/validate", 0.0) + record.get("timing/save_checkpoint", 0.0)
            seconds += record["timing/step"] - pauses
            tokens += round(record["actor/n_tokens"])
            for key, value in (("loss", record["actor/loss"]), ("seconds", seconds), ("tokens", tokens)):
                training[key].append(round(value, 4))
        if f"val/{SOURCE}/kl" in record:
            found = {key: record[f"val/{SOURCE}/{key}"] for key in ("kl", "reverse_kl")}
            found |= {"step": step, "seconds": seconds, "tokens": tokens}
            found["ended"] = 1 - record[f"val/{SOURCE}/truncated_fraction"]
            for key, value in found.items():
                validation[key].append(round(value, 4))
    return {"validation": validation, "training": training}


def scores_of(models: Path, student: Path, validation: Path, answers: Path) -> dict[str, float]:
    """Return the result of curve_scores.py."""
    files = (models / "teacher", student, validation, answers)
    command = [sys.executable, str(HERE / "curve_scores.py"), *map(str, files)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=REPO)
    return {key: round(value, 4) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}


def result_of(variant: Variant, models: Path, folder: Path, answers: Path, is_timed: bool) -> dict[str, Any]:
    """Return everything that is published about a finished run."""
    last = max(find_validations(folder / "validation").items())[1]
    final = scores_of(models, model_folder(folder), last, answers)
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=REPO)
    return {
        "arguments": variant.arguments,
        "commit": revision.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "timed": is_timed,
        "final": final,
        **curves_of(folder),
    }


def add_result(name: str, result: dict[str, Any]) -> None:
    """Add a result to the file."""
    draft = RESULTS.with_suffix(".draft")
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(json.dumps(read_results() | {name: result}, indent=1) + "\n")
    draft.rename(RESULTS)


def run_series(models: Path, folder: Path, only: Sequence[str], max_runs: int | None, *, is_timed: bool) -> None:
    """Run what the results do not have yet."""
    wanted = [(variant, seed) for variant, seed in ordered_runs() if not only or variant.name in only]
    missing = [(variant, seed) for variant, seed in wanted if not is_done(read_results(), variant, seed)][:max_runs]
    if not missing:
        print("all runs are done")
        return
    folder.mkdir(parents=True, exist_ok=True)
    data, answers = prepare(models, folder)
    with teacher_service(models, folder / "teacher_service"):
        for number, (variant, seed) in enumerate(missing, 1):
            name = run_name(variant, seed)
            print(f"{time.strftime('%H:%M')} run {number} of {len(missing)}: {name}", flush=True)
            train(variant, seed, models, data, folder / name)
            if UNTRAINED not in read_results():
                first = folder / name / "validation/step_0.jsonl"
                add_result(UNTRAINED, {"final": scores_of(models, models / "student", first, answers)})
            result = result_of(variant, models, folder / name, answers, is_timed)
            add_result(name, result)
            for checkpoint in (folder / name).glob("global_step_*"):
                shutil.rmtree(checkpoint)
            print(f"{time.strftime('%H:%M')} {name}: {result['final']}", flush=True)


def main() -> int:
    """Run the command. Return its exit status."""
    parser = argparse.ArgumentParser(description="Runs of the published curves.")
    parser.add_argument("--models", type=Path, default=REPO / "outputs/smollm2", help="folder of the example")
    parser.add_argument("--dir", type=Path, default=REPO / "outputs/curves", help="folder of the runs")
    parser.add_argument("--only", nargs="+", default=[], choices=[v.name for v in VARIANTS], metavar="NAME")
    parser.add_argument("--max-runs", type=int, metavar="N", help="stop after N runs")
    parser.add_argument("--untimed", action="store_true", help="other programs run, too: publish no times")
    parser.add_argument("--list", action="store_true", help="list the runs, and which are done")
    args = parser.parse_args()
    if args.list:
        results = read_results()
        for variant, seed in ordered_runs():
            state = "done" if is_done(results, variant, seed) else "missing"
            print(f"{run_name(variant, seed):<26}{state:<9}{' '.join(variant.overrides)}")
        return 0
    absent = [name for name in ("teacher", "student", "train.jsonl", "val.jsonl") if not (args.models / name).exists()]
    if absent:
        print(
            f"error: {args.models} has no {', '.join(absent)}; run examples/smollm2/models.py and data.py with this "
            "folder, or set --models",
            file=sys.stderr,
        )
        return 1
    try:
        run_series(args.models.resolve(), args.dir.resolve(), args.only, args.max_runs, is_timed=not args.untimed)
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(map(str, error.cmd))[:300]} ended with status {error.returncode}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues the series", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
