"""Train for a long time while processes are killed and stopped, and measure whether anything grows.

    python -m tests.soak [--minutes 60] [--fault-every 60] [--seed 0] [--dir DIR] [--json FILE]

A training of the quickstart's size (``one_step_off``) with a teacher service of two workers. In the first half, every
``--fault-every`` seconds on average, one random fault of :data:`FAULTS`, which the run must survive. The second half is
without faults, so that the growth of a worker can be told from the memory that each new one takes in its first minutes.
Every 10 s a sample of the memory, file descriptors and threads of each process, and of ``/dev/shm``, temporary files
and logs. Memory is anonymous memory: pages of libraries change between shared and private with the other processes. Its
lowest values are compared, because freed memory is returned once per minute and taken again by the next step. At the
end: growth per hour after the first ten minutes of the run and of the process, for the whole run and for its first half
alone, the number of faults, and a check that each sample was trained on once.

The exit status is 1 if anything grows beyond its limit, the run ended, or a process is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from tests._support.growth import Measure, Sample, growths, table
from tests._support.repository import REPO
from tests._support.sample_records import check_exactly_once, record_of
from tests._support.teacher_service import run_script
from tests._support.training_command import (
    RUN_ID_VARIABLE,
    Run,
    Teacher,
    processes_of_run,
    running_teacher,
    stop_service,
)

WARM_UP_S = 600.0
SAMPLE_EVERY_S = 10.0
SILENCE_S = 240.0
"""Time without a step after which the run counts as hung. The longest fault costs two deadlines and two starts."""
SAVE_FREQ = 25
TEACHER = {"N_LOGPROBS": 16, "KV_CACHE_MIB": 64}
"""Options of the teacher service. All pages of a small KV cache are in use soon, so that they are no growth."""
ROLES = {
    "ray::ActorWorker": "actor",
    "ray::RolloutWorker": "rollout worker",
    "ray::ScoringWorker": "scoring worker",
    "/raylet/raylet": "raylet",
    "/gcs/gcs_server": "Ray control service",
    "teacher proxy": "teacher proxy",
    "teacher worker": "teacher worker",
    "dashboard": "Ray dashboard and agents",
    "log_monitor": "Ray log monitor",
    "ray/_private/monitor": "Ray monitor",
}
"""Part of a command line -> role of the process."""
MEMORY = Measure("MB", limit=25.0, relative=0.05, of_lows=True)
MEASURES = {
    "memory": MEMORY,
    "teacher worker memory": replace(MEMORY, warm_up_s=1500.0),
    "file descriptors": Measure("", limit=5.0),
    "threads": Measure("", limit=8.0),
    "size": Measure("MB", limit=25.0, relative=0.05),
    "files": Measure("", limit=20.0),
    "logs of Ray files": Measure("", limit=400.0),
    "logs of the teacher files": Measure("", limit=60.0),
    "Ray log monitor file descriptors": Measure("", limit=200.0),
}
"""Limits by measure, or by role and measure. Each teacher worker has its own log. Ray keeps three logs of each process
until the end of the session, and its log monitor keeps up to 200 of them open. A pool of threads grows one by one up to
its size. The memory of a teacher worker reaches its maximum within 25 minutes."""
SETTINGS = (
    "trainer.total_training_steps=1000000",
    f"trainer.save_freq={SAVE_FREQ}",
    "trainer.max_actor_ckpt_to_keep=2",
    "trainer.max_worker_restarts=100000",
    "trainer.max_actor_restarts=100000",
    "trainer.logger=[jsonl]",
    "actor_rollout_ref.actor.optim.lr=1e-5",
    "actor_rollout_ref.actor.timeout_s=30",
    "actor_rollout_ref.rollout.timeout_s=30",
    "actor_rollout_ref.nccl_timeout=20",
    "actor_rollout_ref.teacher.on_failure=wait",
)


class LowestMemory:
    """Lowest anonymous memory of processes since the last call of :meth:`take`, sampled every 0.1 s by a thread."""

    def __init__(self) -> None:
        self._lowest: dict[int, int] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._sample, daemon=True).start()

    def take(self, pid: int) -> float:
        """Return the lowest value of a process in MB, and the present one the first time."""
        with self._lock:
            present = anonymous_bytes(pid)
            lowest = min(self._lowest.get(pid, present), present)
            self._lowest[pid] = present
        return lowest / 1e6

    def _sample(self) -> None:
        while True:
            with self._lock:
                for pid, lowest in list(self._lowest.items()):
                    try:
                        self._lowest[pid] = min(lowest, anonymous_bytes(pid))
                    except OSError:
                        del self._lowest[pid]
            time.sleep(0.1)


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """A run, its teacher service, and the faults and samples so far.

    Attributes:
        run: The training.
        faults: Number of faults by name.
        samples: Values of all measures.
        started: Start, of the monotonic clock.
    """

    def __init__(self, run: Run, teacher: Teacher, rng: random.Random, joined: ExitStack) -> None:
        self.run, self.teacher, self._rng, self._joined = run, teacher, rng, joined
        self.faults: Counter[str] = Counter()
        self._next: list[str] = []
        self.samples: list[Sample] = []
        self._memory = LowestMemory()
        self.started = time.monotonic()

    # --- faults ---

    def inject(self) -> None:
        """Inject the next fault of a random order. Without its process, which may be starting, nothing happens."""
        if not self._next:
            self._next = self._rng.sample(list(FAULTS), len(FAULTS))
        if FAULTS[name := self._next.pop()](self):
            self.faults[name] += 1
            print(f"{self.seconds:6.0f} s  step {self.step:5d}  {name}", flush=True)

    def signal_run(self, part: str, number: int) -> bool:
        """Send a signal to the oldest process of the run whose command line has ``part``."""
        pids = sorted(int(line.split()[0]) for line in processes_of_run(self.run.run_id) if part in line)
        return bool(pids) and send(pids[0], number)

    def kill_teacher_worker(self) -> bool:
        """Kill a teacher worker, and start another one."""
        pids = [p for p in self._service_pids() if "teacher worker" in command_of(p)]
        if len(pids) < 2 or not send(self._rng.choice(pids), signal.SIGKILL):
            return False
        folder = self.teacher.run_dir / f"joined{self.faults['teacher worker killed']}"
        self._joined.callback(stop_service, folder)
        joined = run_script("join_server.sh", RUN_DIR=str(folder), **self.teacher.settings)
        assert joined.returncode == 0, joined.stdout + joined.stderr
        return True

    def stop_proxy_for_a_while(self) -> bool:
        """Stop the teacher's proxy for 8 s."""
        [proxy] = [p for p in self._service_pids() if "teacher proxy" in command_of(p)]
        send(proxy, signal.SIGSTOP)
        time.sleep(8)
        return send(proxy, signal.SIGCONT)

    # --- samples ---

    def take_samples(self) -> None:
        """Read all measures."""
        at_s = self.seconds
        for process in self._processes():
            with suppress(psutil.Error, OSError), process.oneshot():
                role, source = role_of(process, self.run.process.pid), f"{process.pid}-{process.create_time()}"
                values = {
                    "memory": self._memory.take(process.pid),
                    "file descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                }
                self.samples += [Sample(role, name, source, at_s, float(value)) for name, value in values.items()]
        for role, folder in self._folders().items():
            sizes = list(file_sizes(folder))
            self.samples.append(Sample(role, "size", role, at_s, sum(sizes) / 1e6))
            self.samples.append(Sample(role, "files", role, at_s, float(len(sizes))))

    def _processes(self) -> Iterator[psutil.Process]:
        for pid in [self.run.process.pid, *self._service_pids()]:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                yield from (process, *process.children(recursive=True))

    def _service_pids(self) -> list[int]:
        files = self.teacher.run_dir.rglob("*.pid")
        pids = [int(file.read_text().split()[0]) for file in files]
        return [pid for pid in pids if psutil.pid_exists(pid)]

    def _folders(self) -> dict[str, Path]:
        return {
            "/dev/shm": Path("/dev/shm"),
            "temporary files": self.run.temporary,
            "logs of Ray": self.run.folder.parent / "ray" / "ray" / "session_latest" / "logs",
            "logs of the teacher": self.teacher.run_dir,
        }

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self.started

    @property
    def step(self) -> int:
        """Number of completed steps of the present history."""
        path = self.run.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


FAULTS: dict[str, Callable[[Soak], bool]] = {
    "actor killed": lambda soak: soak.signal_run("ray::ActorWorker", signal.SIGKILL),
    "actor stopped": lambda soak: soak.signal_run("ray::ActorWorker", signal.SIGSTOP),
    "rollout worker killed": lambda soak: soak.signal_run("ray::RolloutWorker", signal.SIGKILL),
    "rollout worker stopped": lambda soak: soak.signal_run("ray::RolloutWorker", signal.SIGSTOP),
    "scoring worker killed": lambda soak: soak.signal_run("ray::ScoringWorker", signal.SIGKILL),
    "teacher worker killed": Soak.kill_teacher_worker,
    "teacher proxy stopped for 8 s": Soak.stop_proxy_for_a_while,
}


def send(pid: int, number: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def command_of(pid: int) -> str:
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def role_of(process: psutil.Process, driver: int) -> str:
    if process.pid == driver:
        return "driver"
    command = " ".join(process.cmdline())
    return next((role for part, role in ROLES.items() if part in command), "other processes")


def file_sizes(folder: Path) -> Iterator[int]:
    """Yield the size on the disk of each file below a folder."""
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                yield path.stat().st_blocks * 512


@contextmanager
def running_training(folder: Path, teacher: Teacher) -> Iterator[Run]:
    """Start the training, and end it with Ctrl-C."""
    temporary = Path(tempfile.mkdtemp(prefix="gkd", dir="/tmp"))  # the path of a Unix socket must be short
    run_id = f"soak-{os.getpid()}"
    command = [sys.executable, "-m", "recipe_gkd.main_gkd", "--config-name", "quickstart", *SETTINGS]
    command += [
        f"trainer.default_local_dir={folder / 'run'}",
        f"actor_rollout_ref.teacher.server_port={teacher.port}",
    ]
    (folder / "ray").mkdir(exist_ok=True)
    env = {
        "QUICKSTART_DIR": str(folder),
        RUN_ID_VARIABLE: run_id,
        "TMPDIR": str(temporary),
        "RAY_TMPDIR": str(folder / "ray"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, env=os.environ | env, stdout=output, stderr=output, text=True, cwd=REPO)
        run = Run(process, folder / "run", run_id, temporary)
        try:
            yield run
        finally:
            send(process.pid, signal.SIGINT)
            run.finish()


def train_with_faults(soak: Soak, minutes: float, fault_every_s: float, rng: random.Random) -> str | None:
    """Take samples until the time is over, and inject faults in its first half. Return the reason of an earlier end."""
    next_fault_s, step, step_at_s = 60.0, 0, 0.0
    while soak.seconds < 60 * minutes:
        if soak.run.process.poll() is not None:
            return f"the run ended with status {soak.run.process.returncode}; see output.txt and run.log"
        if soak.step != step:
            step, step_at_s = soak.step, soak.seconds
        if soak.seconds - step_at_s > SILENCE_S:
            return f"no step for {SILENCE_S:g} s"
        soak.take_samples()
        if next_fault_s < soak.seconds < 30 * minutes:
            soak.inject()
            next_fault_s = soak.seconds + rng.uniform(0.5, 1.5) * fault_every_s
        time.sleep(SAMPLE_EVERY_S)
    return None


def main() -> int:
    """Run the soak test, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--fault-every", type=float, default=60.0, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="folder of the models and the run; default: a temporary one")
    parser.add_argument("--json", type=Path, help="file for the figures and all samples")
    arguments = parser.parse_args()
    folder = (arguments.dir or Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"files: {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "recipe_gkd.quickstart.prepare", "--out", str(folder)], check=True, cwd=REPO)
    rng = random.Random(arguments.seed)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a command in the background ignores it, and its children
    with (
        contextmanager(running_teacher)(folder / "teacher", folder / "service", n_workers=2, **TEACHER) as teacher,
        ExitStack() as joined,
        running_training(folder, teacher) as run,
    ):
        soak = Soak(run, teacher, rng, joined)
        problem = train_with_faults(soak, arguments.minutes, arguments.fault_every, rng)
        step, seconds = soak.step, soak.seconds
    leftovers = run.leftovers()
    warm_up_s = min(WARM_UP_S, seconds / 6)
    found = list(growths(soak.samples, MEASURES, warm_up_s))
    with_faults = list(growths([s for s in soak.samples if s.at_s < seconds / 2], MEASURES, warm_up_s))
    record = record_of(run.folder)
    print(f"\nwith faults, then without:\n{table(found, MEASURES)}\n\nwith faults:\n{table(with_faults, MEASURES)}\n")
    print(f"{seconds / 60:.0f} minutes, {step} steps; faults: {dict(soak.faults)}")
    n_starts = len({r["resumed_from"] for r in record})
    print(f"ended early: {problem}; left over: {leftovers}; starts of the actors: {n_starts}")
    check_exactly_once(run.folder, len(record), per_step=64, max_staleness=1)
    print(f"each of {64 * len(record)} samples was trained on once")
    if arguments.json:
        figures = {"minutes": seconds / 60, "steps": step, "faults": soak.faults, "problem": problem}
        rows = {"growth": list(map(asdict, found)), "growth_with_faults": list(map(asdict, with_faults))}
        arguments.json.write_text(json.dumps(figures | rows | {"samples": list(map(asdict, soak.samples))}))
    return int(problem is not None or bool(leftovers) or not all(row.is_within for row in [*found, *with_faults]))


if __name__ == "__main__":
    sys.exit(main())
