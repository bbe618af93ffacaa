"""Random faults during saves: a process is killed or the disk is full, and the run resumes from a complete checkpoint.

The actors (two Megatron ranks on gloo), their writer processes, ``Trainer.fit`` with its saver, the run lock, recovery
and resume are real. The training loop only updates and saves. Calls to the actors use pipes instead of Ray.

    python -m tests.integration.training.chaos_saves [COUNT [SEED]]

For pytest, CHAOS_SAVES and CHAOS_SEED set the number of trials and the seed. A reference run records a hash of the
weights after every step. Each trial resumes, and its weights must have the hash of the checkpoint's step, and later the
hashes of the following steps, which depend on the optimizer state. The fault hits the driver, an actor rank, one of its
writer processes, or the disk (by a file size limit, which another process can set).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests._support.ports import free_port
from tests._support.repository import REPO

N_TRIALS, SEED = int(os.environ.get("CHAOS_SAVES", "100")), int(os.environ.get("CHAOS_SEED", "0"))
N_RANKS, STEPS_PER_TRIAL, LAST_STEP = 2, 2, 15
TRIAL_TIMEOUT_S = 90.0  # Far above the usual duration and below the actors' own timeout, so that a hang fails the test.
FAULTS = ("driver", "rank", "writer", "disk")


@pytest.mark.slow
@pytest.mark.timeout(60 + 12 * N_TRIALS)
def test_run_resumes_after_fault_during_save(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.training.chaos_saves", str(N_TRIALS), str(SEED)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


# ---- an actor rank


def train_step(actor: Any, step: int) -> None:
    """Train on a fixed batch of the step."""
    from tests._support.tiny_models import make_samples, update

    update(actor, make_samples(4, seed=step), step)


def digest(actor: Any) -> str:
    """Return a hash of the weights."""
    from recipe_gkd.commands.gpu_smoke.tiny_actor import exported

    weights = sorted(exported(actor).items())
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for _, tensor in weights)).hexdigest()


def serve_rank(rank: int, port: int, config: Any, pipe: Connection) -> None:
    """Start an actor and serve calls from the pipe until it is closed."""
    from recipe_gkd.errors import GkdError, WorkerError
    from tests._support.tiny_models import started

    with started(rank, N_RANKS, port, config, total_steps=LAST_STEP) as actor:
        additional = {function.__name__: partial(function, actor) for function in (train_step, digest)}
        while True:
            try:
                number, method, args = pipe.recv()
            except EOFError:
                os._exit(0)
            try:
                reply = True, additional.get(method, getattr(actor, method, None))(*args)  # type: ignore[misc]
            except GkdError as error:
                reply = False, error
            except Exception as error:  # noqa: BLE001  # WorkerGroup does the same.
                reply = False, WorkerError(f"{method}: rank {rank}: {type(error).__name__}: {error}")
            pipe.send((number, *reply))


class Group:
    """Substitute for ``WorkerGroup`` that uses pipes. A broken pipe is a dead rank."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.pipes, self.number = pipes, 0

    async def call(self, method: Any, *args: Any, timeout_s: float, phase: str) -> list[Any]:
        """Call a method on all ranks and return the results by rank. Raise the first error."""
        method = method.__name__
        from recipe_gkd.errors import DeadlineError, WorkerDied

        self.number += 1
        deadline = time.monotonic() + timeout_s
        replies: dict[int, Any] = {}
        errors: list[Exception] = []
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send((self.number, method, args))
            except OSError:
                raise WorkerDied(f"{phase}: rank {rank} died") from None
        while len(replies) + len(errors) < len(self.pipes):
            if errors:
                deadline = min(deadline, time.monotonic() + 1.0)
            while not (ready := wait(self.pipes, 0)) and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
            if not ready:
                raise errors[0] if errors else DeadlineError(f"{phase}: no reply within {timeout_s:g} s")
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    number, succeeded, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    raise WorkerDied(f"{phase}: rank {rank} died") from None
                if number != self.number:
                    continue  # The reply belongs to a call that timed out.
                if succeeded:
                    replies[rank] = value
                else:
                    errors.append(value)
        if errors:
            raise errors[0]
        return [replies[rank] for rank in range(len(self.pipes))]


