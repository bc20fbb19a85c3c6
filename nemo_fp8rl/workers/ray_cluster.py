"""The Ray cluster of a run: an existing one that the run joins, or one that it starts with a token."""

import atexit
import os
import secrets
import shutil
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
from nemo_fp8rl.workers.socket_folder import LONGEST_PATH, short_folder

FORWARDED = ("HF_", "NCCL_", "VLLM_", "NVTE_", "TORCH", "PYTORCH_", "CUDA_", "TRITON_", "UCX_", "GLOO_", "PYTHONPATH")
"""Prefixes of the variables that workers of an existing cluster take from the run's environment. Secrets among them are
left out, because Ray writes environments to logs that everybody can read.
"""

LONGEST_FOLDER = LONGEST_PATH - len("/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Bytes that the folder for temporary files may have in which Ray has its sockets."""


def find_cluster() -> bool:
    """Set RAY_ADDRESS, if it is unset, to the cluster that `ray start` began on this machine, if that cluster answers.

    NeMo RL's runs join a cluster in this way. A cluster of another user than root is not joined: that user could write
    the file in which Ray stores the address. Return True if RAY_ADDRESS was set.
    """
    if joins_cluster():
        return False
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # the folders where Ray looks
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
    """Return True if the workers go to an existing Ray cluster, whose machines may differ from this one."""
    return bool(os.environ.get("RAY_ADDRESS"))


def is_in_cluster() -> bool:
    """Return True if this process has joined or started a cluster. Does not import Ray."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def check_address() -> None:
    """Raise UserError if RAY_ADDRESS is not host:port, or if nobody answers there; Ray would wait minutes in silence.

    The values `auto`, `local` and ray://... are left to Ray itself.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto", "local") or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise _join_error("it is not host:port")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, UnicodeError) as error:
        raise _join_error(error) from None


def _join_error(reason: object) -> UserError:
    return UserError(
        f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: that Ray cluster cannot be joined ({str(reason)[:200]}); start it, "
        "or unset RAY_ADDRESS, and `ray stop` the one that runs on this machine, to have a new one started"
    )


def require_token() -> None:
    """Make a Ray cluster that this process starts require a token.

    Ray reads the setting when it is imported, and vLLM imports Ray. Raises UserError if Ray is imported already.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # NeMo RL, which is imported later, sets the same
    if joins_cluster():
        return
    if "ray" not in sys.modules:
        os.environ["RAY_AUTH_MODE"] = "token"
        if "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ["RAY_AUTH_TOKEN_PATH"] = _write_token()
    elif os.environ.get("RAY_AUTH_MODE") != "token":
        raise UserError(
            "cluster.backend=ray: Ray was imported before it could be given a token; start the run by the nemo-fp8rl "
            "command, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before Python starts"
        )


def _write_token() -> str:
    """Write a new token and return its path. It is a file that only this user can read, because Ray writes environments
    to logs that everybody can read.
    """
    folder = tempfile.TemporaryDirectory(prefix="nemo_fp8rl_")
    atexit.register(folder.cleanup)
    path = os.path.join(folder.name, "ray_token")
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(secrets.token_hex(32))
    return path


def shorten_folder() -> None:
    """Give the Ray cluster that this process starts a shorter folder than TMPDIR, if that is too long for its sockets.

    The folder is removed at the end of the process.
    Raises: UserError if RAY_TMPDIR is too long
    """
    given = os.environ.get("RAY_TMPDIR")
    if given is not None and len(os.fsencode(given)) > LONGEST_FOLDER:
        raise UserError(
            f"RAY_TMPDIR={given}: Ray's sockets are below it, and its path has more than {LONGEST_FOLDER} bytes; unset "
            "it, or give a shorter folder"
        )
    if given is None and len(os.fsencode(os.environ.get("TMPDIR", ""))) > LONGEST_FOLDER:
        name = "fp8rl_12345678"
        folder = tempfile.mkdtemp(prefix=name[:6], dir=short_folder(LONGEST_FOLDER - len("/") - len(name)))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["RAY_TMPDIR"] = folder


def connect(
    num_cpus: int,
    setup_hook: str | None = None,
    variables: Mapping[str, str] | None = None,
    log_to_driver: bool = False,
) -> None:
    """Join the Ray cluster of RAY_ADDRESS, or start one on loopback with a token of its own.

    A cluster in which this process is already stays as it is: the code that joined or started it chose its settings.

    num_cpus:      CPUs of a cluster that is started
    setup_hook:    name of a function that every worker process calls first
    variables:     of the workers' environment
    log_to_driver: show the workers' output in this process
    Raises:        UserError if the cluster cannot be joined
    """
    if is_in_cluster():
        return
    check_address()
    require_token()
    import ray

    environment: dict[str, Any] = {
        "env_vars": {**(_forwarded_variables() if joins_cluster() else {}), **(variables or {})}
    }
    if setup_hook is not None:
        environment["worker_process_setup_hook"] = setup_hook
    if joins_cluster():
        try:
            ray.init(log_to_driver=log_to_driver, runtime_env=environment)
        except (ConnectionError, ValueError, SystemExit) as error:  # SystemExit: nobody answered
            raise _join_error(error) from None
        return
    shorten_folder()
    ray.init(
        "local",  # even if another cluster runs on this machine
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=log_to_driver,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        runtime_env=environment,
    )


def _forwarded_variables() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FORWARDED) and name != "CUDA_VISIBLE_DEVICES" and not looks_secret(name, value)
    }
