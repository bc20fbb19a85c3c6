"""Calibrated scales against sorting all elements; merging against one pass. Nearest rank: the smallest value v such
that at least p % of the elements are at most v."""

import json
import math
import random
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_fp8rl.fp8 import kv_scales
from nemo_fp8rl.fp8.kv_scales import BINS, CalibrationError, KvScales, KvSketches

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PERCENTILES = [0.001, 1, 25.0, 50, 90, 99.9, 99.999, 100]
FLOAT32_MAX = torch.finfo(torch.float32).max


def sketch_of(*parts: Tensor) -> KvSketches:
    """A model of one layer whose k saw the parts."""
    sketches = KvSketches.empty(1)
    for part in parts:
        sketches.observe(0, k=part)
    return sketches


def k_percentile(x: Tensor, percentile: float) -> float:
    return sketch_of(x).percentile(percentile)[0, 1].item()


def k_scale(x: Tensor, **how: object) -> float:
    sketches = sketch_of(x)
    sketches.observe(0, q=torch.ones(1), v=torch.ones(1))
    return sketches.scales(**how).k_scale[0]


def nearest_rank(x: Tensor, percentile: float) -> float:
    magnitudes = x.double().abs().reshape(-1).sort().values
    return magnitudes[math.ceil(Fraction(str(percentile)) / 100 * len(magnitudes)) - 1].item()


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES, smallest: int = 1) -> Tensor:
    """Finite values of any shape: of one size, of every size down to denormals, few distinct ones, many zeros."""
    shape = draw(st.lists(st.integers(smallest, 9), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["normal", "bits", "few", "denormal"]))
    if kind == "normal":
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** draw(st.integers(-38, 38))
    elif kind == "bits":
        x = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).view(torch.float32)
    elif kind == "few":
        x = torch.randint(-2, 3, shape, generator=generator) * 1.7
    else:
        x = torch.randint(0, 2**23, shape, generator=generator).to(torch.int32).view(torch.float32)
    x = x.to(draw(st.sampled_from(dtypes)))
    x = torch.where(torch.isfinite(x), x, 0)
    return x.transpose(0, -1) if x.dim() > 1 and draw(st.booleans()) else x


def same(a: KvSketches, b: KvSketches) -> bool:
    return torch.equal(a.amax, b.amax) and torch.equal(a.counts, b.counts)


@settings(deadline=None, max_examples=200)
@given(tensors(), st.one_of(st.sampled_from(PERCENTILES), st.floats(1e-6, 100)))
def test_percentiles_of_elements_lie_within_the_stated_bound(x, percentile):
    exact, got = nearest_rank(x, percentile), k_percentile(x, percentile)
    if x.dtype is torch.bfloat16:
        assert got == exact
    elif exact >= 2.0**-126:
        assert exact <= got < exact * (1 + 2.0**-7)
    else:
        assert exact <= got < exact + 2.0**-133
    assert got <= x.double().abs().max()


def test_the_bound_is_as_tight_as_stated():
    just_above_a_bin = torch.tensor([1 + 2.0**-23, 2.0])
    assert k_percentile(just_above_a_bin, 50) == 1 + 2.0**-7
    denormal = torch.tensor([2.0**-149, 2.0])
    assert k_percentile(denormal, 50) == 2.0**-133


@settings(deadline=None, max_examples=100)
@given(tensors())
def test_the_maximum_is_exact_and_is_percentile_100(x):
    assert sketch_of(x).amax[0, 1].item() == x.double().abs().max().item() == k_percentile(x, 100)


