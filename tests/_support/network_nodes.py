"""Nodes on one machine: processes with their own network, process ids, host name, ``/tmp`` and ``/dev/shm``.

A switch (a bridge in a separate network namespace) joins the nodes. Each node is a set of Linux namespaces whose
first process waits for the end of its standard input. The kernel ends all processes of a node together with that
process, and removes namespaces and interfaces. Nothing is left, even if the program that created the nodes is killed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests._support.repository import REPO
from tests._support.waiting import wait_until

SUBNET = "10.77.0"
RAY_PORT = 6379
OBJECT_STORE_BYTES = 160 << 20
_TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname")
_TMP = "/tmp"
_SETUP_TIMEOUT_S = 20.0
_RAY_TIMEOUT_S = 120.0
_SHARED_MEMORY = "512m"
_DISK = "256m"
"""Size of ``/tmp/ray`` of a node, the folder of Ray's logs and spilled objects."""
_RAY_TOKEN = secrets.token_hex(32)
"""Token of the clusters of this process. By default Ray's head requires a token if the home directory has one."""
_NOT_INHERITED = ("VLLM_", "RAY_", "TMPDIR", "GLOO_", "NCCL_", "PYTEST_")
_BEGIN = "set -e; ip link set lo up"
_WAIT = "echo ready; while read -r _; do :; done"
"""End of a node's first process: it reaps orphans, and exits when the program that holds its input has ended."""


