"""A teacher service as a Ray job: `ray job submit ... -- python3 -m launch.teacher_on_ray --ckpt-path DIR ...`.

The proxy runs beside this driver, each worker in a Ray task that has TP_SIZE GPUs. A process that ends is started
again, after a pause that doubles up to MAX_PAUSE_S while it keeps ending; a worker whose node is lost is started on
another. When the driver ends, however it does, all of them end.
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

from teacher.__main__ import make_parser
from teacher.errors import TeacherError
from teacher.wire.auth import check_bind, server_keys

logger = logging.getLogger("teacher_on_ray")

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
STEADY_S = 300.0  # who lived so long starts over with the first pause
STOP_S = 15.0


def main() -> int:
    args, worker_options = _parser().parse_known_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    ip = args.server_ip or ray.util.get_node_ip_address()
    keys = ["--auth-dir", os.path.abspath(args.auth_dir)] if args.auth_dir else []
    proxy = ["proxy", "--bind", args.bind or ip, "--frontend-port", str(args.frontend_port), *keys]
    proxy += ["--backend-port", str(args.backend_port), "--http-port", str(args.http_port)]
    worker = ["worker", "--server-ip", ip, "--backend-port", str(args.backend_port), *keys]
    worker += ["--tp-size", str(args.tp_size), *worker_options]
    try:  # what is wrong with them is said here, not again and again by processes that end
        for command in (proxy, worker):
            make_parser().parse_args(command)
        check_bind(args.bind or ip, server_keys(args.auth_dir))
    except TeacherError as error:
        logger.error("%s", error)
        return 1

    ray.init(logging_level=logging.WARNING)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # after ray.init, which has a handler of its own
        signal.signal(number, lambda number, frame: stop.set())

    gpus = 0 if args.cpu else args.tp_size
    task = ray.remote(num_gpus=gpus, num_cpus=1, max_retries=-1)(keep_running)  # -1: also if its node is lost
    workers = [task.remote(worker, f"worker {i}") for i in range(args.n_workers)]
    logger.info("%d workers of %d GPUs are asked for; trainings use:", args.n_workers, gpus)
    logger.info(
        "  actor_rollout_ref.teacher.server_ip=%s actor_rollout_ref.teacher.server_port=%d", ip, args.frontend_port
    )
    try:
        keep_running(proxy, "proxy", stop)
    finally:
        for reference in workers:
            ray.cancel(reference, recursive=False)  # KeyboardInterrupt in `keep_running` there
        ray.wait(workers, num_returns=len(workers), timeout=STOP_S + 5)
        ray.shutdown()
    return 0


def keep_running(arguments: list[str], name: str, stop: threading.Event | None = None) -> None:
    """`python -m teacher ARGUMENTS` as a child of this process, again whenever it ends, until `stop` or interrupted."""
    import teacher  # where this runs, which may be another machine

    environment = {**os.environ, "PYTHONPATH": str(Path(teacher.__file__).parents[1])}
    command = [sys.executable, "-m", "teacher", *arguments, "--end-with-parent", str(os.getpid())]
    stop, pause_s = stop or threading.Event(), FIRST_PAUSE_S
    while not stop.is_set():
        began = time.monotonic()
        child = subprocess.Popen(command, env=environment)
        try:
            while child.poll() is None and not stop.wait(0.2):
                pass
        finally:
            child.terminate()
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(STOP_S)
        if stop.is_set():
            return
        if time.monotonic() - began > STEADY_S:
            pause_s = FIRST_PAUSE_S
        print(
            f"{name} ended with status {child.returncode}; starting it again in {pause_s:g} s",
            file=sys.stderr,
            flush=True,
        )
        stop.wait(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="All other options are those of `python -m teacher worker`.",
    )
    parser.add_argument("--n-workers", type=int, default=1)
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs of each worker")
    parser.add_argument("--auth-dir", default="", help="keys, on a disk that all nodes share")
    parser.add_argument("--bind", default="", help="interface of the proxy; default: this node's address")
    parser.add_argument(
        "--server-ip", default="", help="what workers and trainings call it; default: this node's address"
    )
    parser.add_argument("--frontend-port", type=int, default=15555)
    parser.add_argument("--backend-port", type=int, default=15556)
    parser.add_argument("--http-port", type=int, default=15557, help="/healthz and /metrics of this node; -1: none")
    parser.add_argument("--cpu", action="store_true", help="workers without GPUs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
