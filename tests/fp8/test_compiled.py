"""Loops that numba compiles, where no folder for its cache can be written."""

import ast
import errno
import os
import runpy
from pathlib import Path

import pytest
from numba.core import caching

import nemo_fp8rl
from nemo_fp8rl.fp8.kernels.on_cpu import compiled


@pytest.fixture(autouse=True)
def fresh() -> None:
    compiled._say_uncached.cache_clear()


def refuse(*_):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def double(x):
    return 2 * x


def test_where_no_folder_can_be_written_a_loop_is_compiled_in_memory(monkeypatch, caplog):
    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", refuse)
    first, second = compiled.jit(double), compiled.jit(double)
    assert first(3) == second(3) == 6
    assert first.signatures
    (said,) = caplog.messages
    assert "set NUMBA_CACHE_DIR to a folder of yours that can be written" in said


def test_a_disk_that_fills_up_costs_the_cache_alone(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(caching.IndexDataCacheFile, "save", refuse)
    assert compiled.jit(double)(3) == 6
    (said,) = caplog.messages
    assert os.strerror(errno.EROFS) in said


def test_what_is_stored_is_taken_again(monkeypatch, tmp_path):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    assert compiled.jit(double)(3) == 6
    again = compiled.jit(double)
    assert again(3) == 6
    assert sum(again.stats.cache_hits.values()) == 1


def test_a_change_in_a_file_beside_the_loop_compiles_it_again(monkeypatch, tmp_path):
    """Code of another file may be part of the loop."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "loop.py").write_text("def triple(x):\n    return 3 * x\n")
    triple = runpy.run_path(str(tmp_path / "loop.py"))["triple"]
    hits = []
    for beside in ("", "", "x = 1\n"):
        (tmp_path / "beside.py").write_text(beside)
        os.utime(tmp_path / "beside.py", (1, 1))
        loop = compiled.jit(triple)
        assert loop(3) == 9
        hits.append(sum(loop.stats.cache_hits.values()))
    assert hits == [0, 1, 0]


def test_every_loop_with_a_cache_is_compiled_so():
    """numba itself ends the import of a module whose loops it cannot store."""
    for path in Path(nemo_fp8rl.__file__).parent.rglob("*.py"):
        keywords = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.keyword))
        assert all(keyword.arg != "cache" for keyword in keywords), path
