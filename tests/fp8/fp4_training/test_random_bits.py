"""The generator gives Random123's numbers; draws repeat, and differ wherever two roundings must not share them."""

import math

import pytest
import torch

from nemo_fp8rl.fp8.fp4_training.random_bits import BITS, CHUNK_COUNTERS, GradientBits, LayerBits, philox

CPU = torch.device("cpu")
ONES, PI = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_the_words_are_those_of_random123(counter, key, words):
    """Its known answers for philox4x32 10 (kat_vectors)."""
    first, *others = counter
    assert tuple(int(word) for word in philox((torch.tensor([first]), *others), key)) == words


def draws(seed: int = 1, layer: str = "a", step: int = 3, calls: int = 1, operand: int = 0) -> torch.Tensor:
    trainer = GradientBits(seed)
    trainer.start_step(step)
    bits = [LayerBits(trainer, layer).start_call() for _ in range(calls)]
    return bits[-1].draw(operand, (7, 13), CPU)


def test_draws_repeat_and_no_two_roundings_share_them():
    first = draws()
    assert torch.equal(first, draws())
    others = [draws(seed=2), draws(layer="b"), draws(step=4), draws(calls=2), draws(operand=1)]
    for number, one in enumerate([first, *others]):
        assert all((one != other).float().mean() > 0.9 for other in [first, *others][:number])


def test_calls_are_counted_anew_in_each_step_and_for_each_layer():
    trainer = GradientBits(5)
    a, b = LayerBits(trainer, "a"), LayerBits(trainer, "b")
    trainer.start_step(0)
    assert [bits.start_call().call for bits in (a, b, a)] == [0, 0, 1]
    trainer.start_step(1)
    assert (a.start_call().step, a.start_call().call) == (1, 1)


def test_draws_do_not_depend_on_the_size_of_a_chunk_and_are_uniform():
    count = 8 * CHUNK_COUNTERS + 11
    bits = GradientBits(0).start_call("layer")
    drawn = bits.draw(0, (count,), CPU)
    assert torch.equal(drawn[:1000], bits.draw(0, (10, 100), CPU).view(-1))
    assert (drawn.min() >= 0) and (drawn.max() < 2**BITS) and torch.equal(drawn, drawn.floor())
    shares = torch.histc(drawn, 64, 0, 2**BITS) / count
    assert (shares - 1 / 64).abs().max() < 5 * math.sqrt(1 / 64 / count)
    for distance in (1, 2, 8):  # neighbours are not correlated
        pairs = torch.corrcoef(torch.stack([drawn[:-distance], drawn[distance:]]))[0, 1]
        assert abs(float(pairs)) < 5 / math.sqrt(count)
