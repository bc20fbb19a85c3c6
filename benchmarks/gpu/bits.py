"""Kernels against kernels on one GPU: which give the same bits, and does a row depend on its batch?

    python benchmarks/gpu/bits.py [--seconds 300] [--sections fp8 operations ...] [--json FILE] [--dry-run]

fp8         Qwen3-8B's FP8 linear layers: Transformer Engine, DeepGEMM, CUTLASS, vLLM's Triton kernel, and ours
operations  the shared operations against their formulas, computed by torch on the CPU
attention   FlashAttention 3 and ours: whole prompts, chunks, decode, pages; gradients from output and log-sum-exp
bf16        head, router and qkv: F.linear, DeepGEMM, and ours
experts     vLLM's Triton experts with tiles of 16 and 64 rows, ours, and Transformer Engine's grouped product

A library that is not installed is one line, and not a failure. Each section has its share of the time, and leaves out
what is over. --dry-run has tiny sizes, on a CPU with Triton's interpreter.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.interpreted import prepare
from benchmarks.gpu.sections import parse, run

SECTIONS = {"fp8": 0.4, "operations": 0.15, "attention": 0.2, "bf16": 0.15, "experts": 0.1}
"""With their shares of the time, the most important first."""


def main() -> int:
    arguments = parse(__doc__, SECTIONS, seconds=300)
    if arguments.dry_run:
        prepare()
    import torch

    if not arguments.dry_run and not torch.cuda.is_available():
        arguments.refuse("there is no GPU; --dry-run has tiny sizes on a CPU")
    from benchmarks.gpu import attention_bits, expert_bits, linear_bits, operation_bits

    compare = {
        "fp8": linear_bits.compare_fp8,
        "operations": operation_bits.compare,
        "attention": attention_bits.compare,
        "bf16": linear_bits.compare_bf16,
        "experts": expert_bits.compare,
    }
    return run(arguments, SECTIONS, compare, "CPU, Triton's interpreter", with_gradients=("attention",))


if __name__ == "__main__":
    sys.exit(main())
