"""Checks of a start's settings that need no process of the service, and the machine's GPUs."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from teacher.errors import TeacherSetupError

REPO = Path(__file__).parents[2]
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
_NVIDIA_SMI_TIMEOUT_S = 60.0
_SIOCGIFADDR, _MAX_INTERFACE_BYTES = 0x8915, 15  # linux/sockios.h, net/if.h
_MAX_TMPDIR_BYTES = 70
"""Longest TMPDIR for vLLM's sockets: their paths have at most 107 bytes, of which the name needs 37."""


def check_settings(args: Namespace) -> list[str]:
    """Check the options of workers and this machine. Complete ``args``, and return the visible GPUs.

    Raises:
        TeacherSetupError: An option is invalid, or an engine cannot start on this machine.
    """
    if former := os.environ.get("MAX_ANSWER_MIB"):
        raise TeacherSetupError("MAX_ANSWER_MIB is now MAX_RESULT_MIB", remedy=f"set MAX_RESULT_MIB={former} instead")
    require("SLEEP_MODE", args.sleep_mode, ("0", "1"))
    require("ASYNC_SCHEDULING", args.async_scheduling, ("auto", "on", "off"))
    if min(args.n_workers, args.tp_size) < 1:
        raise TeacherSetupError("N_WORKERS and TP_SIZE must be 1 or more", options=("N_WORKERS", "TP_SIZE"))
    if not args.ckpt_path:
        raise _invalid("CKPT_PATH is not set", "it names the local folder of the teacher model; see --help")
    if not os.path.isdir(args.ckpt_path):
        raise _invalid(f"CKPT_PATH={args.ckpt_path} is not a folder", "expected a local model in Hugging Face format")
    args.ckpt_path = os.path.abspath(args.ckpt_path)
    gpus = find_gpus()
    if gpus and (needed := args.n_workers * args.tp_size) > len(gpus):
        what = f"N_WORKERS={args.n_workers} x TP_SIZE={args.tp_size} need {needed} GPUs, {len(gpus)} are visible"
        raise TeacherSetupError(what, options=("N_WORKERS", "TP_SIZE"))
    args.python = args.python or sys.executable
    if shutil.which(args.python) is None:
        raise _invalid(f"PYTHON={args.python} is not found", "set it to the interpreter that has vLLM installed")
    # On GPUs vLLM compiles kernels at the first start.
    args.start_timeout_s = args.start_timeout_s or (1800 if gpus else 600)
    # On a busy CPU, a step of healthy engines took more than 60 s.
    args.stall_timeout_s = args.stall_timeout_s or ("60" if gpus else "300")
    if gpus and args.backend == "vllm":
        _check_machine(args.python)
    if args.auth_dir and not os.path.isdir(args.auth_dir):
        remedy = f"create it with: {args.python} -m teacher keys --auth-dir {args.auth_dir}"
        raise _invalid(f"AUTH_DIR={args.auth_dir} is not a folder", remedy)
    args.auth_dir = args.auth_dir and os.path.abspath(args.auth_dir)
    return gpus


def require(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value of an option that is not one of ``allowed``."""
    if value not in allowed:
        raise _invalid(f"{name} must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}")


def check_port_is_free(ip: str, port: int, options: tuple[str, ...]) -> None:
    """Check that nothing listens on a port. Another service there could answer the check of a new one.

    Args:
        ip: Address of this machine.
        port: The port.
        options: Names of the options that determine the port.

    Raises:
        TeacherSetupError: A process listens on the port.
    """
    try:
        socket.create_connection((ip, port), timeout=5).close()
    except (OSError, OverflowError):
        return
    raise TeacherSetupError(
        f"port {port} of {ip} is in use",
        remedy=f"stop what uses it ({REPO}/teacher/stop_server.sh), or set {' / '.join(options)}",
        options=options,
    )


def connect_address(bind: str) -> str:
    """Return the address at which processes of this machine reach a service that listens on ``bind``.

    Args:
        bind: Address, ``*``, or name of a network interface, which only a listening socket can resolve.

    Raises:
        TeacherSetupError: The interface has no IPv4 address.
    """
    if bind in ("0.0.0.0", "*"):
        return "127.0.0.1"
    if bind not in (name for _, name in socket.if_nameindex()):
        return bind
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", bind.encode()[:_MAX_INTERFACE_BYTES]))
        except OSError as error:
            what = f"BIND={bind}: this network interface has no IPv4 address: {error.strerror}"
            raise TeacherSetupError(what, options=("BIND",), remedy="set an address of this machine") from None
    return socket.inet_ntoa(found[20:24])


def find_gpus() -> list[str]:
    """Return the names of the visible GPUs. Empty on a machine without GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = re.findall(r"[^,\s]+", visible)
        return list(itertools.takewhile(lambda name: not name.startswith("-"), listed))  # as CUDA, which ends at -1
    try:
        found = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        what = f"nvidia-smi did not answer within {_NVIDIA_SMI_TIMEOUT_S:g} s"
        raise TeacherSetupError(what, remedy="check the driver, or set CUDA_VISIBLE_DEVICES") from None
    except OSError:
        return []
    return found.stdout.split() if found.returncode == 0 else []


def environment_of_processes() -> dict[str, str]:
    """Return the variables of the service's processes, which import this package in any folder."""
    variables = dict(os.environ)
    others = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(REPO))]
    variables["PYTHONPATH"] = os.pathsep.join([str(REPO), *others])
    if not variables.get("VLLM_RPC_BASE_PATH") and len(os.fsencode(variables.get("TMPDIR", ""))) > _MAX_TMPDIR_BYTES:
        variables["VLLM_RPC_BASE_PATH"] = "/tmp"
    return variables


def _check_machine(python: str) -> None:
    command = [python, "-m", "teacher.machine_checks", "cuda"]
    if subprocess.run(command, env=environment_of_processes(), check=False).returncode:
        raise TeacherSetupError("a vLLM engine cannot start on this machine", remedy="see the problems above")


def _invalid(what: str, remedy: str = "") -> TeacherSetupError:
    return TeacherSetupError(what, remedy=remedy, options=(re.split("[ =]", what)[0],))
