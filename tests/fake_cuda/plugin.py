"""`pytest -p tests.fake_cuda.plugin`: the fake device, and Triton's interpreter, before any test imports torch."""

import os

from tests.fake_cuda.device import install
from tests.fake_cuda.rank import FAKE

os.environ[FAKE] = "1"
install()

import pytest  # noqa: E402

from tests.interpreted_triton import interpret  # noqa: E402

interpret()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "far" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="another process does not map the fake device's memory"))
