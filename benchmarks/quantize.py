"""The cost of a quantizer relative to a memcpy of the same bytes: ours, and those of other frameworks.

    python benchmarks/quantize.py [--rows 8192] [--columns 12288] [--rounds 15] [--json FILE]

bf16 weights, 128x128 blocks, on the CPU. A memcpy is timed just before every call, and the ratio is to that memcpy, in
CPU seconds of one thread; the table shows medians. The gain of a second thread is the ratio of the best wall times; the
gain of the memcpy shows what the machine allows. Memory is the growth of the process's peak beyond input and output.
Results go to benchmarks/results/quantize_cpu.json unless --json names another file. The compiled entry needs a C++
compiler.

    python benchmarks/quantize.py --formats [--rows 2048] [--columns 4096] [--rounds 40]

Every number format beside FP8, in turns, in one thread: weights by the block of a weight, activations by the block of a
token; quantized, and quantized and dequantized at once (the operands of emulated matmuls). The ratio is that of the
shortest times. Results go to benchmarks/results/quantize_formats_cpu.json.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from measure import peak_growth, seconds
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.fp8 import (
    BLOCK,
    FP8,
    MXFP8,
    NVFP4,
    BlockScaled,
    KernelName,
    encode_scale,
    fake_quantize,
    fake_quantize_tokens,
    largest_magnitude,
    quantize_blockwise,
    quantize_delta,
    scale_shape,
)
from nemo_fp8rl.fp8.kernels import describe, resolve

E4M3 = torch.float8_e4m3fn
RESULTS = Path(__file__).resolve().parent / "results" / "quantize_cpu.json"
FORMAT_RESULTS = RESULTS.with_name("quantize_formats_cpu.json")
SLOW_ROUNDS = 2
STEP = 1e-6
"""Change of a master weight in one optimizer step of RL; the weights have sigma 0.02."""


def nemo_rl(x: Tensor) -> tuple[Tensor, Tensor]:
    """NeMo RL models/generation/vllm/quantization/fp8.py, cast_tensor_to_fp8_blockwise, fp32 scales."""
    blocks = x.reshape(x.size(0) // 128, 128, x.size(1) // 128, 128).permute(0, 2, 1, 3)
    flat = blocks.to(torch.float32).contiguous().flatten(start_dim=2)
    amax = torch.amax(torch.abs(flat), dim=-1, keepdim=True)
    scale = 448.0 / amax
    scale = torch.where(amax == 0, 1.0, scale)
    scale = torch.where(amax == torch.inf, 1.0, scale)
    data = torch.clamp(flat * scale, min=-448.0, max=448.0).to(E4M3)
    return _to_rows(data, x), torch.reciprocal(scale)


def verl(x: Tensor) -> tuple[Tensor, Tensor]:
    """verl utils/kernel/fp8_kernel.py, the torch path, which verl uses without Triton."""
    blocks = x.reshape(x.size(0) // 128, 128, x.size(1) // 128, 128).permute(0, 2, 1, 3).contiguous()
    flat = blocks.to(torch.float32).flatten(start_dim=2)
    amax = flat.abs().amax(dim=-1, keepdim=True)
    scale = torch.div(448.0, amax)
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    scale = torch.where(amax == torch.inf, torch.ones_like(scale), scale)
    flat.mul_(scale).clamp_(min=-448.0, max=448.0)
    return _to_rows(flat.to(E4M3), x), torch.reciprocal(scale)


def _to_rows(data: Tensor, x: Tensor) -> Tensor:
    return data.reshape(x.size(0) // 128, x.size(1) // 128, 128, 128).permute(0, 2, 1, 3).reshape(x.shape)


def deepgemm(x: Tensor) -> tuple[Tensor, Tensor]:
    """DeepGEMM utils/math.py, per_block_cast_to_fp8 with UE8M0 scales."""
    padded = F.pad(x, (0, -x.size(1) % 128, 0, -x.size(0) % 128))
    blocks = padded.view(-1, 128, padded.size(1) // 128, 128)
    scale_inv = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    bits = scale_inv.view(torch.int32)
    scale_inv = ((bits >> 23) + (bits & 0x7FFFFF).bool().int() << 23).view(torch.float32)
    data = (blocks * (1.0 / scale_inv)).to(E4M3).view_as(padded)[: x.size(0), : x.size(1)].contiguous()
    return data, scale_inv.view(blocks.size(0), blocks.size(2))


def formula(x: Tensor) -> tuple[Tensor, Tensor]:
    """The contract in as few torch operations as possible, to be compiled."""
    blocks = x.view(x.size(0) // 128, 128, x.size(1) // 128, 128).float()
    amax = blocks.abs().amax((1, 3), keepdim=True)
    scale = torch.where(amax == 0, 1.0, torch.div(torch.full_like(amax, 448.0), amax))
    scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return (blocks * scale).clamp(-448, 448).to(E4M3).view(x.shape), 1.0 / scale


def weights(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return bf16 weights before and after an optimizer step; they are made strip by strip."""
    before, after = (torch.empty(rows, columns, dtype=torch.bfloat16) for _ in range(2))
    for top in range(0, rows, 1024):
        master = torch.randn(min(1024, rows - top), columns) * 0.02
        before[top : top + 1024] = master
        after[top : top + 1024] = master + STEP * (torch.randint(0, 2, master.shape) * 2 - 1)
    return before, after


