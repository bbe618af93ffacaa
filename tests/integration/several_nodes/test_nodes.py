"""The nodes themselves: they are separated, can be cut and killed, and leave nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._support.network_nodes import Network, Node, network, ray_cluster, unavailable
from tests._support.waiting import PATIENCE_S, wait_until

SERVER = "import socket; s = socket.create_server(('', 7000)); print('ready', flush=True)\nwhile True: s.accept()"
RAY_PROGRAM = """
import ray, socket
ray.init(address="auto", log_to_driver=False)
task = ray.remote(lambda: (socket.gethostname(), ray.util.get_node_ip_address()))
print(*ray.get(task.options(num_cpus=2).remote(), timeout=60))
"""


@pytest.fixture
def created(tmp_path: Path) -> Iterator[Network]:
    if reason := unavailable():
        pytest.skip(reason)
    with network(tmp_path) as created:
        yield created


def connects(node: Node, to: Node) -> bool:
    """Return True if a TCP connection from a node to the server on another one opens within a second."""
    program = f"import socket; socket.create_connection(('{to.address}', 7000), timeout=1)"
    return node.run(sys.executable, "-c", program, timeout_s=PATIENCE_S).returncode == 0


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S).stdout


def pid_namespace(process: Path) -> str:
    """Return the namespace of the process ids of a process, empty if it has ended."""
    try:
        return os.readlink(process / "ns/pid")
    except OSError:
        return ""


def start_server(node: Node, log: Path) -> None:
    node.start(sys.executable, "-c", SERVER, log=log)
    wait_until(lambda: "ready" in log.read_text())


class TestNode:
    def test_has_own_name_address_files_and_processes(self, created: Network) -> None:
        nodes = [created.add_node() for _ in range(2)]
        show = "hostname; hostname -I; touch /tmp/mine /dev/shm/mine; ls /tmp | grep node; ps -e -o pid= | wc -l"
        for i, node in enumerate(nodes):
            shown = node.run("bash", "-c", show.replace("mine", f"of_node{i}"), timeout_s=PATIENCE_S).stdout.split()
            assert shown[:3] == [f"node{i}", node.address, f"of_node{i}"]
            assert int(shown[3]) < 8  # the first process and this command

    def test_shares_its_folder_with_this_machine(self, created: Network) -> None:
        created.add_node().run("touch", f"{created.shared}/file", timeout_s=PATIENCE_S)
        assert (created.shared / "file").exists()

    def test_cut_link_loses_packets_until_restored(self, created: Network) -> None:
        first, second = created.add_node(), created.add_node()
        start_server(second, created.shared / "server.log")
        assert connects(first, second)
        second.cut()
        assert not connects(first, second)
        second.restore()
        assert connects(first, second)

    def test_kill_ends_all_processes_and_interfaces(self, created: Network) -> None:
        first, second = created.add_node(), created.add_node()
        second.start("bash", "-c", "setsid sleep 3600 & setsid sleep 3600", log=created.shared / "sleep.log")
        wait_until(lambda: sum("sleep 3600" in line for line in second.processes()) >= 2)
        second.kill()
        assert second.processes() == []

        links = first.switch.command("ip", "-o", "link")
        wait_until(lambda: second.port not in output_of(*links))
        assert first.port in output_of(*links)

    def test_ends_with_the_program_that_created_it(self, tmp_path: Path) -> None:
        if reason := unavailable():
            pytest.skip(reason)
        program = (
            "import os, pathlib, signal, tests._support.network_nodes as nodes\n"
            f"with nodes.network(pathlib.Path({str(tmp_path)!r})) as created:\n"
            "    node = created.add_node()\n"
            "    print(node.namespaces.pid_namespace, created.switch.pid_namespace, flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        identifiers = output_of(sys.executable, "-c", program).split()
        assert len(identifiers) == 2
        wait_until(lambda: not any(pid_namespace(folder) in identifiers for folder in Path("/proc").glob("[0-9]*")))


@pytest.mark.slow  # the tests of tests/integration/several_nodes that use such nodes are slow, too
def test_ray_runs_task_on_second_node(created: Network) -> None:
    nodes = [created.add_node() for _ in range(2)]
    with ray_cluster(nodes, (1, 2)):
        done = nodes[0].run(sys.executable, "-c", RAY_PROGRAM, timeout_s=PATIENCE_S)
    assert done.stdout.split()[-2:] == ["node1", nodes[1].address], done.stdout + done.stderr
    assert [line for node in nodes for line in node.processes()] == []
