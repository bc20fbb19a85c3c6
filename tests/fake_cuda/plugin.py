"""`pytest -p tests.fake_cuda.plugin`: the fake device, and Transformer Engine on it, before any test imports torch."""

import os

from tests.fake_cuda.rank import FAKE, own_gpu

os.environ[FAKE] = "1"
own_gpu(0)

import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "far" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="another process does not map the fake device's memory"))
