"""This node on the network of a run's machines."""

import os
import socket

import psutil


def address_towards(host: str) -> str:
    """This node's own, on the way to another node or to itself. Raises OSError where it finds no way."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing, but finds the way
        address: str = probe.getsockname()[0]
        return address


def set_gloo_interface(address: str) -> None:
    """Have groups of this process made on the interface that has this address, unless GLOO_SOCKET_IFNAME says another.

    gloo itself takes what this host's own name resolves to: on Debian 127.0.1.1, by which no other node reaches it.
    """
    every = ((name, one.address) for name, of_card in psutil.net_if_addrs().items() for one in of_card)
    if interface := next((name for name, known in every if known == address), None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
