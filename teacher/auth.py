"""CURVE: who may talk to a service, and that nobody else can listen or change what is said.

The server knows the public keys that it lets in; a client or a worker knows the server's. A key is 40
characters of Z85.
"""

from __future__ import annotations

from dataclasses import dataclass

import zmq


@dataclass(frozen=True)
class ServerKeys:
    """Of the proxy. `allowed` are the public keys of clients and workers."""

    public: bytes
    secret: bytes
    allowed: tuple[bytes, ...]

    def secure(self, socket: zmq.Socket) -> None:
        """Before it is bound."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


@dataclass(frozen=True)
class ClientKeys:
    """Of a client, or of a worker."""

    server_public: bytes
    public: bytes
    secret: bytes

    def secure(self, socket: zmq.Socket) -> None:
        """Before it is connected."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


Keys = ServerKeys | ClientKeys
