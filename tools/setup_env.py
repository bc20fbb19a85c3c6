"""Create .venv beside the Makefile from the pinned requirements; do nothing when it is already up to date.

    setup_env.py           what a run needs
    setup_env.py dev       and what tests, linter and type checker need

Uses the standard library only. Order: the CPU build of torch, the locks (--no-deps: see requirements/lock.txt), then
this project in editable mode. A stamp written last makes the next call quick; after an interruption or a failure the
same command continues. Exit code 2, with one sentence on stderr, when something is missing; details in .venv/setup.log.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
STAMP, DEV_STAMP = VENV / "setup.stamp", VENV / "setup-dev.stamp"
REQUIREMENTS = ROOT / "requirements"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
VERSION = "{}.{}".format(*sys.version_info)
PLATFORM = f"Python {VERSION} on {platform.system()} {platform.machine()}"

NO_SPACE = "No space left on device"
NO_NETWORK = re.compile("connection broken|Could not fetch URL|ReadTimeout|IncompleteRead|incomplete-download")
NO_MATCH = re.compile(r"No matching distribution found for ([^\s(]+)")
COLLECTING = re.compile(r"^Collecting ([^\s(]+)", re.MULTILINE)


class SetupError(Exception):
    """What went wrong and what to do about it, in one sentence."""


def fingerprint():
    """Hash of all that decides what .venv must contain, and of its place (its scripts hold absolute paths)."""
    digest = hashlib.sha256(f"{PLATFORM} {ROOT}".encode())
    for path in [*sorted(REQUIREMENTS.glob("*.txt")), ROOT / "pyproject.toml", Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def up_to_date(stamp, wanted):
    return stamp.is_file() and PYTHON.exists() and stamp.read_text() == wanted


def run(*command):
    """Run a command with its output in the log; return (succeeded, output)."""
    env = {**os.environ, "PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env.setdefault("PIP_RETRIES", "2")
    env.pop("PYTHONPATH", None)
    with LOG.open("ab") as log:
        log.write(("$ " + " ".join(map(str, command)) + "\n").encode())
        log.flush()
        start = log.tell()
        done = subprocess.run(list(map(str, command)), stdout=log, stderr=log, env=env, cwd=ROOT, check=False)
    return done.returncode == 0, LOG.read_bytes()[start:].decode(errors="replace")


def pip(*arguments):
    """pip install without dependencies; modules are compiled when first imported, which is quicker than all of them."""
    return run(PYTHON, "-m", "pip", "install", "--no-deps", "--no-compile", *arguments)


def check(result, what):
    """Turn the output of a failed command into a sentence; '' if it succeeded."""
    succeeded, output = result
    if succeeded:
        return ""
    downloading = [] if "Installing collected packages" in output else COLLECTING.findall(output)
    missing = NO_MATCH.findall(output)
    errors = [line[6:].strip(" .") for line in output.splitlines() if line.startswith("ERROR:")] or ["see the log"]
    package = (missing or downloading or [what])[-1]
    if NO_SPACE in output:
        problem = f"the disk is full while installing {package}: free about 3 GB here and in the temporary directory"
    elif NO_NETWORK.search(output):
        problem = f"pip could not reach a package index for {package}: check the network, the proxy and pip's settings"
    elif missing:
        problem = f"pip's package sources have no wheel of {package} for {PLATFORM}: add a source that has it"
    else:
        problem = f"pip could not install {package} ({errors[-1][:200]}): solve that"
    raise SetupError(f"{problem}, then run the same command again")


def usable():
    """Whether .venv is a virtual environment with pip, made for this place by this version of Python."""
    script = VENV / "bin" / "pip"
    if not PYTHON.exists() or not script.exists() or f"{VENV}/bin/" not in script.read_text():
        return False
    return run(PYTHON, "-c", f"import sys, pip; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})")[0]


def create_venv():
    if usable():
        for info in VENV.glob("lib/python*/site-packages/*.dist-info"):
            if not (info / "INSTALLER").exists():  # pip writes it after all else: this package was cut off half-way
                shutil.rmtree(info)
        return ""
    if VENV.exists():
        shutil.rmtree(VENV)
    VENV.mkdir()
    base = sys._base_executable  # not sys.executable, which may be the one in .venv just removed
    succeeded, output = run(base, "-m", "venv", VENV)
    if not succeeded and NO_SPACE not in output and re.search("ensurepip|No module named '?venv", output):
        hint = f"install it (on Debian and Ubuntu: apt install python{VERSION}-venv)"
        raise SetupError(f"this Python {VERSION} lacks the venv or ensurepip module: {hint}, then try again")
    check((succeeded, output), "the virtual environment")
    return f" with Python {platform.python_version()}"


def install(file):
    return check(pip("--only-binary=:all:", f"-r{REQUIREMENTS / file}"), "the pinned packages")


def install_torch():
    file = REQUIREMENTS / "torch.txt"
    outputs = []
    for place, options in (("pip's configured sources", ()), (TORCH_INDEX, ("--index-url", TORCH_INDEX))):
        succeeded, output = pip("--only-binary=:all:", "-r", file, *options)
        if succeeded:
            return f" from {place}"
        if not NO_MATCH.search(output):
            check((succeeded, output), "torch")
        outputs.append(output)
    why = ["could not be reached" if NO_NETWORK.search(output) else "gave no wheel" for output in outputs]
    raise SetupError(
        f"{file.read_text().split()[-1]} for {PLATFORM} is not to be had, as pip's configured sources {why[0]} and "
        f"{TORCH_INDEX} {why[1]}: check the network, or name a folder with the wheel in PIP_FIND_LINKS, and try again"
    )


def main():
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise SetupError(f"Python 3.11 to 3.13 is needed, this is {VERSION}: try e.g. make PYTHON=python3.12 test")
    dev = sys.argv[1:] == ["dev"]
    if sys.argv[1:] and not dev:
        raise SetupError(f"set-up knows no {' '.join(sys.argv[1:])}: give nothing, or dev")
    wanted, stamp = fingerprint(), DEV_STAMP if dev else STAMP
    if up_to_date(stamp, wanted):
        return
    guard = os.open(ROOT, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some network file systems cannot lock
        fcntl.flock(guard, fcntl.LOCK_EX)  # a second make waits here for the first
    if up_to_date(stamp, wanted):
        return
    runtime_there = up_to_date(STAMP, wanted)
    stamp.unlink(missing_ok=True)
    log = LOG.relative_to(ROOT)
    steps = {
        ".venv": create_venv,
        "torch (CPU build)": install_torch,
        "the pinned packages": lambda: install("lock.txt"),
        "this project": lambda: check(pip("--no-build-isolation", "-e", "."), "this project"),
    }
    if runtime_there:
        steps = {".venv": create_venv}
    if dev:
        steps["the development tools"] = lambda: install("dev.txt")
    size = 0.6 * (not runtime_there) + 0.3 * dev
    on_disk = 2.6 * (not runtime_there) + 0.7 * dev
    print(
        f"setting up .venv (first time: about {size:.1f} GB to download, {on_disk:.1f} GB on disk; progress in {log})",
        flush=True,
    )
    for name, step in steps.items():
        start = time.monotonic()
        print(f"  installing {name} ...", end="", flush=True)
        try:
            note = step()
        except (SetupError, OSError) as error:
            print(" failed", flush=True)
            raise SetupError(f"{error} (details: {log})") from None
        print(f"{note} {time.monotonic() - start:.0f} s", flush=True)
    STAMP.write_text(wanted)
    stamp.write_text(wanted)


if __name__ == "__main__":
    try:
        main()
    except (SetupError, OSError) as error:
        print(f"set-up failed: {error}.", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues.", file=sys.stderr)
        sys.exit(130)
