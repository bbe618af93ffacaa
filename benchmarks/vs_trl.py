"""Seconds per step of this project and of TRL's on-policy distillation, on the same CPU job, alternating in one run.

    python benchmarks/vs_trl.py [--job small|medium] [--rounds 2] [--steps 30] [--env DIR] [--json FILE]

**TRL**: ``trl.DistillationTrainer`` of TRL 1.16.0, always on-policy, with the teacher in the trainer's process.
(``trl.experimental`` also has ``GKDTrainer``, on-policy with ``lmbda=1``, and ``GOLDTrainer``; they are not measured.
``ServerDistillationTrainer`` and ``AsyncDistillationTrainer`` need vLLM servers.) ``vs_trl_job.py`` has all settings,
such as ``beta=0`` (forward KL), float32, no gradient checkpointing, the batch as one micro-batch. It generates with
``model.generate``, its default. With such a teacher it has no top-k: its loss is on the whole vocabulary. torch uses
its default number of threads.

**Ours**: the training command with ``--config-name quickstart``, the schedule ``one_step_off``, and a teacher service
of ``teacher/start_server.sh``, which sends the ``TOP_K`` most probable ids. Each process has one thread, as in
``launch/quickstart.sh``.

Both train the same random models in float32 with the same prompts, batch size and AdamW. The models give their
only end-of-sequence id a probability below 1e-15, so that every response has the maximum length.

    s/step     median over the steps after the first ``WARM_UP_STEPS``: on our side of ``timing/step``, on TRL's of the
               time between the ends of two steps; then the median over the rounds
    mean       mean over the same steps: in a pipeline single steps can be shorter than the rate that it sustains
    foreign    mean number of CPUs that other programs used meanwhile; the times are valid only if it is near 0
    cpu s      CPU seconds per step, in user and kernel mode, in total and of each group of processes

TRL needs versions of packages that this project does not. It is installed with uv into a separate environment. If
that fails, the command prints the reason and exits with status 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from teacher_processes import REPO, free_port
from trl_environment import ENVIRONMENT, REQUIREMENTS, SkippedError, environment_python
from vs_trl_job import JOBS, PROMPT_TOKENS, Job, busy_s, prepare

WARM_UP_STEPS = 5
TOP_K = 16
LR = 1e-4
START_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 60.0
_POLL_S = 0.05
_GROUPS = {
    "ray::RolloutWorker": "rollout",
    "VLLM::": "rollout",
    "ray::ActorWorker": "actor",
    "ray::ScoringWorker": "scoring",
    "recipe_gkd.main_gkd": "driver",
    "teacher worker": "teacher",
    "teacher proxy": "teacher proxy",
}
"""Part of a command line -> group of the process. Its descendants belong to the same group, if they have none."""


@dataclass(kw_only=True)
class Measurement:
    """Result of one run of one side.

    Attributes:
        step_s: Seconds of each step after the first :data:`WARM_UP_STEPS`.
        cpu_s: Group of processes -> its CPU seconds per step.
        timings: Name of a metric ``timing/NAME`` -> median seconds per step.
        mean_length: Mean length of the responses, in tokens.
        foreign_cpus: Mean number of CPUs that were busy with other processes. The times are wrong if it is not near 0.
    """

    step_s: list[float]
    cpu_s: dict[str, float]
    timings: dict[str, float]
    mean_length: float
    foreign_cpus: float


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Clocks after a number of steps.

    Attributes:
        steps: Completed steps.
        wall_s: Monotonic time.
        busy_s: CPU seconds of all processes of the machine.
        cpu_s: Group of our processes -> its CPU seconds.
    """

    steps: int
    wall_s: float
    busy_s: float
    cpu_s: dict[str, float]


def run_trl(job: Job, folder: Path, steps: int, python: Path) -> Measurement:
    """Train a job with TRL in its environment."""
    files = {"student": "student", "teacher": "teacher", "data": "train.parquet"}
    settings: dict[str, Any] = {name: str(folder / file) for name, file in files.items()}
    settings |= {"responses": job.responses, "response_tokens": job.response_tokens, "lr": LR, "adam_beta2": 0.98}
    return train_trl(settings, folder, steps, python)


def train_trl(
    settings: dict[str, Any], folder: Path, steps: int, python: Path, *, warm_up: int = WARM_UP_STEPS
) -> Measurement:
    """Run ``vs_trl_job.py`` with these settings, which it describes. ``folder`` gets its files."""
    settings = settings | {"steps": steps, "result": str(folder / "trl.json")}
    (folder / "job.json").write_text(json.dumps(settings), encoding="utf-8")
    with (folder / "trl.log").open("w", encoding="utf-8") as output:
        code = subprocess.run(
            [str(python), str(REPO / "benchmarks" / "vs_trl_job.py"), str(folder / "job.json")],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=START_TIMEOUT_S + steps * STEP_TIMEOUT_S,
            check=False,
        ).returncode
    if code:
        raise RuntimeError(f"TRL ended with status {code}:\n{_end_of(folder / 'trl.log')}")
    found = json.loads((folder / "trl.json").read_text(encoding="utf-8"))
    wall_s, cpu_s, busy = (found[name][warm_up - 1 :] for name in ("wall_s", "cpu_s", "busy_s"))
    return Measurement(
        step_s=[after - before for before, after in itertools.pairwise(wall_s)],
        cpu_s={"trl": (cpu_s[-1] - cpu_s[0]) / (len(cpu_s) - 1)},
        timings={},
        mean_length=found["mean_length"],
        foreign_cpus=(busy[-1] - busy[0] - (cpu_s[-1] - cpu_s[0])) / (wall_s[-1] - wall_s[0]),
    )