def test_a_percentile_is_read_as_the_decimal_number_that_was_written():
    x = torch.arange(1, 1001).float()  # in double precision, 99.9 % of 1000 is above 999
    assert Fraction(99.9) / 100 * 1000 > 999
    for percentile, expected in ((99.9, 999), (0.1, 1), (0.11, 2), (70.1, 701), (100, 1000)):
        assert nearest_rank(x, percentile) == expected
        assert expected <= k_percentile(x, percentile) < expected * (1 + 2.0**-7)
    counted = torch.cat([torch.full((999,), 1.0), torch.full((1,), 2.0)])
    assert k_percentile(counted, 99.9) == 1
    assert k_percentile(counted, 99.91) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_finite_value_is_counted_in_the_bin_of_the_next_bfloat16(dtype):
    if dtype is torch.float32:  # every 16-bit upper half, with lower halves at the borders of a bin
        low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFF], dtype=torch.int32)
        x = ((torch.arange(0x7F80, dtype=torch.int32) << 16)[:, None] + low).view(torch.float32)
    else:
        x = torch.arange(0x7F80 if dtype is torch.bfloat16 else 0x7C00, dtype=torch.int16).view(dtype)
    ceiling = torch.arange(BINS - 1, dtype=torch.int16).view(torch.bfloat16).double()
    expected = torch.searchsorted(ceiling, x.double().reshape(-1))  # the first bin that is not below
    counts = torch.bincount(expected, minlength=BINS)
    assert torch.equal(sketch_of(x).counts[0, 1], counts)
    assert torch.equal(sketch_of(-x).counts[0, 1], counts)


def test_large_float32_above_the_largest_bfloat16_stay_finite():
    x = torch.full((10,), FLOAT32_MAX)
    assert k_percentile(x, 50) == FLOAT32_MAX
    assert k_scale(x, margin=kv_scales.LARGEST_MARGIN) == 2.0**127


@settings(deadline=None, max_examples=50)
@given(tensors(), st.integers(1, 20))
def test_cutting_into_pieces_changes_nothing(x, values):
    whole = sketch_of(x)
    with mock.patch.dict(kv_scales.PIECE_VALUES, cpu=values):
        assert same(sketch_of(x), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_data_are_counted_by_value_and_left_as_they_were(dtype):
    qkv = torch.randn(700, 3, 5, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    given = qkv.clone()
    for view in (qkv[:, 1], qkv.permute(3, 2, 0, 1), qkv[::3, :, 2:, ::5], qkv[:1].expand(4, -1, -1, -1)):
        assert same(sketch_of(view), sketch_of(view.contiguous()))
    assert torch.equal(qkv, given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_data_that_require_gradients_are_counted_without_one(dtype):
    x = torch.randn(8, 3, dtype=dtype, requires_grad=True)
    sketches = sketch_of(x, x.t() * 2)
    assert not sketches.amax.requires_grad
    assert sketches.counts[0, 1].sum() == 48


def test_large_data_are_counted_completely():
    x = torch.randn(3, 1_000_003, generator=torch.Generator().manual_seed(0)).bfloat16()
    sketches = sketch_of(x, x.t())
    assert sketches.counts.sum().item() == 2 * x.numel()
    assert sketches.percentile(99.9)[0, 1].item() == nearest_rank(x, 99.9)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("qkv"), tensors(smallest=0)), max_size=12), st.randoms())
def test_merging_in_any_order_and_grouping_equals_one_pass(observations, rng: random.Random):
    whole = KvSketches.empty(3)
    for layer, name, x in observations:
        whole.observe(layer, **{name: x})

    ranks = [KvSketches.empty(3) for _ in range(4)]
    for layer, name, x in rng.sample(observations, len(observations)):
        for part in x.reshape(-1).chunk(rng.randint(1, 3)):
            rng.choice(ranks).observe(layer, **{name: part})
    while len(ranks) > 1:
        rng.shuffle(ranks)
        ranks[0].merge(ranks.pop())
    assert same(ranks[0], whole)


def test_merging_leaves_the_other_sketches_as_they_were():
    one, other = sketch_of(torch.ones(3)), sketch_of(torch.full((2,), 5.0))
    one.merge(other)
    assert same(other, sketch_of(torch.full((2,), 5.0)))


