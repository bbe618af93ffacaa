"""Run a teacher service as a Ray job: `ray job submit ... -- python3 -m launch.teacher_on_ray --ckpt-path DIR ...`.

The proxy runs next to this driver, each worker in a Ray task with TP_SIZE GPUs. A process that ends is restarted after
a delay, which doubles up to MAX_RESTART_DELAY_S while the process keeps ending. A worker whose node is lost is
restarted on another node. All processes end with the driver. Workers get the driver's variables that start with NCCL_,
GLOO_, TORCH_, PYTORCH_ or VLLM_, except those that differ between nodes.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ray

from recipe_gkd.runtime.worker_variables import forwarded_variables
from teacher.__main__ import make_parser
from teacher.errors import TeacherError
from teacher.wire.auth import check_bind, server_keys

logger = logging.getLogger("teacher_on_ray")

MIN_RESTART_DELAY_S, MAX_RESTART_DELAY_S = 1.0, 60.0
STABLE_AFTER_S = 300.0  # a process that ran this long is restarted with the minimum delay
STOP_TIMEOUT_S = 15.0


def main() -> int:
    """Run the service until a signal arrives, and return the exit status."""
    args, worker_options = _parser().parse_known_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    ip = args.server_ip or ray.util.get_node_ip_address()
    keys = ["--auth-dir", os.path.abspath(args.auth_dir)] if args.auth_dir else []
    proxy = ["proxy", "--bind", args.bind or ip, "--frontend-port", str(args.frontend_port), *keys]
    proxy += ["--backend-port", str(args.backend_port), "--http-port", str(args.http_port)]
    proxy += ["--trusted-network"] if args.trusted_network else []
    worker = ["worker", "--server-ip", ip, "--backend-port", str(args.backend_port), *keys]
    worker += ["--tp-size", str(args.tp_size), *worker_options]
    try:  # report invalid arguments here, not in processes that end and are restarted
        for command in (proxy, worker):
            make_parser().parse_args(command)
        check_bind(args.bind or ip, server_keys(args.auth_dir), trusted_network=args.trusted_network)
    except TeacherError as error:
        logger.error("%s", error)
        return 1

    ray.init(logging_level=logging.WARNING)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # after ray.init, which installs its own handlers
        signal.signal(number, lambda number, frame: stop.set())

    gpus = 0 if args.cpu else args.tp_size
    variables = forwarded_variables(os.environ, {})
    task = ray.remote(num_gpus=gpus, num_cpus=1, max_retries=-1, runtime_env={"env_vars": variables})(
        keep_running
    )  # -1: restart it even if its node is lost
    workers = [task.remote(worker, f"worker {i}") for i in range(args.n_workers)]
    logger.info("requested %d workers with %d GPUs each; settings for trainings:", args.n_workers, gpus)
    logger.info(
        "  actor_rollout_ref.teacher.server_ip=%s actor_rollout_ref.teacher.server_port=%d", ip, args.frontend_port
    )
    try:
        keep_running(proxy, "proxy", stop)
    finally:
        for reference in workers:
            ray.cancel(reference, recursive=False)  # raises KeyboardInterrupt in its `keep_running`
        ray.wait(workers, num_returns=len(workers), timeout=STOP_TIMEOUT_S + 5)
        ray.shutdown()
    return 0


def keep_running(arguments: list[str], name: str, stop: threading.Event | None = None) -> None:
    """Run `python -m teacher ARGUMENTS` as a child process and restart it whenever it ends.

    Args:
        arguments: Command and options.
        name: Name of the process, for messages.
        stop: Event that ends the child and this function. A KeyboardInterrupt does the same.
    """
    import teacher  # imported here, because this function can run on another machine

    environment = {**os.environ, "PYTHONPATH": str(Path(teacher.__file__).parents[1])}
    command = [sys.executable, "-m", "teacher", *arguments, "--end-with-parent", str(os.getpid())]
    stop, delay_s = stop or threading.Event(), MIN_RESTART_DELAY_S
    while not stop.is_set():
        began = time.monotonic()
        child = subprocess.Popen(command, env=environment)
        try:
            while child.poll() is None and not stop.wait(0.2):
                pass
        finally:
            child.terminate()
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(STOP_TIMEOUT_S)
        if stop.is_set():
            return
        if time.monotonic() - began > STABLE_AFTER_S:
            delay_s = MIN_RESTART_DELAY_S
        print(
            f"{name} ended with status {child.returncode}; restarting it in {delay_s:g} s",
            file=sys.stderr,
            flush=True,
        )
        stop.wait(delay_s)
        delay_s = min(2 * delay_s, MAX_RESTART_DELAY_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="All other options are passed to `python -m teacher worker`.",
    )
    parser.add_argument("--n-workers", type=int, default=1)
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs per worker")
    parser.add_argument("--auth-dir", default="", help="folder of keys, on a disk that all nodes share")
    parser.add_argument(
        "--trusted-network",
        action="store_true",
        help="no keys: everyone who reaches the proxy can use, read and disturb the service",
    )
    parser.add_argument("--bind", default="", help="interface of the proxy; default: this node's address")
    parser.add_argument(
        "--server-ip", default="", help="address of the proxy for workers and trainings; default: this node's address"
    )
    parser.add_argument("--frontend-port", type=int, default=15555)
    parser.add_argument("--backend-port", type=int, default=15556)
    parser.add_argument(
        "--http-port", type=int, default=15557, help="port of /healthz and /metrics on this node; -1: none"
    )
    parser.add_argument("--cpu", action="store_true", help="workers without GPUs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
