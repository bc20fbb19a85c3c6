"""A damaged or missing message is found and named, and both sides give up at once."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.message import Entry, Header
from nemo_fp8rl.refit.receiver.piece_receiver import IncomingLink, receive_pieces
from nemo_fp8rl.refit.reports import SendReport
from nemo_fp8rl.refit.sender.push import Link
from nemo_fp8rl.refit.sender.weight_sender import WeightSender
from nemo_fp8rl.refit.transport.in_process import in_process_link
from nemo_fp8rl.refit.transport.link import LinkError
from tests.refit.memory_engine import (
    as_whole,
    random_weights,
)
from tests.refit.stream import (
    BUCKET,
    FAULTS,
    FAULTY,
    Stream,
    change_header,
    faulty_stream,
    flip_bit,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_message_is_found_and_named(fault):
    change, message = FAULTS[fault]
    error = faulty_stream(change).refusal(random_weights(FAULTY), 7)
    assert re.search(message, error), error


@pytest.mark.parametrize("change", [lambda k, m: [] if k == 2 else [m], change_header(2, last=False)])
def test_a_last_message_that_never_comes_ends_the_wait(change):
    assert "no message within 0.3 s" in faulty_stream(change, timeout=0.3).refusal(random_weights(FAULTY), 7)


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_anywhere_in_a_piece_is_found(seed):
    error = faulty_stream(flip_bit(seed)).refusal(random_weights(FAULTY), 7)
    assert any(part.name in error for part in FAULTY), error


def test_a_refusal_wakes_the_sender_at_once():
    """Otherwise the sender would wait for buffers that nobody releases, until its link's timeout."""
    stream = faulty_stream(FAULTS["of an old version"][0], timeout=20.0)
    thread = ThreadPoolExecutor(1).submit(stream.run, random_weights(FAULTY), 7)
    (report,), (answer,) = thread.result(timeout=5)
    assert isinstance(answer, RefitError)
    assert isinstance(report, SendReport)
    assert set(report.failed) <= {(0, 0)}
    assert stream.senders[0].base_version == -1
    for reader in [t for t in threading.enumerate() if t.name.startswith("refit-link")]:
        reader.join(5)
        assert not reader.is_alive()


def test_a_sink_notices_at_once_that_its_source_gave_up():
    """Without a word it would go on and wait for messages that do not come."""
    sending, receiving = in_process_link(BUCKET, 0.5)
    sender = WeightSender(FAULTY, "pow2")
    report = sender.send(list(random_weights(FAULTY).items()), 0, {(0, 0): Link(sending, FAULTY)}, keep=True)
    assert list(report.failed.values()) == ["no free buffer within 0.5 s, a share of cluster.engine_timeout_seconds"]
    with pytest.raises(LinkError, match="the link is closed"):
        receiving.receive()


def test_a_link_that_breaks_leaves_the_others_whole():
    stream, weights = Stream([FAULTY], [FAULTY] * 3, bucket=BUCKET), random_weights(FAULTY)
    stream.links[0][0, 1].end.close()
    (report,), loaded = stream.run(weights, 7, keep=True)
    assert isinstance(report, SendReport)
    assert list(report.failed) == [(0, 1)]
    assert isinstance(loaded[1], LinkError)
    for sink in (0, 2):
        stored = stream.engine.ranks[sink].held
        assert all(content.equals(stored[name]) for name, content in as_whole(FAULTY, weights, "pow2").items())
    assert stream.senders[0].base_version == -1


def test_an_old_version_is_refused():
    weights, stream = random_weights(FAULTY), faulty_stream(lambda k, message: [message])
    stream.deliver(weights, 5)
    stream.links[0][0, 0].end.close()
    assert "refit 4 is stale: this engine has had version 5" in stream.refusal(weights, 4)


def test_any_error_while_a_link_is_read_ends_the_refit():
    """Otherwise the reader of the link's messages would wait for ever."""

    class Full:
        closed = False

        def receive(self):
            raise MemoryError("no memory for a header")

        def close(self) -> None:
            self.closed = True

    end = Full()
    with pytest.raises(RefitError, match="MemoryError: no memory for a header"):
        list(receive_pieces([IncomingLink(end, [])], 0))
    assert end.closed


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()))
def test_bytes_that_are_no_header_are_a_refit_error(message):
    try:
        header = Header.decode(message)
    except RefitError:
        return
    assert Header.decode(header.encode()) == header


@pytest.mark.parametrize(
    "message", [b"[" * 100_000, b'[Infinity, 0, [], true, ""]', b'[0, 0, [[0, "full", 1e999, ""]], true, ""]', b"[1]"]
)
def test_json_that_is_no_header_is_a_refit_error(message):
    with pytest.raises(RefitError, match="a message of the refit is damaged"):
        Header.decode(message)


def test_a_header_round_trips():
    header = Header(3, 1, (Entry(0, "full", 10, "ab"), Entry(5, "delta", 0, "")), last=True, abort="why")
    assert Header.decode(header.encode()) == header