RANK = """
import sys
import torch
import torch.distributed as dist
from nemo_fp8rl.fp8.kv_scales import KvSketches

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
sketches = KvSketches.empty(3)
for part in torch.load(f"{folder}/data.pt")[rank]:
    sketches.observe(part["layer"], **part["tensors"])
sketches.all_reduce()
torch.save({"amax": sketches.amax, "counts": sketches.counts}, f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


def test_ranks_that_saw_other_heads_and_layers_agree_after_all_reduce(tmp_path):
    generator = torch.Generator().manual_seed(0)
    data = [
        [{"layer": 0, "tensors": {"q": torch.randn(9, 4, generator=generator).bfloat16(), "k": torch.zeros(3)}}],
        [
            {"layer": 0, "tensors": {"q": torch.randn(5, 4, generator=generator).half() * 3}},
            {"layer": 2, "tensors": {"v": torch.randn(7, generator=generator)}},
        ],
    ]
    torch.save(data, tmp_path / "data.pt")
    root = Path(kv_scales.__file__).parents[2]
    command = [sys.executable, "-c", RANK]
    processes = [subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=root) for rank in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]

    whole = KvSketches.empty(3)
    for part in (*data[0], *data[1]):
        whole.observe(part["layer"], **part["tensors"])
    for rank in range(2):
        assert same(KvSketches(**torch.load(tmp_path / f"{rank}.pt")), whole)


MARGINS = st.one_of(st.sampled_from([1.0, 1.05, 2.0, 224.0]), st.floats(1e-3, 224))
WHOLE = st.floats(2.0**-149, FLOAT32_MAX, width=32, allow_subnormal=True)
"""Any magnitude that float32 holds."""


@settings(deadline=None, max_examples=300)
@given(WHOLE, MARGINS)
def test_pow2_scales_are_the_smallest_powers_of_two_that_fit(amax, margin):
    scale, needed = k_scale(torch.tensor([amax]), margin=margin), Fraction(amax) * Fraction(margin)
    assert math.frexp(scale)[0] == 0.5
    assert Fraction(scale) * 448 >= needed
    assert Fraction(scale) / 2 * 448 < needed or scale == 2.0**-126


@pytest.mark.parametrize("exponent", [-126, -100, -9, -1, 0, 1, 60, 118])
def test_pow2_scales_are_right_on_the_border_and_one_ulp_to_either_side(exponent):
    border = torch.tensor([1.75]) * 2.0**exponent  # 448 * 2^(exponent - 8)
    above, below = (torch.nextafter(border, torch.tensor([to])) for to in (math.inf, 0.0))
    floor = max(exponent - 8, -126)
    assert k_scale(border, margin=1.0) == k_scale(below, margin=1.0) == 2.0**floor
    assert k_scale(above, margin=1.0) == 2.0 ** max(exponent - 7, -126)


def test_pow2_scales_fit_also_where_double_precision_would_round_the_excess_away():
    margin = 448 / 3
    assert 3 * margin == 448
    assert 3 * Fraction(margin) > 448
    assert k_scale(torch.tensor([3.0]), margin=margin) == 2


@settings(deadline=None, max_examples=200)
@given(WHOLE, MARGINS)
def test_fp32_scales_are_amax_times_margin_over_448_in_float32(amax, margin):
    exact = Fraction(amax) * Fraction(margin) / 448
    scale = k_scale(torch.tensor([amax]), margin=margin, scale_format="fp32")
    assert scale == torch.tensor(scale, dtype=torch.float32).item()
    assert scale == 2.0**-126 or abs(Fraction(scale) / exact - 1) <= Fraction(2) ** -24 + Fraction(2) ** -52


@settings(deadline=None, max_examples=50)
@given(tensors(), st.sampled_from(["pow2", "fp32"]))
def test_calibrated_data_fit_into_e4m3(x, scale_format):
    stored = x.double().abs() / k_scale(x, scale_format=scale_format)
    assert stored.max() <= 448 / 1.049


def test_a_tensor_of_zeros_gets_scale_one():
    for scale_format in ("pow2", "fp32"):
        for percentile in (None, 99.9):
            assert k_scale(torch.zeros(4), scale_format=scale_format, percentile=percentile) == 1


def test_scales_are_those_of_their_own_layer_and_tensor():
    sketches = KvSketches.empty(2)
    sketches.observe(0, q=torch.tensor([-448.0]), k=torch.tensor([896.0, 1.0]), v=torch.tensor([448.0 * 4]))
    sketches.observe(1, q=torch.tensor([56.0]), k=torch.tensor([28.0]), v=torch.tensor([14.0]))
    sketches.observe(1, v=torch.tensor([-7.0]))
    assert sketches.scales(margin=1.0) == KvScales((2.0, 0.0625), (4.0, 0.03125), (1.0, 0.125))
    wide = sketches.scales(margin=3.0, scale_format="fp32")
    assert wide.q_scale == (3.0, 0.375)


def test_the_default_is_the_maximum_with_a_margin_of_five_percent_in_powers_of_two():
    x = torch.tensor([1.0, 440.0])
    assert k_scale(x) == 2.0
    assert k_scale(x, scale_format="fp32") == pytest.approx(440 * 1.05 / 448, rel=1e-7)


@given(tensors())
def test_sketches_of_maxima_alone_give_the_same_scales_and_no_percentile(x):
    alone = KvSketches.empty(1, percentiles=False)
    alone.observe(0, q=x, k=-x, v=torch.ones(1))
    full = KvSketches.empty(1)
    full.observe(0, q=x, k=-x, v=torch.ones(1))
    assert alone.scales() == full.scales()
    with pytest.raises(ValueError, match=r"without percentiles, and 99\.9"):
        alone.scales(percentile=99.9)
    with pytest.raises(ValueError, match=r"of 1 layers and 1 bins cannot be merged into .* 32641 bins"):
        full.merge(alone)


def test_a_percentile_clips_outliers():
    x = torch.ones(1000)
    x[17] = 1e6
    assert k_scale(x, percentile=99.9) == k_scale(torch.ones(1)) == 2.0**-8
    assert k_scale(x, percentile=99.95) == k_scale(x) == 4096
    with_one = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert k_scale(with_one, percentile=50, margin=1.0, scale_format="fp32") == torch.tensor(2.0).div(448).item()


def test_named_scales_carry_the_names_and_type_that_vllm_loads():
    scales = KvScales((2.0, 3.0), (4.0, 5.0), (0.5, 0.25))
    named = dict(scales.named())
    assert {name: tensor.item() for name, tensor in named.items()} == {
        "model.layers.0.self_attn.attn.q_scale": 0.5,
        "model.layers.0.self_attn.k_scale": 2.0,
        "model.layers.0.self_attn.v_scale": 4.0,
        "model.layers.1.self_attn.attn.q_scale": 0.25,
        "model.layers.1.self_attn.k_scale": 3.0,
        "model.layers.1.self_attn.v_scale": 5.0,
    }
    assert {(tensor.dtype, tensor.shape) for tensor in named.values()} == {(torch.float32, torch.Size([]))}
    assert list(named) == KvScales.names(2)


REMAP = """
import json, sys
import torch
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name

