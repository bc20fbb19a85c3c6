"""Every kernel of the shared operations compiles for Hopper and Blackwell; a CPU can compile and not run them."""

from typing import Any

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set, so nothing is compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from nemo_fp8rl.ops import activation, attention, experts, kv_pages, log_softmax, matmul, norm, rank_sum, rope  # noqa: E402

BF16, FP32, INT, INT64, E4M3 = "*bf16", "*fp32", "i32", "*i64", "*fp8e4nv"
SIZES = {"rows": INT, "size": INT, "eps": "fp32", "steps": INT}
PAGES, TILE = ("k_cache", "v_cache"), {"QUERIES": 16, "HEADS": 4, "BLOCK_KEYS": 64, "BLOCK_D": 128}
ATTENTION = {
    **{"q": BF16, "out": BF16, "lse": FP32, "scale": "fp32"},
    **dict.fromkeys(("block_table", "query_starts", "lengths"), "*i32"),
    **{name: INT for name in attention.attention_kernel.arg_names[13:-4]},
}
NO_WINDOW = {"prompt_lengths": None, "window": None}
IN_WINDOW = {"prompt_lengths": "*i32", "window": INT}
NO_SCALES = {"k_scale": None, "v_scale": None}
KERNELS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (
        norm.norm_kernel,
        {"x": BF16, "residual": BF16, "weight": BF16, "out": BF16, "total": BF16, **SIZES},
        {"HAS_RESIDUAL": True, "ROWS": 1, "BLOCK": 4096},
    ),
    (
        norm.norm_kernel,
        {"x": BF16, "residual": BF16, "weight": BF16, "out": BF16, "total": BF16, **SIZES},
        {"HAS_RESIDUAL": False, "ROWS": 32, "BLOCK": 128},
    ),
    (
        norm.norm_backward_kernel,
        {"x": BF16, "weight": BF16, "grad": BF16, "grad_x": BF16, "grad_weight": FP32, **SIZES},
        {"ROWS": 1, "BLOCK": 4096},
    ),
    (
        rope.rotate_kernel,
        {"x": BF16, "positions": INT64, "table": BF16, "out": BF16, **dict.fromkeys(("tokens", "heads"), INT)}
        | dict.fromkeys(("stride_token", "stride_head"), INT),
        {"BACKWARD": False, "TOKENS": 2, "HEADS": 32, "HALF": 64, "BLOCK": 64},
    ),
    (activation.silu_mul_kernel, {"gate_up": BF16, "out": BF16, **SIZES}, {"ROWS": 4, "BLOCK": 1024}),
    (
        activation.silu_mul_backward_kernel,
        {"gate_up": BF16, "grad": BF16, "grad_gate_up": BF16, **SIZES},
        {"ROWS": 4, "BLOCK": 1024},
    ),
    (
        matmul.linear_kernel,
        {"x": BF16, "weight": BF16, "bias": BF16, "out": BF16, "m": INT, "n": INT, "k": INT},
        {"HAS_BIAS": True, "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64},
    ),
    (
        matmul.fp8_linear_kernel,
        {"x": E4M3, "weight": E4M3, "x_scale": FP32, "weight_scale": FP32, "out": BF16, "m": INT, "n": INT, "k": INT}
        | dict.fromkeys(("stride_scale_m", "stride_scale_k"), INT),
        {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128},
    ),
    (
        log_softmax.log_softmax_kernel,
        {"x": FP32, "out": FP32, "rows": INT, "columns": INT, "stride_row": INT},
        {"ROWS": 1, "BLOCK": 1024},
    ),
    (attention.attention_kernel, dict.fromkeys(PAGES, BF16) | ATTENTION, NO_SCALES | NO_WINDOW | TILE),
    (attention.attention_kernel, dict.fromkeys(PAGES, BF16) | ATTENTION | IN_WINDOW, NO_SCALES | TILE),
    (
        attention.attention_kernel,
        dict.fromkeys(PAGES, E4M3) | dict.fromkeys(("k_scale", "v_scale"), FP32) | ATTENTION,
        NO_WINDOW | TILE,
    ),
    (
        attention.attention_kernel,
        dict.fromkeys(PAGES, E4M3) | dict.fromkeys(("k_scale", "v_scale"), FP32) | ATTENTION | IN_WINDOW,
        TILE,
    ),
    (
        kv_pages.write_kernel,
        {**dict.fromkeys(("key", "value"), BF16), **dict.fromkeys(PAGES, E4M3), "slots": INT64}
        | dict.fromkeys(("k_scale", "v_scale"), FP32)
        | {name: INT for name in kv_pages.write_kernel.arg_names[7:-3]},
        {"TOKENS": 4, "GROUPS": 8, "BLOCK_D": 128},
    ),
    (
        experts.choose_experts_kernel,
        {"logits": FP32, "weights": FP32, "ids": "*i32", "rows": INT, "experts": INT},
        {"K": 8, "RENORMALIZE": True, "ROWS": 4, "BLOCK": 128},
    ),
    (
        experts.experts_kernel,
        {**dict.fromkeys(("x", "weight"), E4M3), **dict.fromkeys(("x_scale", "weight_scale"), FP32), "out": BF16}
        | {"order": "*i32", "tile_experts": "*i32", **dict.fromkeys(("slots", "top_k", "n", "k"), INT)}
        | dict.fromkeys(("stride_scale_m", "stride_scale_k"), INT),
        {"IS_FP8": True, "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128},
    ),
    (
        experts.combine_kernel,
        {"y": BF16, "weights": FP32, "order": INT64, "out": BF16, "n": INT, "k": INT},
        {"BLOCK": 1024},
    ),
    (rank_sum.sum_kernel, {"parts": BF16, "out": BF16, "size": INT}, {"RANKS": 8, "BLOCK": 1024}),
]


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel[0].fn.__name__)
def test_it_compiles(kernel, arch, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function, types, constants = kernel
    types = {name: types[name] for name in function.arg_names if name in types}
    if not constants.get("HAS_RESIDUAL", True):
        constants = {**constants, "residual": None, "total": None}
        types = {name: kind for name, kind in types.items() if name not in constants}
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    program = triton.compile(ASTSource(function, signature, constants), target=GPUTarget("cuda", arch, 32))
    assert program.asm["cubin"]
