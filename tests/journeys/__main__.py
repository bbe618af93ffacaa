"""Measure the paths of one step: ``python -m tests.journeys``. Takes about a minute.

It runs three steps of a real training (driver, Megatron actor, vLLM engine, teacher service) with the schedule
``sync``, whose phases follow each other, and a run whose update fails. Every process records the functions that it
calls, and the types of their arguments (:mod:`tests.journeys.tracer`). The length of a journey is the number of files
with a function that received the data of the journey in the last step:

=================  =====================================================================================================
prompt             prompts, responses, samples, batches: from their dispatch to the optimizer step, in all processes
                   but the service's
teacher row        sequences to score and their scores, from the request to the divergence, with the service
weight             tensors, buckets, addresses and statistics during a weight sync
received bucket    buckets and tensors in the engine
save               folders and states of a checkpoint, in driver, actor and the processes that write
error              exceptions in the driver, from the failed call to the line on the terminal
update chain       calls from the training loop to Megatron's schedule, driver and actor together
=================  =====================================================================================================
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests._support.repository import REPO
from tests._support.training_command import Run, make_model, running_teacher
from tests.integration.training.conftest import run_starter

TARGETS = {
    "prompt": 30,
    "teacher row": 24,
    "weight": 22,
    "received bucket": 5,
    "save": 7,
    "error": 12,
    "update chain": 8,
}
SAMPLES = {"Prompt", "Response", "Sample", "ReadyBatch", "PackedBatch", "PackedSequences", "DeviceBatch"}
ROWS = {"TeacherRequest", "TeacherSequence", "ScoredSequence", "PartScores", "StoredTopK", "TeacherTopK"}
BUCKETS = {"Bucket", "BucketPlan", "Tensor"}
WEIGHTS = {*BUCKETS, "TransportAddress", "TransferStats"}
SAVES = {"Path", "PosixPath", "Progress", "ShardedSave", "WriteResult", "MegatronSave"}
FAILING_LOSS = """
import torch
from recipe_gkd.losses import LossOutputs

def loss(inputs):
    if torch.distributed.is_initialized():  # not in the dry run before the start
        raise ArithmeticError("planned")
    return LossOutputs(loss_T=-inputs.student_sampled_logps_T)
"""


@dataclass(frozen=True)
class Call:
    """A recorded call of a function."""

    time: float
    role: str
    file: str
    name: str
    types: Sequence[str] = ()
    stack: Sequence[str] = ()


def read_calls(folder: Path) -> list[Call]:
    """Return the calls of all processes in the order of time."""
    calls: list[Call] = []
    for path in folder.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        role = _role(lines)
        calls += [Call(line[0], role, *line[1:]) for line in lines]
    return sorted(calls, key=lambda call: call.time)


def _role(lines: Sequence[Sequence[Any]]) -> str:
    names, files = {line[2] for line in lines}, {line[1] for line in lines}
    if "main" in names and "recipe_gkd/main_gkd.py" in files:
        return "driver"
    if any(name.startswith("ActorWorker.") for name in names):
        return "actor"
    if any(name.startswith("RolloutWorker.") for name in names):
        return "engine"
    if any(name.startswith("ScoringWorker.") for name in names):
        return "scoring"
    if any(file.startswith("teacher/") for file in files) and not any(f.startswith("recipe_gkd/") for f in files):
        return "service"
    return "writer" if any("writer_process" in file for file in files) else "other"


def first(calls: Sequence[Call], name: str, after: float, role: str | None = None) -> float:
    """Return the time of the first call of a function after a time."""
    return next(call.time for call in calls if call.time > after and call.name == name and role in (None, call.role))


def files(calls: Sequence[Call], roles: Sequence[str], types: Set[str], start: float, end: float) -> list[str]:
    """Return the files with functions that received data of these types, in processes of some roles and a period."""
    return sorted(
        {
            call.file
            for call in calls
            if start <= call.time <= end and call.role in roles and not types.isdisjoint(call.types)
        }
    )


def journeys_of_step(calls: Sequence[Call]) -> dict[str, list[str]]:
    """Return the files of each journey in the last step of the recorded run."""
    start = _starts(calls, "WeightSynchronizer.sync")[-1]
    receive = first(calls, "RolloutWorker.receive_weights", start)
    commit = first(calls, "RolloutWorker.commit_weights", receive)
    generate = first(calls, "RolloutWorker.generate", commit)
    score = first(calls, "ScoringWorker.score", generate)
    update = first(calls, "StudentActor.update", score, "actor")
    save = first(calls, "CheckpointSaver.save", update)
    end = max(call.time for call in calls if call.name.startswith("CheckpointSaver."))
    workers = ("driver", "engine", "scoring", "actor")
    found = {
        "prompt": files(calls, workers, SAMPLES, commit, save),
        "teacher row": files(calls, (*workers, "service"), ROWS, generate, save),
        "weight": files(calls, ("driver", "actor", "engine"), WEIGHTS, start, generate),
        "received bucket": files(calls, ("engine",), BUCKETS, receive, commit),
        "save": files(calls, ("driver", "actor", "writer"), SAVES, save, end),
    }
    remote = next(call for call in calls if call.time > score and "Cluster.update" in call.stack)
    inside = next(call for call in calls if call.time > update and call.role == "actor" and call.stack)
    outside = takewhile(lambda name: name != "Trainer.loop", remote.stack)
    found["update chain"] = [*reversed(list(outside)), *reversed(inside.stack)]
    return found


def journey_of_error(calls: Sequence[Call]) -> list[str]:
    """Return the files of the driver from the failed call to the line on the terminal."""
    failed = first(calls, "WorkerGroup._to_worker_error", 0.0)
    reported = first(calls, "report_error", failed)
    return files(calls, ("driver",), {"Exception"}, failed, reported + 0.1)


def _starts(calls: Sequence[Call], name: str) -> list[float]:
    """Return the times of a coroutine's calls that follow a pause; it is called again whenever it resumes."""
    times = [call.time for call in calls if call.name == name]
    return [time for previous, time in zip([0.0, *times], times, strict=False) if time - previous > 0.5]


