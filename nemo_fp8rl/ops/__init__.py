"""Operations that trainer and engine share on a GPU: one kernel, one rounding rule and one order of sums for both.

An operation here gives a row the same bits whatever other rows are in the batch, because each sum has an order that is
written out. It uses only IEEE operations (a product that feeds a sum is written as `fma`, division and square root are
rounded to nearest, `exp` and `log` are polynomials), so every GPU, Triton's interpreter on a CPU and the torch formulas
of the tests agree to the bit. docs/alignment.md lists the rounding rules.

Those that a traced model calls are opaque operations of torch (`torch.ops.nemo_fp8rl`), so that torch.compile fuses
nothing into them. Attention and experts are called inside opaque operations of vLLM. `flash_attention` is a library's,
for recipes that choose it.
"""
