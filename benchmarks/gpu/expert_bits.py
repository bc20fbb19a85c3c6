"""FP8 experts: vLLM's Triton kernel with tiles of 16 and 64 rows, ours, and Transformer Engine's grouped product."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.report import (
    DEVICE,
    MISSING,
    ON_GPU,
    Report,
    describe_agreement,
    equal_share,
    milliseconds,
    percent,
)
from nemo_fp8rl.fp8 import BLOCK, FP8_TOKENS, quantize_activations, quantize_blockwise
from nemo_fp8rl.ops.experts import experts_linear, tiles_of_experts

EXPERTS, TOP_K, WIDTH, OUT, TOKENS = 128, 8, 2048, 1536, (4096, 1, 64, 500)
"""Of Qwen3-30B-A3B: gate and up of an expert, together."""
DRY_EXPERTS, DRY_TOP_K, DRY_WIDTH, DRY_OUT, DRY_TOKENS = 3, 2, 128, 128, (20, 1)

Multiply = Callable[[Tensor, Tensor], Tensor]
"""(x [tokens, K] in bf16, experts int32 [tokens, k]) -> [tokens, k, N]."""


def by_triton(rows: int, weights: list[Tensor], scale_format: str) -> Multiply:
    """Return vLLM's kernel with its default tiles, but for the number of rows. Raises ImportError without vLLM."""
    import vllm.triton_utils
    from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    stored = [quantize_blockwise(w, scale_format=scale_format) for w in weights]  # type: ignore[arg-type]
    weight, scales = torch.stack([s.data for s in stored]), torch.stack([s.scale_inv for s in stored])
    tiles = {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "SPLIT_K": 1}
    config = tiles | ({"num_warps": 4, "num_stages": 3} if ON_GPU else {})
    no_integers = dict.fromkeys(("use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False)

    def multiply(x: Tensor, experts: Tensor) -> Tensor:
        order = moe_align_block_size(experts, rows, len(weights), None)
        quantized = quantize_activations(x, scale_format)  # type: ignore[arg-type]
        out = x.new_empty(*experts.shape, weight.size(1))
        invoke_fused_moe_triton_kernel(
            quantized.data,
            weight,
            out,
            quantized.scale_inv,
            scales,
            None,
            *order,
            mul_routed_weight=False,
            top_k=experts.size(1),
            config=config,
            compute_type=vllm.triton_utils.tl.bfloat16,
            use_fp8_w8a8=True,
            block_shape=list(BLOCK),
            **no_integers,
        )
        return out

    return multiply


def by_ours(weights: list[Tensor], scale_format: str) -> Multiply:
    """Return the product that aligned trainers and engines share."""
    stored = [quantize_blockwise(w, scale_format=scale_format) for w in weights]  # type: ignore[arg-type]
    weight, scales = torch.stack([s.data for s in stored]), torch.stack([s.scale_inv for s in stored])

    def multiply(x: Tensor, experts: Tensor) -> Tensor:
        tiles = tiles_of_experts(experts, len(weights))
        out = experts_linear(x, weight, scales, tiles, experts.size(1), scale_format == "pow2")
        return out.view(*experts.shape, -1)

    return multiply


def by_transformer_engine(weights: list[Tensor], scale_format: str) -> Multiply:
    """Return its GroupedLinear, in which the trainer multiplies. Raises ImportError without it."""
    if not ON_GPU:
        raise ImportError("needs a GPU")
    import transformer_engine.pytorch as te

    from nemo_fp8rl.policy.layers.te_linears import block_scaling

    recipe: Any = block_scaling(scale_format)  # type: ignore[arg-type]
    n, k = weights[0].shape
    layer = te.GroupedLinear(len(weights), k, n, bias=False, params_dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        for i, weight in enumerate(weights):
            getattr(layer, f"weight{i}").copy_(weight)

    def multiply(x: Tensor, experts: Tensor) -> Tensor:
        flat = experts.flatten().long()
        slots = [(flat == expert).nonzero()[:, 0] for expert in range(len(weights))]
        padded = [-(-len(s) // FP8_TOKENS) * FP8_TOKENS for s in slots]
        rows = x.new_zeros(sum(padded), k)
        out, at = x.new_empty(len(flat), n), 0
        for own, size in zip(slots, padded, strict=True):
            rows[at : at + len(own)] = x[own // experts.size(1)]
            at += size
        with torch.no_grad(), te.autocast(recipe=recipe):
            product, at = layer(rows, padded), 0
        for own, size in zip(slots, padded, strict=True):
            out[own] = product[at : at + len(own)]
            at += size
        return out.view(*experts.shape, n)

    return multiply


def compare(report: Report, dry_run: bool, rounds: int) -> None:
    """Add a line for each scale format and number of tokens; times are of Triton's kernels, with the quantizer."""
    count, k, width, out, tokens = (
        (DRY_EXPERTS, DRY_TOP_K, DRY_WIDTH, DRY_OUT, DRY_TOKENS) if dry_run else (EXPERTS, TOP_K, WIDTH, OUT, TOKENS)
    )
    generator = torch.Generator(DEVICE).manual_seed(0)
    weights = [
        (torch.randn(out, width, generator=generator, device=DEVICE) * width**-0.5).bfloat16() for _ in range(count)
    ]
    x = torch.randn(tokens[0], width, generator=generator, device=DEVICE).bfloat16()
    experts = torch.rand(tokens[0], count, generator=generator, device=DEVICE).topk(k).indices.int()
    makers: dict[str, Callable[[str], Multiply]] = {
        "Triton, 16 rows": lambda scale_format: by_triton(16, weights, scale_format),
        "Triton, 64 rows": lambda scale_format: by_triton(64, weights, scale_format),
        "ours": lambda scale_format: by_ours(weights, scale_format),
        "TE": lambda scale_format: by_transformer_engine(weights, scale_format),
    }
    for scale_format in ("pow2", "fp32"):
        kernels = {}
        for name, make in list(makers.items()):
            try:
                kernels[name] = make(scale_format)
            except MISSING as error:
                del makers[name]
                report.leave_out(name, error)
        whole: dict[str, Tensor] = {}
        for m in tokens:
            if not report.has_time():
                continue
            outputs, own_rows, ms = {}, {}, {}
            case = f"{scale_format} {count} experts of {out}x{width}, {m} tokens"
            for name, multiply in kernels.items():
                with report.guard(f"{case} {name}"):
                    outputs[name] = multiply(x[:m], experts[:m])
                    own_rows[name] = equal_share(outputs[name], whole.setdefault(name, outputs[name])[:m])
                    if name != "TE":  # its time would be that of sorting the rows here
                        ms[name] = milliseconds(lambda f=multiply, m=m: f(x[:m], experts[:m]), rounds)
            if not outputs:
                continue
            text, shares = describe_agreement(outputs)
            moved = [f"{name} {percent(share)}" for name, share in own_rows.items() if share < 1]
            times = " ".join(f"{name} {time:.3f}" for name, time in ms.items())
            text += f"; rows of the largest batch: {', '.join(moved) or 'all equal'}; ms: {times}"
            report.add(case, text, equal=shares, own_rows=own_rows, ms=ms)
