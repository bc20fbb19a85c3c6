"""Links through /dev/shm: the file, its pages and its domain."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.transport import shared_memory
from nemo_fp8rl.refit.transport.handshake import Listener, connect
from tests.refit.transport.links import (
    AT_ONCE,
    CAPACITY,
    LONG,
    TOKEN,
    authenticated_caller,
    control_pair,
    in_thread,
    link_files,
    raises_link_error,
)


def test_a_domain_is_that_of_the_machine_and_its_dev_shm(monkeypatch, tmp_path):
    domain = shared_memory.domain()
    script = "from nemo_fp8rl.refit.transport.shared_memory import domain; print(domain())"
    other = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert other.stdout.strip() == domain
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    assert shared_memory.domain() != domain
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "missing")
    assert shared_memory.domain().endswith(f"/{os.getpid()}")


def test_a_file_that_is_not_two_buckets_is_not_mapped(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    (tmp_path / "nemo_fp8rl-short").write_bytes(bytes(4096))
    with control_pair(LONG) as (source, sink):
        source.send_fields(file="nemo_fp8rl-short")
        with raises_link_error("not two buckets"):
            shared_memory.take(sink, 4096)


def test_the_file_has_no_name_once_the_link_stands(make_link):
    before = set(link_files())
    _, receiver = make_link("shared_memory")
    (mapped,) = set(link_files()) - before
    assert mapped.startswith("/dev/shm/")
    assert mapped.endswith(" (deleted)")
    receiver.kill()
    assert not Path(mapped.removesuffix(" (deleted)")).exists()


@pytest.fixture
def files_of_this_test(monkeypatch) -> Callable[[], list[Path]]:
    """files_of_this_test() -> the files in /dev/shm of links of this test."""
    prefix = f"nemo_fp8rl-test-{os.getpid()}-{time.monotonic_ns()}-"
    monkeypatch.setattr(shared_memory, "PREFIX", prefix)
    return lambda: list(Path("/dev/shm").glob(f"{prefix}*"))


def test_the_file_goes_when_the_sink_never_maps_it(cleanup, files_of_this_test):
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    with authenticated_caller(listener, name="sink") as control:
        accepting = in_thread(listener.accept, "sink", CAPACITY)
        control.receive_fields(transport=str)
        control.receive_fields(file=str)
        (path,) = files_of_this_test()
        assert path.stat().st_mode & 0o777 == 0o600
    with raises_link_error():
        accepting.result(LONG)
    assert files_of_this_test() == []


FIXES = ("nemo_fp8rl.refit.bucket_bytes", "nemo_fp8rl.refit.transport=collective", "/dev/shm larger")


@pytest.mark.parametrize("real", [True, False])
def test_a_full_dev_shm_names_three_fixes_on_both_sides(cleanup, monkeypatch, files_of_this_test, real):
    space = os.statvfs("/dev/shm")
    capacity = space.f_blocks * space.f_frsize if real else CAPACITY
    if not real:
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(full))
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    connecting = in_thread(connect, listener.address, TOKEN, "sink", LONG)
    for call in (lambda: listener.accept("sink", capacity), lambda: connecting.result(AT_ONCE)):
        with pytest.raises(RefitError) as caught:
            call()
        assert all(fix in str(caught.value) for fix in FIXES)
        assert f"{2 * -(-capacity // 4096) * 4096 / 2**20:.1f} MiB" in str(caught.value)
    assert files_of_this_test() == []


def test_pages_are_reserved_before_the_sink_hears_of_the_file(cleanup, files_of_this_test):
    """One that is missing in_thread would be a SIGBUS."""
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    with authenticated_caller(listener, name="sink") as control:
        in_thread(listener.accept, "sink", CAPACITY)
        control.receive_fields(transport=str)
        control.receive_fields(file=str)
        assert files_of_this_test()[0].stat().st_blocks * 512 >= 2 * CAPACITY