def run_ours(job: Job, folder: Path, steps: int) -> Measurement:
    """Train a job with this project: teacher service, Ray, vLLM and Megatron."""
    env = {"QUICKSTART_DIR": str(folder)}
    limits = {"N_LOGPROBS": str(TOP_K), "MAX_MODEL_LEN": str(PROMPT_TOKENS + job.response_tokens)}
    with teacher_service(folder / "teacher", folder / "service", limits) as port:
        arguments = ["--config-name", "quickstart", *overrides(job, folder, steps, port)]
        return train_ours(arguments, folder, steps, env)


@contextmanager
def teacher_service(teacher: Path, run_dir: Path, limits: dict[str, str]) -> Iterator[str]:
    """Run a teacher service in float32 during the context, and yield its port."""
    env = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "CKPT_PATH": str(teacher),
        "RUN_DIR": str(run_dir), "DTYPE": "float32", "HTTP_PORT": "-1", **limits,
        "PROXY_FRONTEND_PORT": str(free_port()), "PROXY_BACKEND_PORT": str(free_port()),
    }  # fmt: skip
    _script("start_server.sh", env)
    try:
        yield env["PROXY_FRONTEND_PORT"]
    finally:
        _script("stop_server.sh", env)


def _script(name: str, env: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", str(REPO / "teacher" / name)],
        env=env, cwd=REPO, capture_output=True, text=True, timeout=START_TIMEOUT_S + 60.0, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"teacher/{name} failed:\n{done.stdout}{done.stderr}")


def overrides(job: Job, folder: Path, steps: int, port: str) -> list[str]:
    """Return the arguments of the training command. One step more than ``steps`` keeps its processes alive."""
    return [
        f"data.train_files={folder / 'train.parquet'}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={job.response_tokens}",
        f"data.train_batch_size={job.responses}",
        f"actor_rollout_ref.model.path={folder / 'student'}",
        f"actor_rollout_ref.teacher.server_port={port}",
        f"actor_rollout_ref.actor.optim.lr={LR}",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.actor.optim.lr_decay_style=constant",
        f"trainer.total_training_steps={steps + 1}",
        "trainer.scheduler=one_step_off",
        "trainer.save_freq=-1",
        "trainer.logger=[jsonl]",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / 'ours'}",
    ]


def train_ours(
    arguments: list[str], folder: Path, steps: int, env: dict[str, str], *, warm_up: int = WARM_UP_STEPS
) -> Measurement:
    """Run the training command, whose run folder is ``folder/ours`` and whose teacher is in ``folder/service``."""
    metrics = folder / "ours" / "metrics.jsonl"
    shutil.rmtree(metrics.parent, ignore_errors=True)
    command = [sys.executable, "-m", "recipe_gkd.main_gkd", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    with (folder / "ours.log").open("w", encoding="utf-8") as output:
        driver = subprocess.Popen(command, env=env, cwd=REPO, stdout=output, stderr=subprocess.STDOUT)
    try:
        roots = [driver.pid, *(int(file.read_text().split()[0]) for file in (folder / "service").glob("*.pid"))]

        def wait_for(step: int, timeout_s: float) -> Snapshot:
            deadline = time.monotonic() + timeout_s
            while (done := _n_lines(metrics)) < step:
                if driver.poll() is not None:
                    raise RuntimeError(f"the training ended with {driver.returncode}:\n{_end_of(folder / 'ours.log')}")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"step {step} took over {timeout_s} s:\n{_end_of(folder / 'ours.log')}")
                time.sleep(_POLL_S)
            return Snapshot(steps=done, wall_s=time.monotonic(), busy_s=busy_s(), cpu_s=cpu_seconds(roots))

        before = wait_for(warm_up, START_TIMEOUT_S)
        after = wait_for(steps, steps * STEP_TIMEOUT_S)
        driver.wait(timeout=START_TIMEOUT_S)
    finally:
        if driver.poll() is None:
            driver.terminate()
            driver.wait(timeout=60.0)
    if driver.returncode:
        raise RuntimeError(f"the training ended with {driver.returncode}:\n{_end_of(folder / 'ours.log')}")
    return _measurement(metrics, slice(warm_up, steps), before, after)