@dataclass(frozen=True)
class Namespaces:
    """Namespaces of a first process.

    Attributes:
        launcher: Process of ``unshare``, whose standard input keeps the first process alive.
        first_pid: Process id of the first process on this machine.
        pid_namespace: Identifier of the namespace of its process ids.
    """

    launcher: subprocess.Popen[str]
    first_pid: int
    pid_namespace: str

    @classmethod
    def create(cls, *kinds: str, setup: str) -> Namespaces:
        """Create namespaces.

        Args:
            kinds: Options of ``unshare``.
            setup: Shell commands of the first process.

        Raises:
            OSError: The kernel or the commands refuse.
        """
        launcher = subprocess.Popen(
            ["unshare", *kinds, "--fork", "--kill-child", "bash", "-c", f"{_BEGIN}\n{setup}\n{_WAIT}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C must not end a node before the programs on it.
        )
        assert launcher.stdout is not None
        if launcher.stdout.readline() != "ready\n":
            launcher.kill()
            raise OSError(launcher.communicate(timeout=_SETUP_TIMEOUT_S)[1].strip() or "unshare failed")
        [first_pid] = _children(launcher.pid)
        return cls(launcher, first_pid, os.readlink(f"/proc/{first_pid}/ns/pid"))

    def command(self, *arguments: str) -> list[str]:
        """Return a command that runs ``arguments`` in the namespaces."""
        namespaces = ("--net", "--pid", "--mount", "--uts", "--ipc")
        return ["nsenter", "--target", str(self.first_pid), *namespaces, *arguments]

    def end(self) -> None:
        """Kill all processes, and wait until they have ended."""
        with suppress(ProcessLookupError):
            os.kill(self.first_pid, signal.SIGKILL)
        self.launcher.communicate(timeout=_SETUP_TIMEOUT_S)

    def processes(self) -> list[str]:
        """Return ``pid command`` of each live process, except the first one. Zombies are excluded."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(folder / "ns/pid") == self.pid_namespace and folder.name != str(self.first_pid):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    found.extend([f"{folder.name} {command[:100]}"] if command else [])
        return found


@dataclass(frozen=True)
class Node:
    """A node of a :class:`Network`.

    Attributes:
        name: Host name.
        address: Address on the switch.
        namespaces: Namespaces of its processes.
        port: Interface of the switch to which the node is connected.
    """

    name: str
    address: str
    namespaces: Namespaces
    port: str
    switch: Namespaces

    def start(self, *command: str, cwd: Path | None = None, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a program on the node.

        Args:
            command: Program and arguments.
            cwd: Working directory.
            log: File that receives its output.
            variables: Additional environment variables.

        Returns:
            Process that waits for the program and returns its status. :meth:`send` sends a signal to the program.
        """
        with log.open("ab") as file:
            return subprocess.Popen(
                self.namespaces.command("env", "-C", str(cwd or REPO), *command),
                env=_environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, *command: str, timeout_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program on the node, and return its status and output. Fail if it exceeds ``timeout_s``."""
        arguments = self.namespaces.command("env", "-C", str(REPO), "timeout", "-k", "5", str(timeout_s), *command)
        return subprocess.run(
            arguments,
            env=_environment(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s + 10,
            check=False,
        )

    @staticmethod
    def send(process: subprocess.Popen[bytes], number: int) -> None:
        """Send a signal to a program that :meth:`start` has started."""
        for pid in _children(process.pid):
            os.kill(pid, number)

    def cut(self) -> None:
        """Disconnect the node. Packets are lost; no connection is closed."""
        _check_call(self.switch.command("ip", "link", "set", self.port, "nomaster"))

    def restore(self) -> None:
        """Connect the node again."""
        _check_call(self.switch.command("ip", "link", "set", self.port, "master", "switch"))

    def fill_disk(self) -> None:
        """Fill the disk of Ray's logs and spilled objects."""
        self.run("dd", "if=/dev/zero", "of=/tmp/ray/full", "bs=64k", timeout_s=_SETUP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill all processes of the node. Its connections are closed, as far as the other ends can be reached."""
        self.namespaces.end()

    def lose_power(self) -> None:
        """End the node without a packet to the other nodes."""
        self.cut()
        self.kill()

    def processes(self) -> list[str]:
        """Return ``pid command`` of each live process that was started on the node."""
        return self.namespaces.processes()


@dataclass
class Network:
    """Switch with the nodes that are connected to it.

    Attributes:
        private: Folder for the nodes' own files.
        shared: Folder that all nodes share.
        nodes: Nodes so far, including those that were killed.
    """

    switch: Namespaces
    private: Path
    shared: Path
    nodes: list[Node] = field(default_factory=list)

    def add_node(self) -> Node:
        """Start and connect a node with the next address.

        As on Debian, a node resolves its own name to 127.0.1.1, which is useless on other nodes.
        """
        n = len(self.nodes)
        name, address = f"node{n}", f"{SUBNET}.{n + 1}"
        hosts = self.private / f"{name}.hosts"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        files = _private_files(self.private / name, hosts, [self.shared, REPO, Path(sys.prefix), Path(sys.base_prefix)])
        kinds = ("--net", "--pid", "--mount", "--uts", "--ipc", "--mount-proc")
        namespaces = Namespaces.create(*kinds, setup=f"hostname {name}\n{files}")
        self.nodes.append(node := Node(name, address, namespaces, f"to_{name}", self.switch))
        _connect(node)
        return node


@contextmanager
def network(shared: Path) -> Iterator[Network]:
    """Create a switch, yield it, and end all nodes that were added to it.

    Args:
        shared: Folder that is the same on all nodes and on this machine. The repository and the interpreter are shared
            too. Other files below ``/tmp`` are different on each node.

    Raises:
        OSError: The machine does not allow it; see :func:`unavailable`.
    """
    with tempfile.TemporaryDirectory(prefix="gkd_nodes", ignore_cleanup_errors=True) as private:
        bridge = "ip link add switch type bridge; ip link set switch up"
        created = Network(Namespaces.create("--net", "--pid", setup=bridge), Path(private), shared)
        try:
            yield created
        finally:
            for node in created.nodes:
                node.kill()
            created.switch.end()


def unavailable() -> str:
    """Return the reason why this machine cannot create nodes. Empty if it can."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} (packages util-linux, iproute2, hostname)"
    try:
        with tempfile.TemporaryDirectory() as shared, network(Path(shared)) as created:
            created.add_node()
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces, bridges or veth interfaces cannot be created (this needs root): {error}"


@contextmanager
def ray_cluster(nodes: Sequence[Node], cpus: Sequence[int]) -> Iterator[str]:
    """Start Ray on nodes, and yield the address of the cluster. The head is the first node.

    Args:
        cpus: Number of CPU slots of each node, which select the nodes of the pools.
    """
    address = f"{nodes[0].address}:{RAY_PORT}"
    try:
        for node, n_cpus in zip(nodes, cpus, strict=True):
            role = ("--head", "--port", str(RAY_PORT), "--include-dashboard=false")
            start_ray(node, n_cpus, *(role if node is nodes[0] else ("--address", address)))
        yield address
    finally:
        for node in nodes:
            node.kill()  # Faster than `ray stop`, and complete.


def start_ray(node: Node, n_cpus: int, *options: str) -> None:
    """Start Ray's processes on a node. Fail if they do not start."""
    command = (ray_program(), "start", "--node-ip-address", node.address, "--num-cpus", str(n_cpus), "--num-gpus", "0")
    store = ("--object-store-memory", str(OBJECT_STORE_BYTES), "--disable-usage-stats")
    done = node.run(*command, *store, *options, timeout_s=_RAY_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def ray_program() -> str:
    """Return the path of ``ray`` beside this interpreter."""
    return str(Path(sys.executable).with_name("ray"))


def _connect(node: Node) -> None:
    """Connect a new node to the switch."""
    pair = ("ip", "link", "add", node.port, "netns", str(node.switch.first_pid), "type", "veth", "peer", "name", "eth0")
    _check_call([*pair, "netns", str(node.namespaces.first_pid)])
    inside = node.namespaces.command
    _check_call(inside("ip", "address", "add", f"{node.address}/24", "dev", "eth0"))
    _check_call(inside("ip", "link", "set", "eth0", "up"))
    _check_call(node.switch.command("ip", "link", "set", node.port, "master", "switch", "up"))


def _private_files(folder: Path, hosts: Path, kept: Sequence[Path]) -> str:
    """Return shell commands that give a node its own ``/tmp``, ``/dev/shm`` and host names.

    Args:
        folder: Folder of this machine that becomes the node's ``/tmp``.
        hosts: File that becomes its ``/etc/hosts``.
        kept: Folders that the node shares with this machine.
    """
    (folder / "ray").mkdir(parents=True)
    commands = [
        f"mount -t tmpfs -o size={_DISK} tmpfs '{folder}/ray'",
        f"mount -t tmpfs -o size={_SHARED_MEMORY} tmpfs /dev/shm",
        f"mount --bind '{hosts}' /etc/hosts",
        "mount --bind /dev/null /etc/resolv.conf",  # No name server can be reached: fail at once instead of in 10 s.
    ]
    for path in sorted({path.resolve() for path in kept if path.resolve().is_relative_to(_TMP)}):
        if path == Path(_TMP):
            continue
        inside = folder / path.relative_to(_TMP)
        inside.mkdir(parents=True, exist_ok=True)
        commands.append(f"mount --bind '{path}' '{inside}'")
    return "\n".join([*commands, f"mount --rbind '{folder}' {_TMP}", f"chmod 1777 {_TMP}"])


def _environment(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment of a program on a node. Modules of the test process set variables that are not for it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    own = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return inherited | own | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _RAY_TOKEN} | variables


def _children(pid: int) -> list[int]:
    """Return the child processes of a process, once it has one."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    wait_until(lambda: bool(path.read_text().split()), _SETUP_TIMEOUT_S)
    return [int(child) for child in path.read_text().split()]


def _check_call(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_SETUP_TIMEOUT_S)
