"""Refits between both sides of the checkpoint engine: whole, delta, failed and repeated; with real links, on a CPU."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import NonFiniteError, quantize_blockwise, scale_name
from nemo_fp8rl.nemo_rl.refit_transport import rollout_side
from nemo_fp8rl.nemo_rl.refit_transport.rollout_side import RolloutSide
from nemo_fp8rl.refit.manifest import RefitError
from tests.nemo_rl.refit_transport.sides import (
    K_SCALE,
    LAYERS,
    Q_PROJ,
    Sides,
    by_contract,
    check_equal,
    make_weights,
    step,
    wire_over_bf16,
)


@pytest.fixture
def make_sides() -> Iterator[type[Sides]]:
    made: list[Sides] = []

    def make(*args, **kwargs) -> Sides:
        made.append(Sides(*args, **kwargs))
        return made[-1]

    yield make
    for sides in made:
        sides.close()


class FlippingEnd:
    """A link's end that flips a bit of the first payload, as a damaged memory would."""

    def __init__(self, end, flips: list[int]) -> None:
        self.end, self.flips = end, flips

    def receive(self) -> tuple[bytes, Tensor]:
        header, payload = self.end.receive()
        if self.flips and payload.numel():
            payload[self.flips.pop()] ^= 1
        return header, payload

    def __getattr__(self, name: str):
        return getattr(self.end, name)


@pytest.fixture
def flips(monkeypatch) -> list[int]:
    """Places of bits to flip in payloads to come."""
    places, connect = list[int](), rollout_side.connect
    monkeypatch.setattr(rollout_side, "connect", lambda *args: FlippingEnd(connect(*args), places))
    return places


def test_a_whole_version_has_the_contracts_bytes(make_sides):
    sides, weights = make_sides(rollout_ranks=2), make_weights()
    sides.refit(weights).check(weights)
    assert sides.policy.metrics.whole == 2
    assert wire_over_bf16(sides) <= 0.505


def test_a_delta_has_the_contracts_bytes(make_sides):
    sides, weights = make_sides(rollout_ranks=2), make_weights()
    sides.refit(weights).check(weights)
    for _ in range(2):
        weights = step(weights)
        sides.refit(weights).check(weights)
        assert (sides.policy.metrics.deltas, sides.policy.metrics.whole) == (2, 0)
        assert wire_over_bf16(sides) <= 0.01
    assert sides.rollout[0].metrics.is_delta


def test_mode_full_sends_no_delta(make_sides):
    sides, weights = make_sides(mode="full"), make_weights()
    for _ in range(2):
        sides.refit(weights).check(weights)
        assert (sides.policy.metrics.deltas, sides.policy.metrics.whole) == (0, 1)


def test_a_tensor_that_changes_much_is_sent_whole_within_a_delta(make_sides):
    sides, weights = make_sides(), make_weights()
    sides.refit(weights).check(weights)
    weights = step(weights) | {Q_PROJ: make_weights(1)[Q_PROJ]}
    sides.refit(weights).check(weights)
    assert 0.01 < wire_over_bf16(sides) < 0.505


def test_kv_scales_come_with_their_version(make_sides):
    sides = make_sides()
    for weights in (make_weights(), step(make_weights())):
        assert sides.refit(weights).loaded[0][K_SCALE].tolist() == weights[K_SCALE].tolist()


@pytest.mark.parametrize("scales_first", [False, True])
def test_fp8_that_the_worker_streams_is_sent_as_it_is(make_sides, scales_first):
    """Even with scales that the contract would not make."""
    sides, quantized = make_sides(), quantize_blockwise(make_weights()[Q_PROJ], scale_format="fp32")
    pairs = [(Q_PROJ, quantized.data), (scale_name(Q_PROJ), quantized.scale_inv)]
    outcome = sides.refit(iter(pairs[::-1] if scales_first else pairs))
    check_equal(outcome.loaded[0], dict(pairs))


def test_a_flipped_bit_is_found_and_named_and_the_version_sent_again(make_sides, flips, caplog):
    sides, weights = make_sides(), make_weights()
    flips.append(5)
    with caplog.at_level(logging.WARNING):
        sides.refit(weights).check(weights)
    assert "model.embed_tokens.weight" in caplog.text
    assert "the digest of" in caplog.text
    assert sides.policy.metrics.retries == 1


