"""Commands `proxy` and `worker`, which run the processes of a service."""

from __future__ import annotations

import argparse
import logging
import time

from teacher.commands.arguments import add_auth_dir, add_command, port, positive, seconds
from teacher.commands.processes import add_process, end_with_parent, write_ready_file
from teacher.common.head_dtype import HEAD_DTYPES
from teacher.engines import EngineConfig, load_engine
from teacher.proxy.admission import MAX_QUEUE_TOKENS
from teacher.proxy.proxy import STALL_TIMEOUT_S, Proxy
from teacher.proxy.proxy_sockets import MAX_IO_THREADS, SocketSettings, default_io_threads
from teacher.stop_signal import StopSignal
from teacher.wire.auth import client_keys, server_keys
from teacher.wire.sockets import BACKEND_PORT, FRONTEND_PORT
from teacher.worker import Worker

logger = logging.getLogger("teacher")

_HTTP_PORT_OFFSET = 2


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the parser."""
    _add_proxy(commands)
    _add_worker(commands)


def _add_proxy(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    proxy = add_command(
        commands, "proxy", _proxy, "run the proxy, which queues requests and sends them to workers", log_level="INFO"
    )
    proxy.add_argument(
        "--bind", default="127.0.0.1", help="interface; any but loopback needs --auth-dir or --trusted-network"
    )
    proxy.add_argument("--frontend-port", type=port, default=FRONTEND_PORT, help="port for clients")
    proxy.add_argument("--backend-port", type=port, default=BACKEND_PORT, help="port for workers")
    add_auth_dir(proxy, "keys of the server and of its clients")
    proxy.add_argument(
        "--trusted-network",
        action="store_true",
        help="allow any interface without keys: everyone who reaches it can use, read and disturb the service",
    )
    proxy.add_argument(
        "--io-threads", type=_io_threads, default=default_io_threads(), help="threads that send, receive and encrypt"
    )
    _add_stall_timeout(
        proxy, "a worker without messages for 1.5 times this, or its own value if larger, loses its requests to others"
    )
    proxy.add_argument(
        "--max-queue-tokens", type=positive, default=MAX_QUEUE_TOKENS, help="maximum tokens in the queue"
    )
    proxy.add_argument("--http-bind", default="127.0.0.1", help="interface of /healthz and /metrics, which use no keys")
    proxy.add_argument("--http-port", type=_http_port, help="0: any, -1: none; default: frontend port + 2 (15557)")
    add_process(proxy, "file written when all ports are bound")


def _add_worker(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    worker = add_command(commands, "worker", _worker, "run one engine that scores the requests of a proxy")
    worker.add_argument("--ckpt-path", required=True, help="local folder of the teacher model, Hugging Face format")
    worker.add_argument("--model-name", default="", help="name of the served model; default: name of the folder")
    worker.add_argument("--backend", default="vllm", help="engine: vllm")
    worker.add_argument("--tp-size", type=positive, default=1, help="tensor-parallel ranks")
    worker.add_argument("--n-logprobs", type=positive, default=256, help="top-k, up to the vocabulary size")
    worker.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="auto: the checkpoint's, bfloat16 for float32; float32 on a CPU that emulates 16 bits",
    )
    worker.add_argument(
        "--head-dtype", default="auto", choices=HEAD_DTYPES, help="dtype of logits; auto: float32 on CUDA, else --dtype"
    )
    worker.add_argument(
        "--max-model-len", type=int, default=0, help="longest sequence in tokens; 0: the model's maximum"
    )
    worker.add_argument("--logits-mib", type=positive, default=1024, help="memory for the logits of one engine step")
    worker.add_argument("--max-result-mib", type=positive, default=2048, help="host memory for results in progress")
    worker.add_argument("--kv-cache-mib", type=int, default=0, help="0: vLLM's choice on a GPU, 256 on a CPU")
    worker.add_argument("--gpu-memory-utilization", type=float, default=0.85, help="not used on a CPU")
    worker.add_argument("--sleep-mode", action="store_true", help="allow `python -m teacher sleep` and `wake`")
    worker.add_argument(
        "--async-scheduling", default="auto", choices=["auto", "on", "off"], help="auto: vLLM's choice; a CPU has none"
    )
    worker.add_argument("--server-ip", default="127.0.0.1", help="address of the proxy")
    worker.add_argument("--backend-port", type=port, default=BACKEND_PORT, help="the proxy's port for workers")
    add_auth_dir(worker, "keys of a client, for a proxy with keys")
    _add_stall_timeout(worker, "maximum duration of an engine step; a longer one ends the worker")
    add_process(worker, "file written when the proxy has accepted this worker")


def _add_stall_timeout(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--stall-timeout-s", type=seconds, default=STALL_TIMEOUT_S, help=text)


def _io_threads(text: str) -> int:
    if (value := positive(text)) > MAX_IO_THREADS:
        raise argparse.ArgumentTypeError(f"expected 1 to {MAX_IO_THREADS}, got {value}")
    return value


def _http_port(text: str) -> int:
    return -1 if text == "-1" else port(text)


def _proxy(args: argparse.Namespace) -> int:
    from teacher.proxy.http import HttpServer  # needs prometheus_client, which clients and workers do not import

    stop = StopSignal()
    end_with_parent(args.end_with_parent)
    settings = SocketSettings(
        keys=server_keys(args.auth_dir), trusted_network=args.trusted_network, io_threads=args.io_threads
    )
    proxy = Proxy(
        *(args.bind, args.frontend_port, args.backend_port),
        sockets=settings,
        stall_timeout_s=args.stall_timeout_s,
        max_queue_tokens=args.max_queue_tokens,
    )
    http_port = args.http_port
    if http_port is None:
        http_port = args.frontend_port and min(args.frontend_port + _HTTP_PORT_OFFSET, 65535)
    if http_port < 0:
        return _serve(proxy, stop, args, "")
    with HttpServer(args.http_bind, http_port, lambda: (proxy.latest_status, _age_s(proxy.latest_status_at))) as http:
        return _serve(proxy, stop, args, f", http://{args.http_bind}:{http.port}/healthz and /metrics")


def _serve(proxy: Proxy, stop: StopSignal, args: argparse.Namespace, also: str) -> int:
    keys = f"keys of {args.auth_dir}" if args.auth_dir else "no keys"
    if args.trusted_network:
        logger.warning(
            "--trusted-network: connections are not encrypted or authenticated; everyone who reaches %s can use, read "
            "and disturb this service",
            args.bind,
        )
    logger.info(
        "serving clients at %s:%d, workers at %d%s; %s", args.bind, proxy.frontend_port, proxy.backend_port, also, keys
    )
    write_ready_file(args.ready_file)
    proxy.run(stop)
    logger.info("ended")
    return 0


def _age_s(at: float) -> float:
    return time.monotonic() - at


def _worker(args: argparse.Namespace) -> int:
    end_with_parent(args.end_with_parent)
    client_keys(args.auth_dir)  # fail before the long start of the engine
    names = EngineConfig.__dataclass_fields__
    engine = load_engine(args.backend, EngineConfig(**{name: getattr(args, name) for name in names}))
    try:
        worker = Worker(
            engine,
            args.server_ip,
            args.backend_port,
            auth_dir=args.auth_dir,
            stall_timeout_s=args.stall_timeout_s,
        )
        # Installed after loading: until then the default action of SIGTERM ends the process at once.
        stop = StopSignal()  # kept until the engine is closed; a second signal interrupts that
        worker.run(stop, on_registered=lambda: write_ready_file(args.ready_file))
    finally:
        engine.close()
    return 0
