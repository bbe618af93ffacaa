"""Runs whose processes are killed at random moments: each sample is trained on once, with unchanged results.

KILLS and KILL_SEED set the number of kills of the slow campaign and its seed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests._support.sample_records import check_exactly_once, record_of
from tests._support.training_command import FULL_OBJECTIVE, Run, StartRun, processes_of_run
from tests._support.waiting import PATIENCE_S

N_KILLS, SEED = int(os.environ.get("KILLS", "20")), int(os.environ.get("KILL_SEED", "0"))
TARGETS = {
    "driver": "recipe_gkd.main_gkd",
    "actor": "ray::ActorWorker",
    "rollout": "ray::RolloutWorker",
    "scoring": "ray::ScoringWorker",
    "raylet": "/raylet/raylet",
    "control service": "/gcs/gcs_server",
}
"""Name of a target -> part of the command line of its process."""
REPLACED = {"actor", "rollout", "scoring"}
"""Targets without which a run continues."""
RAY_WITHOUT_CONTROL_SERVICE_S = 5
"""Time after which Ray ends without its control service. In its 60 s by default, a campaign would complete."""
REPRODUCIBLE = ("actor/", "response_seq_len/", "reward/")
N_PER_STEP = 2 + 2 * 6
"""Samples per step with ``FULL_OBJECTIVE``: two prompts have a reference response, six have two responses."""


def reproducible(run: Run) -> list[dict[str, Any]]:
    """Return the metrics of each step that do not depend on time or restarts."""
    return [
        {name: value for name, value in line.items() if name.startswith(REPRODUCIBLE) and name != "actor/restarts"}
        for line in run.metrics
    ]


def kill(run: Run, target: str) -> bool:
    """Kill the oldest process of a target. Return False if there is none, because the run is starting or ending.

    Ray is not killed before it has started: the driver would start it once more.
    """
    processes = processes_of_run(run.run_id)
    pids = sorted(int(line.split()[0]) for line in processes if TARGETS[target] in line)
    has_started = any(TARGETS["actor"] in line for line in processes)
    if not pids or (target in ("raylet", "control service") and not has_started):
        return False
    with suppress(ProcessLookupError):
        os.kill(run.process.pid if target == "driver" else pids[0], signal.SIGKILL)
    return True


def wait_for_moment(run: Run, rng: random.Random, steps: range) -> None:
    """Wait until a random one of ``steps`` is done, and for a random part of a step more, or until the run ends."""
    step = rng.choice(steps)
    deadline = time.monotonic() + PATIENCE_S
    while len(run.metrics) < step and run.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(rng.uniform(0.0, 0.5) if step else rng.uniform(0.0, 20.0))


class Campaign:
    """A run that is started again after each kill that ends it.

    Attributes:
        kills: Targets that were killed, with the number of steps that were complete.
    """

    def __init__(self, start_run: StartRun, overrides: tuple[str, ...], folder: Path, n_steps: int) -> None:
        self._start_run, self._overrides, self._folder, self._n_steps = start_run, overrides, folder, n_steps
        self.kills: list[tuple[str, int]] = []
        self.n_starts = 0
        self.run = self.start()

    def start(self) -> Run:
        """Start the run again."""
        self.n_starts += 1
        restarts = ("trainer.max_worker_restarts=1000", "trainer.max_actor_restarts=1000")
        self.run = self._start_run(*self._overrides, *restarts, folder=self._folder)
        return self.run

    def execute(self, targets: list[str], rng: random.Random) -> None:
        """Kill each target at a random moment of its part of the steps, and let the run finish."""
        last = self._n_steps - 2  # the run must not end before the last kill
        for i, target in enumerate(targets):
            first = i * last // len(targets)
            wait_for_moment(self.run, rng, range(first, max(first + 1, (i + 1) * last // len(targets))))
            while not (self.run.process.poll() is None and kill(self.run, target)):
                self.start_if_ended()
                time.sleep(0.1)
            self.kills.append((target, len(self.run.metrics)))
            if target not in REPLACED:
                self.await_end(target)
                self.start()
        while self.run.finish().status != 0 and self.n_starts <= len(targets) + 1:
            self.start()  # the last kill of a worker can end the run, for example during its start
        assert self.run.status == 0, self.run.output

    def start_if_ended(self) -> None:
        """Start the run again if the kill of a worker has ended it, for example during its start."""
        if self.run.process.poll() is not None:
            assert self.run.finish().status != 0, f"the run is complete after the kills {self.kills}"
            self.start()

    def await_end(self, target: str) -> None:
        """Wait for the end of the run after the kill of ``target``. Nothing of it may be left."""
        ended = self.run.finish()
        assert ended.status not in (None, 0), f"after the kill of {target}: {ended.output}"
        assert ended.leftovers() == [], target


@pytest.mark.slow
def test_killed_processes_change_nothing_in_sync(
    start_run: StartRun, validation: list[str], reference_run: Run, tmp_path: Path
) -> None:
    """Kills of the scoring worker, the actor and the driver. The campaign kills the other processes, too."""
    assert reference_run.status == 0, reference_run.output
    overrides = ("trainer.scheduler=sync", "trainer.total_epochs=2", "trainer.save_freq=2", *validation)
    campaign = Campaign(start_run, (*overrides, *FULL_OBJECTIVE), tmp_path / "killed", n_steps=6)
    campaign.run.await_step(1)
    assert kill(campaign.run, "scoring")
    campaign.run.await_step(3)
    assert kill(campaign.run, "actor")
    campaign.run.await_step(5)
    assert kill(campaign.run, "driver")
    campaign.await_end("driver")
    final = campaign.start().finish()
    assert final.status == 0, final.output
    assert reproducible(final) == reproducible(reference_run)
    check_exactly_once(final.folder, n_steps=6, per_step=N_PER_STEP, max_staleness=0)
    expected = [(line["uids"], line["rows"]) for line in record_of(reference_run.folder)]
    assert [(line["uids"], line["rows"]) for line in record_of(final.folder)] == expected
    assert [line["resumed_from"] for line in record_of(final.folder)] == [0, 0, 2, 2, 4, 4]
    log = (final.folder / "run.log").read_text()
    assert "scoring worker 0 of 1 died" in log
    assert "starting all actor ranks again (1 of 1000 restarts)" in log

    import transformers

    folder = final.folder / "global_step_6" / "huggingface"
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.timeout(120 * (N_KILLS + 3))
@pytest.mark.parametrize("scheduler", ["sync", "one_step_off"])
def test_campaign_of_random_kills(
    start_run: StartRun, validation: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    """Half of the kills in each schedule. ``sync`` ends bitwise as without kills."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", str(RAY_WITHOUT_CONTROL_SERVICE_S))
    rng, n_steps = random.Random(f"{SEED}-{scheduler}"), 24
    settings = (f"trainer.scheduler={scheduler}", f"trainer.total_training_steps={n_steps}", "trainer.save_freq=2")
    overrides = (*settings, *validation, "trainer.test_freq=-1", "trainer.val_kl=false", *FULL_OBJECTIVE)
    targets = rng.choices(list(TARGETS), k=N_KILLS // 2)
    campaign = Campaign(start_run, overrides, tmp_path / "killed", n_steps)
    campaign.execute(targets, rng)
    print(f"{scheduler}: {campaign.n_starts} starts, kills (target, complete steps): {campaign.kills}")
    bound = 0 if scheduler == "sync" else 1
    check_exactly_once(campaign.run.folder, n_steps, N_PER_STEP, bound)
    if scheduler == "sync":
        undisturbed = start_run(*overrides, folder=tmp_path / "undisturbed").finish()
        assert undisturbed.status == 0, undisturbed.output
        assert reproducible(campaign.run) == reproducible(undisturbed)
