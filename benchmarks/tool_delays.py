"""Throughput of a training over conversations whose tool takes time, relative to the same training with a fast tool.

    python benchmarks/tool_delays.py --models outputs/calculator [--rounds 2] [--steps 30] [--delay 2] [--json FILE]

MODELS is the folder of ``launch/example_calculator.sh`` after its training: its trained student calls the calculator in
every conversation. vLLM, Megatron and the teacher service are real; a call takes 0 to ``--delay`` seconds. The
conversations of a batch wait for their tools while those of later batches are in the engine, so the throughput depends
on the bound of the staleness. Alternates in each round; a round takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from delayed_calculator import DELAY_VARIABLE
from teacher_processes import REPO
from vs_trl import Measurement, teacher_service, train_ours

from recipe_gkd.commands.model_folder import model_folder
from recipe_gkd.errors import GkdError

STALENESS = (4, 8)
WARM_UP_STEPS = 8
LIMITS = {"N_LOGPROBS": "16", "MAX_MODEL_LEN": "64"}
EXAMPLE = REPO / "examples/calculator"


def run(models: Path, student: Path, folder: Path, steps: int, staleness: int, delay_s: float) -> Measurement:
    """Train with tools that take up to ``delay_s`` seconds. A tiny learning rate gives all runs the same work."""
    with teacher_service(models / "teacher", folder / "service", LIMITS) as port:
        arguments = [
            "--config-path", str(EXAMPLE), "--config-name", "calculator",
            f"actor_rollout_ref.model.path={student}",
            f"actor_rollout_ref.teacher.server_port={port}",
            "actor_rollout_ref.actor.optim.lr=1e-30", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
            f"rollout.tools=[{Path(__file__).with_name('delayed_calculator.py')}:calculator]",
            "trainer.scheduler=n_step_off", f"trainer.max_staleness={staleness}",
            f"trainer.inflight_update={str(staleness > 0).lower()}", f"trainer.total_training_steps={steps}",
            "trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=-1",
            "trainer.logger=[jsonl]", f"trainer.default_local_dir={folder / 'ours'}",
        ]  # fmt: skip
        env = {"CALCULATOR_DIR": str(models), DELAY_VARIABLE: str(delay_s)}
        # The last batches are trained on while no later ones are generated, and are not measured.
        return train_ours(arguments, folder, steps - staleness - 1, env, warm_up=WARM_UP_STEPS)


def main() -> int:
    """Run the command. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=REPO / "outputs/calculator", help="folder of the example")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--delay", type=float, default=2.0, help="longest call in seconds")
    parser.add_argument("--staleness", type=int, nargs="+", default=STALENESS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    models: Path = arguments.models.resolve()
    try:
        student = model_folder(models / "run")
    except GkdError as error:
        parser.error(f"{error}; run launch/example_calculator.sh, or set --models")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `finally` then stops the teacher service
    step_s: dict[int, dict[float, list[float]]] = {each: {0.0: [], arguments.delay: []} for each in arguments.staleness}
    for _ in range(arguments.rounds):
        for staleness, by_delay in step_s.items():
            for delay_s, found in by_delay.items():
                with tempfile.TemporaryDirectory() as folder:
                    measured = run(models, student, Path(folder), arguments.steps, staleness, delay_s)
                found.append(statistics.mean(measured.step_s))
                print(
                    f"staleness {staleness}, calls of 0 to {delay_s:g} s: {found[-1]:.2f} s/step, "
                    f"{measured.mean_length:.1f} tokens a response, {measured.foreign_cpus:.2f} CPUs of other programs",
                    file=sys.stderr,
                )
    print(f"calls of 0 to {arguments.delay:g} s: seconds per step, and throughput relative to calls that take no time")
    print("staleness   fast   slow   throughput (each round)")
    for staleness, by_delay in step_s.items():
        fast, slow = by_delay.values()
        ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(fast, slow, strict=True))
        print(f"{staleness:<9} {min(fast):6.2f} {min(slow):6.2f}   {ratios}")
    if arguments.json:
        arguments.json.write_text(json.dumps(step_s, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
