"""A real SLURM on one machine: a controller, and three nodes that are namespaces with a real slurmd in each.

A node has its own network, host name, processes, /mnt (what a job's node_tmp is) and /dev/shm; files are shared, as a
cluster's are. Its GPUs are device files with nothing behind them, its Pyxis is a fake. Root only.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

NODES = ("lab1", "lab2", "lab3")
NODE_TMP = "/mnt"
TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "nsenter", "unshare", "setpriv")
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Before a command: however this process ends, that does, too."""
ETC = Path(__file__).parent / "etc"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}


class Lab:
    """Open with `with`. `environment` makes sbatch and the like talk to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "etc" / "slurm.conf")}
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Lab":
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._down()

    # What a user does

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        done = subprocess.run(
            command, env=self.environment | variables, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """SLURM's word for a job."""
        return self._field(job, "JobState")

    def exit_code(self, job: str) -> int:
        return int(self._field(job, "ExitCode").split(":")[0])

    def wait(self, job: str, seconds: float) -> str:
        """Its state once it has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (state := self.state(job)) in ENDED:
                return state
            self.hurry(job)
            time.sleep(1)
        raise AssertionError(f"job {job} is {self.state(job)} after {seconds:g} s")

    def hurry(self, job: str) -> None:
        """A requeued job would wait for two minutes. A node refuses one that starts in the second of its requeue."""
        if self.state(job) == "PENDING":
            time.sleep(2)
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)

    def jobs(self) -> list[str]:
        """Numbers of all jobs there were."""
        lines = self.run("scontrol", "--oneliner", "show", "jobs").splitlines()
        return [word.partition("=")[2] for line in lines for word in line.split() if word.startswith("JobId=")]

    # Nodes

    def kill_node(self, name: str) -> None:
        """As if its power were cut: all its processes are gone, and its network."""
        self._on_host("ip", "link", "set", f"v{name}", "down")
        self._kill(self.nodes.pop(name))

    def processes(self, name: str) -> list[str]:
        """Command lines of what runs on a node, but for SLURM's own."""
        inside = [p for p in psutil.Process(self.nodes[name].pid).children(recursive=True) if p.is_running()]
        lines = []
        for process in inside:
            with suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
        return [line for line in lines if line and not line.startswith(("slurmd", "/usr/sbin/slurmd"))]

    def files(self, name: str) -> list[str]:
        """What is left in a node's own folder."""
        return sorted(os.listdir(self.folder / f"tmp.{name}"))

    # Up and down

    def _up(self) -> None:
        self._remove_network()  # of a lab that was killed
        for name in ("etc", "munge", "state"):
            (self.folder / name).mkdir(parents=True)
        for path in ETC.iterdir():
            text = path.read_text().replace("@LAB@", str(self.folder)).replace("@HOST@", socket.gethostname())
            (self.folder / "etc" / path.name).write_text(text)
        if has_spank():
            plugin = ("-shared", "-fPIC", "-o", f"{self.folder}/fake_pyxis.so", f"{ETC.parent}/fake_pyxis.c")
            self._on_host("gcc", "-Wall", "-Wextra", "-Werror", *plugin)
        for number in (0, 1):
            os.mknod(self.folder / f"gpu{number}", 0o20666, os.makedev(1, 3))
        munge = self.folder / "munge"
        munge.chmod(0o755)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        self.daemons.append(
            subprocess.Popen(
                [*ENDS_WITH_US, "munged", "--foreground", "--force",
                 f"--key-file={munge}/key", f"--socket={munge}/socket",
                 f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"],
                stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
        self._until((munge / "socket").exists, "munged")
        self._on_host("ip", "link", "add", "brlab", "type", "bridge")
        self._on_host("ip", "addr", "add", "10.77.0.254/24", "dev", "brlab")
        self._on_host("ip", "link", "set", "brlab", "up")
        self.daemons.append(
            subprocess.Popen([*ENDS_WITH_US, "slurmctld", "-D", "-c"], env=self.environment, stderr=subprocess.DEVNULL)
        )
        for number, name in enumerate(NODES, 1):
            self._start_node(name, f"10.77.0.{number}/24")
        self._until(
            lambda: self.run("sinfo", "-hplow", "-tidle", "-o%D", check=False).strip() == "3", "three idle nodes"
        )

    def _start_node(self, name: str, address: str) -> None:
        self._on_host("ip", "netns", "add", name)
        self._on_host("ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        self._on_host("ip", "link", "set", f"v{name}", "master", "brlab", "up")
        inside = ("nsenter", f"--net=/run/netns/{name}")
        self._on_host(*inside, "ip", "addr", "add", address, "dev", "eth0")
        self._on_host(*inside, "ip", "link", "set", "eth0", "up")
        self._on_host(*inside, "ip", "link", "set", "lo", "up")
        own = self.folder / f"tmp.{name}"
        own.mkdir()
        start = (
            f"hostname {name} && mount --bind {self.folder}/etc/hosts /etc/hosts && mount --bind {own} {NODE_TMP} && "
            f"mount -t tmpfs -o size=8g tmpfs /dev/shm && exec slurmd -D -N {name}"
        )
        isolate = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        with (self.folder / f"{name}.out").open("wb") as out:
            self.nodes[name] = subprocess.Popen(
                [*ENDS_WITH_US, *inside, *isolate, "--propagation=private", "bash", "-c", start],
                env=self.environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _down(self) -> None:
        for process in (*self.nodes.values(), *reversed(self.daemons)):
            self._kill(process)
        self._remove_network()

    def _remove_network(self) -> None:
        for name in NODES:
            self._on_host("ip", "netns", "del", name, check=False)
            self._on_host("ip", "link", "del", f"v{name}", check=False)
        self._on_host("ip", "link", "del", "brlab", check=False)

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        """And all below it: a PID namespace ends with its first process."""
        with suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait(10)

    def _field(self, job: str, name: str) -> str:
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    @staticmethod
    def _on_host(*command: str, check: bool = True) -> None:
        subprocess.run(command, check=check, capture_output=not check)

    @staticmethod
    def _until(there: "object", what: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not there():  # type: ignore[operator]
            assert time.monotonic() < end, f"{what}: not there after {seconds:g} s"
            time.sleep(0.1)


def has_spank() -> bool:
    """Whether plugins for srun can be built here."""
    return shutil.which("gcc") is not None and Path("/usr/include/slurm/spank.h").exists()


def missing_tools() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool) is None]
