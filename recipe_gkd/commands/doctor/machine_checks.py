"""Checks of this machine: devices, /dev/shm, ports, name lookups, memory, and the run folder with its disk."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.commands.doctor.findings import Finding, Severity, problems_of
from recipe_gkd.commands.plan.changes import smallest_change
from recipe_gkd.commands.plan.estimate import estimate_run
from recipe_gkd.config import Config
from recipe_gkd.config.conditions import saves_checkpoints
from recipe_gkd.config.weight_transport import cuda_problems, weight_transport
from recipe_gkd.errors import ConfigError, ModelError
from recipe_gkd.memory_budget.actor_states import ITEM_BYTES, read_actor_memory
from recipe_gkd.memory_budget.slots import query_gpus, slot_memory
from recipe_gkd.metrics.loggers.logger_checks import check_loggers
from recipe_gkd.metrics.loggers.prometheus_logger import check_metrics_port
from recipe_gkd.runtime.socket_paths import shorten_socket_paths
from teacher.common.machine_checks import driver_release, find_problems, shared_memory_problems
from teacher.common.sizes import size_text

CONNECT_TIMEOUT_S = 5.0
"""Deadline of a TCP connection to another service."""
SLOW_LOOKUP_S = 0.5
"""Time of a lookup of a host name that is a warning."""
_PROBE_BYTES = 1 << 20


def device_of(config: Config) -> str:
    """Return the device kind that the workers get on this machine, ``"cuda"`` or ``"cpu"``."""
    if config.trainer.device != "auto":
        return config.trainer.device
    hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") == "" and not config.ray_init.address
    return "cpu" if hides_gpus or driver_release() is None else "cuda"


def device_findings(config: Config, device: str) -> list[Finding]:
    """Check driver, compiler, headers and disk space, and the number of devices if Ray is started on this machine.

    With ``ray_init.address`` the workers may run elsewhere, so that findings are warnings.
    """
    messages = [text for text in find_problems(device, {}) if text not in shared_memory_problems()]
    needed, keys = _slots(config)
    found = len(query_gpus("index")) if device == "cuda" else config.ray_init.num_cpus or os.cpu_count() or 1
    kind = "GPUs" if device == "cuda" else "CPU slots"
    starts_ray = not config.ray_init.address
    if starts_ray and found < needed:
        remedy = "lower them" if device == "cuda" else "lower them, or raise ray_init.num_cpus"
        messages.append(
            f"this machine has {found} {kind}, expected {needed} for {keys}; {remedy}, or connect to a larger cluster "
            "with ray_init.address"
        )
    where = f"{found} {kind} here" if starts_ray else f"the cluster at {config.ray_init.address} was not examined"
    text = f"device {device}: {needed} {kind} needed, {where}"
    return problems_of("devices", messages, otherwise=text, severity="problem" if starts_ray else "warning")


def _slots(config: Config) -> tuple[int, str]:
    """Return the number of slots of all workers, and the keys that determine it."""
    trainer, keys = config.trainer, "trainer.nnodes x trainer.n_gpus_per_node"
    n_actors = trainer.nnodes * trainer.n_gpus_per_node
    if config.actor_rollout_ref.hybrid_engine:
        return n_actors, keys
    nodes, each = config.rollout_pool
    return n_actors + nodes * each, f"{keys} + rollout.nnodes x rollout.n_gpus_per_node"


def transport_findings(config: Config) -> list[Finding]:
    """Check the settings and variables that the transfer of weights between CUDA devices needs."""
    messages = [str(problem) for problem in cuda_problems(config, os.environ)]
    return problems_of("weight transport", messages, otherwise=weight_transport(config))


def shared_memory_findings(config: Config, device: str) -> list[Finding]:
    """Check the size of /dev/shm.

    A small one is a warning if the workers run elsewhere, and on a CPU, where Ray then keeps its objects on the disk.
    """
    severity: Severity = "problem" if device == "cuda" and not config.ray_init.address else "warning"
    enough = "/dev/shm is large enough"
    return problems_of("shared memory", shared_memory_problems(), otherwise=enough, severity=severity)


def port_findings(config: Config) -> list[Finding]:
    """Check that the port of the metrics is free, and that the Ray cluster of ``ray_init.address`` can be reached.

    Raises:
        ConfigError: The port of the metrics is in use.
    """
    port, address, messages, parts = config.trainer.metrics_port, config.ray_init.address, [], []
    check_metrics_port(port)
    if port:
        parts.append(f"trainer.metrics_port={port} is free")
    host, _, number = (address or "").rpartition(":")
    if host and number.isdigit():
        parts.append(f"ray_init.address={address} accepts connections")
        if (reason := connection_error(host, int(number))) is not None:
            messages.append(
                f"ray_init.address={address} cannot be reached: {reason}; check `ray status` there, or set it to null "
                "to start Ray on this machine"
            )
    return problems_of("ports", messages, otherwise="; ".join(parts) or "no fixed port is used")


def connection_error(host: str, port: int) -> str | None:
    """Return why a TCP connection fails, None if it succeeds."""
    try:
        socket.create_connection((host.split("://")[-1], port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def name_lookup_findings() -> list[Finding]:
    """Look up the host names of this machine's addresses, as torch does for each connection."""
    addresses = ["127.0.0.1"]
    with suppress(OSError):  # The machine's own name may be unknown.
        own = socket.gethostbyname_ex(socket.gethostname())[2]
        addresses = list(dict.fromkeys([*addresses, *own]))
    seconds = {address: _lookup_seconds(address) for address in addresses}
    slow = [
        f"a lookup of the host name of {address} took {seconds[address]:.1f} s, expected {SLOW_LOOKUP_S:g} s at most; "
        "torch makes one for each connection. Check the DNS server in /etc/resolv.conf, or add a line such as "
        f"`::ffff:{address} {socket.gethostname()}` to /etc/hosts for each node"
        for address in addresses
        if seconds[address] > SLOW_LOOKUP_S
    ]
    fast = f"host names of {', '.join(addresses)} found in {max(seconds.values()):.2f} s"
    return problems_of("name lookups", slow, otherwise=fast, severity="warning")


