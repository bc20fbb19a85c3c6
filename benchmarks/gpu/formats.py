"""MXFP8 and NVFP4 in an engine on one GPU: the kernels' numbers, what a refit derives, and the speed of rollouts.

    python benchmarks/gpu/formats.py [--seconds 480] [--sections linear refit rollout] [--json FILE] [--dry-run]

linear      Qwen3-8B's layers by each kernel that this GPU has, against the trainer's emulated layer: equal bits, the
            largest distance in units of bf16's last place, and whether a row depends on its batch; time over bf16's
refit       the time to derive what kernels read (Marlin's repacking, swizzled scales), for all layers of Qwen3-8B
rollout     tokens per second in bf16, FP8, and each format, of the same random model as benchmarks/rollout.py

A GPU before Blackwell has Marlin alone: W4A16 as it is, the others with activations that are rounded before. --dry-run
has tiny sizes on a CPU; in `linear` and `refit` the kernels are then the fakes of the tests.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from torch import Tensor

from benchmarks.gpu.report import DEVICE, Report, equal_share, milliseconds, percent, relative_error
from benchmarks.gpu.sections import parse, run
from nemo_fp8rl.fp8 import FLOW_FORMATS, BlockScaled, Format, LinearRecipe, encode_scale, fprop, quantize_blockwise

SECTIONS = {"linear": 0.3, "refit": 0.2, "rollout": 0.5}
"""With their shares of the time."""
FORMATS = ("nvfp4_a16", "mxfp8", "nvfp4")
LAYERS = 36
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate and up": (24576, 4096), "down": (4096, 12288)}
"""Qwen3-8B's."""
TOKENS = (1, 16, 512, 4096)
DRY_SHAPES, DRY_TOKENS = {"qkv": (192, 128)}, (1, 20)
LARGEST_ERROR = 0.004
"""Relative to the emulated layer; rounding both to bf16 gives about 0.002 where sums are in another order."""


def methods(format: Format) -> Iterator[Any]:
    """Yield the linear methods that this GPU has for a format: its own first, and Marlin's."""
    from nemo_fp8rl.generation.fp8_method.gpu_formats.choice import gpu_methods
    from nemo_fp8rl.generation.fp8_method.gpu_formats.marlin_linear import MarlinLinearMethod

    recipe = LinearRecipe(format)
    for kind in dict.fromkeys((gpu_methods(recipe)[0], MarlinLinearMethod)):
        yield kind(recipe)


def make_layer(method: Any, shape: tuple[int, int], seed: int = 0) -> tuple[Any, BlockScaled]:
    """Return a layer with the parameters that a refit writes, and the weight."""
    generator, format = torch.Generator(DEVICE).manual_seed(seed), method.format
    weight = torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16) * 0.02
    encode = encode_scale(weight.abs().amax(), "pow2", 4) if format.has_global else None
    stored = quantize_blockwise(weight, format=format, encode=encode)
    layer = torch.nn.Module()
    tensors = {"weight": stored.data, format.scale_name("weight"): stored.scale_inv}
    if stored.global_scale is not None:
        tensors[format.global_name("weight")] = stored.global_scale.reshape(1)
    for name, tensor in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    method.prepare(layer, torch.bfloat16)
    return layer, stored


def largest_distance(a: Tensor, b: Tensor) -> int:
    """Return the largest distance of bf16 values, in steps between neighbours."""
    order = [torch.where(x < 0, -32768 - x, x) for x in (a.view(torch.int16).int(), b.view(torch.int16).int())]
    return int((order[0] - order[1]).abs().max())


def compare_linear(report: Report, dry_run: bool, rounds: int) -> None:
    shapes, sizes = (DRY_SHAPES, DRY_TOKENS) if dry_run else (SHAPES, TOKENS)
    for format in (FLOW_FORMATS[name] for name in FORMATS):
        for method in methods(format):
            for label, (n, k) in shapes.items():
                case = f"{format.name}, {method.kernel_name}, {label}"
                if not report.has_time():
                    continue
                with report.guard(case):
                    _compare_one(report, case, method, (n, k), sizes, rounds)


