"""Deltas: when they are sent, what they cost, and the bytes that a rank keeps for them."""

from dataclasses import replace

import pytest
import torch

from nemo_fp8rl.refit.manifest import RefitError, TensorPart
from nemo_fp8rl.refit.message import Header
from nemo_fp8rl.refit.sender.push import Link
from nemo_fp8rl.refit.sender.weight_sender import MIN_DELTA_BYTES, WeightSender
from nemo_fp8rl.refit.transport.in_process import in_process_link
from tests.refit.memory_engine import (
    Message,
    fp8,
    random_weights,
    split,
)
from tests.refit.stream import (
    DOWN,
    EACH_FORMAT,
    EMBED,
    FROM_BF16_OR_FP8,
    LARGE,
    PARTS,
    UP,
    Stream,
    halve_some,
    record_entries,
)


def test_a_step_of_rl_is_a_two_hundredth_of_bf16():
    change, entries = record_entries()
    stream, master = Stream([LARGE], [LARGE], change=change), torch.randn(1024, 1024) * 0.02
    weights = random_weights(LARGE) | {UP: master.bfloat16()}
    stream.deliver(weights, 0, keep=True)
    weights |= {UP: (master - 1e-6 * torch.randn_like(master).sign()).bfloat16()}
    (report,) = stream.deliver(weights, 1, delta=True, keep=True)
    assert stream.has_weights(weights)
    assert entries[0].encoding == "delta"
    assert report.quantized_bf16_nbytes == 2 * 1024 * 1024
    assert 0 < report.quantized_nbytes < 0.005 * report.quantized_bf16_nbytes


@EACH_FORMAT
@FROM_BF16_OR_FP8
def test_deltas_bring_what_a_full_version_brings(fmt, from_fp8):
    parts = [*LARGE, fp8(DOWN, 128, 384)]  # of three scales, so that data do not begin at a multiple of eight bytes
    sources, sinks = split(parts, 2, 0, replicate=False), split(parts, 2, 1, replicate=True)
    weights, stream = random_weights(parts), Stream(sources, sinks, fmt=fmt, from_fp8=from_fp8)
    stream.deliver(weights, 0, keep=True)
    for version in range(1, 4):
        weights = halve_some(weights, 0.01, seed=version)
        reports = stream.deliver(weights, version, delta=True, keep=True)
        assert stream.has_weights(weights, fmt)
        assert sum(r.nbytes for r in reports) < 0.1 * sum(r.bf16_nbytes for r in reports)


def test_a_delta_of_nothing_is_a_few_bytes():
    weights, stream = random_weights(LARGE[:1]), Stream([LARGE[:1]], [LARGE[:1]])
    stream.deliver(weights, 0, keep=True)
    (report,) = stream.deliver(weights, 1, delta=True, keep=True)
    assert report.nbytes < 4 * 64 + 200
    assert stream.has_weights(weights)


@pytest.mark.parametrize(("share", "encodings"), [(0.02, ["delta"] * 2 + ["full"]), (0.5, ["full"] * 3)])
def test_where_more_than_an_eighth_changed_all_bytes_go(share, encodings):
    """Small tensors, such as the norm, are sent whole, too."""
    change, entries = record_entries()
    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE], change=change)
    stream.deliver(weights, 0, keep=True)
    weights = halve_some(weights, share)
    stream.deliver(weights, 1, delta=True, keep=True)
    assert stream.has_weights(weights)
    assert LARGE[2].data_bytes < MIN_DELTA_BYTES
    assert [entries[piece].encoding for piece in range(3)] == encodings


