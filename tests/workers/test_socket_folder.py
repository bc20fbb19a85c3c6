"""Folders that are short enough for sockets."""

import tempfile

import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.workers import socket_folder


def test_a_short_folder_for_temporary_files_is_taken(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert str(socket_folder.short_folder(4)) == "/tmp"


def test_another_takes_the_place_of_a_long_one(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/none")
    assert str(socket_folder.short_folder(len(str(tmp_path)))) == str(tmp_path)
    assert str(socket_folder.short_folder(len(str(tmp_path)) - 1)) == "/tmp"


def test_where_there_is_none_the_variable_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=rf"TMPDIR={tmp_path} is longer than the 3 bytes"):
        socket_folder.short_folder(3)
