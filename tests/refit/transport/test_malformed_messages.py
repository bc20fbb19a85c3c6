"""Bytes that are not a message, or not an offer, are a LinkError on both sides."""

import json
import os
import socket
import struct
import time
from typing import Any

import pytest

from nemo_fp8rl.refit.transport import shared_memory
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.handshake import connect
from nemo_fp8rl.refit.transport.link import MAX_HEADER
from tests.refit.transport.links import (
    CAPACITY,
    LONG,
    PROCESS_TRANSPORTS,
    SHORT,
    TOKEN,
    control_pair,
    fill_and_send,
    frame,
    in_thread,
    raises_link_error,
)


@pytest.mark.parametrize(
    "messages",
    [
        frame(b""),
        frame(b"M"),
        frame(b"R"),
        frame(b"X" + bytes(8)),
        frame(struct.pack("<cQ", b"M", CAPACITY + 1)),
        frame(struct.pack("<cQ", b"M", 2**64 - 1)),
        struct.pack("!i", MAX_HEADER + 10),
        struct.pack("!iQ", -1, 2**63),
        struct.pack("!i", -7),
        struct.pack("!i", 0x7FFFFFFF) + b"garbage",
        frame(struct.pack("<cQ", b"M", 0)) * 3 + b"a third message into two buffers",
    ],
    ids=repr,
)
@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_garbage_for_the_receiver_is_a_link_error(make_local_link, transport, messages):
    sender, receiver = make_local_link(transport)
    os.write(sender._control._connection.fileno(), messages)
    with raises_link_error():
        for _ in range(3):
            receiver.receive()
    with raises_link_error():  # the sender notices it, too
        for _ in range(100):
            sender.acquire_buffer()
            time.sleep(0.02)


@pytest.mark.parametrize("messages", [frame(b""), frame(b"M"), frame(b"RR"), struct.pack("!i", 2**30), frame(b"R")])
@pytest.mark.parametrize("full", [True, False])
def test_garbage_for_the_sender_is_a_link_error(make_local_link, messages, full):
    sender, receiver = make_local_link("shared_memory")
    for _ in range(2 if full else 0):
        fill_and_send(sender, b"", b"x")
    os.write(receiver._control._connection.fileno(), messages * 3)  # three releases for two messages
    with raises_link_error():
        for _ in range(100):
            sender.acquire_buffer()
            time.sleep(0.02)
    with raises_link_error():
        receiver.receive() and receiver.receive() and receiver.receive()


def test_half_a_message_is_silence():
    with control_pair(SHORT) as (source, sink):
        os.write(source._connection.fileno(), frame(b"a message")[:-3])
        with raises_link_error(r"within a message for 0\.5 s"):
            sink.receive(100)
        with raises_link_error("gone"):  # what comes in_thread could not be told from the rest of it
            source.receive(100)


def test_a_side_that_stops_reading_is_silent():
    with control_pair(SHORT) as (source, _), raises_link_error(r"0\.5 s"):
        source.send(bytes(MAX_HEADER))


def nixl_offer(**changed: Any) -> bytes:
    offer = {"metadata": "", "addresses": [4096, 8192], "memory": "DRAM", "device": 0}
    return json.dumps(offer | changed).encode()


@pytest.mark.parametrize(
    "messages",
    [
        [b"garbage"],
        [b'{"transport": "pigeon", "capacity": 5}'],
        [b'{"transport": "shared_memory", "capacity": 0}', b'{"file": "nemo_fp8rl-x"}'],
        [b'{"transport": "shared_memory", "capacity": true}', b'{"file": "nemo_fp8rl-x"}'],
        [b'{"transport": "shared_memory", "capacity": 5}', b'{"file": "nemo_fp8rl-that-is-not-there"}'],
        [b'{"transport": "shared_memory", "capacity": 5}', b'{"file": "nemo_fp8rl-/../../etc/passwd"}'],
        [b'{"transport": "shared_memory", "capacity": 5}', b'{"file": "../../etc/passwd"}'],
        [b'{"transport": "shared_memory", "capacity": 5}', b'{"file": "nemo_fp8rl-\\u0000"}'],
        [b'{"transport": "shared_memory", "capacity": 5}', b'{"file": 5}'],
        [b'{"transport": "cuda_ipc", "capacity": 5}', b'{"handle": 5}'],
        [b'{"transport": "cuda_ipc", "capacity": 5}', b'{"handle": "not hexadecimal"}'],
        [b'{"transport": "cuda_ipc", "capacity": 5}', b'{"handle": "00ff"}'],
        [b'{"transport": "nixl", "capacity": 5}', b'{"metadata": "x"}'],
        [b'{"transport": "nixl", "capacity": 5}', nixl_offer(metadata="no base64")],
        [b'{"transport": "nixl", "capacity": 5}', nixl_offer(metadata="bm9uc2Vuc2U=")],
        [b'{"transport": "nixl", "capacity": 5}', nixl_offer(addresses=[4096])],
        [b'{"transport": "nixl", "capacity": 5}', nixl_offer(addresses=[4096, "4096"])],
        [b'{"transport": "nixl", "capacity": 5}', nixl_offer(memory="FILE")],
        [b'{"transport": "collective", "capacity": 5}', b'{"port": 1, "prefix": "x"}'],
        [b'{"transport": "collective", "capacity": 5}', b'{"port": 1000000, "prefix": "x"}'],
        [b'{"transport": "collective", "capacity": 5}', b'{"port": -1}'],
        [b'{"transport": "collective", "capacity": %d}' % 2**60],
        [b'{"transport": "collective", "capacity": %d}' % 2**70],
    ],
    ids=lambda messages: messages[-1].decode(),
)
def test_a_sink_takes_no_nonsense_for_an_offer(messages):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connecting = in_thread(connect, listener.getsockname(), TOKEN, "sink", 1.0)
        control = Control(listener.accept()[0], LONG, "the sink")
        control.authenticate(TOKEN, is_caller=False)
        assert control.receive_fields(name=str) == {"name": "sink", "domain": shared_memory.domain()}
        for message in messages:
            control.send(message)
        with raises_link_error(within=LONG / 2):  # torch's connection has its own timeout, for which torch waits twice
            connecting.result(LONG)
        with raises_link_error():  # the source receives the error
            control.receive_fields(mapped=bool)
