"""The address and the network interface of this node on the network of a run's machines."""

import os
import socket

import psutil

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.run_schema import ClusterConfig

GLOO, NCCL, VLLM_HOST = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"


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
        os.environ.setdefault(GLOO, interface)


def node_address(cluster: ClusterConfig) -> str:
    """Return the address of this node on the cluster's interface; loopback without a Ray cluster."""
    if cluster.backend == "in_process":
        return "127.0.0.1"
    import ray

    return ray.util.get_node_ip_address()


def check_interfaces() -> None:
    """Raise UserError for a variable that names a network interface, or an address, that this machine has not.

    gloo takes names of interfaces, separated by commas. NCCL takes the beginnings of names, after = whole names, after
    ^ those to leave out. Their own errors name neither the variable nor the interface.
    """
    interfaces = psutil.net_if_addrs()
    there = f"this machine has {', '.join(sorted(interfaces))}"
    if (value := os.environ.get(GLOO)) and (missing := [name for name in value.split(",") if name not in interfaces]):
        raise UserError(
            f"{GLOO}={value}: there is no network interface {missing[0]!r} ({there}); unset it, or name one"
        )
    value = os.environ.get(NCCL) or "^"
    names = tuple(entry.partition(":")[0] for entry in value.removeprefix("=").split(","))  # NAME:PORT is allowed
    matches = [name for name in interfaces if (name in names if value.startswith("=") else name.startswith(names))]
    if not value.startswith("^") and not matches:
        raise UserError(f"{NCCL}={value}: there is no such network interface ({there}); unset it, or name one")
    addresses = {entry.address for entries in interfaces.values() for entry in entries}
    if (value := os.environ.get(VLLM_HOST)) and value not in addresses:
        raise UserError(f"{VLLM_HOST}={value} is no address of this machine; unset it, or set it to one of its own")
