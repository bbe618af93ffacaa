"""Faults of whole nodes and of links, during trainings on several nodes."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress

import pytest

from tests._support.network_nodes import Node
from tests._support.sample_records import record_of
from tests._support.waiting import wait_until
from tests.integration.several_nodes.conftest import TIMEOUT_S, Laboratory, TrainingOnNodes

pytestmark = pytest.mark.slow

UNTIL_STOPPED = "trainer.total_training_steps=100000", "ray_init.address=auto"
ERROR_MARGIN_S = 5.0
RPC_TIMEOUT_S = TIMEOUT_S * 7 / 6
"""Deadline of the driver for a phase of a weight sync, after that of the workers."""
END_S = 45.0
"""Time from the error to the end of the driver: a diagnosis, and deadlines of ending workers on lost nodes."""


def start(laboratory: Laboratory, node: Node, name: str, *overrides: str) -> tuple[TrainingOnNodes, set[str]]:
    """Start a training and wait for three steps. Return it and the processes that the node had before."""
    before = {line.split()[0] for line in node.processes()}
    run = laboratory.train(node, name, *UNTIL_STOPPED, *overrides)
    run.await_step(3)
    return run, before


def assert_nothing_left(node: Node, before: set[str]) -> None:
    """Wait until a node has only the processes that it had before, and Ray's idle workers."""

    def left() -> list[str]:
        return [line for line in node.processes() if line.split()[0] not in before and "ray::IDLE" not in line]

    with suppress(AssertionError):
        wait_until(lambda: not left(), 15)
    assert left() == []


def await_error(run: TrainingOnNodes, pattern: str, timeout_s: float) -> None:
    """Wait until the driver has printed an error after its first steps. Fail if it takes longer than ``timeout_s``."""
    started = time.monotonic()

    def found() -> bool:
        return re.search(pattern, re.split(r"^step +3/", run.output, maxsplit=1, flags=re.MULTILINE)[1]) is not None

    with suppress(AssertionError):
        wait_until(lambda: found() or run.process.poll() is not None, timeout_s)
    assert found(), f"no {pattern} after {time.monotonic() - started:.1f} s in:\n{run.output}"


class TestLostNode:
    def test_without_another_node_error_names_lost_node(self, laboratory: Laboratory) -> None:
        with laboratory.ray_nodes(2, 1) as (first, second):
            run, before = start(laboratory, first, "lost_node", "trainer.max_worker_restarts=0")
            second.kill()
            await_error(run, rf"rollout worker 0 of 1\b.*node {second.address}", TIMEOUT_S + ERROR_MARGIN_S)
            assert run.finish(END_S) == 1, run.output
            assert_nothing_left(first, before)
        assert second.processes() == []

    def test_rollout_worker_continues_on_another_node(self, laboratory: Laboratory) -> None:
        with laboratory.ray_nodes(2, 1, 1) as (first, *others):
            run, before = start(laboratory, first, "replaced_node")
            [address] = re.findall(r"^rollout +0 of 1 +\w+ (\S+) ", run.output, re.MULTILINE)
            [lost] = [node for node in others if node.address == address]
            lost.kill()
            n_before = len(run.metrics)
            run.await_step(n_before + 5)
            assert run.metrics[-1]["rollout/restarts"] >= 1
            assert address in run.output.split("starting another")[1], run.output
            run.node.send(run.process, signal.SIGINT)
            run.finish(END_S)
            assert_nothing_left(first, before)

    def test_actor_ranks_continue_on_another_node_from_the_newest_checkpoint(self, laboratory: Laboratory) -> None:
        """Their scoring worker moves with them. The default allows one restart.

        Ray may place the rollout worker on any node, so the spare one has room for it and the actors.
        """
        with laboratory.ray_nodes(1, 3, 3) as (first, *others):
            run, before = start(laboratory, first, "replaced_actors", "trainer.save_freq=2")
            [address] = set(re.findall(r"^actor +\d of 2 +\w+ (\S+) ", run.output, re.MULTILINE))
            [lost] = [node for node in others if node.address == address]
            lost.kill()
            n_before = len(run.metrics)
            run.await_step(n_before + 5)
            assert run.metrics[-1]["actor/restarts"] == 1
            resumed = [line["resumed_from"] for line in record_of(run.folder)]
            assert resumed[0] == 0 and resumed[-1] >= 2 and resumed[-1] % 2 == 0
            run.node.send(run.process, signal.SIGINT)
            run.finish(END_S)
            assert_nothing_left(first, before)


