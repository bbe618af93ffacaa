"""A real proxy process with a client, and its memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from teacher.client import TeacherClient
from tests._support.ports import free_port
from tests._support.repository import REPO
from tests._support.waiting import wait_until
from tests.fuzz.hostile import Frames
from tests.fuzz.messages import SEQUENCES

START_TIMEOUT_S = 60.0
DEADLINE_S = 20.0
_MAX_QUEUE_TOKENS = 100_000


class ProxyProcess:
    """A proxy started by its command.

    Attributes:
        port: Port for clients.
        backend_port: Port for workers.
        http_port: Port of the HTTP endpoint.
        client: A client.
    """

    def __init__(self, folder: Path, module: str = "teacher") -> None:
        """Start the process, and wait until its ports are bound.

        Args:
            folder: Folder of its log.
            module: Module with the command, which tests replace by one with a fault.
        """
        self.port, self.backend_port, self.http_port = free_port(), free_port(), free_port()
        ready, self._log = folder / "ready", folder / "proxy.log"
        command = [
            *(sys.executable, "-m", module, "proxy", "--end-with-parent", str(os.getpid())),
            *("--frontend-port", str(self.port), "--backend-port", str(self.backend_port)),
            *("--http-port", str(self.http_port), "--max-queue-tokens", str(_MAX_QUEUE_TOKENS)),
            *("--ready-file", str(ready)),
        ]
        with ExitStack() as undo, self._log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=REPO, stderr=log, stdout=log)
            undo.callback(self._process.kill)
            wait_until(lambda: ready.exists() or self._process.poll() is not None, START_TIMEOUT_S)
            self.ensure_alive()
            undo.pop_all()
        self.client = TeacherClient(server_port=self.port, timeout_s=DEADLINE_S)

    def ensure_alive(self) -> None:
        """Check that the process has not ended."""
        status = self._process.poll()
        assert status is None, f"the proxy ended with status {status}:\n{self._log.read_text(errors='replace')[-3000:]}"

    def rss_bytes(self) -> int:
        """Return the resident memory."""
        self.ensure_alive()
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def check_serves(self) -> None:
        """Check that the proxy's workers score a valid request."""
        self.ensure_alive()
        self.client.wake()
        assert len(self.client.submit(SEQUENCES).result(timeout=DEADLINE_S)) == len(SEQUENCES)

    def exchange(self, port: int, writes: Frames, answer_s: float = 0.0) -> bytes:
        """Send bytes to a port, end the sending direction, and return everything until the proxy closes the connection.

        Args:
            port: Port of the proxy.
            writes: Bytes to send.
            answer_s: Time to wait for an answer before the sending direction is ended, in seconds.
        """
        received = b""
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
            try:
                for data in writes:
                    connection.sendall(data)
                time.sleep(answer_s)
                connection.shutdown(socket.SHUT_WR)
                while data := connection.recv(1 << 16):
                    received += data
            except TimeoutError:
                raise AssertionError("the proxy did not close a connection") from None
            except OSError:  # the proxy may close the connection before it has read everything
                self.ensure_alive()
        return received

    def close(self) -> None:
        """End the client and the process."""
        self.client.close()
        self._process.kill()
        self._process.wait(timeout=DEADLINE_S)
