"""Rules of scales and remainders, and combinations of dtypes that are refused. `test_fused_adam` has the rest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.policy.optimizer.scaled_adam import (
    DTYPES,
    LARGEST,
    MASTER,
    MOMENTS,
    ScaledAdamW,
    choose_scale,
    join_master,
    split_master,
)

OPTIMIZER = "policy.megatron_cfg.optimizer"
AWARE = f"{OPTIMIZER}.use_precision_aware_optimizer=true"
FP16_MASTERS = (AWARE, "main_params_dtype=fp16", "lr=1e-5")


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1))
def test_a_split_master_is_exact_and_its_weight_is_nearest(bits):
    master = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    weight, low = split_master(master)
    assert torch.equal(join_master(weight, low).view(torch.int32), master.view(torch.int32))
    numbers = master.isfinite() & weight.isfinite()
    error, of_torch = ((w.double() - master.double()).abs()[numbers] for w in (weight, master.bfloat16()))
    assert torch.equal(error, of_torch)  # only the side of a tie may differ


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize(("value", "is_zero"), [(0.0, True), (-0.0, True), (1e-41, True), (1e-20, False), (3.0, False)])
def test_a_piece_without_a_finite_reciprocal_counts_as_zeros(dtype, value, is_zero):
    scale, reciprocal = choose_scale(torch.tensor([0.0, value]), dtype)
    assert scale.isfinite() and scale > 0
    assert (reciprocal == 0) == is_zero
    assert is_zero or value * reciprocal == pytest.approx(LARGEST[dtype])


def test_a_nan_is_not_hidden():
    assert all(part.isnan() for part in choose_scale(torch.tensor([0.0, torch.nan]), torch.uint8))


@pytest.mark.parametrize("name", ["fp16", "fp8"])
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1), st.floats(-30, 30))
def test_a_state_written_with_its_scale_is_the_same_bytes(name, values, exponent):
    piece, copy = (torch.zeros(len(values), dtype=torch.bfloat16) for _ in range(2))
    adam = ScaledAdamW([], dict.fromkeys((MASTER, *MOMENTS), DTYPES[name]), remainders=False)
    for kind in (MASTER, *MOMENTS):
        adam.write(piece, kind, torch.tensor(values) * 2.0**exponent)
        adam.write(copy, kind, adam.read(piece, kind), adam.scale(piece, kind))
        stored, again = (adam.state[p][kind].view(torch.uint8) for p in (piece, copy))
        assert torch.equal(stored, again)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("exp_avg_dtype=fp8",), "exp_avg_dtype=fp8 has a meaning only with .*use_precision_aware_optimizer=true"),
        (("exp_avg_sq_dtype=bf16",), "exp_avg_sq_dtype=bf16 has a meaning only with"),
        (("main_params_dtype=fp16", "lr=0.001"), "main_params_dtype=fp16 has a meaning only with"),
        ((AWARE, "main_params_dtype=fp16", "lr=9e-6"), "lr=9e-06: float16 rounds most updates of such a rate away"),
        ((*FP16_MASTERS, "policy.precision=float32", "nemo_fp8rl.flow=bf16"), "its own master"),
        ((*FP16_MASTERS, "nemo_fp8rl.fp8_param=true"), "quantized from float32 masters"),
        ((AWARE, "exp_avg_dtype=float8"), "exp_avg_dtype"),
    ],
)  # fmt: skip
def test_combinations_are_refused_with_the_reason(recipe, keys, message):
    with pytest.raises(UserError, match=message):
        recipe(*map(whole_key, keys))


@pytest.mark.parametrize("keys", [FP16_MASTERS, (AWARE, "exp_avg_dtype=fp8"), (AWARE,)])
def test_combinations_that_train_are_accepted(recipe, keys):
    assert recipe(*map(whole_key, keys))


def whole_key(key: str) -> str:
    return key if "." in key.partition("=")[0] else f"{OPTIMIZER}.{key}"
