"""Ranks that the tests of this folder share; each test sets them up anew."""

from collections.abc import Iterator

import pytest

from tests.policy.ranks import Ranks


@pytest.fixture(scope="package")
def two() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def four() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()
