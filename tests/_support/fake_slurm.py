"""Stand-ins for ``srun``, ``scontrol`` and Python, so that launch/slurm.sbatch runs as two nodes on this machine."""

from __future__ import annotations

from pathlib import Path

SRUN = """#!/bin/bash
# srun [--option=value ...] COMMAND: run COMMAND here. Fails for a node that is not in the job.
echo "srun $*" >>"$EVENTS"
while [[ $1 == --* ]]; do
  case $1 in --nodelist=*|--exclude=*) [[ " node-1 node-2 " == *" ${1#*=} "* ]] || exit 1 ;; esac
  shift
done
exec "$@"
"""
SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then printf 'node-1\\nnode-2\\n'; else echo "scontrol $*" >>"$EVENTS"; fi
"""
PYTHON = """#!/bin/bash
# Python, except that the training is TRAINING.
if [[ "$*" == *recipe_gkd.main_gkd* ]]; then
  echo "training $*" >>"$EVENTS"
  exec {python} "{training}" "${{@: -1}}"
fi
exec {python} "$@"
"""
TRAINING = '''
"""Run a task on each node of the cluster, then wait for SIGUSR1, and end like a training that was saved."""
import os
import signal
import sys

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
ray.init(address=sys.argv[1].partition("=")[2], logging_level="ERROR")
task = ray.remote(lambda: ray.get_runtime_context().get_node_id())
nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
on_node = [task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in nodes]
assert set(ray.get([each.remote() for each in on_node], timeout=60)) == nodes
events = open(os.environ["EVENTS"], "a")
print("tasks ran on", len(nodes), "nodes", file=events, flush=True)
got = signal.sigtimedwait([signal.SIGUSR1], 60)
print("training got", got and signal.Signals(got.si_signo).name, file=events, flush=True)
ray.shutdown()
os._exit(75)
'''


def install(folder: Path, python: str, python_stub: str | None = None) -> None:
    """Write the stand-ins to ``folder``: ``bin`` for PATH, and ``python``.

    Args:
        python: Interpreter of the stand-in for Python.
        python_stub: Script that takes its place, without Ray.
    """
    (folder / "bin").mkdir()
    (folder / "training.py").write_text(TRAINING)
    texts = {
        "bin/srun": SRUN,
        "bin/scontrol": SCONTROL,
        "python": python_stub or PYTHON.format(python=python, training=folder / "training.py"),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
