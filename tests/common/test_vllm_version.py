"""Which versions of vLLM are taken."""

import pytest

from nemo_fp8rl import which_vllm
from nemo_fp8rl.errors import UserError


@pytest.mark.parametrize("found", ["0.25.0", "0.25.1", "0.28.1.dev3+cpu", "0.32.0"])
def test_supported_versions_are_told_apart_by_their_first_two_numbers(found, monkeypatch):
    monkeypatch.setattr(which_vllm, "installed_vllm", lambda: found)
    assert which_vllm.vllm_version() == (0, int(found[2:4]))


def test_an_environment_without_vllm_is_refused(monkeypatch):
    monkeypatch.setattr(which_vllm, "DISTRIBUTIONS", ())
    which_vllm.installed_vllm.cache_clear()
    with pytest.raises(UserError, match=r"^vLLM is not installed, and 0\.25 to 0\.32 are supported: install one"):
        which_vllm.vllm_version()
    monkeypatch.undo()
    which_vllm.installed_vllm.cache_clear()
    assert which_vllm.OLDEST <= which_vllm.vllm_version() <= which_vllm.NEWEST
