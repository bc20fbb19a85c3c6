"""Calibrated scales: against the exact maximum and exact arithmetic, and across ranks."""

import json
import math
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
from nemo_fp8rl.fp8.kv_scales import MARGIN, CalibrationError, KvMaxima, KvScales

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FLOAT32_MAX = torch.finfo(torch.float32).max


def maxima_of(*parts: Tensor) -> KvMaxima:
    """Maxima of a model of one layer whose k is observed in these parts."""
    maxima = KvMaxima(1)
    for part in parts:
        maxima.observe(0, k=part)
    return maxima


def k_scale(x: Tensor, margin: float = MARGIN) -> float:
    maxima = maxima_of(x)
    maxima.observe(0, q=torch.ones(1), v=torch.ones(1))
    with mock.patch.object(kv_scales, "MARGIN", margin):
        return maxima.scales().k_scale[0]


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


@settings(deadline=None, max_examples=100)
@given(tensors())
def test_the_maximum_is_exact(x):
    assert maxima_of(x).amax[0, 1].item() == x.double().abs().max().item()


def test_large_float32_above_the_largest_bfloat16_stay_finite():
    assert k_scale(torch.full((10,), FLOAT32_MAX), margin=224.0) == 2.0**127


@settings(deadline=None, max_examples=50)
@given(tensors(), st.integers(1, 20))
def test_cutting_into_pieces_changes_nothing(x, values):
    whole = maxima_of(x).amax
    with mock.patch.dict(kv_scales.PIECE_VALUES, cpu=values):
        assert torch.equal(maxima_of(x).amax, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_data_are_read_by_value_and_not_changed(dtype):
    qkv = torch.randn(700, 3, 5, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    original = qkv.clone()
    for view in (qkv[:, 1], qkv.permute(3, 2, 0, 1), qkv[::3, :, 2:, ::5], qkv[:1].expand(4, -1, -1, -1)):
        assert torch.equal(maxima_of(view).amax, maxima_of(view.contiguous()).amax)
    assert torch.equal(qkv, original)


@pytest.mark.parametrize("dtype", DTYPES)
def test_maxima_of_data_that_require_gradients_have_none(dtype):
    x = torch.randn(8, 3, dtype=dtype, requires_grad=True)
    assert not maxima_of(x, x.t() * 2).amax.requires_grad


RANK = """
import sys
import torch
import torch.distributed as dist
from nemo_fp8rl.fp8.kv_scales import KvMaxima

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
maxima = KvMaxima(3)
for part in torch.load(f"{folder}/data.pt")[rank]:
    maxima.observe(part["layer"], **part["tensors"])
maxima.all_reduce()
torch.save(maxima.amax, f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


def test_ranks_of_other_heads_and_layers_agree_after_all_reduce(tmp_path):
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

    whole = KvMaxima(3)
    for part in (*data[0], *data[1]):
        whole.observe(part["layer"], **part["tensors"])
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), whole.amax)


MARGINS = st.one_of(st.sampled_from([1.0, 1.05, 2.0, 224.0]), st.floats(1e-3, 224))
WHOLE = st.floats(2.0**-149, FLOAT32_MAX, width=32, allow_subnormal=True)
"""Any magnitude that float32 holds."""


@settings(deadline=None, max_examples=300)
@given(WHOLE, MARGINS)
def test_scales_are_the_smallest_powers_of_two_that_fit(amax, margin):
    scale, needed = k_scale(torch.tensor([amax]), margin=margin), Fraction(amax) * Fraction(margin)
    assert math.frexp(scale)[0] == 0.5
    assert Fraction(scale) * 448 >= needed
    assert Fraction(scale) / 2 * 448 < needed or scale == 2.0**-126


@pytest.mark.parametrize("exponent", [-126, -100, -9, -1, 0, 1, 60, 118])
def test_scales_are_right_at_a_border_and_one_ulp_beside_it(exponent):
    border = torch.tensor([1.75]) * 2.0**exponent  # 448 * 2^(exponent - 8)
    above, below = (torch.nextafter(border, torch.tensor([to])) for to in (math.inf, 0.0))
    floor = max(exponent - 8, -126)
    assert k_scale(border, margin=1.0) == k_scale(below, margin=1.0) == 2.0**floor
    assert k_scale(above, margin=1.0) == 2.0 ** max(exponent - 7, -126)


def test_scales_fit_where_double_precision_rounds_the_excess_away():
    margin = 448 / 3
    assert 3 * margin == 448
    assert 3 * Fraction(margin) > 448
    assert k_scale(torch.tensor([3.0]), margin=margin) == 2


@settings(deadline=None, max_examples=50)
@given(tensors())
def test_calibrated_data_fit_into_e4m3(x):
    stored = x.double().abs() / k_scale(x)
    assert stored.max() <= 448 / 1.049


def test_a_tensor_of_zeros_gets_scale_one():
    assert k_scale(torch.zeros(4)) == 1


def test_each_layer_and_tensor_has_its_own_scale():
    maxima = KvMaxima(2)
    maxima.observe(0, q=torch.tensor([-448.0]), k=torch.tensor([896.0, 1.0]), v=torch.tensor([448.0 * 4]))
    maxima.observe(1, q=torch.tensor([56.0]), k=torch.tensor([28.0]), v=torch.tensor([14.0]))
    maxima.observe(1, v=torch.tensor([-7.0]))
    with mock.patch.object(kv_scales, "MARGIN", 1.0):
        assert maxima.scales() == KvScales((2.0, 0.0625), (4.0, 0.03125), (1.0, 0.125))


def test_the_margin_is_five_percent():
    assert k_scale(torch.tensor([1.0, 448 / 1.051])) == 1.0
    assert k_scale(torch.tensor([1.0, 448 / 1.049])) == 2.0


def test_named_scales_carry_the_names_and_type_that_vllm_loads():
    scales = KvScales((2.0, 3.0), (4.0, 5.0), (0.5, 0.25))
    named = dict(scales.named_tensors())
    assert {name: tensor.item() for name, tensor in named.items()} == {
        "model.layers.0.self_attn.attn.q_scale": 0.5,
        "model.layers.0.self_attn.k_scale": 2.0,
        "model.layers.0.self_attn.v_scale": 4.0,
        "model.layers.1.self_attn.attn.q_scale": 0.25,
        "model.layers.1.self_attn.k_scale": 3.0,
        "model.layers.1.self_attn.v_scale": 5.0,
    }
    assert {(tensor.dtype, tensor.shape) for tensor in named.values()} == {(torch.float32, torch.Size([]))}
    assert list(named) == KvScales.tensor_names(2)


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
    names = [name for name, _ in KvScales((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)).named_tensors()]
    command = [sys.executable, "-c", REMAP, json.dumps(names)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    parameters, mapped, remapped = json.loads(result.stdout.splitlines()[-1])
    assert mapped == remapped == parameters


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_values_are_refused_with_count_and_first_place(dtype, bad):
    x = torch.ones(40, 5, 6, dtype=dtype)
    x[3, 4, 0] = x[39, 0, 0] = x[3, 4, 5] = bad
    maxima = KvMaxima(8)
    maxima.observe(7, v=x[:3])
    before = maxima.amax.clone()
    for values in (1, 50, 10_000):
        with mock.patch.dict(kv_scales.PIECE_VALUES, cpu=values):
            with pytest.raises(CalibrationError, match=r"^v of layer 7: 3 of 1200 values .* \[3, 4, 0\]$"):
                maxima.observe(7, v=x)
            with pytest.raises(CalibrationError, match=r"^q of layer 0: 3 of 1200 values .* \[0, 0, 39\]$"):
                maxima.observe(0, q=x.transpose(0, 2))
    assert torch.equal(maxima.amax, before)


def test_any_bits_of_a_nan_are_refused():
    for payload in (0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF, -1, -0x80_0000 + 1):
        x = torch.tensor([0, payload], dtype=torch.int32).view(torch.float32)
        with pytest.raises(CalibrationError, match=r"1 of 2 values .* \[1\]"):
            maxima_of(x)
    with pytest.raises(CalibrationError, match="1 of 1 values"):
        maxima_of(torch.tensor(math.nan))


def test_a_layer_that_saw_nothing_is_refused_by_name():
    maxima = KvMaxima(3)
    for layer in range(3):
        maxima.observe(layer, q=torch.ones(1), k=torch.ones(1), v=torch.ones(0) if layer == 1 else torch.ones(1))
    with pytest.raises(CalibrationError, match=r"^v of layer 1 saw no data, the first of 1 such of 9 tensors$"):
        maxima.scales()
    with pytest.raises(CalibrationError, match=r"^q of layer 0 saw no data, the first of 3 such of 3 tensors$"):
        KvMaxima(1).scales()


@pytest.mark.parametrize("layer", [-1, 3, 100])
def test_a_layer_that_does_not_exist_is_refused(layer):
    with pytest.raises(ValueError, match=f"no layer {layer} in a model of 3 layers"):
        KvMaxima(3).observe(layer, k=torch.ones(1))


def test_other_dtypes_and_models_without_layers_are_refused():
    with pytest.raises(ValueError, match="at least one layer, got 0"):
        KvMaxima(0)
    for dtype in (torch.float64, torch.int32, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=re.escape(f"q of layer 0: {', '.join(map(str, DTYPES))}")):
            KvMaxima(1).observe(0, q=torch.ones(1).to(dtype))
