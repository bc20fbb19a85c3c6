"""The Ray cluster of a run: joined, or started here with a token."""

import atexit
import os
import secrets
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.secret_variables import looks_secret

FORWARDED = ("HF_", "NCCL_", "VLLM_", "NVTE_", "TORCH", "PYTORCH_", "CUDA_", "TRITON_", "UCX_", "GLOO_", "PYTHONPATH")
"""Beginnings of the names of variables that workers of a cluster joined take from the run's environment; not secrets
among them, for Ray writes environments to logs that everybody can read.
"""


def find_cluster() -> bool:
    """Set RAY_ADDRESS, where it is not, to the cluster that `ray start` began on this machine, if that answers: as NeMo
    RL's runs join it. Not to one of another user, who could write the file in which Ray says where it is, but root.
    """
    if joins_cluster():
        return False
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # where Ray looks
    current = Path(folder) / "ray/ray_current_cluster"
    with suppress(OSError, ValueError):
        status = current.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_uid in (os.getuid(), 0):
            address = current.read_text().strip()
            host, port = address.rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=2).close()
            os.environ["RAY_ADDRESS"] = address
            return True
    return False


def joins_cluster() -> bool:
    """Whether workers go to a Ray cluster that is there already, on machines that need not be like this one."""
    return bool(os.environ.get("RAY_ADDRESS"))


def is_in_cluster() -> bool:
    """Whether this process has joined or started one; Ray is not imported to find out."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def check_address() -> None:
    """Raise UserError where RAY_ADDRESS is a host and port at which nobody answers, for which Ray would wait minutes
    without a word, or none. Of `auto` and ray://... Ray itself knows better.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto", "local") or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise _not_joined("it is no host:port")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, UnicodeError) as error:
        raise _not_joined(error) from None


def _not_joined(why: object) -> UserError:
    return UserError(
        f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: that Ray cluster cannot be joined ({str(why)[:200]}); start it, or "
        "unset RAY_ADDRESS, and `ray stop` what runs here, to have one started"
    )


def require_token() -> None:
    """A Ray that is started here asks for a token; it reads that when it is imported, and vLLM imports it too."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # as NeMo RL has it, which is imported later
    if joins_cluster():
        return
    if "ray" not in sys.modules:
        os.environ["RAY_AUTH_MODE"] = "token"
        if "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ["RAY_AUTH_TOKEN_PATH"] = _token_file()
    elif os.environ.get("RAY_AUTH_MODE") != "token":
        raise UserError(
            "cluster.backend=ray: Ray was imported before it could be given a token; start the run by the nemo-fp8rl "
            "command, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before Python starts"
        )


def _token_file() -> str:
    """A new token, in a file that only this user reads: Ray writes environments to logs that everybody can."""
    folder = tempfile.TemporaryDirectory(prefix="nemo_fp8rl_")
    atexit.register(folder.cleanup)
    path = os.path.join(folder.name, "ray_token")
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(secrets.token_hex(32))
    return path


def connect(
    num_cpus: int,
    setup_hook: str | None = None,
    variables: Mapping[str, str] | None = None,
    log_to_driver: bool = False,
) -> None:
    """Join the Ray cluster of RAY_ADDRESS, or start one here: on loopback, with a token of its own.

    One that this process is in already stays as it is: who joined or started it has decided what it asks of others.

    setup_hook: name of a function that every worker process calls first. variables: of its environment. log_to_driver:
    what workers write is shown here.
    """
    if is_in_cluster():
        return
    check_address()
    require_token()
    import ray

    environment: dict[str, Any] = {"env_vars": {**(_forwarded() if joins_cluster() else {}), **(variables or {})}}
    if setup_hook is not None:
        environment["worker_process_setup_hook"] = setup_hook
    if joins_cluster():
        try:
            ray.init(log_to_driver=log_to_driver, runtime_env=environment)
        except (ConnectionError, ValueError, SystemExit) as error:  # SystemExit: nobody answered
            raise _not_joined(error) from None
        return
    ray.init(
        "local",  # whatever else runs on this machine
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=log_to_driver,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        runtime_env=environment,
    )


def _forwarded() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FORWARDED) and name != "CUDA_VISIBLE_DEVICES" and not looks_secret(name, value)
    }
