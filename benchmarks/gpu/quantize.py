"""The speed of quantizers on a GPU relative to a copy of the same bytes: ours, Transformer Engine's, and others.

    python benchmarks/gpu/quantize.py [--rows 16384] [--columns 12288] [--rounds 30] [--json FILE] [--dry-run]

bf16 weights in 128x128 blocks. Times are medians of CUDA events; the weights are larger than the GPU's cache. The table
also shows the bandwidth, of the bytes read and written, and its ratio to the bandwidth of a copy of the weights. Behind
it, MXFP8 and NVFP4 beside FP8, and whether their bytes are the reference's. --dry-run has the formats alone, in a tiny
size, on a CPU with Triton's interpreter.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

if "--dry-run" in sys.argv:  # before anything defines kernels
    from tests.interpreted_triton import interpret

    interpret()

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.report import DEVICE, milliseconds
from benchmarks.quantize import E4M3, deepgemm, format_calls, formula, nemo_rl, verl, weights
from nemo_fp8rl.fp8 import (
    BLOCK,
    FORMATS,
    BlockScaled,
    encode_scale,
    largest_magnitude,
    quantize_blockwise,
    quantize_delta,
    scale_shape,
)
from nemo_fp8rl.fp8.kernels import describe, why_unavailable


def measure(rows: int, columns: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    before, after = (tensor.cuda() for tensor in weights(rows, columns))
    copy = torch.zeros_like(before)
    shape = scale_shape(before.shape, BLOCK)
    out = BlockScaled(torch.zeros(before.shape, dtype=E4M3, device="cuda"), torch.zeros(shape, device="cuda"), BLOCK)
    base = quantize_blockwise(before, kernel="triton").data
    compiled = torch.compile(formula, dynamic=False)
    calls: dict[str, tuple[float, Callable[[], Any]]] = {  # bytes per value, read and written
        "copy": (4, lambda: copy.copy_(before)),
        "quantize, pow2 scales": (3, lambda: quantize_blockwise(before, kernel="triton", out=out, check=False)),
        "quantize, fp32 scales": (
            3,
            lambda: quantize_blockwise(before, kernel="triton", scale_format="fp32", out=out, check=False),
        ),
        "quantize, checked": (3, lambda: quantize_blockwise(before, kernel="triton", out=out)),
        "quantize + delta": (4, lambda: quantize_delta(after, base, kernel="triton", out=out)),
        "torch.compile": (3, lambda: compiled(before)),
        "DeepGEMM, eager": (3, lambda: deepgemm(before)),
        "verl, torch": (3, lambda: verl(before)),
        "NeMo RL": (3, lambda: nemo_rl(before)),
    }
    kernels = ["triton"]
    if not why_unavailable("te", "cuda"):
        kernels.append("te")
        calls["Transformer Engine"] = (3, lambda: quantize_blockwise(before, kernel="te", out=out))
    times = {name: (nbytes, milliseconds(call, rounds)) for name, (nbytes, call) in calls.items()}
    bandwidth = {name: nbytes * before.numel() / ms / 1e6 for name, (nbytes, ms) in times.items()}
    expected = quantize_blockwise(before.cpu(), kernel="reference")
    equal = {}
    for kernel in kernels:
        quantized = quantize_blockwise(before, kernel=kernel)
        equal[kernel] = bool(
            torch.equal(quantized.data.cpu().view(torch.uint8), expected.data.view(torch.uint8))
            and torch.equal(quantized.scale_inv.cpu(), expected.scale_inv)
        )
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "kernels": [describe(kernel) for kernel in kernels],
        "values": before.numel(),
        "equal_to_the_contract": equal,
        "quantizers": {
            name: {"ms": ms, "GB/s": bandwidth[name], "over_copy": bandwidth[name] / bandwidth["copy"]}
            for name, (_, ms) in times.items()
        },
    }


def measure_formats(rows: int, columns: int, rounds: int) -> dict[str, Any]:
    """Return by task and format: the time, its ratio to FP8's, and whether the bytes are the reference's."""
    torch.manual_seed(0)
    on_host = weights(rows, columns)[0]
    x = on_host.to(DEVICE)
    tasks = format_calls(x, "triton", check=False)
    results: dict[str, Any] = {}
    for task in ("weight", "token"):
        times = {name: milliseconds(call, rounds) for name, call in tasks[task].items()}
        results[task] = {name: {"ms": ms, "over_fp8": ms / times["fp8"]} for name, ms in times.items()}
        for name, row in results[task].items():
            seen = tasks[task][name]()
            top = on_host[: 16 * seen.block[0]]
            encode = encode_scale(largest_magnitude(on_host), "pow2")
            expected = quantize_blockwise(
                top, format=FORMATS[name], block=seen.block, encode=encode, kernel="reference"
            )
            row["equal_to_the_reference"] = all(
                torch.equal(a[: len(b)].cpu().view(torch.uint8), b.view(torch.uint8))
                for a, b in ((seen.data, expected.data), (seen.scale_inv, expected.scale_inv))
            )
    return results


def show_formats(results: dict[str, Any]) -> None:
    table = Table("task", "format", "ms", "x FP8", "the reference's bytes")
    for task, rows in results.items():
        for name, row in rows.items():
            table.add_row(
                task,
                name,
                f"{row['ms']:.3f}",
                f"{row['over_fp8']:.2f}",
                "yes" if row["equal_to_the_reference"] else "NO",
            )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=12288)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if arguments.dry_run:
        show_formats(measure_formats(256, 256, 1))
        return
    if arguments.rows % 128 or arguments.columns % 128:
        parser.error("--rows and --columns must be multiples of 128: the other frameworks' formulations need that")
    result = measure(arguments.rows, arguments.columns, arguments.rounds)
    table = Table("quantizer", "ms", "GB/s", "of a copy's", title=f"{result['device']}, {result['values'] / 1e6:.0f} M")
    for name, row in result["quantizers"].items():
        table.add_row(name, f"{row['ms']:.3f}", f"{row['GB/s']:.0f}", f"{row['over_copy']:.2f}")
    Console().print(table)
    Console().print(f"the contract's bytes: {result['equal_to_the_contract']}")
    result["formats"] = measure_formats(arguments.rows, arguments.columns, arguments.rounds)
    show_formats(result["formats"])
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
