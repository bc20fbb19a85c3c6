"""The transform is orthogonal, follows the tokens, and rounds once."""

import pytest
import torch

from nemo_fp8rl.fp8.fp4_training.hadamard import SIGNS, hadamard_matrix, transform_tokens


def test_the_matrix_is_orthogonal_and_exact_in_bfloat16():
    matrix = hadamard_matrix(torch.device("cpu"))
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))
    assert torch.equal(matrix[:, 0], torch.tensor(SIGNS) / 4)  # the first column of Sylvester's matrix is of ones
    assert torch.equal(matrix.bfloat16().float(), matrix)


@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_each_tile_of_tokens_is_multiplied_and_rounded_once(tokens):
    x = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    transformed = transform_tokens(x)
    whole = -(-tokens // 16) * 16
    assert (transformed.shape, transformed.dtype) == ((6, whole), torch.bfloat16)
    padded = torch.cat([x, x.new_zeros(whole - tokens, 6)]).double()
    matrix = hadamard_matrix(torch.device("cpu")).double()
    tiles = torch.cat([padded[start : start + 16].t() @ matrix for start in range(0, whole, 16)], 1)
    assert ((transformed.double() - tiles).abs() <= tiles.abs() * 2.0**-8 + 1e-6).all()


def test_an_outlier_is_spread_over_its_tile_and_a_product_stays():
    x, dy = (torch.randn(32, n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (3, 5))
    x[4, 1] = 100.0
    spread = transform_tokens(x)
    assert spread[1, :16].abs().max() < 40 and spread[1, :16].abs().min() > 15
    product = transform_tokens(dy).float() @ spread.float().t()
    exact = dy.float().t() @ x.float()
    torch.testing.assert_close(product, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))
