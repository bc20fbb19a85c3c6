"""Folders of a Ray cluster that a run starts."""

import os

import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.workers import ray_cluster

SESSION = "/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"


@pytest.fixture(autouse=True)
def unset(monkeypatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "")
    monkeypatch.delenv("RAY_TMPDIR")


@pytest.mark.parametrize(("longer", "is_replaced"), [(0, False), (1, True), (100, True)])
def test_rays_sockets_fit_whatever_the_folder_for_temporary_files(monkeypatch, longer, is_replaced):
    monkeypatch.setenv("TMPDIR", "/" + "x" * (106 - len(SESSION) + longer))
    ray_cluster.shorten_folder()
    assert ("RAY_TMPDIR" in os.environ) == is_replaced
    used = os.environ.get("RAY_TMPDIR", os.environ["TMPDIR"])
    assert len(used + SESSION) <= 107
    ray_cluster.shorten_folder()  # a second cluster of the process
    assert os.environ.get("RAY_TMPDIR", os.environ["TMPDIR"]) == used
    if is_replaced:
        os.rmdir(used)


def test_a_folder_for_ray_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + "x" * 40)
    with pytest.raises(UserError, match="RAY_TMPDIR=/tmp/xxx"):
        ray_cluster.shorten_folder()
