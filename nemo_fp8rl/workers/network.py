"""The address and the network interface of this node on the network of a run's machines."""

import os
import socket

import psutil

from nemo_fp8rl.config.run_schema import ClusterConfig


def address_towards(host: str) -> str:
    """Return this node's address on the route to another node, or to itself. Raises OSError if there is no route."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing, but finds the route
        address: str = probe.getsockname()[0]
        return address


def set_gloo_interface(address: str) -> None:
    """Make gloo groups of this process use the interface with this address, unless GLOO_SOCKET_IFNAME is set.

    By default gloo takes the address to which this host's own name resolves: on Debian that is 127.0.1.1, by which no
    other node reaches it.
    """
    addresses = ((name, entry.address) for name, entries in psutil.net_if_addrs().items() for entry in entries)
    if interface := next((name for name, known in addresses if known == address), None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def node_address(cluster: ClusterConfig) -> str:
    """Return the address of this node on the cluster's interface; loopback without a Ray cluster."""
    if cluster.backend == "in_process":
        return "127.0.0.1"
    import ray

    return ray.util.get_node_ip_address()