class TestCutLink:
    def test_shorter_than_deadline_training_continues(self, laboratory: Laboratory) -> None:
        with laboratory.ray_nodes(2, 1) as (first, second):
            run, before = start(laboratory, first, "short_cut")
            second.cut()
            time.sleep(TIMEOUT_S / 3)
            n_before = len(run.metrics)
            second.restore()
            run.await_step(n_before + 5)
            assert run.metrics[-1]["rollout/restarts"] == 0
            run.node.send(run.process, signal.SIGINT)
            run.finish(END_S)
            assert_nothing_left(first, before)
            assert_nothing_left(second, before | {line.split()[0] for line in second.processes() if "ray" in line})

    def test_longer_than_deadline_error_names_worker_and_node(self, laboratory: Laboratory) -> None:
        with laboratory.ray_nodes(2, 1) as (first, second):
            run, before = start(laboratory, first, "long_cut", "trainer.max_worker_restarts=0")
            second.cut()
            await_error(run, rf"rollout worker 0 of 1\b.*node {second.address}", RPC_TIMEOUT_S + ERROR_MARGIN_S)
            assert run.finish(END_S) == 1, run.output
            assert_nothing_left(first, before)

    def test_link_to_teacher_error_names_its_address(self, laboratory: Laboratory) -> None:
        with laboratory.ray_nodes(2, 1) as (first, _):
            run, before = start(laboratory, first, "teacher_cut")
            laboratory.teacher.cut()
            try:
                await_error(run, rf"{laboratory.teacher.address}:\d+", TIMEOUT_S + ERROR_MARGIN_S)
                assert run.finish(END_S) == 1, run.output
            finally:
                laboratory.teacher.restore()
            assert_nothing_left(first, before)


class TestFullDisk:
    """The disk of Ray's logs and spilled objects is full on the rollout node."""

    def test_training_continues(self, laboratory: Laboratory) -> None:
        with laboratory.ray_nodes(2, 1) as (first, second):
            run, before = start(laboratory, first, "full_disk")
            second.fill_disk()
            n_before = len(run.metrics)
            run.await_step(n_before + 5)
            assert run.metrics[-1]["rollout/restarts"] == 0
            run.node.send(run.process, signal.SIGINT)
            run.finish(END_S)
            assert_nothing_left(first, before)

    def test_worker_that_dies_there_ends_the_run(self, laboratory: Laboratory) -> None:
        """Its successor cannot write its log. The error names the node, and mentions the disk."""
        with laboratory.ray_nodes(2, 1) as (first, second):
            run, before = start(laboratory, first, "full_disk_restart")
            second.fill_disk()
            workers: list[str] = []

            def is_found() -> bool:
                workers[:] = [line for line in second.processes() if "ray::RolloutWorker" in line]
                return bool(workers)

            wait_until(is_found)  # Ray changes the title of the process between two calls
            os.kill(int(workers[0].split()[0]), signal.SIGKILL)
            message = rf"error: start again: rollout worker 0 of 1: its process died, on node {second.address}"
            await_error(run, message, TIMEOUT_S + ERROR_MARGIN_S)
            assert run.finish(END_S) == 1, run.output
            assert re.search(r"`df /\S+/session_\S+` if its log had no space", run.output), run.output
            assert_nothing_left(first, before)
