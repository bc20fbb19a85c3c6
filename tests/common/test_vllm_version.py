"""Which versions of vLLM are taken."""

import pytest

from nemo_fp8rl.common import vllm_version
from nemo_fp8rl.common.errors import UserError


@pytest.mark.parametrize("found", ["0.25.0", "0.25.1", "0.32.1.dev3+cpu", "0.32.0"])
def test_supported_versions_are_told_apart_by_their_first_two_numbers(found, monkeypatch):
    monkeypatch.setattr(vllm_version, "installed_vllm", lambda: found)
    assert vllm_version.vllm_version() == (0, int(found[2:4]))


def test_an_environment_without_vllm_is_refused(monkeypatch):
    monkeypatch.setattr(vllm_version, "DISTRIBUTIONS", ())
    vllm_version.installed_vllm.cache_clear()
    with pytest.raises(UserError, match=r"^vLLM is not installed, and 0\.25 and 0\.32 are supported: install one"):
        vllm_version.vllm_version()
    monkeypatch.undo()
    vllm_version.installed_vllm.cache_clear()
    assert vllm_version.vllm_version() in (vllm_version.OLDER, vllm_version.NEWER)
