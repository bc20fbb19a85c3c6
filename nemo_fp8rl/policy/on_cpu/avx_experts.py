"""Products and activations of bfloat16 experts in the order of vLLM's vector kernel, so that no bit differs.

The kernel (vLLM 0.32, csrc/cpu/cpu_fused_moe.cpp, micro_gemm/cpu_micro_gemm_vec.hpp) adds one product after another,
and its exponential is a polynomial with AVX-512. A library's matmul may add in another order: with torch's operations
0.02 % of a layer's values had another last bit on an Intel CPU, where MKL happens to add as the kernel does, and 0.19 %
were reported from an AMD CPU. Left as it is: the kernel fuses the multiply-adds of the weighted sum of the experts,
which Megatron's dispatcher does not; 0.002 % of the values differ.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_fp8rl.fp8.kernels.on_cpu.threads import run_in_threads

THREAD_PRODUCTS = 1 << 24
"""The least work of a thread, in multiply-adds: about two milliseconds."""


def linear_in_kernel_order(x: Tensor, weight: Tensor) -> Tensor:
    """Return x times the transposed weight, with the gradient of a linear layer.

    x:       float32 [tokens, k]
    weight:  float32 [n, k]
    """
    from nemo_fp8rl.policy.on_cpu.avx_experts_loops import multiply  # compiled at the first call on a machine

    columns = weight.detach().t().contiguous().numpy()
    return _with_gradient_of(
        F.linear(x, weight), lambda rows, out, fused: multiply(rows, columns, out, fused), x, work_of_row=weight.numel()
    )


def silu_product_in_kernel_order(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up with its gradient; all float32 [tokens, n]."""
    from nemo_fp8rl.policy.on_cpu.avx_experts_loops import activate

    return _with_gradient_of(F.silu(gate) * up, activate, gate, up, work_of_row=32 * gate.size(-1))


def _with_gradient_of(plain: Tensor, loop: Callable, *inputs: Tensor, work_of_row: int) -> Tensor:
    """Return what `loop(*rows of inputs, out, fused)` writes, with the gradient of `plain` of that shape."""
    arrays = [tensor.detach().contiguous().numpy() for tensor in inputs]
    out, fused = np.empty(plain.shape, np.float32), torch.cpu._is_avx512_supported()

    def work(first: int, end: int) -> None:
        loop(*(array[first:end] for array in arrays), out[first:end], fused)

    run_in_threads(work, len(out), min(torch.get_num_threads(), len(out) * work_of_row // THREAD_PRODUCTS))
    return torch.from_numpy(out) + (plain - plain.detach())
