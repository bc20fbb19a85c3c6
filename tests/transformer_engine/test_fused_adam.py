"""Transformer Engine's FusedAdam against the package's AdamW for CPUs, state by state, and what the package changes."""

from itertools import product

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.policy.optimizer.scaled_adam import DTYPES, MASTER, MOMENTS, ScaledAdamW
from tests.transformer_engine.fake_kernels import fake_hopper

pytestmark = pytest.mark.transformer_engine
KEYS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MASTERS = {"remainders": ("fp32", True), "masters": ("fp32", False), "fp16": ("fp16", False)}
SIZES = (7, 128, 1000)


def new_pieces() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).mul(0.02).bfloat16() for size in SIZES]


def fused(kind, pieces, mean: str, square: str, master: str, remainders: bool):
    return kind(
        [{"params": pieces}], **KEYS, master_weights=True, use_decoupled_grad=True, master_weight_dtype=DTYPES[master],
        exp_avg_dtype=DTYPES[mean], exp_avg_sq_dtype=DTYPES[square], store_param_remainders=remainders,
    )  # fmt: skip


def scaled(pieces, mean: str, square: str, master: str, remainders: bool) -> ScaledAdamW:
    dtypes = {"exp_avg": DTYPES[mean], "exp_avg_sq": DTYPES[square], MASTER: DTYPES[master]}
    return ScaledAdamW([{"params": pieces, **KEYS}], dtypes, remainders)


def give_gradients(step: int, dtype: torch.dtype, *sets: list[Tensor]) -> None:
    """Set gradients of very different magnitudes, some of them 0."""
    generator = torch.Generator().manual_seed(step)
    for index, pieces in enumerate(zip(*sets, strict=True)):
        gradient = torch.randn(pieces[0].shape, generator=generator) * 10.0 ** (-2 * index)
        gradient *= torch.rand(gradient.shape, generator=generator) > 0.2
        for piece in pieces:
            piece.decoupled_grad = gradient.to(dtype)


def stored_bytes(state) -> Tensor:
    return (state._data if hasattr(state, "_quantizer") else state).contiguous().view(torch.uint8)


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize(("mean", "square"), product(DTYPES, DTYPES))
def test_states_are_those_of_fused_adam(mean, square, master, gradients):
    """Every byte that is stored, every scale and every weight, after each of four steps."""
    from nemo_fp8rl.policy.optimizer.fused_adam import MASTER_STATE, FiniteFusedAdam, FusedAdam

    ours, theirs, finite = new_pieces(), new_pieces(), new_pieces()
    adam = scaled(ours, mean, square, *MASTERS[master])
    with fake_hopper():
        references = [
            (fused(kind, pieces, mean, square, *MASTERS[master]), pieces)
            for kind, pieces in ((FusedAdam, theirs), (FiniteFusedAdam, finite))
        ]
        for step in range(4):
            give_gradients(step, gradients, ours, theirs, finite)
            adam.step()
            for reference, pieces in references:
                reference.step()
                for piece, other in zip(ours, pieces, strict=True):
                    assert torch.equal(piece, other)
                    for kind in (MASTER, *MOMENTS):
                        state = reference.state[other][MASTER_STATE if kind == MASTER else kind]
                        assert torch.equal(stored_bytes(adam.state[piece][kind]), stored_bytes(state)), (step, kind)
                        if type(reference) is FiniteFusedAdam:
                            assert torch.equal(adam.read(piece, kind), reference.read(other, kind)), (step, kind)
                            assert adam.scale(piece, kind) == reference.scale(other, kind)


@pytest.mark.parametrize(("mean", "square"), [("fp8", "fp16"), ("fp16", "fp8")])
@pytest.mark.parametrize("size", [0.0, 1e-41])
def test_moments_of_zeros_stay_finite(mean, square, size):
    """FusedAdam keeps NaN of such values, and its class here does not. A piece without gradients decays to 1e-41."""
    from nemo_fp8rl.policy.optimizer.fused_adam import FiniteFusedAdam, FusedAdam

    moments = {}
    with fake_hopper():
        for kind in (FusedAdam, FiniteFusedAdam):
            pieces = new_pieces()
            adam = fused(kind, pieces, mean, square, "fp32", True)
            for piece in pieces:
                piece.decoupled_grad = torch.zeros_like(piece)
            adam.step()
            for piece, moment in product(pieces, MOMENTS):
                adam.set_scaled_state(piece, moment, torch.full(piece.shape, size).index_fill(0, torch.tensor([0]), 0))
            states = [adam.get_unscaled_state(piece, moment) for piece, moment in product(pieces, MOMENTS)]
            moments[kind] = torch.cat(states)
            if kind is FiniteFusedAdam:
                adam.step()
                assert all(piece.isfinite().all() for piece in pieces)
    assert moments[FusedAdam].isnan().any()
    assert not moments[FiniteFusedAdam].any()


def test_a_written_state_with_its_scale_is_the_same_bytes():
    from nemo_fp8rl.policy.optimizer.fused_adam import FiniteFusedAdam

    with fake_hopper():
        pieces, others = new_pieces(), new_pieces()
        give_gradients(0, torch.float32, pieces, others)
        adam, other = (fused(FiniteFusedAdam, p, "fp8", "fp16", "fp16", False) for p in (pieces, others))
        for _ in range(3):
            adam.step()
        for piece, copy in zip(pieces, others, strict=True):
            copy.copy_(piece)
            for kind in (MASTER, *MOMENTS):
                other.write(copy, kind, adam.read(piece, kind), adam.scale(piece, kind))
                assert torch.equal(other.read(copy, kind), adam.read(piece, kind))
        other.param_groups[0]["step"] = 3
        give_gradients(1, torch.float32, pieces, others)
        adam.step()
        other.step()
    assert all(torch.equal(piece, copy) for piece, copy in zip(pieces, others, strict=True))


def test_an_fp8_moment_has_one_byte():
    """Transformer Engine's tensor also has a transpose, which only a matmul reads."""
    from nemo_fp8rl.policy.optimizer.fused_adam import FiniteFusedAdam, FusedAdam

    sizes = {}
    with fake_hopper():
        for kind in (FusedAdam, FiniteFusedAdam):
            pieces = new_pieces()
            adam = fused(kind, pieces, "fp8", "fp16", "fp32", True)
            for step in range(2):
                give_gradients(step, torch.float32, pieces)
                adam.step()
            state = adam.state[pieces[-1]]["exp_avg"]
            sizes[kind] = sum(part.nbytes for part in (state._data, state._transpose) if part is not None)
    assert sizes == {FusedAdam: 2 * SIZES[-1], FiniteFusedAdam: SIZES[-1]}
