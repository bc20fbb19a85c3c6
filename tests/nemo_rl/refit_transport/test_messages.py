"""Messages that the trainer's side never sends: each is refused by name, and nothing of the version is handed out."""

import json

import pytest
import torch
import xxhash

from nemo_fp8rl.nemo_rl.refit_transport.rollout_side import AbortedRefit, _Incoming
from nemo_fp8rl.nemo_rl.refit_transport.wire import Entry, Header, Store
from nemo_fp8rl.refit.digest import bytes_of, digest_of
from nemo_fp8rl.refit.manifest import RefitError, TensorPart

NAME, VALUES = "model.norm.weight", torch.arange(6.0).reshape(3, 2)
PART = TensorPart.of(NAME, torch.float32, (3, 2))


def band(start: int = 0, end: int = 3, **changes: object) -> tuple[Entry, torch.Tensor]:
    """Return an entry of these rows, and its payload."""
    values = VALUES[start:end].contiguous()
    entry = Entry.of(PART.cut(((start, end), (0, 2))), "full", values.nbytes)
    return entry._replace(**{"digest": digest_of(values)} | changes), bytes_of(values)


def read(*bands: tuple[Entry, torch.Tensor], store: Store | None = None, **header: object) -> Store:
    """Read a message of these bands into the store, as a whole version of one message unless the header says else."""
    store = store or Store(torch.device("cpu"))
    payload = torch.cat([torch.nn.functional.pad(data, (0, -len(data) % 64)) for _, data in bands])
    fields = {"version": "a:2", "base": "", "sequence": 0, "last": True} | header
    message = Header(entries=tuple(entry for entry, _ in bands), **fields).encode()
    _Incoming(store).read(Header.decode(message), payload)
    return store


def test_a_version_in_bands_is_read():
    """Else the refusals below could have any reason."""
    assert torch.equal(read(band(0, 2), band(2, 3)).content(PART).data, VALUES)


@pytest.mark.parametrize(
    ("bands", "header", "message"),
    [
        ([band(0, 2)], {}, r"2 of 3 rows of model\.norm\.weight arrived"),
        ([band(1, 3)], {}, r"model\.norm\.weight: row 1 arrived out of order"),
        ([band(), band()], {}, r"model\.norm\.weight: row 0 arrived out of order"),
        ([band(rows=(0, 9))], {}, r"model\.norm\.weight: rows 0 to 9 of 3 arrived"),
        ([band(nbytes=20)], {}, r"model\.norm\.weight has 20 bytes, must have 24"),
        ([band(nbytes=4000)], {}, r"model\.norm\.weight has 64 bytes, must have 24"),
        ([band(digest="0")], {}, r"the digest of model\.norm\.weight is not the trainer's"),
        ([band(digest="")], {}, r"the digest of model\.norm\.weight is not the trainer's"),
        ([band(encoding="delta")], {}, r"a delta of model\.norm\.weight arrived, which is not stored"),
        ([band()], {"base": "a:1"}, "a delta to a:1 arrived, stored is -"),
        ([band()], {"sequence": 1}, "message 1 of a:2 arrived where 0"),
    ],
)
def test_a_message_that_does_not_fit_is_refused_by_name(bands, header, message):
    with pytest.raises(RefitError, match=message):
        read(*bands, **header)


def test_a_refused_version_is_not_stored():
    store = read(band())
    store.version = "a:1"
    with pytest.raises(RefitError):
        read(band(digest="0"), store=store)
    assert store.version == ""


def test_a_damaged_delta_is_named():
    store = read(band())
    store.version = "a:1"
    entry = Entry.of(PART, "delta", 24)
    with pytest.raises(RefitError, match=r"model\.norm\.weight: a delta of 24 bytes is cut off"):
        read((entry, torch.zeros(24, dtype=torch.uint8)), store=store, base="a:1")


def test_an_abort_says_the_trainers_reason():
    with pytest.raises(AbortedRefit, match="the trainer gave up: no memory"):
        read(band(), abort="no memory")


GOOD = [NAME, "float32", [3, 2], [0, 3], "full", 24, ""]


@pytest.mark.parametrize(
    "entry",
    [
        GOOD[:-1],
        [*GOOD[:1], "Tensor", *GOOD[2:]],
        [*GOOD[:2], [3, -2], *GOOD[3:]],
        [*GOOD[:4], "zip", *GOOD[5:]],
        [*GOOD[:5], -1, ""],
        [*GOOD[:3], [0], *GOOD[4:]],
        7,
    ],
)
def test_a_damaged_header_is_refused(entry):
    assert Header.decode(encoded(GOOD)).entries[0].part == PART
    with pytest.raises(RefitError, match="a message of the refit is damaged"):
        Header.decode(encoded(entry))


def encoded(entry: object) -> bytes:
    message = json.dumps(["a:1", "", 0, [entry], True, ""]).encode()
    return xxhash.xxh3_64_digest(message) + message


def test_a_bit_that_flips_anywhere_in_a_header_is_found():
    message = Header("a:1", "", 0, (Entry.of(PART, "full", 24),), last=True).encode()
    for i in range(8 * len(message)):
        damaged = bytearray(message)
        damaged[i // 8] ^= 1 << i % 8
        with pytest.raises(RefitError, match="its digest is another"):
            Header.decode(bytes(damaged))
