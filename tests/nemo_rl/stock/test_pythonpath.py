"""NeMo RL's workers import this package from PYTHONPATH, and need no library that they lack."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nemo_fp8rl.nemo_rl.run.run_loop import _ray
from nemo_fp8rl.nemo_rl.stock import pythonpath

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("installed", [False, True])
def test_pythonpath_of_ray_has_this_package_alone(installed, tmp_path, monkeypatch):
    if installed:
        (tmp_path / "site-packages/torch").mkdir(parents=True)
        (tmp_path / "site-packages/nemo_fp8rl").symlink_to(ROOT / "nemo_fp8rl")
        monkeypatch.setattr(pythonpath, "PACKAGE", tmp_path / "site-packages/nemo_fp8rl")
    started = []
    for name in ("nemo_rl", "nemo_rl.distributed", "nemo_rl.distributed.virtual_cluster"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[name].init_ray = lambda: started.append(os.environ["PYTHONPATH"])
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    with _ray(2, uses_package=False):
        theirs, folder = started.pop().split(os.pathsep)
        found = subprocess.run(
            [sys.executable, "-c", "import nemo_fp8rl; print(nemo_fp8rl.__file__)"],
            capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True,
        )  # fmt: skip
        assert (theirs, found.stdout.strip()) == ("/theirs", f"{folder}/nemo_fp8rl/__init__.py")
        assert os.listdir(folder) == ["nemo_fp8rl"] if installed else folder == str(ROOT)
    assert os.environ["PYTHONPATH"] == "/theirs"
    assert Path(folder).is_dir() != installed


def test_modules_of_nemo_rls_workers_need_torch_and_numpy_alone():
    """Their own libraries apart: `megatron_worker` and `vllm_worker` import Megatron's and vLLM's."""
    code = """
import sys
sys.modules.update(dict.fromkeys(("numba", "vllm", "megatron", "omegaconf", "pydantic", "xxhash", "zstandard")))
from nemo_fp8rl.fp8 import quantize_blockwise
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.nemo_rl.stock import fp8_stream, layer_agreement
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
