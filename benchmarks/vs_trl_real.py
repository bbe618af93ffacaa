"""This project and TRL's on-policy distillation of a real language model: time per step, and what the student learned.

    python benchmarks/vs_trl_real.py --models outputs/smollm2 [--dtype bfloat16] [--rounds 2] [--steps 8] [--env DIR]
        [--json FILE]

MODELS is the folder of ``launch/example_smollm2.sh`` with ``teacher`` (SmolLM2-135M-Instruct), ``student`` (the same
without six layers), ``train.jsonl`` and ``val.jsonl``. Both sides train the student with forward KL, the same 384
prompts, 16 responses of at most 48 tokens per step, AdamW and a constant learning rate, in float32 or, with ``--dtype
bfloat16``, with bfloat16 products and float32 master weights. ``vs_trl.py`` has the columns, TRL's other settings and
its environment. TRL has the loss on the whole vocabulary; here the teacher sends its 64 most likely ids, and the rest
is one outcome. On our side the last step, which generates no batch, is not measured.

Afterwards both students answer 64 held-out prompts, and ``examples/smollm2/curve_scores.py`` computes their exact KL
divergence to the teacher. Alternates the sides in each round; a round takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from teacher_processes import REPO
from trl_environment import REQUIREMENTS, SkippedError, environment_python
from vs_trl import Measurement, parse_arguments, report, teacher_service, train_ours, train_trl

RESPONSES, RESPONSE_TOKENS, TOP_K, N_PROMPTS, N_HELD_OUT = 16, 48, 64, 384, 64
LR = 5e-5
WARM_UP_STEPS = 2
TARGET = 2.5
EXAMPLE = REPO / "examples/smollm2"


def run_trl(models: Path, folder: Path, steps: int, python: Path, dtype: str) -> Measurement:
    """Train with TRL. The student is in ``folder/trl``."""
    settings = {
        "student": str(models / "student"), "teacher": str(models / "teacher"), "data": str(folder / "train.jsonl"),
        "responses": RESPONSES, "response_tokens": RESPONSE_TOKENS, "lr": LR, "adam_beta2": 0.999,
        "save": str(folder / "trl"), "bf16": dtype == "bfloat16",
    }  # fmt: skip
    return train_trl(settings, folder, steps, python, warm_up=WARM_UP_STEPS)


def run_ours(models: Path, folder: Path, steps: int, dtype: str) -> Measurement:
    """Train with this project. The run is in ``folder/ours``."""
    service = {"N_LOGPROBS": str(TOP_K), "MAX_MODEL_LEN": "512", "DTYPE": dtype}
    with teacher_service(models / "teacher", folder / "service", service) as port:
        arguments = [
            "--config-path", str(EXAMPLE), "--config-name", "smollm2",
            f"data.train_files={folder / 'train.jsonl'}", "data.val_files=[]",
            f"data.train_batch_size={RESPONSES}", f"data.max_response_length={RESPONSE_TOKENS}",
            f"actor_rollout_ref.teacher.server_port={port}",
            f"actor_rollout_ref.actor.megatron.dtype={dtype}", f"actor_rollout_ref.rollout.dtype={dtype}",
            f"actor_rollout_ref.actor.optim.lr={LR}", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
            "actor_rollout_ref.actor.optim.lr_decay_style=constant",
            f"trainer.total_training_steps={steps}", "trainer.test_freq=-1", "trainer.val_before_train=false",
            "trainer.save_freq=1000", "trainer.logger=[jsonl]", f"trainer.default_local_dir={folder / 'ours'}",
        ]  # fmt: skip
        return train_ours(arguments, folder, steps - 1, {"EXAMPLE_DIR": str(models)}, warm_up=WARM_UP_STEPS)


def generate_answers(models: Path, students: dict[str, Path], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the greedy responses of the teacher and of each student to held-out prompts."""
    out = folder / "answers.jsonl"
    folders = {"teacher": models / "teacher", **students}
    command = [sys.executable, "-m", "recipe_gkd", "evaluate", *map(str, folders.values())]
    command += ["--data", str(models / "val.jsonl"), "--responses", str(out), "--dtype", "float32"]
    command += ["--cpu-cache-gb", "0.25", f"data.val_max_samples={N_HELD_OUT}"]
    command += [f"data.max_response_length={RESPONSE_TOKENS}"]
    subprocess.run(command, check=True, cwd=REPO, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {name: records[number * N_HELD_OUT : (number + 1) * N_HELD_OUT] for number, name in enumerate(folders)}


def scores_of(models: Path, students: dict[str, Path], folder: Path) -> dict[str, dict[str, float]]:
    """Return the exact scores of each student; see ``curve_scores.py``."""
    answers = generate_answers(models, students, folder)
    teacher = folder / "teacher.jsonl"
    teacher.write_text("".join(json.dumps(record) + "\n" for record in answers["teacher"]), encoding="utf-8")
    scores = {}
    for name, student in students.items():
        own = folder / f"{name}.jsonl"
        lines = (json.dumps(record | {"answer": record["response"]}) + "\n" for record in answers[name])
        own.write_text("".join(lines), encoding="utf-8")
        files = (models / "teacher", student, own, teacher)
        command = [sys.executable, str(EXAMPLE / "curve_scores.py"), *map(str, files)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=REPO)
        scores[name] = json.loads(done.stdout.splitlines()[-1])
    return scores


def main() -> int:
    """Run the command. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=REPO / "outputs/smollm2", help="folder of the example")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both sides")
    arguments = parse_arguments(parser, steps=8, warm_up=WARM_UP_STEPS, min_steps=WARM_UP_STEPS + 3)
    models: Path = arguments.models.resolve()
    if not (models / "student").is_dir() or not (models / "val.jsonl").is_file():
        parser.error(f"{models} has no models and data; run launch/example_smollm2.sh, or set --models")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `finally` then stops the teacher service
    try:
        python = environment_python(arguments.env.expanduser().absolute())
    except SkippedError as reason:
        print(f"skipped: {reason}")
        return 0
    found: dict[str, list[Measurement]] = {"trl": [], "ours": []}
    scores: list[dict[str, dict[str, float]]] = []
    prompts = (models / "train.jsonl").read_text(encoding="utf-8").splitlines()[:N_PROMPTS]
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "train.jsonl").write_text("\n".join(prompts) + "\n", encoding="utf-8")
            found["trl"].append(run_trl(models, folder, arguments.steps, python, arguments.dtype))
            found["ours"].append(run_ours(models, folder, arguments.steps, arguments.dtype))
            for side, runs in found.items():
                print(f"{side}: {statistics.median(runs[-1].step_s):.2f} s/step", file=sys.stderr)
            students = {
                "untrained": models / "student",
                "trl": folder / "trl",
                "ours": folder / "ours" / f"global_step_{arguments.steps}" / "huggingface",
            }
            scores.append(scores_of(models, students, folder))
    shape = f"{RESPONSES} responses x at most {RESPONSE_TOKENS} tokens, {arguments.steps} steps"
    heading = f"SmolLM2, {arguments.dtype}: {shape}"
    results = report(heading, TARGET, found)
    for name in scores[0]:
        means = {key: statistics.mean(each[name][key] for each in scores) for key in scores[0][name]}
        print(f"{name:9}  " + ", ".join(f"{key} {value:.3f}" for key, value in means.items()))
    if arguments.json:
        text = json.dumps({"requirements": REQUIREMENTS, "times": results, "scores": scores}, indent=2)
        arguments.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
