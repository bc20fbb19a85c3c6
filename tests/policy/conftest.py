"""Two ranks that the tests of this folder share; each test sets them up anew."""

from collections.abc import Iterator

import pytest

from tests.policy.ranks import Ranks


@pytest.fixture(scope="package")
def two() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()