# ---- the driver


class LiftLimits(logging.Handler):
    """Handler that lifts the file size limit as soon as a save has failed."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(logging.WARNING)
        self.pids = pids

    def emit(self, record: logging.LogRecord) -> None:
        if "could not be saved" in record.getMessage():
            for pid in (os.getpid(), *self.pids):
                with suppress(ProcessLookupError):
                    limit_files(pid, None)


def limit_files(pid: int, n_bytes: int | None) -> None:
    """Set the file size limit of a process. None removes the limit."""
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if n_bytes is None else n_bytes, hard))


def drive(config: Any, pipes: list[Connection], events: Connection, pids: list[int]) -> None:
    """Run the driver process and send the events of the run. The last event is its end, with an error or none."""
    logging.basicConfig(filename=Path(config.trainer.default_local_dir) / "run.log", level=logging.INFO, force=True)
    logging.getLogger("recipe_gkd.checkpoints").addHandler(LiftLimits(pids))
    try:
        failed_saves = asyncio.run(train(config, Group(pipes), events))
    except Exception as error:  # noqa: BLE001 - sent to the parent, which reports it
        events.send(("end", f"{type(error).__name__}: {error}", None))
    else:
        events.send(("end", "", failed_saves))


async def train(config: Any, group: Group, events: Connection) -> int:
    """Resume, train up to `STEPS_PER_TRIAL` steps with a save after each, and return the number of failed saves."""
    from types import SimpleNamespace

    from recipe_gkd.actor.ray_worker import ActorWorker
    from recipe_gkd.checkpoints.folders import recover
    from recipe_gkd.checkpoints.resume import load_first_usable, resume_points
    from recipe_gkd.checkpoints.run_lock import locked
    from recipe_gkd.checkpoints.state import Progress, ResumeState
    from recipe_gkd.errors import WorkerDied
    from recipe_gkd.trainer import Trainer

    class Run(Trainer):
        async def loop(self, _: object) -> None:
            while self.progress.step < self.last_step:
                await self.call_actors(train_step, self.progress.step)
                step = self.progress.step + 1
                self.progress = dataclasses.replace(self.progress, step=step, prompts_trained=4 * step)
                events.send(("trained", step, (await self.call_actors(digest))[0]))
                await self.save()
                events.send(("saved", step, self.saver.failed_saves))

        async def save(self) -> None:
            events.send(("saving", self.progress.step, None))
            await super().save()

    root = Path(config.trainer.default_local_dir)
    fresh = Progress(0, 0, 64, 1, True, data_fingerprint="fingerprint")
    timeout_s = config.actor_rollout_ref.actor.timeout_s
    with locked(root):
        recover(root)
        start = ResumeState(fresh)
        if points := resume_points(config, fresh):

            async def load(path: str) -> None:
                await group.call(ActorWorker.load_checkpoint, path, timeout_s=timeout_s, phase="load_checkpoint")

            point = await load_first_usable(points, load, may_skip=config.trainer.resume_mode == "auto")
            start = ResumeState(point.progress, point.folder)
        [weights, *_] = await group.call(digest, timeout_s=timeout_s, phase="digest")
        events.send(("resumed", start.progress.step, weights))
        last = min(start.progress.step + STEPS_PER_TRIAL, LAST_STEP)
        loader: Any = SimpleNamespace(
            data=SimpleNamespace(ids=[np.zeros(1, np.int32)]), last_step=lambda position, step: last
        )
        teachers: Any = SimpleNamespace(resume=lambda _: None)

        async def actor_is_lost(error: BaseException) -> bool:
            return isinstance(error, WorkerDied)

        workers: Any = SimpleNamespace(
            actor_is_lost=actor_is_lost, actors=group, rollouts=[], engine_dtype="float32", actor_devices=("cpu",)
        )
        run = Run(config, workers, teachers, loader, start)
        await run.fit()
        return run.saver.failed_saves


# ---- a trial


@dataclasses.dataclass
class Trial:
    """Processes of one run, and the events that its driver has sent.

    Attributes:
        ranks: Processes of the actor ranks.
        events: Pipe from the driver.
        received: Events so far: kind, step or error, and a value.
    """

    ranks: list[Any]
    driver: Any
    events: Connection
    received: list[tuple[str, Any, Any]] = dataclasses.field(default_factory=list)

    def next(self, timeout_s: float) -> tuple[str, Any, Any] | None:
        """Return the next event, or None if the driver is dead or sent no event within ``timeout_s``."""
        try:
            if not self.events.poll(max(0.0, timeout_s)):
                return None
            self.received.append(self.events.recv())
        except (EOFError, OSError):
            return None
        return self.received[-1]

    def events_of_kind(self, kind: str) -> list[tuple[Any, Any]]:
        """Return the events of one kind, without the kind."""
        return [event[1:] for event in self.received if event[0] == kind]

    def descendants(self) -> dict[int, list[psutil.Process]]:
        """Return the child processes of each rank."""
        found = {}
        for number, rank in enumerate(self.ranks):
            with suppress(psutil.NoSuchProcess):
                found[number] = psutil.Process(rank.pid).children(recursive=True)
        return found


@contextmanager
def run(config: Any) -> Iterator[Trial]:
    """Start the ranks and the driver of a run. On exit kill them, and check that their child processes end."""
    context = multiprocessing.get_context("fork")
    pairs, (here, there), port = [context.Pipe() for _ in range(N_RANKS)], context.Pipe(duplex=False), free_port()
    all_ends = [end for pair in pairs for end in pair] + [here, there]

    def run_child(kept: list[Connection], work: Any, *args: Any) -> None:
        for end in all_ends:
            if end not in kept:
                end.close()
        with open(os.devnull, "w") as null:  # Hide messages about killed writers.
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
        try:
            work(*args)
        finally:
            os._exit(0)

    ranks = [
        context.Process(target=run_child, args=([pairs[rank][1]], serve_rank, rank, port, config, pairs[rank][1]))
        for rank in range(N_RANKS)
    ]
    for process in ranks:
        process.start()
    pipes = [pair[0] for pair in pairs]
    pids = [process.pid for process in ranks]
    driver = context.Process(target=run_child, args=([*pipes, there], drive, config, pipes, there, pids))
    driver.start()
    for end in all_ends:
        if end is not here:
            end.close()
    trial = Trial(ranks, driver, here)
    children: list[psutil.Process] = []
    try:
        yield trial
        children = [child for found in trial.descendants().values() for child in found]
    finally:
        for process in (driver, *ranks):  # Ray also ends the workers of a dead driver.
            process.kill()
            process.join()
        here.close()
        _, alive = psutil.wait_procs(children, timeout=15)
        for child in alive:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    assert not alive, f"alive after their actor's end: {alive}"


def inject_fault(kind: str, trial: Trial, rng: random.Random, save_s: float) -> str:
    """Inject a fault at a random time of the save that has just started, and return a description of it."""
    before = {child.pid for found in trial.descendants().values() for child in found}
    if kind == "disk":
        victim = rng.choice([trial.driver, *trial.ranks])
        time.sleep(rng.choice([0.0, rng.uniform(0, save_s)]))
        limit_files(victim.pid, rng.choice([0, rng.randrange(200), rng.randrange(100_000)]))
        return "disk"
    until = time.monotonic() + rng.uniform(0, 1.2 * save_s)
    if kind in ("driver", "rank"):
        time.sleep(max(0.0, until - time.monotonic()))
        os.kill(trial.driver.pid if kind == "driver" else rng.choice(trial.ranks).pid, signal.SIGKILL)
        return kind
    while time.monotonic() < until + 2 * save_s:
        writers = [child for found in trial.descendants().values() for child in found if child.pid not in before]
        with suppress(psutil.NoSuchProcess):
            if writers and (time.monotonic() > until or rng.random() < 0.3):
                rng.choice(writers).kill()
                return kind
        time.sleep(0.002)
    return f"{kind} (had already ended)"


def check_folder(root: Path) -> None:
    """Check that each folder with a final name is complete, and that the latest checkpoint is one of them."""
    from recipe_gkd.checkpoints.folders import LATEST, damage, final_folder, read_latest, steps_of

    broken = {step: damage(final_folder(root, step)) for step in steps_of(root)}
    assert not any(broken.values()), broken
    latest = read_latest(root)
    temporary = [root / f"{prefix}global_step_{latest}" for prefix in (".replaced_", ".writing_")]
    is_temporary = any(folder.exists() for folder in temporary)
    assert latest in broken or (latest is None and not (root / LATEST).exists()) or is_temporary, latest


def one_trial(
    config: Any, kind: str, rng: random.Random, expected: dict[int, str], save_s: float, resumes_at: int
) -> str:
    """Resume, train, inject a fault into one of the saves, and return a description of the outcome."""
    deadline = time.monotonic() + TRIAL_TIMEOUT_S
    faulty_save = rng.randrange(STEPS_PER_TRIAL)
    fault, n_saves = "", 0
    with run(config) as trial:
        while (event := trial.next(deadline - time.monotonic())) and event[0] != "end":
            if event[0] in ("resumed", "trained"):
                assert event[2] == expected[event[1]], f"the weights after step {event[1]} differ"
                assert event[0] == "trained" or resumes_at in (-1, event[1]), (
                    f"resumed from {event[1]}, not {resumes_at}"
                )
            if event[0] == "saving":
                n_saves += 1
                if n_saves == faulty_save + 1:
                    fault = inject_fault(kind, trial, rng, save_s)
        assert time.monotonic() < deadline, f"no end after {fault}: {trial.received[-3:]}"
        log = Path(config.trainer.default_local_dir) / "run.log"
        assert trial.events_of_kind("resumed"), f"did not start:\n{log.read_text()[-2000:]}"
        ends = trial.events_of_kind("end")
        error, failed = ends[0] if ends else ("killed", None)
        if fault == "driver":
            assert error in ("killed", ""), error
        elif fault == "rank":
            assert error == "" or error.startswith("WorkerDied"), error
        else:  # The run continued to its end.
            assert error == "" and failed in (0, 1), f"{fault}: {error}"
    return f"{fault or 'no fault'}{' failed save' if failed else ''}"


def make_run_config(model: Path, root: Path, *overrides: str) -> Any:
    """Return the configuration of a run in ``root`` that saves after each step."""
    from tests._support.tiny_models import ACTOR, make_config

    return make_config(
        model, f"{ACTOR}.timeout_s=120", "actor_rollout_ref.nccl_timeout=120", "trainer.save_freq=1",
        f"trainer.default_local_dir={root}", *overrides, ranks=N_RANKS,
    )  # fmt: skip


def damage_checkpoint(folder: Path, rng: random.Random) -> None:
    """Truncate or remove a file of a checkpoint, or all of it."""
    shard = rng.choice(sorted((folder / "actor").glob("*.distcp")))
    file = rng.choice([shard, folder / "trainer.json", folder / "actor" / "metadata.json", folder / "actor/.metadata"])
    damage = rng.choice(["truncate", "remove", "remove all"])
    if damage == "truncate":
        os.truncate(file, rng.randrange(file.stat().st_size))
    elif damage == "remove":
        file.unlink()
    else:
        shutil.rmtree(folder)


def clear_damage(root: Path, damaged: Path | None, inode: int | None) -> None:
    """Remove the damaged folder, if the trial has not replaced it, and correct the name of the latest checkpoint."""
    from recipe_gkd.checkpoints.folders import read_latest, steps_of, write_latest

    if damaged and damaged.exists() and damaged.stat().st_ino == inode:
        shutil.rmtree(damaged)
    if damaged and not damaged.exists() and damaged.name == f"global_step_{read_latest(root)}":
        write_latest(root, max(step for step in steps_of(root) if step < int(damaged.name[12:])))


def choose_overrides(root: Path, rng: random.Random) -> tuple[list[str], int, Path | None]:
    """Choose the settings of a trial, and damage the latest checkpoint in up to 15 % of the trials.

    Up to a quarter of the trials resume from an earlier step, and replace the checkpoints after it.

    Returns:
        Overrides, the step from which the trial must resume (-1: any), and the damaged folder, if any.
    """
    from recipe_gkd.checkpoints.folders import read_latest, recover, steps_of
    from tests._support.tiny_models import ACTOR

    contents = "[model,optimizer,extra" + rng.choice([",hf_model]", "]"])
    settings = [
        f"{ACTOR}.checkpoint.save_contents={contents}",
        f"{ACTOR}.checkpoint.async_save={rng.choice(['true', 'true', 'false'])}",
        f"trainer.max_actor_ckpt_to_keep={rng.choice(['null', '2'])}",
    ]
    choice = rng.random()
    if choice < 0.5:
        recover(root)  # Else the resuming run recovers.
    check_folder(root)
    if choice > 0.5 or (latest := read_latest(root)) is None:
        return settings, -1, None
    earlier = [step for step in steps_of(root) if step < latest]
    if earlier and choice < 0.15:
        damage_checkpoint(root / f"global_step_{latest}", rng)
        return settings, earlier[-1], root / f"global_step_{latest}"
    if earlier and choice < 0.4:
        step = rng.choice(earlier)
        chosen = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={root}/global_step_{step}"]
        return settings + chosen, step, None
    return settings, latest, None


def reference(model: Path, root: Path) -> tuple[dict[int, str], float]:
    """Return the hash of the weights after each step, and the median duration of a save in seconds."""
    expected: dict[int, str] = {}
    seconds: list[float] = []
    started = 0.0
    while LAST_STEP not in expected:
        with run(make_run_config(model, root)) as trial:
            while (event := trial.next(TRIAL_TIMEOUT_S)) and event[0] != "end":
                if event[0] in ("resumed", "trained"):
                    assert expected.setdefault(event[1], event[2]) == event[2]
                if event[0] == "saving":
                    started = time.monotonic()
                if event[0] == "saved":
                    seconds.append(time.monotonic() - started)
        assert event == ("end", "", 0), (event, (root / "run.log").read_text()[-2000:])
    return expected, sorted(seconds)[len(seconds) // 2]


def main(n_trials: int, seed: int) -> None:
    """Run the reference and ``n_trials`` trials, and print their outcomes."""
    import torch

    import recipe_gkd.actor.megatron.backend  # Imported once, before the forks.
    import recipe_gkd.trainer  # noqa: F401
    from tests._support.tiny_models import make_folder

    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="chaos_saves_", ignore_cleanup_errors=True) as folder:
        model, root = make_folder(Path(folder) / "model", "qwen2"), Path(folder) / "run"
        root.mkdir()
        expected, save_s = reference(model, root)
        print(f"reference: {len(expected)} steps, {save_s:.2f} s a save", flush=True)
        started = time.monotonic()
        for number in range(n_trials):
            rng = random.Random(f"{seed} {number}")
            if max((int(path.name[12:]) for path in root.glob("global_step_*")), default=0) > LAST_STEP - 2:
                shutil.rmtree(root)
                root.mkdir()
            kind = FAULTS[number % len(FAULTS)]
            settings, resumes_at, damaged = choose_overrides(root, rng)
            before = damaged.stat().st_ino if damaged and damaged.exists() else None
            try:
                config = make_run_config(model, root, *settings)
                outcome = one_trial(config, kind, rng, expected, save_s, resumes_at)
                clear_damage(root, damaged, before)
            except BaseException:
                print(f"trial {number} of seed {seed}: {kind}, {settings}", flush=True)
                print((root / "run.log").read_text()[-3000:], sorted(path.name for path in root.iterdir()), flush=True)
                raise
            outcomes[outcome] += 1
            note = f", {damaged.name} was damaged" if damaged else ""
            print(f"{time.monotonic() - started:6.1f} s  trial {number}: {outcome}{note}", flush=True)
    print(dict(outcomes))


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    main(*(arguments + [N_TRIALS, SEED][len(arguments) :]))