def logger_findings(config: Config) -> list[Finding]:
    """Check the loggers that can fail when they open.

    Raises:
        ConfigError: A user's class cannot be loaded, or a service has no API key.
    """
    check_loggers(config.trainer.logger)
    return [Finding("loggers", "ok", ", ".join(config.trainer.logger) or "none")]


def socket_findings(config: Config) -> list[Finding]:
    """Check that the sockets of Ray and vLLM fit into the temporary folder.

    Raises:
        ResourceError: They do not, and no short folder can be used instead.
    """
    if config.ray_init.address:
        return []
    changes = shorten_socket_paths(dict(os.environ))
    return problems_of("sockets", changes, otherwise="the temporary folder is short enough", severity="warning")


def _lookup_seconds(address: str) -> float:
    """Return the longest of three lookups, in seconds. torch connects to IPv6 forms of IPv4 addresses."""
    longest = 0.0
    for _ in range(3):
        started = time.monotonic()
        with suppress(OSError):
            socket.getnameinfo((f"::ffff:{address}", 0), 0)
        longest = max(longest, time.monotonic() - started)
        if longest > SLOW_LOOKUP_S:
            break
    return longest


def folder_findings(config: Config) -> Iterator[Finding]:
    """Write a file where the run folder is or will be, and compare the free space with the size of a checkpoint."""
    folder = folder_of(config.trainer).absolute()
    key = f"trainer.default_local_dir={folder}"
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    problem = None if existing.is_dir() else f"{existing} is a file"
    if problem is None:
        try:
            with tempfile.TemporaryDirectory(dir=existing, prefix=".doctor-") as name:
                _write_probe(Path(name) / "probe")
        except OSError as error:
            problem = f"a file in {existing} cannot be written: {error.strerror}"
    if problem is not None:
        yield Finding("run folder", "problem", f"{key}: {problem}; free some space, or choose a folder of your own")
        return
    free, needed = shutil.disk_usage(existing).free, checkpoint_bytes(config)
    if saves_checkpoints(config) and needed is not None and free < needed:
        text = f"{key}: the disk has {size_text(free)} free, but a checkpoint needs {size_text(needed)}"
        yield Finding("run folder", "problem", f"{text}; free some space, or choose a folder on another disk")
        return
    yield from problems_of("run folder", find_problems("cpu", {"trainer.default_local_dir": str(folder)}),
                           otherwise=f"{folder} can be written, {size_text(free)} free")  # fmt: skip


def _write_probe(path: Path) -> None:
    with path.open("wb") as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def checkpoint_bytes(config: Config) -> float | None:
    """Return the least size of a checkpoint in bytes, None if the student is unknown.

    With LoRA the shards have the adapters only, and the folder huggingface the merged weights.
    """
    actor = config.actor_rollout_ref.actor
    try:
        memory = read_actor_memory(config)
    except (ConfigError, ModelError):  # another check reports it
        return None
    item, is_megatron = ITEM_BYTES[actor.dtype], actor.strategy == "megatron"
    stored = item if is_megatron else ITEM_BYTES["float32"]
    # Megatron saves the float32 weights of the optimizer too, if they are not the weights of the model.
    has_copies = is_megatron and (actor.megatron.use_distributed_optimizer or stored < ITEM_BYTES["float32"])
    n_trained = memory.n_adapters or memory.n_weights
    sizes = {
        "model": n_trained * stored,
        "optimizer": n_trained * ITEM_BYTES["float32"] * (3 if has_copies else 2),
        "hf_model": memory.n_weights * item,
    }
    return float(sum(size for part, size in sizes.items() if part in actor.checkpoint.save_contents))


def memory_findings(config: Config, device: str) -> list[Finding]:
    """Compare the estimate of ``plan`` with the memory of this machine's devices."""
    if config.trainer.nnodes > 1 or config.ray_init.address:
        return [Finding("memory", "skipped", "the devices may be on other machines; see: python -m recipe_gkd plan")]
    slots = config.trainer.n_gpus_per_node if device == "cuda" else _slots(config)[0]
    memory = slot_memory(device, slots)
    if memory is None:
        return [Finding("memory", "skipped", "the memory of the GPUs cannot be read; see: python -m recipe_gkd plan")]
    estimate = estimate_run(config, device, memory)
    if not estimate.problems:
        largest = max(pool.total for pool in estimate.pools)
        text = f"about {size_text(largest)} of {size_text(memory)} per device are needed"
        return [Finding("memory", "ok", text)]
    change = smallest_change(config, device, memory)
    remedy = "set " + " ".join(change.overrides) if change is not None else "use more or larger devices"
    return [Finding("memory", "warning", f"{'; '.join(estimate.problems)} (estimate); {remedy}")]