def test_a_refit_that_fails_hands_out_nothing_and_the_next_is_whole(make_sides, flips):
    sides, weights = make_sides(rollout_ranks=1, retries=0), make_weights()
    sides.refit(weights).check(weights)
    flips.append(5)
    weights = step(weights)
    outcome = sides.refit(weights)
    assert outcome.loaded == [{}]
    assert "model.embed_tokens.weight" in str(outcome.rollout_errors[0])
    assert isinstance(outcome.policy_error, RefitError)
    assert "rollout rank 0 has not got the weights" in str(outcome.policy_error)
    sides.refit(weights).check(weights)
    assert (sides.policy.metrics.deltas, sides.policy.metrics.whole) == (0, 1)
    weights = step(weights)
    sides.refit(weights).check(weights)
    assert sides.policy.metrics.deltas == 1


def test_damage_in_the_receivers_memory_is_found_by_the_next_delta(make_sides, caplog):
    sides, weights = make_sides(), make_weights()
    sides.refit(weights).check(weights)
    part = next(part for part in sides.rollout[0].store.parts() if part.name == Q_PROJ)
    sides.rollout[0].store.content(part).data.view(torch.uint8)[3, 3] ^= 1
    weights = step(weights)
    sides.refit(weights).check(weights)
    assert Q_PROJ in caplog.text


def test_weights_that_are_not_finite_are_named_on_both_sides(make_sides):
    sides, weights = make_sides(), make_weights()
    sides.refit(weights).check(weights)
    for name in (Q_PROJ, "model.norm.weight"):
        damaged = step(weights)
        damaged[name].view(-1)[7] = float("nan")
        stream = iter(damaged.items())
        outcome = sides.refit(stream)
        assert isinstance(outcome.policy_error, NonFiniteError)
        assert name in str(outcome.policy_error)
        assert name in str(outcome.rollout_errors[0])
        assert outcome.loaded == [{}]
        assert next(stream, None) is None, "other ranks take part in the collectives of the iterator"
        sides.refit(weights).check(weights)
        assert sides.policy.metrics.whole == 1


def test_a_restarted_engine_gets_a_whole_version_and_the_other_a_delta(make_sides):
    sides, weights = make_sides(rollout_ranks=2), make_weights()
    sides.refit(weights).check(weights)
    sides.rollout[1].disconnect()
    sides.rollout[1] = RolloutSide(sides.settings)
    sides.connect()
    weights = step(weights)
    sides.refit(weights).check(weights)
    assert (sides.policy.metrics.deltas, sides.policy.metrics.whole) == (1, 1)


def test_a_receiver_that_lost_its_link_gets_the_version_again(make_sides):
    sides, weights = make_sides(rollout_ranks=2), make_weights()
    sides.refit(weights).check(weights)
    sides.rollout[1].disconnect()
    weights = step(weights)
    sides.refit(weights).check(weights)
    assert sides.policy.metrics.retries == 1


def test_an_engine_that_does_not_come_is_named_with_the_key_of_the_wait(make_sides):
    sides, weights = make_sides(timeout_seconds=0.5, retries=3), make_weights()
    sides.policy.connect(sides.listener, [(7, "")])
    sides.rollout = []
    message = str(sides.refit(weights).policy_error)
    assert (
        "rollout rank 7 has not got the weights in 1 attempts: rollout rank 7 did not connect within 0.5 s" in message
    )
    assert message.endswith('Fp8CheckpointEngine"].timeout_seconds')


def test_a_trainer_that_sends_nothing_is_named_with_the_key_of_the_wait(make_sides):
    sides, weights = make_sides(timeout_seconds=1.0, retries=0), make_weights()
    sides.refit(weights).check(weights)
    with pytest.raises(RefitError, match=r"no message from .* within 1 s, .*\.timeout_seconds"):
        next(sides.rollout[0].receive())


def test_a_rank_without_receivers_reads_the_iterator(make_sides):
    sides = make_sides(rollout_ranks=0)
    stream = iter(make_weights().items())
    assert sides.refit(stream).policy_error is None
    assert next(stream, None) is None


def test_an_error_of_the_iterator_reaches_both_sides(make_sides):
    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from list(make_weights().items())[:3]
        raise OSError("the export failed")

    outcome = make_sides().refit(stream())
    assert str(outcome.policy_error) == "the export failed"
    assert "the trainer gave up: the export failed" in str(outcome.rollout_errors[0])
    assert outcome.loaded == [{}]


def test_a_tensor_that_is_gone_is_forgotten(make_sides):
    sides, weights = make_sides(), make_weights()
    sides.refit(weights).check(weights)
    weights = step(weights)
    del weights["model.norm.weight"]
    sides.refit(weights).check(weights)


def test_the_expected_tensors_are_in_fp8():
    """Else the comparisons above would say nothing about FP8."""
    expected = by_contract(make_weights())
    assert sum(name.endswith("_scale_inv") for name in expected) == 4
    assert all(LAYERS.quantizes(name) for name in expected if scale_name(name) in expected)
