"""Options of the commands, as flags or environment variables: ``--n-logprobs 64`` is ``N_LOGPROBS=64``."""

from __future__ import annotations

import os
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from typing import NamedTuple

from teacher.errors import TeacherSetupError

_WIDTH, _NAME_WIDTH = 118, 26


class Option(NamedTuple):
    """Option of a command.

    Attributes:
        name: Name of the environment variable.
        default: Value if neither flag nor variable is set. An empty variable counts as not set. If the default is an
            integer, the value must be an integer of 0 or more.
        text: Help text. The default follows if it does not end with a description of it in brackets.
    """

    name: str
    default: str | int
    text: str


# fmt: off
ENGINE_OPTIONS = (
    Option("CKPT_PATH", "", "local folder of the teacher model, Hugging Face format (required)"),
    Option("MODEL_NAME", "", "name of the served model  [name of the folder]"),
    Option("BACKEND", "vllm", "engine"),
    Option("TP_SIZE", 1, "tensor-parallel ranks of one worker"),
    Option("N_LOGPROBS", 256, "top-k, up to the vocabulary size"),
    Option("DTYPE", "auto", "auto, float32, bfloat16, float16  [auto: the checkpoint's, or a faster one]"),
    Option("HEAD_DTYPE", "auto", "dtype of the logits: auto, float32, model  [auto: float32 on a GPU, else DTYPE]"),
    Option("MAX_MODEL_LEN", 0, "longest prompt plus response in tokens  [0: the model's]"),
    Option("LOGITS_MIB", 1024, "memory for the logits of one engine step"),
    Option("MAX_RESULT_MIB", 2048, "host memory for results in progress"),
    Option("KV_CACHE_MIB", 0, "size of the KV cache  [0: vLLM's choice on a GPU, 256 on a CPU]"),
    Option("GPU_MEMORY_UTILIZATION", "0.85", "fraction of a GPU for weights and KV cache"),
    Option("ASYNC_SCHEDULING", "auto", "auto, on, off: schedule a step while the GPU computes the one before it  "
           "[auto: vLLM's choice]"),
)
WORKER_OPTIONS = (
    *ENGINE_OPTIONS,
    Option("N_WORKERS", 1, "workers started here"),
    Option("SLEEP_MODE", "0", "1: allow `python -m teacher sleep` and `wake`; weights then go to host memory"),
    Option("PROXY_BACKEND_PORT", 15556, "the proxy's port for workers"),
    Option("AUTH_DIR", "", "keys, created by `python -m teacher keys --auth-dir AUTH_DIR`  [none]"),
    Option("STALL_TIMEOUT_S", "", "maximum duration of an engine step; a longer one ends its worker, others get its "
           "requests  [300; 60 on GPUs]"),
    Option("LOG_FORMAT", "text", "text or json"),
    Option("LOG_LEVEL", "", "DEBUG, INFO, WARNING, ERROR  [proxy and gateway INFO, workers WARNING]"),
    Option("START_TIMEOUT_S", 0, "maximum duration of the start, in seconds  [600; 1800 on GPUs, where kernels are "
           "compiled]"),
    Option("STOP_TIMEOUT_S", 10, "seconds before SIGKILL, if the start fails"),
    Option("PYTHON", "", "interpreter  [.venv/bin/python beside the teacher folder, or python3]"),
)
SERVE_OPTIONS = (
    *WORKER_OPTIONS,
    Option("PROXY_FRONTEND_PORT", 15555, "the port for clients"),
    Option("BIND", "127.0.0.1", "interface of both ports; any but loopback needs AUTH_DIR or TRUSTED_NETWORK"),
    Option("TRUSTED_NETWORK", "0", "1: allow any BIND without keys; everyone who reaches it can use and disturb the "
           "service"),
    Option("PROXY_IO_THREADS", "", "threads of the proxy that send, receive and encrypt  [cores, at most 4]"),
    Option("HTTP_PORT", "", "/healthz and /metrics; 0: any port, -1: none. They use no keys: bind them to trusted "
           "networks only  [PROXY_FRONTEND_PORT + 2]"),
    Option("HTTP_BIND", "127.0.0.1", "interface of HTTP_PORT"),
    Option("OPENAI_PORT", 0, "port of 127.0.0.1 for /v1/completions with prompt_logprobs over HTTP, without keys; see "
           "`python -m teacher gateway`  [0: none]"),
    Option("MAX_QUEUE_TOKENS", 8388608, "maximum tokens in the proxy's queue; further requests wait at the clients"),
    Option("RUN_DIR", "", "pids and logs  [$PWD/outputs/teacher-HOST-PROXY_FRONTEND_PORT]"),
)
JOIN_OPTIONS = (
    *WORKER_OPTIONS,
    Option("SERVER_IP", "127.0.0.1", "address of the proxy, which must listen there (BIND of start_server.sh)"),
    Option("RUN_DIR", "", "pids and logs  [$PWD/outputs/teacher-join-HOST-SERVER_IP-PROXY_BACKEND_PORT]"),
)
STOP_OPTIONS = (
    Option("PROXY_FRONTEND_PORT", 15555, "port of the service, part of the default run folder"),
    Option("RUN_DIR", "", "run folder  [$PWD/outputs/teacher-HOST-PROXY_FRONTEND_PORT]"),
    Option("STOP_TIMEOUT_S", 10, "seconds before SIGKILL"),
)
# fmt: on


def help_of(options: Sequence[Option]) -> str:
    """Return the help of options, for a terminal."""
    indent = " " * _NAME_WIDTH
    lines = [
        textwrap.fill(
            text if text.endswith("]") or default == "" else f"{text}  [{default}]",
            _WIDTH,
            initial_indent=f"  {name}".ljust(_NAME_WIDTH),
            subsequent_indent=indent,
        )
        for name, default, text in options
    ]
    title = "Options, as flags or environment variables (--run-dir DIR is RUN_DIR=DIR; flags override variables):"
    return "\n".join([title, *lines])


def parse_options(options: Sequence[Option], arguments: Sequence[str]) -> Namespace:
    """Return the values of all options under their names in lower case. Flags override the environment.

    Raises:
        TeacherSetupError: An argument is no option, has no value, or must be a number.
    """
    defaults = {name: default for name, default, _ in options}
    values = {name: os.environ.get(name) or str(default) for name, default in defaults.items()}
    words = iter(arguments)
    for word in words:
        flag, has_value, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_").upper()
        if not word.startswith("--"):
            raise TeacherSetupError(f"unexpected argument {word!r}", remedy="see --help")
        if name not in values:
            raise TeacherSetupError(f"unknown option {flag}", remedy="see --help")
        if not has_value and (value := next(words, "\0")) == "\0":
            raise TeacherSetupError(f"{flag} needs a value", remedy="see --help", options=(name,))
        values[name] = value
    return Namespace(**{name.lower(): _convert(name, value, defaults[name]) for name, value in values.items()})


def _convert(name: str, value: str, default: str | int) -> str | int:
    if isinstance(default, str):
        return value
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        raise TeacherSetupError(f"{name} must be an integer of 0 or more, got {value!r}", options=(name,))
    return int(value)
