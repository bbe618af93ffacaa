"""`python -m teacher proxy|worker|check`: one process of the service, or one question to it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import numpy as np

from teacher.client import TeacherClient
from teacher.errors import TeacherError
from teacher.records import TeacherSequence
from teacher.sockets import BACKEND_PORT, FRONTEND_PORT

logger = logging.getLogger("teacher")


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done or stopped by a signal, 1 failed (the last line on stderr says why), 2 wrong arguments."""
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        args.run(args)
    except TeacherError as error:
        print(f"teacher {args.command}: {error}", file=sys.stderr)
        return 1
    except Exception:  # not to the interpreter, whose long way out would bury the reason under others' last words
        logger.exception("teacher %s failed", args.command)
        return 1
    return 0


def _proxy(args: argparse.Namespace) -> None:
    from teacher.proxy import Proxy
    from teacher.stop_signal import StopSignal

    stop = StopSignal()
    proxy = Proxy(args.bind, args.frontend_port, args.backend_port)
    _touch(args.ready_file)
    proxy.run(stop)


def _worker(args: argparse.Namespace) -> None:
    from teacher.engines.base import EngineConfig, load_engine
    from teacher.stop_signal import StopSignal
    from teacher.worker import Worker

    names = EngineConfig.__dataclass_fields__
    engine = load_engine(args.backend, EngineConfig(**{name: getattr(args, name) for name in names}))
    try:
        # After loading, and not before: until then the default action of SIGTERM ends the process at once.
        Worker(engine, args.server_ip, args.backend_port).run(
            StopSignal(), on_registered=lambda: _touch(args.ready_file)
        )
    finally:
        engine.close()


def _check(args: argparse.Namespace) -> None:
    with TeacherClient(args.server_ip, args.port, timeout_s=args.timeout_s) as client:
        info = client.hello()
        sequence = TeacherSequence(np.zeros(2, np.int32), prompt_len=1)
        (answer,) = client.submit([sequence]).result()
        print(f"{client.address} answered with {answer.topk_logps_TK.shape[1]} logprobs a position")
        for name, value in vars(info).items():
            print(f"  {name}: {value}")


def _touch(path: str) -> None:
    if path:
        Path(path).write_text(f"{os.getpid()}\n", encoding="ascii")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="teacher", description=__doc__)
    parser.add_argument("--log-level", default="WARNING", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        formatter = argparse.ArgumentDefaultsHelpFormatter
        sub = commands.add_parser(name, help=text, description=text, formatter_class=formatter)
        sub.set_defaults(run=run)
        return sub

    proxy = command("proxy", _proxy, "the service's address: queues requests and hands them to workers")
    proxy.add_argument(
        "--bind", default="127.0.0.1", help="interface; there is no authentication: trusted networks only"
    )
    proxy.add_argument("--frontend-port", type=_port, default=FRONTEND_PORT, help="for clients")
    proxy.add_argument("--backend-port", type=_port, default=BACKEND_PORT, help="for workers")
    proxy.add_argument("--ready-file", default="", help="written when both ports are bound")

    worker = command("worker", _worker, "one engine that serves a proxy")
    worker.add_argument("--ckpt-path", required=True, help="local folder of the teacher model, Hugging Face format")
    worker.add_argument("--model-name", default="", help="name of the served model; default: name of the folder")
    worker.add_argument("--backend", default="vllm", help="engine: vllm")
    worker.add_argument("--tp-size", type=_positive, default=1, help="tensor-parallel ranks")
    worker.add_argument("--n-logprobs", type=_positive, default=256, help="top-k, up to the vocabulary size")
    worker.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    worker.add_argument("--max-model-len", type=int, default=0, help="longest sequence in tokens; 0: the model's")
    worker.add_argument("--logits-mib", type=_positive, default=1024, help="memory for the logits of one engine step")
    worker.add_argument("--kv-cache-mib", type=int, default=0, help="0: vLLM's choice on a GPU, 256 on a CPU")
    worker.add_argument("--gpu-memory-utilization", type=float, default=0.85, help="not used on a CPU")
    worker.add_argument("--server-ip", default="127.0.0.1", help="where the proxy is")
    worker.add_argument("--backend-port", type=_port, default=BACKEND_PORT, help="the proxy's port for workers")
    worker.add_argument("--ready-file", default="", help="written when the proxy has accepted this worker")

    check = command("check", _check, "send one real request; print what answered, or why nobody did")
    check.add_argument("--server-ip", default="127.0.0.1")
    check.add_argument("--port", type=_port, default=FRONTEND_PORT)
    check.add_argument("--timeout-s", type=float, default=10.0)
    return parser


def _port(text: str) -> int:
    if not 0 <= (port := int(text)) < 65536:
        raise argparse.ArgumentTypeError(f"a port is 0 (any) to 65535, got {port}")
    return port


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    logging.shutdown()
    # All is closed. The interpreter would take seconds more to take torch and vLLM apart.
    os._exit(code)
