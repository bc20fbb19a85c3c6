"""What runs on the nodes of a job, here on one machine: preflight, a real Ray, the driver's start, the end of all."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nemo_fp8rl.commands.launch.slurm import node
from nemo_fp8rl.commands.launch.slurm import preflight as preflight_module
from nemo_fp8rl.commands.launch.slurm.attempt import Attempt, free_ports, node_address, write
from nemo_fp8rl.commands.launch.slurm.preflight import check_node, differing_versions, listen
from nemo_fp8rl.commands.launch.slurm.ready import missing, wait
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.workers import ROLE


def variables(folder: Path, hosts: str, **others: str) -> dict[str, str]:
    """What the script exports."""
    (folder / "canary").write_text(str(folder))
    return {
        **os.environ,
        **{"ATTEMPT_DIR": str(folder), "HOSTS": hosts, "GENERATION_NODES": "0", "GPUS_PER_NODE": "0"},
        **{"GENERATION_GPUS_PER_NODE": "0", "PORTS": "20000-29999", "MIN_FREE_GIB": "0.001", "SECRETS_FILE": ""},
        **{"RAY_TMPDIR": f"{folder}/tmp", "PREFLIGHT_DIR": str(folder), "RAY_AUTH_MODE": "token"},
        **{"RAY_AUTH_TOKEN_PATH": str(folder / "token"), "SLURM_CPUS_ON_NODE": "1"},
        **others,
    }


def attempt(folder: Path, hosts: tuple[str, ...], alone: int = 0, gpus: int = 0) -> Attempt:
    return Attempt(folder, hosts, alone, (gpus, gpus), folder / "tmp", range(20000, 30000), None)


def rays(folder: Path) -> set[psutil.Process]:
    """Processes that write to this folder, or were told of it: of Ray, which other tests start, too."""
    found = psutil.process_iter(["cmdline", "status", "open_files"])
    alive = (p for p in found if p.info["status"] != psutil.STATUS_ZOMBIE)
    return {p for p in alive if str(folder) in f"{p.info['cmdline']} {p.info['open_files']}"}


def module(name: str, *arguments: str, env: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", f"nemo_fp8rl.commands.launch.slurm.{name}", *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def preflight(
    index: int, env: dict[str, str], reduces: bool = True, address: str = "127.0.0.1"
) -> "subprocess.Popen[str]":
    """Of a node that this machine plays, with little patience; or one that joins the others, and does nothing more."""
    code = (
        "import sys, time; from torch import distributed; from nemo_fp8rl.commands.launch.slurm import preflight\n"
        f"preflight.REDUCE_SECONDS = 15; preflight.node_address = lambda *_: '{address}'\n"
        f"if not {reduces}: distributed.init_process_group = lambda *_, **__: time.sleep(100)\n"
        f"sys.exit(preflight.main({index}, 60))"
    )
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_good_nodes_pass_and_reduce_together(tmp_path):
    env = variables(tmp_path, "one two")
    nodes = [preflight(i, env) for i in range(2)]
    said = [node.communicate(timeout=100)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert (tmp_path / "bad_nodes").read_text() == ""
    assert "preflight: one: good\npreflight: two: good\n" in said[0]


def local_addresses() -> list[str]:
    every = (one for of_card in psutil.net_if_addrs().values() for one in of_card)
    return [one.address for one in every if one.family == socket.AF_INET]


def listeners(process: int) -> set[tuple[str, int]]:
    """Addresses and ports on which it listens, as the kernel has them."""
    found = psutil.Process(process).net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def test_the_nodes_meet_on_the_address_of_the_first_alone(tmp_path):
    env = variables(tmp_path, "one two")
    address = next((address for address in local_addresses() if not address.startswith("127.")), "127.0.0.1")
    nodes = [preflight(0, env, address=address), preflight(1, env, reduces=False, address=address)]
    try:
        while not (tmp_path / "1.joined").exists():
            assert nodes[0].poll() is None
            time.sleep(0.05)
        place = json.loads((tmp_path / "store.json").read_text())
        assert place["address"] == address
        while len(found := listeners(nodes[0].pid)) < 2:  # the store, and gloo's own
            assert nodes[0].poll() is None
            time.sleep(0.05)
        assert place["port"] in {port for _, port in found}
        assert {where for where, _ in found} == {address}
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


def test_an_address_of_another_machine_is_said(tmp_path):
    with pytest.raises(UserError, match=r"cannot listen on 203\.0\.113\.1:\d+ \(.*look at DNS"):
        listen("203.0.113.1", attempt(tmp_path, ("one",)))


def test_only_the_node_that_does_not_join_the_others_is_bad(tmp_path):
    env = variables(tmp_path, "one two three")
    nodes = [preflight(i, env) for i in range(2)]
    found = tmp_path / "0.json"
    while not found.exists():
        assert nodes[0].poll() is None
        time.sleep(0.1)
    write(tmp_path / "2.json", json.loads(found.read_text()) | {"host": "three"})
    said = [node.communicate(timeout=100)[0] for node in nodes]
    assert (tmp_path / "bad_nodes").read_text() == "three\n", said
    assert "preflight: three: it did not join an all-reduce" in said[0]


@pytest.mark.long
def test_when_all_joined_and_none_reduces_no_node_is_bad(tmp_path):
    env = variables(tmp_path, "one two")
    head, other = preflight(0, env), preflight(1, env, reduces=False)
    said = head.communicate(timeout=100)[0]
    other.kill()
    other.communicate()
    assert head.returncode == 1
    assert "preflight: an all-reduce failed, which 2 of 2 nodes had joined" in said
    assert (tmp_path / "0.joined").exists() and not (tmp_path / "bad_nodes").exists()


@pytest.mark.parametrize(
    ("nodes", "bad"),
    [
        ("bad bad bad bad", None),
        ("well silent silent silent", None),
        ("bad bad silent well", None),
        ("well bad bad silent", None),
        ("bad bad well well", "0 1"),
        ("well silent bad well", "1 2"),
        ("bad silent", None),
        ("well bad", "1"),
        ("bad well", "0"),
        ("bad", "0"),  # it has none to be compared with
    ],
)
def test_what_is_wrong_with_most_nodes_is_no_nodes_fault(nodes, bad, tmp_path, monkeypatch, capsys):
    answers, full = nodes.split(), "the disk is full"
    monkeypatch.setattr(preflight_module, "check_node", lambda *_: [full] if answers[0] == "bad" else [])
    for name, value in variables(tmp_path, " ".join("0123"[: len(answers)])).items():
        monkeypatch.setenv(name, value)
    for index, answer in enumerate(answers[1:], 1):
        if answer != "silent":
            faults = [full] if answer == "bad" else []
            write(
                tmp_path / f"{index}.json",
                {"host": str(index), "versions": preflight_module._versions(), "faults": faults},
            )
    assert preflight_module.main(0, preflight_module.REDUCE_SECONDS + 0.1) == 1
    found = tmp_path / "bad_nodes"
    assert (found.read_text().split() if found.exists() else None) == (bad and bad.split())
    assert (tmp_path / "store.json").read_text() == "{}\n"  # the others do not wait
    said = "of 4 nodes are bad: maybe for what they share, a setting or the image"
    assert (said in capsys.readouterr().out) == (bad is None and len(answers) == 4)


def test_an_address_is_that_by_which_another_node_is_reached():
    assert node_address(["one"], 0) == socket.gethostbyname(socket.gethostname())
    with pytest.raises(UserError, match=r"two takes 127.0.0.1 for itself \(127"):
        node_address(["127.0.0.1", "two"], 1)
    with pytest.raises(UserError, match=r"127.0.0.1 finds no way to no\.such\.host\.invalid"):
        node_address(["127.0.0.1", "no.such.host.invalid"], 0)
    for address in local_addresses():
        if not address.startswith("127."):
            assert node_address([address, "two"], 1) == address


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    for name, value in variables(tmp_path, "one", RAY_TMPDIR=f"{tmp_path}/nfr-1-0").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # what removing another's comes to
    (tmp_path / "nfr-1-0").mkdir()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(UserError, match="nfr-1-0 is there, and another user's: remove it"):
            node.main(0)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_node_that_is_not_there_is_bad(tmp_path):
    head = module("preflight", "0", "62", env=variables(tmp_path, "one two"))
    said = head.communicate(timeout=100)[0]
    assert head.returncode == 1
    assert "preflight: one: good\npreflight: two: it did not answer\n" in said
    assert (tmp_path / "bad_nodes").read_text() == "two\n"


def test_what_is_wrong_with_a_node_is_said(tmp_path, monkeypatch):
    fake = tmp_path / "fake_nvidia_smi" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "0, GPU-a1, 0\\n1, GPU-b1, 7\\n2, GPU-b2, 0\\n"\n')
    fake.chmod(0o755)
    for name, value in variables(tmp_path, "one", MIN_FREE_GIB="1e9").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)
    (tmp_path / "canary").write_text("another's")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    faults = check_node(attempt(tmp_path, ("one",), gpus=3), 0, tmp_path)
    assert faults[:2] == ["GPU 1 has 7 uncorrected ECC errors", "it has 2 of 3 GPUs"]
    assert "GiB free of the 1e+09 asked for" in faults[2]
    assert "is not the folder that the script wrote to" in faults[3]
    for shown, fault in {
        "": "it has 0 of 3 GPUs",
        "-1": "it has 0 of 3 GPUs",
        "GPU-b": "GPU 1 has 7 uncorrected ECC errors",
        "GPU-a1,GPU-b2": "it has 2 of 3 GPUs",
        "MIG-x,MIG-y": "it has 2 of 3 GPUs",
    }.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert check_node(attempt(tmp_path, ("one",), gpus=3), 0, tmp_path)[0] == fault


@pytest.mark.parametrize("first", [True, False])
def test_a_node_where_cuda_does_not_start_is_bad(tmp_path, monkeypatch, first):
    """At first: later the GPUs may be full."""

    def fails(*args, **how):
        raise RuntimeError("CUDA error: system not yet initialized\nCompile with ...")

    monkeypatch.setattr(preflight_module, "_gpu_faults", lambda wanted: [])
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.zeros", fails)
    for name, value in variables(tmp_path, "one").items():
        monkeypatch.setenv(name, value)
    (folder := tmp_path / f"preflight-{int(not first)}").mkdir()
    (folder / "canary").write_text(os.environ["ATTEMPT_DIR"])
    faults = check_node(attempt(tmp_path, ("one",), gpus=1), 0, folder)
    assert faults == (
        ["CUDA does not start (CUDA error: system not yet initialized Compile with ...)"] if first else []
    )


def test_a_folder_of_a_node_that_is_not_there_is_said(tmp_path, monkeypatch):
    for name, value in variables(tmp_path, "one").items():
        monkeypatch.setenv(name, value)
    there = replace(attempt(tmp_path, ("one",)), node_tmp=tmp_path / "none" / "nfr")
    faults = check_node(there, 0, tmp_path)
    assert faults[0] == f"slurm.node_tmp={tmp_path}/none cannot be used (No such file or directory)"


def test_versions_that_are_not_those_of_most_are_said():
    usual = {"torch": "2.11", "ray": "2.60"}
    found = {"a": usual, "b": {"torch": "2.10", "ray": "2.60"}, "c": usual, "d": {"torch": "2.11"}}
    assert differing_versions(found) == {"b": "torch is 2.10, elsewhere 2.11", "d": "ray is None, elsewhere 2.60"}


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Ray's sockets are below it, and the path of a socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as folder:
        yield Path(folder)


def test_a_node_that_slurm_told_to_end_leaves_word(short_folder):
    env = variables(short_folder, "one two")
    waiting = module("node", "1", env=env)  # for the head
    end = time.monotonic() + 60
    while not (short_folder / "tmp").exists():
        assert waiting.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    assert not (short_folder / "terminated").exists()
    waiting.send_signal(signal.SIGTERM)
    while not (short_folder / "terminated").exists():
        assert waiting.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    (short_folder / "ended").touch()
    said = waiting.communicate(timeout=30)[0]
    assert waiting.returncode == 0, said


def test_a_real_ray_is_there_when_the_driver_starts_and_gone_after_the_end(short_folder):
    folder = short_folder
    (folder / "token").write_text("0" * 64)
    env = variables(folder, socket.gethostname())
    other = subprocess.Popen(["sleep", "100"], env=os.environ | {"NEMO_FP8RL_ATTEMPT": "another's"})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))  # as SLURM may hand it on from a login node
    ray_node = module("node", "0", env=env)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        code = (
            "import os, ray; ray.init(log_to_driver=False); print('seen', len(ray.nodes()), os.environ['RAY_ADDRESS'])"
        )
        driver = module("ready", "100", sys.executable, "-c", code, env=env)
        said = driver.communicate(timeout=120)[0]
        assert f"seen 1 {json.loads((folder / 'cluster.json').read_text())['address']}" in said
        found = rays(folder / "tmp")
        assert len(found) > 2
        open_files = [p.rlimit(psutil.RLIMIT_NOFILE)[0] for p in found if p.name() in ("raylet", "gcs_server")]
        assert open_files == [65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)] * 2
    finally:
        (folder / "ended").touch()
        said = ray_node.communicate(timeout=60)[0]
    assert ray_node.returncode == 0, said
    assert other.poll() is None  # what is another's goes on
    other.kill()
    other.wait()
    assert not rays(folder / "tmp")
    assert not (folder / "tmp").exists()


def test_nodes_that_do_not_come_are_named_in_time(tmp_path):
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"after 2 s these of the 2 nodes .* one, two; see .*node-one.log") as caught:
        wait(attempt(tmp_path, ("one", "two")), 2)
    assert time.monotonic() - begin < 10
    assert "\n" not in str(caught.value)


def test_only_nodes_with_their_gpus_and_their_role_count():
    def one(name: str, gpus: int, role: str, alive: bool = True) -> dict:
        return {"NodeManagerHostname": name, "Alive": alive, "Resources": {"GPU": gpus}, "Labels": {ROLE: role}}

    wanted = attempt(Path("/x"), ("a", "b", "c"), alone=1, gpus=8)
    good = [one("a", 8, "train"), one("b.cluster", 8, "train"), one("c", 8, "generation")]
    assert missing(wanted, good) == []
    assert missing(wanted, good[:2]) == ["c"]
    assert missing(wanted, [*good[:2], one("c", 8, "train")]) == ["c"]
    assert missing(wanted, [good[0], one("b", 8, "train", alive=False), good[2]]) == ["b"]
    assert missing(wanted, [one("a", 7, "train"), *good[1:]]) == ["a (with 7 of 8 GPUs)"]


def test_ports_that_are_taken_are_passed_over():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_ports(1, range(port, port + 3), 0)[0] != port
        with pytest.raises(UserError, match="all are taken"):
            free_ports(1, range(port, port + 1), 0)


def test_files_between_nodes_appear_whole(tmp_path):
    write(tmp_path / "a.json", {"b": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
