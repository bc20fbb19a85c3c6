"""The float32 copies that Transformer Engine's FusedAdam makes in a step are those that the doctor counts."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.commands.doctor.memory.trained_parameter import trained_parameter
from nemo_fp8rl.policy.optimizer.scaled_adam import DTYPES
from tests.transformer_engine.fake_kernels import fake_hopper
from tests.transformer_engine.test_fused_adam import MASTERS, SIZES, fused, give_gradients, new_pieces

pytestmark = pytest.mark.transformer_engine


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize(("mean", "square"), product(DTYPES, DTYPES))
def test_copies_of_a_step(mean, square, master):
    """Of all pieces of a group at once: a kernel's call gets every copy."""
    from nemo_fp8rl.policy.optimizer.fused_adam import FiniteFusedAdam

    copies = list[int]()
    pieces = new_pieces()
    with fake_hopper():
        adam = fused(FiniteFusedAdam, pieces, mean, square, *MASTERS[master])

        def count_copies(kernel: Any) -> Any:
            def call(chunk: int, overflow: Tensor, lists: list[list[Tensor]], *rest: Any) -> None:
                known = [*pieces, *(piece.decoupled_grad for piece in pieces)]
                known += [stored for stored in adam.tensors() if isinstance(stored, Tensor)]
                places = {tensor.untyped_storage().data_ptr() for tensor in known}
                new = [each for tensors in lists for each in tensors if each.untyped_storage().data_ptr() not in places]
                assert all(each.dtype == torch.float32 for each in new)
                copies.append(sum(each.nbytes for each in new))
                kernel(chunk, overflow, lists, *rest)

            return call

        for name in ("multi_tensor_adam", "multi_tensor_adam_param_remainder"):
            setattr(adam, name, count_copies(getattr(adam, name)))
        give_gradients(0, torch.bfloat16, pieces)
        adam.step()
    name, remainders = MASTERS[master]
    keys = {"use_precision_aware_optimizer": True, "exp_avg_dtype": mean, "exp_avg_sq_dtype": square}
    keys |= {"main_params_dtype": name, "store_param_remainders": remainders}
    assert copies == [trained_parameter(keys, 2, 2, has_recipe=False).state_copies * sum(SIZES)]
