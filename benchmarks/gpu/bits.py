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

import argparse
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.interpreted import prepare

SECTIONS = {"fp8": 0.4, "operations": 0.15, "attention": 0.2, "bf16": 0.15, "experts": 0.1}
"""With their shares of the time, the most important first."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="time limit")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    parser.add_argument("--rounds", type=int, default=10, help="calls of which the time is the median")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    dry_run, rounds = arguments.dry_run, 1 if arguments.dry_run else arguments.rounds
    if dry_run:
        prepare()
    import torch

    if not dry_run and not torch.cuda.is_available():
        parser.error("there is no GPU; --dry-run has tiny sizes on a CPU")
    from benchmarks.gpu import attention_bits, expert_bits, linear_bits, operation_bits
    from benchmarks.gpu.report import Report, versions

    compare = {
        "fp8": linear_bits.compare_fp8,
        "operations": operation_bits.compare,
        "attention": attention_bits.compare,
        "bf16": linear_bits.compare_bf16,
        "experts": expert_bits.compare,
    }
    report = Report(arguments.seconds)
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, Triton's interpreter", versions())
    chosen = [name for name in SECTIONS if name in arguments.sections]
    for i, name in enumerate(chosen):
        share = SECTIONS[name] / sum(SECTIONS[other] for other in chosen[i:])
        with report.section(name, report.seconds_left() * share), torch.set_grad_enabled(name == "attention"):
            compare[name](report, dry_run, rounds)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return report.close(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
