"""A link carries every message whole and in order, through two buffers."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.refit.transport.handshake import Listener, connect
from nemo_fp8rl.refit.transport.link import MAX_HEADER
from tests.refit.memory_engine import TRANSPORTS
from tests.refit.transport.links import (
    AT_ONCE,
    CAPACITY,
    LONG,
    PROCESS_TRANSPORTS,
    SHORT,
    TOKEN,
    fill_and_send,
    in_thread,
    raises_link_error,
)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_arrive_to_the_bit_and_in_order(make_link, transport):
    rng = random.Random(0)
    sizes = [0, 1, 4097, CAPACITY, 0, *(rng.randrange(CAPACITY + 1) for _ in range(50))]
    messages = [(rng.randbytes(rng.choice([0, 1, 300])), rng.randbytes(size)) for size in sizes]
    messages[7] = (rng.randbytes(MAX_HEADER), b"payload of the longest header")
    sender, receiver = make_link(transport)
    sending = in_thread(lambda: [fill_and_send(sender, *message) for message in messages])
    for message in messages:
        assert receiver.receive() == message
        receiver.release()
    sending.result(LONG)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_sender_runs_one_message_ahead_and_no_further(make_link, transport):
    sender, receiver = make_link(transport)
    fill_and_send(sender, b"a", b"A" * CAPACITY)
    assert receiver.receive() == (b"a", b"A" * CAPACITY)
    assert in_thread(sender.acquire_buffer).result(AT_ONCE) is not None  # while the receiver has one message
    fill_and_send(sender, b"b", b"B" * CAPACITY)
    assert receiver.receive() == (b"b", b"B" * CAPACITY)
    third = in_thread(fill_and_send, sender, b"c", b"C" * CAPACITY)
    time.sleep(0.3)
    assert not third.done()  # while it has two
    assert receiver.oldest_payload() == b"A" * CAPACITY
    receiver.release()
    third.result(AT_ONCE)
    assert receiver.oldest_payload() == b"B" * CAPACITY  # not yet released
    receiver.release()
    assert receiver.receive() == (b"c", b"C" * CAPACITY)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_may_stay_unreleased_beyond_the_timeout(make_link, transport):
    sender, receiver = make_link(transport, SHORT)
    fill_and_send(sender, b"a", b"A")
    time.sleep(2 * SHORT)  # between refits nobody waits, so there is no timeout
    assert receiver.receive() == (b"a", b"A")
    fill_and_send(sender, b"b", b"B")
    assert receiver.receive() == (b"b", b"B")


@pytest.fixture(scope="module")
def shared_link() -> Iterator[tuple[Any, Any]]:
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    connecting = in_thread(connect, listener.address, TOKEN, "sink", LONG)
    sender = listener.accept("sink", CAPACITY)
    yield sender, connecting.result(LONG)
    sender.close()
    listener.close()


@settings(max_examples=40, deadline=None)
@given(messages=st.lists(st.tuples(st.binary(max_size=50), st.binary(max_size=5000)), max_size=8))
def test_any_messages_come_out_as_they_went_in(shared_link, messages):
    sender, receiver = shared_link
    got = []
    for index, message in enumerate(messages):
        if index >= 2:
            receiver.release()
        fill_and_send(sender, *message)
        header, payload = receiver.receive()
        got.append((header, payload.numpy().tobytes()))
    for _ in messages[-2:]:
        receiver.release()
    assert got == messages


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_that_is_too_large_is_not_sent(make_link, transport):
    sender, receiver = make_link(transport)
    sender.acquire_buffer()
    for header, nbytes in [(b"h" * (MAX_HEADER + 1), 1), (b"h", CAPACITY + 1), (b"h", -1)]:
        with raises_link_error("bytes"):
            sender.send(header, nbytes)
    fill_and_send(sender, b"after", b"all")
    assert receiver.receive() == (b"after", b"all")


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_buffers_are_aligned_for_every_dtype(make_local_link, transport):
    sender, receiver = make_local_link(transport, capacity=1001)
    for _ in range(2):
        buffer = sender.acquire_buffer()
        assert buffer.data_ptr() % 64 == 0
        sender.send(b"", 8)
        assert receiver.receive()[1].data_ptr() % 64 == 0
