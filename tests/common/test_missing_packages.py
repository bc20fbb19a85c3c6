"""Packages that are missing, or made for another build of torch, and the line that mends it."""

from pathlib import Path

import pytest

from nemo_fp8rl import __version__
from nemo_fp8rl.cli import main
from nemo_fp8rl.common import missing_packages
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.missing_packages import as_user_error, check_torch_libraries, pip_line


def install(folder: Path, name: str, version: str) -> None:
    """Let Python's metadata find a distribution of this name."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def cpu_build(tmp_path, monkeypatch) -> Path:
    """A folder whose distributions come first; torch is there in its CPU build."""
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "torch", "2.13.0+cpu")
    return tmp_path


def test_a_torchvision_for_cuda_is_refused_before_it_breaks_an_import(cpu_build, capsys):
    install(cpu_build, "torchvision", "0.29.2")
    install(cpu_build, "torchaudio", "2.11.1")
    assert main(["train", "tiny_cpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("nemo-fp8rl: torchvision 0.29.2 is built for CUDA and torch 2.13.0+cpu is not, ")
    assert said.endswith(": pip uninstall -y torchvision torchaudio\n")


def test_a_torchvision_for_the_cpu_is_fine(cpu_build):
    install(cpu_build, "torchvision", "0.29.2+cpu")
    check_torch_libraries()


def test_so_is_one_for_cuda_beside_a_torch_for_cuda(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "torch", "2.13.0")
    install(tmp_path, "torchvision", "0.29.2")
    check_torch_libraries()


def test_a_machine_with_a_gpu_gets_the_line_for_gpus(tmp_path, monkeypatch):
    driver = tmp_path / "version"
    monkeypatch.setattr(missing_packages, "NVIDIA_DRIVER", driver)
    assert pip_line().startswith("pip install --no-deps -r /")
    driver.touch()
    assert "[gpu]" in pip_line()
    install(tmp_path, "nemo_fp8rl", __version__)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert pip_line() == f"pip install 'nemo-fp8rl[gpu]=={__version__}'"


def test_what_no_requirement_names_keeps_its_traceback():
    assert as_user_error(ModuleNotFoundError(name="nemo_fp8rl.no_such_module"), "train") is None
    assert as_user_error(ModuleNotFoundError(name="my_rewards"), "train") is None
    assert as_user_error(ModuleNotFoundError(name="numpy.no_such_part"), "train") is None


@pytest.mark.parametrize("name", ["megatron", "vllm", "ray", "transformers", "yaml", "math_verify", "numba"])
def test_what_a_requirement_names_becomes_a_sentence(monkeypatch, name):
    monkeypatch.setattr(missing_packages.util, "find_spec", lambda _: None)
    error = as_user_error(ModuleNotFoundError(name=f"{name}.part"), "train")
    assert isinstance(error, UserError)
    assert str(error).endswith(f", which is not installed: {pip_line()}")
