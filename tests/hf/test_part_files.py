"""Any region of a tensor is read back to the bit, however it was divided into parts."""

import os
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.region import full_region, overlap, region_at, region_slices, shape_of, start_of
from nemo_fp8rl.hf.storage.part_files import PartReader, PartWriter
from nemo_fp8rl.hf.storage.safetensors_file import write_safetensors

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def random(shape, dtype, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cuts(data, size: int) -> list[tuple[int, int]]:
    """`size` in one to three pieces."""
    inner = data.draw(st.lists(st.integers(1, max(1, size - 1)), max_size=2, unique=True)) if size > 1 else []
    borders = [0, *sorted(inner), size]
    return list(pairwise(borders))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(1, 9), columns=st.integers(1, 7), dtype=st.sampled_from(DTYPES))
def test_any_region_of_any_partition(tmp_path_factory, data, rows, columns, dtype):
    folder, tensor = tmp_path_factory.mktemp("parts"), random((rows, columns), dtype)
    boxes = [(r, c) for r in cuts(data, rows) for c in cuts(data, columns)]
    writers = [PartWriter(folder, f"rank_{i}") for i in range(2)]
    for box in boxes:
        data.draw(st.sampled_from(writers)).add("w", tensor[region_slices(box)], start_of(box))
    for writer in writers:
        writer.close()
    first, last = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    region = ((first, data.draw(st.integers(first + 1, rows))), (last, data.draw(st.integers(last + 1, columns))))
    with PartReader(folder) as reader:
        read = reader.get("w", region)
    assert read.dtype == dtype
    assert torch.equal(read.view(torch.uint8), tensor[region_slices(region)].contiguous().view(torch.uint8))


def test_a_part_that_nobody_wrote_is_refused(tmp_path):
    writer = PartWriter(tmp_path, "rank_0")
    writer.add("w", torch.ones(2, 3), (2, 0))
    writer.close()
    with PartReader(tmp_path) as reader:
        assert torch.equal(reader.get("w", ((2, 4), (0, 3))), torch.ones(2, 3))
        for name, region in (("w", full_region((4, 3))), ("other", full_region((4, 3)))):
            with pytest.raises(UserError, match=f"does not hold all of {name}; the checkpoint is not complete"):
                reader.get(name, region)


@pytest.mark.parametrize(
    ("shape", "refusal"),
    [
        ((3, 3), r"w@2,0 ends at \(4, 3\), but in this model w has shape \(3, 3\)"),
        ((4, 2), r"w@2,0 ends at \(4, 3\), but in this model w has shape \(4, 2\)"),
        ((12,), r"w@2,0 ends at \(4, 3\), but in this model w has shape \(12,\)"),
        (None, "holds w, which this model does not have"),
    ],
)
def test_parts_of_another_model_are_refused(tmp_path, shape, refusal):
    writer = PartWriter(tmp_path, "rank_0")
    writer.add("w", torch.ones(2, 3), (2, 0))
    writer.close()
    with PartReader(tmp_path) as reader:
        reader.check({"w": (4, 3), "not there": (1,)})
        with pytest.raises(UserError, match=refusal):
            reader.check({"w": shape} if shape else {})


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "rank_0.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match=r"rank_0\.safetensors is not a whole safetensors file"), PartReader(tmp_path):
        pass


def test_files_are_of_bounded_size(tmp_path):
    writer = PartWriter(tmp_path, "model", file_bytes=1000)
    tensors = {f"t{i}": random((30,), torch.float32, i) for i in range(20)}  # 120 bytes each
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["model-2.safetensors", "model-3.safetensors", "model.safetensors"]
    assert {n: t for path in files for n, t in load_file(path).items()}.keys() == tensors.keys()
    with PartReader(tmp_path) as reader:
        assert all(torch.equal(reader.get(n, full_region(t.shape)), t) for n, t in tensors.items())


def test_a_writer_on_a_full_disk_goes_on_and_says_so_at_the_end(tmp_path):
    writer = PartWriter(tmp_path / "missing", "model")
    for i in range(3):
        writer.add(f"t{i}", torch.ones(2))
    writer.close()
    writer.add("later", torch.ones(2))
    writer.close()
    assert writer.error is not None


def test_what_is_written_is_what_it_was_when_it_was_added(tmp_path):
    tensor = torch.ones(3)
    writer = PartWriter(tmp_path, "model")
    writer.add("t", tensor)
    tensor.zero_()
    writer.close()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["t"], torch.ones(3))


def test_a_part_says_in_its_name_where_it_begins(tmp_path):
    writer = PartWriter(tmp_path, "model")
    for start in ((0, 0), (0, 5), (3, 0)):
        writer.add("w", torch.ones(2, 2), start)
    writer.close()
    assert set(load_file(tmp_path / "model.safetensors")) == {"w", "w@0,5", "w@3,0"}


def test_parts_that_overlap_are_refused(tmp_path):
    """As of two saves into one folder; what one has twice must not make up for what none has."""
    for rank, start in ((0, 0), (1, 1)):
        writer = PartWriter(tmp_path, f"rank_{rank}")
        writer.add("w", torch.ones(2, 3), (start, 0))
        writer.close()
    with PartReader(tmp_path) as reader:
        assert torch.equal(reader.get("w", ((0, 1), (0, 3))), torch.ones(1, 3))
        with pytest.raises(UserError, match="holds some of w twice"):
            reader.get("w", full_region((4, 3)))


@pytest.mark.parametrize("key", ["w@1", "w@a,b"])
def test_a_part_at_no_place_is_refused(tmp_path, key):
    save_file({key: torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="not a whole safetensors file of parts"), PartReader(tmp_path):
        pass


def test_regions():
    assert region_at((1, 2), (3, 4)) == ((1, 4), (2, 6))
    assert shape_of(((1, 4), (2, 6))) == (3, 4)
    assert overlap(((0, 4),), ((2, 9),)) == ((2, 4),)
    assert overlap(((0, 4), (0, 2)), ((2, 9), (2, 3))) is None


def test_a_file_is_for_whom_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        write_safetensors({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o640
