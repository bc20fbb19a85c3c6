"""The compiled inner loops of `avx_experts`; fp8/kernels/on_cpu/loops.py explains the use of numba."""

import numpy as np

from nemo_fp8rl.policy.on_cpu.avx_attention_loops import add_multiple, exponentials, jit

f32 = np.float32


@jit
def multiply(x, weight, out, fused):
    """Write x [tokens, k] times weight [k, n] into out [tokens, n], adding one product after another; all float32."""
    for row in range(len(x)):
        out[row, :] = f32(0)
        for k in range(x.shape[1]):
            add_multiple(x[row, k], weight[k], out[row], fused)


@jit
def activate(gate, up, out, fused):
    """Write silu(gate) * up into out; all float32 [tokens, n]."""
    for row in range(len(gate)):
        decay = -gate[row]
        exponentials(decay, f32(0), fused)
        for j in range(len(decay)):
            sigmoid = f32(f32(1) / f32(f32(1) + decay[j]))
            out[row, j] = f32(up[row, j] * f32(gate[row, j] * sigmoid))