def _measurement(metrics: Path, measured: slice, before: Snapshot, after: Snapshot) -> Measurement:
    cpu_s = {group: seconds - before.cpu_s.get(group, 0.0) for group, seconds in after.cpu_s.items()}
    foreign_s = after.busy_s - before.busy_s - sum(cpu_s.values())
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()][measured]
    names = sorted(name for name in rows[-1] if name.startswith("timing/"))
    return Measurement(
        step_s=[row["timing/step"] for row in rows],
        cpu_s={group: seconds / (after.steps - before.steps) for group, seconds in cpu_s.items()},
        timings={name.removeprefix("timing/"): statistics.median(row.get(name, 0.0) for row in rows) for name in names},
        mean_length=statistics.mean(row["response_seq_len/average"] for row in rows),
        foreign_cpus=foreign_s / (after.wall_s - before.wall_s),
    )


def _n_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def _end_of(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")[-3000:]


def cpu_seconds(roots: list[int]) -> dict[str, float]:
    """Return the CPU seconds of the processes of several trees, by group. See :data:`_GROUPS`."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process ended
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    totals: dict[str, float] = defaultdict(float)
    for pid in seconds:
        path = [pid]
        while path[-1] not in roots and path[-1] in parents:
            path.append(parents[path[-1]])
        if path[-1] in roots:
            totals[_group(path)] += seconds[pid]
    return dict(totals)


def _group(path: list[int]) -> str:
    """Return the group of the first process, given its pid and its ancestors' pids."""
    for pid in path:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        group = next((group for part, group in _GROUPS.items() if part in command), None)
        if group == "driver" and pid != path[0]:
            return "ray"  # raylet, GCS and idle workers
        if group:
            return group
    return "other"


def report(heading: str, target: float, found: dict[str, list[Measurement]]) -> dict[str, Any]:
    """Print the table of a job with this target. Return its figures."""
    step_s = {side: statistics.median(statistics.median(m.step_s) for m in runs) for side, runs in found.items()}
    mean_s = {side: statistics.mean(t for m in runs for t in m.step_s) for side, runs in found.items()}
    ratio, mean_ratio = (times["trl"] / times["ours"] for times in (step_s, mean_s))
    print(f"\n{heading}, {os.cpu_count()} CPUs")
    print("side  s/step    mean  (rounds)              tokens  foreign  cpu s  by group")
    for side, runs in found.items():
        rounds = " ".join(f"{statistics.median(m.step_s):.3f}" for m in runs)
        groups = {group: statistics.median(m.cpu_s.get(group, 0.0) for m in runs) for group in runs[-1].cpu_s}
        parts = ", ".join(f"{group} {s:.3f}" for group, s in sorted(groups.items(), key=lambda item: -item[1]))
        means = [statistics.mean(getattr(m, name) for m in runs) for name in ("mean_length", "foreign_cpus")]
        columns = f"{step_s[side]:6.3f}  {mean_s[side]:6.3f}  {rounds:20}  {means[0]:6.1f}  {means[1]:7.2f}"
        print(f"{side:4}  {columns}  {sum(groups.values()):5.2f}  {parts}")
    print(f"TRL / ours: {ratio:.2f} (target {target}), means: {mean_ratio:.2f}")
    return {
        "step_s": step_s, "ratio": ratio, "target": target, "mean_s": mean_s,
        "rounds": {side: [asdict(m) for m in runs] for side, runs in found.items()},
    }  # fmt: skip


def parse_arguments(parser: argparse.ArgumentParser, *, steps: int, warm_up: int, min_steps: int) -> argparse.Namespace:
    """Add the options of both comparisons with TRL, and return the arguments of the command."""
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--steps", type=int, default=steps, help=f"steps of a run, the first {warm_up} unmeasured")
    parser.add_argument("--env", type=Path, default=ENVIRONMENT, help="folder of TRL's environment")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.steps < min_steps:
        parser.error(f"expected --rounds of at least 1 and --steps of at least {min_steps}")
    return arguments


def main() -> int:
    """Run the command. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, action="append", help="repeatable; default: all")
    arguments = parse_arguments(parser, steps=30, warm_up=WARM_UP_STEPS, min_steps=WARM_UP_STEPS + 2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `finally` then stops the teacher service
    try:
        python = environment_python(arguments.env.expanduser().absolute())
    except SkippedError as reason:
        print(f"skipped: {reason}")
        return 0
    results = {}
    for name in arguments.job or JOBS:
        job = JOBS[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            prepare(job, folder, arguments.steps + 1)
            sides: dict[str, Callable[[], Measurement]] = {
                "trl": partial(run_trl, job, folder, arguments.steps, python),
                "ours": partial(run_ours, job, folder, arguments.steps),
            }
            found: dict[str, list[Measurement]] = {side: [] for side in sides}
            for _ in range(arguments.rounds):
                for side, run in sides.items():
                    found[side].append(run())
                    print(f"{name} {side}: {statistics.median(found[side][-1].step_s):.3f} s/step", file=sys.stderr)
        heading = f"{name}: {job.responses} responses x {job.response_tokens} tokens"
        results[name] = report(heading, job.target, found)
    if arguments.json:
        arguments.json.write_text(json.dumps({"requirements": REQUIREMENTS, "jobs": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
