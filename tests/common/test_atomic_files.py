"""Folders on filesystems that lack what others have: locks, syncs, modes."""

import errno
import fcntl
import os
import stat

import pytest
import torch

from nemo_fp8rl.common.atomic_files import advice, check_checkpoint_folder, is_locked, lock_folder, new_folder
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.storage.safetensors_file import write_safetensors


def failing(number: int):
    def call(*_args, **_options):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(
    "number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EIO], ids=os.strerror
)
def test_a_filesystem_without_locks_is_said_and_works(monkeypatch, tmp_path, caplog, number):
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with lock_folder(tmp_path, "busy"):
        assert not is_locked(tmp_path)
    assert f"{tmp_path} is on a filesystem without locks ({os.strerror(number)}): nothing keeps a second" in caplog.text


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES], ids=["EAGAIN", "EACCES"])
def test_a_lock_that_another_has_is_not_taken_for_a_missing_one(monkeypatch, tmp_path, number):
    (tmp_path / ".lock").touch()
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with pytest.raises(UserError, match="busy"), lock_folder(tmp_path, "busy"):
        pass
    assert is_locked(tmp_path)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EACCES], ids=os.strerror)
def test_a_folder_that_cannot_be_synced_is_done_without(monkeypatch, tmp_path, number):
    sync = os.fsync
    refuse = failing(number)
    monkeypatch.setattr(os, "fsync", lambda fd: refuse() if stat.S_ISDIR(os.fstat(fd).st_mode) else sync(fd))
    check_checkpoint_folder(tmp_path)
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("call", ["fsync", "mkdir", "rename"])
def test_what_a_checkpoint_needs_and_a_filesystem_lacks_is_found(monkeypatch, tmp_path, call):
    monkeypatch.setattr(os, call, failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        check_checkpoint_folder(tmp_path)


def test_a_filesystem_without_modes_takes_tensors(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "chmod", failing(errno.EPERM))
    write_safetensors({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "full"), "make room, or x"),
        (OSError(errno.EACCES, "no"), "allow writing there, or x"),
        (OSError(errno.EIO, "broken"), "x"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "make room, or x"),
        (UserError("rank 1: [Errno 13] Permission denied"), "allow writing there, or x"),
        (RuntimeError("serialization failed"), "x"),
    ],
)
def test_the_advice_is_that_of_the_error(error, said):
    assert advice(error, "x") == said
    assert advice(error) == (said.removesuffix("x").removesuffix(", or ") or "mend that")
