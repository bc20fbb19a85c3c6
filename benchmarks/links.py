"""What a link carries between two processes of this machine, by transport: buckets that nobody fills or empties.

    python benchmarks/links.py [--transports collective nixl ...] [--bucket-mib 64] [--buckets 30] [--device cpu]

Gigabytes a second of the clock, best of three, and CPU seconds a gigabyte on either side. shared_memory and cuda_ipc
carry nothing but the word that a bucket is there. UCX_TLS=tcp shows nixl without shared memory. nixl:
PYTHONPATH=.venv/nixl after `make test-nixl`. benchmarks/results/links_cpu.json is of all three.
"""

import argparse
import json
import multiprocessing
import os
import platform
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.refit.transport.handshake import Listener, connect
from nemo_fp8rl.refit.transport.link import ReceivingEnd, SendingEnd

HOST, TOKEN, SINK, TIMEOUT = "127.0.0.1", "benchmark", "sink", 60.0
ROUNDS = 3


def measured(transport: str, nbytes: int, count: int, device: torch.device) -> tuple[float, float, float]:
    """(GB/s, CPU seconds a GB in the source, in the sink)."""
    processes = multiprocessing.get_context("spawn")
    connection, sink_connection = processes.Pipe()
    listener = Listener(transport, HOST, TOKEN, TIMEOUT, device)  # type: ignore[arg-type]
    sink = processes.Process(target=_receive, args=(sink_connection, listener.address, count, device))
    sink.start()
    end = listener.accept(SINK, nbytes)
    _send(end, nbytes, 2)  # what a first message sets up
    rounds = []
    for _ in range(ROUNDS):
        connection.recv()
        cpu, start = time.process_time(), time.perf_counter()
        _send(end, nbytes, count)
        sink_cpu = connection.recv()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        gigabytes = nbytes * count / 1e9
        rounds.append((gigabytes / seconds, cpu / gigabytes, sink_cpu / gigabytes))
    end.close()
    listener.close()
    sink.join()
    return max(rounds)


def _send(end: SendingEnd, nbytes: int, count: int) -> None:
    for _ in range(count):
        end.acquire_buffer()
        end.send(b"", nbytes)


def _receive(connection: Connection, address: tuple[str, int], count: int, device: torch.device) -> None:
    end = connect(address, TOKEN, SINK, TIMEOUT, device)
    _take(end, 2)
    for _ in range(ROUNDS):
        connection.send(None)
        cpu = time.process_time()
        _take(end, count)
        connection.send(time.process_time() - cpu)


def _take(end: ReceivingEnd, count: int) -> None:
    for _ in range(count):
        end.receive()
        end.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", default=["shared_memory", "collective"])
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--buckets", type=int, default=30)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    columns = "GB/s", "CPU s a GB, source", "sink"
    result: dict[str, Any] = {
        "machine": machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "bucket_mib": args.bucket_mib,
        "ucx_tls": os.environ.get("UCX_TLS", ""),
        "transports": {},
    }
    table = Table("transport", *columns, title=f"{args.bucket_mib} MiB buckets, {result['machine']}")
    for transport in args.transports:
        figures = measured(transport, args.bucket_mib << 20, args.buckets, args.device)
        result["transports"][transport] = dict(zip(columns, figures, strict=True))
        table.add_row(transport, *(f"{figure:.3g}" for figure in figures))
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