def start_up() -> dict[str, float]:
    """Measure the seconds from an imported torch to the first quantized matrix, in a process with cached code."""
    code = (
        "import time, torch; start = time.perf_counter()\n"
        "from nemo_fp8rl.fp8 import quantize_blockwise\n"
        "quantize_blockwise(torch.ones(128, 128, dtype=torch.bfloat16), kernel='cpu')\n"
        "print(time.perf_counter() - start)"
    )
    run = [sys.executable, "-c", code]
    subprocess.run(run, check=True, capture_output=True)
    times = [float(subprocess.run(run, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
    return {"start_up_seconds": median(times)}


def measure(rows: int, columns: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    before, after = weights(rows, columns)
    copy = torch.zeros_like(before)
    out = BlockScaled(torch.zeros(before.shape, dtype=E4M3), torch.zeros(scale_shape(before.shape, BLOCK)), BLOCK)
    base = quantize_blockwise(before, kernel="cpu").data
    ours: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: copy.copy_(before),
        "quantize, pow2 scales": lambda: quantize_blockwise(before, out=out),
        "quantize, fp32 scales": lambda: quantize_blockwise(before, scale_format="fp32", out=out),
        "quantize + delta": lambda: quantize_delta(after, base, out=out),
    }
    others: dict[str, Callable[[], Any]] = {
        "DeepGEMM, eager": lambda: deepgemm(before),
        "verl, torch": lambda: verl(before),
        "NeMo RL": lambda: nemo_rl(before),
    }
    if shutil.which(os.environ.get("CXX", "g++")):
        compiled = torch.compile(formula, dynamic=False)
        compiled(before)
        others = {"torch.compile": lambda: compiled(before), **others}
    table = {}
    for name, call in {**ours, **others}.items():
        times, ratios = [], []
        walls: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(rounds if name in ours else SLOW_ROUNDS):
            memcpy = min(seconds(lambda: copy.copy_(before), time.thread_time) for _ in range(2))
            times.append(seconds(call, time.thread_time))
            ratios.append(times[-1] / memcpy)
            for threads, wall in walls.items():
                torch.set_num_threads(threads)
                wall.append(seconds(call))
                torch.set_num_threads(1)
        results = 0 if name in ours else before.numel()
        table[name] = {
            "ms": median(times) * 1e3,
            "over_memcpy": median(ratios),
            "threads_gain": min(walls[1]) / min(walls[2]),
            "extra_memory": max(0, peak_growth(call) - results) / (2 * before.numel()),
        }
    _, delta = quantize_delta(after, base, out=out)
    assert delta is not None
    encoded = delta.encode()
    target = base.clone()
    return {
        "values": before.numel(),
        "memcpy_ms": median(seconds(lambda: copy.copy_(before), time.thread_time) for _ in range(rounds)) * 1e3,
        "quantizers": table,
        "delta": {
            "changed": delta.changed_bytes / before.numel(),
            "encoded_over_fp8": len(encoded) / before.numel(),
            "encode_ms": seconds(delta.encode, time.thread_time) * 1e3,
            "decode_ms": seconds(lambda: delta.decode(encoded, before.numel()), time.thread_time) * 1e3,
            "apply_ms": seconds(lambda: delta.apply_(target), time.thread_time) * 1e3,
            "exact": bool(torch.equal(target.view(torch.uint8), out.data.view(torch.uint8))),
        },
        **start_up(),
    }


def format_calls(x: Tensor, kernel: KernelName, check: bool) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return calls that quantize x, by task and format. check: whether they look for values that are not finite."""
    encode = encode_scale(largest_magnitude(x), "pow2")
    calls: dict[str, dict[str, Callable[[], Any]]] = {"weight": {}, "token": {}, "weight fake": {}, "token fake": {}}
    for format in (FP8, MXFP8, NVFP4):
        for task, block in (("weight", format.weight_block), ("token", format.line_block)):
            out = quantize_blockwise(x, format=format, block=block, encode=encode, kernel=kernel)
            options = {"format": format, "block": block, "encode": encode, "kernel": kernel, "out": out, "check": check}
            calls[task][format.name] = partial(quantize_blockwise, x, **options)
        calls["weight fake"][format.name] = partial(
            fake_quantize, x, format=format, block=format.weight_block, encode=encode, flush=True
        )
        calls["token fake"][format.name] = partial(fake_quantize_tokens, x, format)
    return calls


def compare_formats(rows: int, columns: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, _ = weights(rows, columns)
    results: dict[str, Any] = {"values": x.numel(), "tasks": {}}
    for task, calls in format_calls(x, "auto", check=True).items():
        shortest = dict.fromkeys(calls, float("inf"))
        for _ in range(rounds):
            for name, call in calls.items():
                shortest[name] = min(shortest[name], seconds(call, time.thread_time))
        results["tasks"][task] = {
            name: {"ms": 1e3 * time_, "over_fp8": time_ / shortest["fp8"]} for name, time_ in shortest.items()
        }
    return results


def show_formats(result: dict[str, Any]) -> None:
    table = Table("task", "format", "ms", "x FP8", title=f"{result['values'] / 1e6:.1f} M bf16 values, one thread")
    for task, rows in result["tasks"].items():
        for name, row in rows.items():
            table.add_row(task, name, f"{row['ms']:.2f}", f"{row['over_fp8']:.2f}")
    Console().print(table)


def show(result: dict[str, Any]) -> None:
    table = Table("quantizer", "x memcpy", "faster on 2 threads", "extra memory", title="CPU quantization, one thread")
    for name, row in result["quantizers"].items():
        gain, memory = f"{row['threads_gain']:.2f}", f"{100 * row['extra_memory']:.1f}%"
        table.add_row(name, f"{row['over_memcpy']:.2f}", gain, memory)
    delta, console = result["delta"], Console()
    console.print(table)
    console.print(
        f"{result['values'] / 1e6:.1f} M bf16 weights; memcpy of them {result['memcpy_ms']:.1f} ms, one thread\n"
        f"one optimizer step changes {delta['changed']:.2%} of the FP8 bytes; encoded they are "
        f"{delta['encoded_over_fp8']:.3%} of all bytes (encode {delta['encode_ms']:.1f} ms, decode "
        f"{delta['decode_ms']:.1f} ms, apply {delta['apply_ms']:.1f} ms, exact: {delta['exact']})\n"
        f"start-up with compiled code cached: {result['start_up_seconds']:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", action="store_true", help="compare the number formats instead")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--columns", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    run, print_result, path, sizes = (
        (compare_formats, show_formats, FORMAT_RESULTS, (2048, 4096, 40))
        if arguments.formats
        else (measure, show, RESULTS, (8192, 12288, 15))
    )
    given = (arguments.rows, arguments.columns, arguments.rounds)
    rows, columns, rounds = (size if value is None else value for value, size in zip(given, sizes, strict=True))
    if rows % 128 or columns % 128:
        parser.error("--rows and --columns must be multiples of 128: the other frameworks' formulations need that")
    result = {
        "machine": machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "kernel": describe(resolve("auto", "cpu")),
        **run(rows, columns, rounds),
    }
    print_result(result)
    path = arguments.json or path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
