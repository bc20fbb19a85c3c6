"""Trainer ranks meet on the network that connects them, whatever a host's name resolves to."""

import os
import socket
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import psutil
import pytest
import torch
import torch.distributed as dist

from nemo_fp8rl.policy.rank.process_groups import start_process_groups

sockets: list[socket.socket] = []
"""The socket at which the ranks meet, in rank 0's process."""


def listen(address: str) -> tuple[str, int]:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    sockets.append(socket.create_server((address, 0)))
    return sockets[0].getsockname()


def join_ranks(rank: int, rendezvous: tuple[str, int]) -> tuple[str | None, set[str], float]:
    """Return the variable of gloo's interface, the addresses of this rank's connections, and a sum over the ranks."""
    start_process_groups(rank, 2, rendezvous, sockets[0] if rank == 0 else None)
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    dist.barrier()
    used = {connection.laddr.ip.removeprefix("::ffff:") for connection in psutil.Process().net_connections("tcp")}
    return os.environ.get("GLOO_SOCKET_IFNAME"), used, float(total)


def find_address() -> tuple[str, str]:
    """Return (interface, address) of this machine on a network."""
    for name, card in psutil.net_if_addrs().items():
        for entry in card:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return name, entry.address
    pytest.skip("this machine is on no network")


def test_ranks_meet_on_the_interface_of_the_cluster(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    name, address = find_address()
    with (
        ProcessPoolExecutor(1, get_context("spawn")) as first,
        ProcessPoolExecutor(1, get_context("spawn")) as second,
    ):
        rendezvous = first.submit(listen, address).result()
        ranks = [process.submit(join_ranks, rank, rendezvous) for rank, process in enumerate((first, second))]
        assert [rank.result(120) for rank in ranks] == [(name, {address}, 3.0)] * 2