def _compare_one(report: Report, case: str, method: Any, shape: tuple[int, int], sizes: Any, rounds: int) -> None:
    layer, stored = make_layer(method, shape)
    method.process_weights_after_loading(layer)
    values = stored.dequantize(torch.bfloat16)
    x = torch.randn(max(sizes), shape[1], generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE).bfloat16()
    whole = method.apply(layer, x)
    emulated = fprop(x, values, method.recipe)
    error, share, steps = (
        relative_error(whole, emulated),
        equal_share(whole, emulated),
        largest_distance(whole, emulated),
    )
    rows = [size for size in sizes if not torch.equal(method.apply(layer, x[:size]), whole[:size])]
    times = {size: milliseconds(partial(method.apply, layer, x[:size]), rounds) for size in sizes}
    plain = {size: milliseconds(partial(torch.nn.functional.linear, x[:size], values), rounds) for size in sizes}
    speed = ", ".join(f"M={size}: {plain[size] / times[size]:.2f}x" for size in sizes)
    same = "a row alone 100 %" if not rows else f"rows differ at M={rows}"
    report.add(
        case,
        f"equal {percent(share)}, error {error:.5f}, at most {steps} steps; {same}; over bf16 {speed}",
        equal=share,
        error=error,
        steps=steps,
        rows_differ_at=rows,
        milliseconds=times,
        bf16_milliseconds=plain,
    )
    if error > LARGEST_ERROR:
        raise AssertionError(f"the error is above {LARGEST_ERROR}: the kernel multiplies other numbers")


def compare_refit(report: Report, dry_run: bool, rounds: int) -> None:
    for format in (FLOW_FORMATS[name] for name in FORMATS):
        for method in methods(format):
            case = f"{format.name}, {method.kernel_name}"
            if not report.has_time():
                continue
            with report.guard(case):
                total, nbytes = 0.0, 0
                for shape in (DRY_SHAPES if dry_run else SHAPES).values():
                    layer, stored = make_layer(method, shape)
                    method.process_weights_after_loading(layer)
                    before = {k: v.data_ptr() for k, v in vars(layer).items() if k.startswith("kernel_")}
                    total += milliseconds(partial(method.process_weights_after_loading, layer), rounds)
                    nbytes += stored.data.nbytes
                    after = {k: v.data_ptr() for k, v in vars(layer).items() if k.startswith("kernel_")}
                    assert before == after, "the derived tensors moved, and CUDA graphs keep their addresses"
                report.add(
                    case,
                    f"{total:.2f} ms a layer ({nbytes / total / 1e6:.0f} GB/s), {total * LAYERS / 1e3:.2f} s a refit",
                    milliseconds=total,
                    seconds_of_qwen3_8b=total * LAYERS / 1e3,
                )


def compare_rollout(report: Report, dry_run: bool, rounds: int) -> None:
    from benchmarks import rollout
    from benchmarks.measure import seconds
    from nemo_fp8rl.commands.export.convert import export
    from nemo_fp8rl.commands.tiny_model import write_model
    from nemo_fp8rl.generation.vllm_compat import survive_scan_of_llvmlite

    sizes, layers, batches = rollout.SIZES | rollout.DENSE, 1 if dry_run else 4, [2] if dry_run else [1, 32, 128]
    with tempfile.TemporaryDirectory() as folder:
        bf16 = Path(folder) / "bf16"
        write_model(bf16, 0, "qwen3", DEVICE, num_hidden_layers=layers, **sizes)
        survive_scan_of_llvmlite()
        speeds: dict[str, dict[int, float]] = {}
        engines = []  # all of them until the end, because the engines of a process share vLLM's groups
        for name in ("bf16", "fp8", *FORMATS):
            if not report.has_time():
                continue
            with report.guard(name):
                if name != "bf16":
                    export(bf16, Path(folder) / name, format=name)
                engine = rollout.start(Path(folder) / name, None if name == "bf16" else "nemo_fp8rl", "auto", batches)
                engines.append(engine)
                rollout.answer(engine, batches[0])  # warm
                speeds[name] = {
                    batch: batch
                    * rollout.ANSWER
                    / median(seconds(partial(rollout.answer, engine, batch)) for _ in range(min(rounds, 3)))
                    for batch in batches
                }
                text = ", ".join(
                    f"{batch} sequences: {speed:.0f} tokens/s ({speed / speeds['bf16'][batch]:.2f}x bf16)"
                    for batch, speed in speeds[name].items()
                )
                report.add(name, text, tokens_per_second=speeds[name])


COMPARE = {"linear": compare_linear, "refit": compare_refit, "rollout": compare_rollout}


def main() -> int:
    arguments = parse(__doc__, SECTIONS, seconds=480)
    if not arguments.dry_run and not torch.cuda.is_available():
        arguments.refuse("there is no GPU; --dry-run has tiny sizes on a CPU")
    if arguments.dry_run:
        import pytest

        from tests.generation.fp8_method.fake_marlin import use_fakes

        use_fakes(pytest.MonkeyPatch())
    return run(arguments, SECTIONS, COMPARE, "CPU, fakes of the kernels")


if __name__ == "__main__":
    sys.exit(main())
