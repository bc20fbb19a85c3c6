"""The rank processes that all tests of this folder share; each test builds its own policy in them."""

from collections.abc import Iterator

import pytest

from tests.policy.ranks import Ranks


@pytest.fixture(scope="session")
def two_processes() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_processes() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture
def two(two_processes: Ranks) -> Iterator[Ranks]:
    yield two_processes
    two_processes.rest()


@pytest.fixture
def four(four_processes: Ranks) -> Iterator[Ranks]:
    yield four_processes
    four_processes.rest()