def test_a_tensor_that_takes_no_delta_may_take_one_later():
    change, entries = record_entries()
    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE], change=change, full_only=frozenset([UP]))
    stream.deliver(weights, 0, keep=True)
    weights = halve_some(weights, 0.01)
    stream.deliver(weights, 1, delta=True, keep=True)
    assert [entries[piece].encoding for piece in range(2)] == ["full", "delta"]
    stream.links = [{i: replace(link, full_only=frozenset()) for i, link in links.items()} for links in stream.links]
    weights = halve_some(weights, 0.01, seed=2)
    stream.deliver(weights, 2, delta=True, keep=True)
    assert [entries[piece].encoding for piece in range(2)] == ["delta", "delta"]
    assert stream.has_weights(weights)


@pytest.mark.parametrize("name", [UP, EMBED])
def test_a_delta_on_other_bytes_than_its_base_is_found(name):
    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE])
    stream.deliver(weights, 0, keep=True)
    stream.engine.ranks[0].held[name].data.view(torch.uint8).view(-1)[77] ^= 1
    error = stream.refusal(halve_some(weights, 0.01), 1, delta=True, keep=True)
    assert error == f"refit 1: {name} in the engine is not what the trainer sent"


@pytest.mark.parametrize("seed", range(6))
def test_a_bit_flipped_in_a_delta_is_found(seed):
    generator = torch.Generator().manual_seed(seed)

    def flip(at: int, message: Message) -> list[Message]:
        entry = Header.decode(message[0]).entries[0]
        assert entry.encoding == "delta"
        message[1][int(torch.randint(entry.nbytes, (), generator=generator))] ^= 1 << seed
        return [message]

    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE])
    stream.deliver(weights, 0, keep=True)
    stream.tampered[0].change = flip
    assert f"refit 1: {UP}" in stream.refusal(halve_some(weights, 0.01), 1, delta=True, keep=True)


def test_bytes_are_kept_only_for_a_next_delta():
    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE])
    (sender,), nbytes = stream.senders, sum(part.nbytes for part in LARGE if part.data_bytes >= MIN_DELTA_BYTES)
    (report,) = stream.deliver(weights, 0, keep=True)
    assert (report.base_nbytes, sender.base_version) == (nbytes, 0)
    (report,) = stream.deliver(weights, 1, delta=True, keep=True)
    assert (report.base_nbytes, sender.base_version) == (nbytes, 1)
    (report,) = stream.deliver(weights, 2)
    assert (report.base_nbytes, sender.base_version) == (0, -1)
    assert sender.base == {}


def test_nothing_is_kept_of_a_refit_that_was_refused():
    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE])
    stream.deliver(weights, 0, keep=True)
    weights[LARGE[-1].name].view(-1)[0] = torch.nan
    (error,), _ = stream.run(weights, 1, delta=True, keep=True)
    assert isinstance(error, RefitError)
    assert (stream.senders[0].base_version, stream.senders[0].base) == (-1, {})


def test_a_delta_needs_a_base_and_only_pieces_sent_have_one():
    up, down = (part for part in PARTS if part.data_bytes >= MIN_DELTA_BYTES)
    sender, weights = WeightSender([up, down], "pow2"), random_weights(PARTS)

    def encodings(version: int, *route: TensorPart, delta: bool) -> dict[str, str]:
        sending, receiving = in_process_link(1 << 20, 20.0)
        values = [(part.name, weights[part.name]) for part in (up, down)]
        sender.send(values, version, {(0, version): Link(sending, route)}, delta=delta, keep=True)
        entries = Header.decode(receiving.receive()[0]).entries
        return {route[entry.piece].name: entry.encoding for entry in entries}

    assert encodings(0, up, delta=False) == {UP: "full"}
    assert encodings(1, up, down, delta=True) == {UP: "delta", DOWN: "full"}
    assert encodings(2, down, delta=True) == {DOWN: "delta"}
    assert {name for name, _ in sender.base} == {DOWN}


def test_the_last_delta_leaves_no_base_to_build_on():
    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE])
    stream.deliver(weights, 0, keep=True)
    stream.deliver(weights, 1, delta=True)
    assert stream.senders[0].base_version == -1