names = json.loads(sys.argv[1])
parameters = {f"model.layers.{i}.self_attn.attn.{t}_scale": None for i in range(2) for t in "qkv"}
mapper = Fp8Config.get_cache_scale_mapper()
mapped = [name for name, _ in mapper.apply([(name, torch.ones(())) for name in names])]
remapped = [maybe_remap_kv_scale_name(name, parameters) for name in names]
print(json.dumps([sorted(parameters), sorted(mapped), sorted(remapped)]))
"""


@pytest.mark.long
def test_vllm_maps_every_name_to_a_parameter_of_its_attention_layer():
    pytest.importorskip("vllm")
    names = [name for name, _ in KvScales((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)).named()]
    command = [sys.executable, "-c", REMAP, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    parameters, mapped, remapped = json.loads(done.stdout.splitlines()[-1])
    assert mapped == remapped == parameters


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_values_are_refused_with_layer_tensor_count_and_first_place(dtype, bad):
    x = torch.ones(40, 5, 6, dtype=dtype)
    x[3, 4, 0] = x[39, 0, 0] = x[3, 4, 5] = bad
    sketches = KvSketches.empty(8)
    sketches.observe(7, v=x[:3])
    before = KvSketches(sketches.amax.clone(), sketches.counts.clone())
    for values in (1, 50, 10_000):
        with mock.patch.dict(kv_scales.PIECE_VALUES, cpu=values):
            with pytest.raises(CalibrationError, match=r"^v of layer 7: 3 of 1200 values .* \[3, 4, 0\]$"):
                sketches.observe(7, v=x)
            with pytest.raises(CalibrationError, match=r"^q of layer 0: 3 of 1200 values .* \[0, 0, 39\]$"):
                sketches.observe(0, q=x.transpose(0, 2))
    assert same(sketches, before)


def test_any_bits_of_a_nan_are_refused():
    for payload in (0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF, -1, -0x80_0000 + 1):
        x = torch.tensor([0, payload], dtype=torch.int32).view(torch.float32)
        with pytest.raises(CalibrationError, match=r"1 of 2 values .* \[1\]"):
            sketch_of(x)
    with pytest.raises(CalibrationError, match="1 of 1 values"):
        sketch_of(torch.tensor(math.nan))


def test_a_layer_that_saw_nothing_is_refused_by_name():
    sketches = KvSketches.empty(3)
    for layer in range(3):
        sketches.observe(layer, q=torch.ones(1), k=torch.ones(1), v=torch.ones(0) if layer == 1 else torch.ones(1))
    with pytest.raises(CalibrationError, match=r"^v of layer 1 saw no data, the first of 1 such of 9 tensors$"):
        sketches.scales()
    with pytest.raises(CalibrationError, match=r"^q of layer 0 saw no data, the first of 3 such of 3 tensors$"):
        KvSketches.empty(1).scales()


def test_zeros_up_to_the_percentile_are_refused_unless_all_are_zero():
    x = torch.zeros(1000)
    x[5] = 2.5
    with pytest.raises(CalibrationError, match=r"^99.9 % of k of layer 0 are 0 .* 2.5"):
        k_scale(x, percentile=99.9)
    assert k_scale(x, percentile=99.91) == k_scale(x)


@pytest.mark.parametrize("margin", [0, -1.0, math.nan, math.inf, 225.0])
def test_a_margin_that_gives_no_scale_is_refused(margin):
    with pytest.raises(ValueError, match=f"margin .* got {margin}"):
        k_scale(torch.ones(1), margin=margin)


@pytest.mark.parametrize("percentile", [0, -1, 100.01, math.nan, math.inf])
def test_a_percentile_outside_0_to_100_is_refused(percentile):
    with pytest.raises(ValueError, match=f"percentile .* got {percentile}"):
        k_scale(torch.ones(1), percentile=percentile)


@pytest.mark.parametrize("layer", [-1, 3, 100])
def test_a_layer_that_does_not_exist_is_refused(layer):
    with pytest.raises(ValueError, match=f"no layer {layer} in sketches of 3 layers"):
        KvSketches.empty(3).observe(layer, k=torch.ones(1))


def test_sketches_of_other_models_dtypes_and_sizes_are_refused():
    with pytest.raises(ValueError, match="of 2 layers and 32641 bins cannot be merged into 3 layers"):
        KvSketches.empty(3).merge(KvSketches.empty(2))
    with pytest.raises(ValueError, match="at least one layer, got 0"):
        KvSketches.empty(0)
    for dtype in (torch.float64, torch.int32, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=re.escape(f"q of layer 0: {', '.join(map(str, DTYPES))}")):
            KvSketches.empty(1).observe(0, q=torch.ones(1).to(dtype))
