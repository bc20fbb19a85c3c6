"""What is said of the two sides' machines."""

import pytest

from nemo_fp8rl.common.machine import describe_processors


@pytest.mark.parametrize(
    ("trainer", "engines", "said"),
    [
        (["AMX"], ["AMX"], "AMX"),
        (
            ["AVX-512"],
            ["AVX-512 BF16", "AVX-512"],
            "trainer AVX-512, engines AVX-512 or AVX-512 BF16, whose kernels may round differently",
        ),
        ([""], [""], "no AVX-512"),
        (["AVX-512"], ["AMX"], "trainer AVX-512, engines AMX, whose kernels may round differently"),
        (["AMX"], ["AMX", "AVX-512"], "trainer AMX, engines AMX or AVX-512, whose kernels may round differently"),
    ],
)
def test_processors_that_round_differently_are_named(trainer, engines, said):
    assert describe_processors(trainer, engines) == said