@contextmanager
def traced(folder: Path) -> Iterator[None]:
    """Record the processes that are started in the context."""
    folder.mkdir()
    paths = [str(REPO / "tests/journeys/site"), str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    before = {name: os.environ.get(name) for name in ("GKD_JOURNEYS", "PYTHONPATH")}
    os.environ |= {"GKD_JOURNEYS": str(folder), "PYTHONPATH": os.pathsep.join(paths)}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def measure(root: Path) -> dict[str, list[str]]:
    """Run the training twice and return what each journey passes."""
    student, teacher = make_model(root / "student", seed=1), make_model(root / "teacher", seed=2)
    data = root / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i} + {i} ="}) + "\n" for i in range(24)))
    (root / "loss.py").write_text(FAILING_LOSS)
    settings = [
        f"data.train_files={data}", "data.max_prompt_length=16", "data.max_response_length=12",
        "data.train_batch_size=8", f"actor_rollout_ref.model.path={student}",
        "actor_rollout_ref.actor.megatron.dtype=float32", "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.kv_cache_memory_megabytes=32", "trainer.device=cpu", "trainer.scheduler=sync",
        "trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.logger=[jsonl]",
    ]  # fmt: skip
    with traced(root / "calls"):
        for service in running_teacher(teacher, root / "service"):
            settings.append(f"actor_rollout_ref.teacher.server_port={service.port}")
            with run_starter(settings, root) as start:
                _check(start(folder=root / "run").finish(), 0)
    found = journeys_of_step(read_calls(root / "calls"))
    for service in running_teacher(teacher, root / "service 2"):
        settings[-1] = f"actor_rollout_ref.teacher.server_port={service.port}"
        with traced(root / "error"), run_starter(settings, root) as start:
            loss = (f"gkd.custom_loss.path={root}/loss.py", "gkd.custom_loss.name=loss")
            _check(start(*loss, folder=root / "failed").finish(), 1)
    return found | {"error": journey_of_error(read_calls(root / "error"))}


def _check(run: Run, status: int) -> None:
    if run.status != status:
        raise SystemExit(f"the run ended with {run.status}, expected {status}:\n{run.output}")


def main() -> None:
    """Print the length of each journey beside its target, and with ``--list`` its files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files and functions of each journey")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gkd") as root:
        found = measure(Path(root))
    for name, target in TARGETS.items():
        print(f"{name:16} {len(found[name]):3}  (target: at most {target})")
        if arguments.list:
            print("".join(f"    {item}\n" for item in found[name]), end="")


if __name__ == "__main__":
    sys.exit(main())
