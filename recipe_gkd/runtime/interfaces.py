"""Network interfaces of this machine."""

from __future__ import annotations

import socket

import psutil


def own_address_toward(host: str) -> str:
    """Return the address of the network interface that leads to ``host``."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # on a datagram socket this selects the route and sends nothing
        return str(probe.getsockname()[0])


def interface_toward(host: str) -> str | None:
    """Return the name of the network interface that leads to ``host``, None if no interface has its address."""
    own = own_address_toward(host)
    found = (name for name, addresses in psutil.net_if_addrs().items() if any(own == at.address for at in addresses))
    return next(found, None)
