"""Fingerprints of operations: digests of what they make of fixed inputs, on the machine where they run.

Trainer and engine compute the fingerprint of their operations at start. Equal digests show that both compute the same
bits on these machines, with these libraries; an operation that differs is named. One digest covers several numbers of
rows, so that a kernel whose rows depend on the batch is found as well.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import quantize_blockwise
from nemo_fp8rl.hf.shared_operations import Shapes
from nemo_fp8rl.ops.activation import silu_mul
from nemo_fp8rl.ops.attention import BLOCK_KEYS, attention
from nemo_fp8rl.ops.experts import choose_experts, combine
from nemo_fp8rl.ops.kv_pages import write_pages
from nemo_fp8rl.ops.log_softmax import log_softmax
from nemo_fp8rl.ops.matmul import fp8_linear, linear
from nemo_fp8rl.ops.norm import add_rms_norm, rms_norm
from nemo_fp8rl.ops.rank_sum import UNORDERED_RANKS, sum_in_rank_order
from nemo_fp8rl.ops.rope import rotate

Fingerprint = frozenset[tuple[str, str]]
"""(operation, digest), of all ranks."""
ROWS = {"cuda": (1, 7, 64, 257, 4096), "cpu": (1, 3, 5)}
"""Numbers of rows; few on a CPU, where only an interpreter runs these operations."""
MOST_VALUES = 1 << 25
"""Values of one output; rows of the head are left out above it."""
MULTIPLIER = 0x2545F4914F6CDD1D
OF_EXPERTS = ("gate_up", "down")
"""Matrices that are an expert's in a mixture of experts."""
LENGTH, PAGE = 80, 16
"""Keys of the longest sequence in attention, which are more than a block of them, and of a page."""
PROMPT, WINDOW, LENGTH_IN_WINDOW = 5, 9, 3 * BLOCK_KEYS + PAGE
"""Tokens, for a recipe with a window of any size: with these a late query's walk over the keys leaves a block out."""
CACHE_SCALES = (2.0**-8, 2.0**-5)
"""Of keys, some of which become the largest code, and of values."""


def shared_fp8_product(x: Tensor, weight: Tensor, pow2: bool) -> Tensor:
    stored = quantize_blockwise(weight, scale_format="pow2" if pow2 else "fp32")
    return fp8_linear(x, stored.data, stored.scale_inv, pow2)


def is_shared_product(
    product: Callable[[Tensor, Tensor, bool], Tensor], shape: tuple[int, int], pow2: bool, device: torch.device
) -> bool:
    """True if a library's FP8 product has the bits of `fp8_linear` on this machine.

    product:  (x [M, K], weight [N, K], both bf16; pow2) -> [M, N]
    shape:    (N, K)
    """
    rows = [m for m in ROWS[device.type] if m * shape[0] <= MOST_VALUES]
    x, weight = _values((max(rows), shape[1]), device, 15), _values(shape, device, 16)
    with torch.no_grad():
        return all(torch.equal(product(x[:m], weight, pow2), shared_fp8_product(x[:m], weight, pow2)) for m in rows)


class Functions(NamedTuple):
    """The operations that a side may take from a library instead of from this folder.

    fp8_product:     (x [M, K], weight [N, K], both bf16; pow2) -> [M, N]
    expert_product:  the same of one expert
    attention:       as `ops.attention`
    """

    fp8_product: Callable[[Tensor, Tensor, bool], Tensor] = shared_fp8_product
    expert_product: Callable[[Tensor, Tensor, bool], Tensor] = shared_fp8_product
    attention: Callable[..., tuple[Tensor, Tensor | None]] | None = None

    def of_matrix(self, name: str, shapes: Shapes) -> Callable[[Tensor, Tensor, bool], Tensor]:
        return self.expert_product if shapes.experts and name in OF_EXPERTS else self.fp8_product


def fingerprint(shapes: Shapes, device: torch.device, functions: Functions | None = None) -> Fingerprint:
    """Return the digest of every operation of a model of these sizes."""
    rows = ROWS[device.type]
    with torch.no_grad():
        digests = _digests(shapes, rows, device, functions or Functions())
        return frozenset((name, _digest(outputs)) for name, outputs in digests)


def _digests(
    shapes: Shapes, rows: Iterable[int], device: torch.device, functions: Functions
) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield (operation, its outputs)."""
    h, d = shapes.hidden_size, shapes.head_dim
    most = max(rows)
    x, residual, weight = (_values((most, h), device, seed) for seed in range(3))
    weight, eps = weight[0], shapes.eps
    yield f"norm of states [{h}]", [rms_norm(x[:m], weight, eps) for m in rows]
    yield f"residual and norm [{h}]", [t for m in rows for t in add_rms_norm(x[:m], residual[:m], weight, eps)]
    q, head_weight = _values((most, shapes.heads, d), device, 3), _values((d,), device, 4)
    yield f"norm of heads [{d}]", [rms_norm(q[:m], head_weight, eps) for m in rows]
    table, positions = _values((most, d), device, 5), torch.arange(most, device=device)
    yield f"rotation [{d}]", [rotate(q[:m], positions[:m], table) for m in rows]
    gate_up = _values((most, 2 * shapes.intermediate_size), device, 6)
    yield f"silu times up [{shapes.intermediate_size}]", [silu_mul(gate_up[:m]) for m in rows]
    for name, (n, k) in shapes.matrices.items():
        inputs, matrix = _values((most, k), device, 7), _values((n, k), device, 8)
        fitting = [m for m in rows if m * n <= MOST_VALUES]
        if name in shapes.fp8_matrices:
            product = functions.of_matrix(name, shapes)
            yield f"FP8 product {name} [{n}, {k}]", [product(inputs[:m], matrix, shapes.pow2) for m in fitting]
        else:
            yield f"product {name} [{n}, {k}]", [linear(inputs[:m], matrix) for m in fitting]
    if shapes.ranks > UNORDERED_RANKS:
        parts = _values((shapes.ranks, most, h), device, 15)
        yield f"sum over {shapes.ranks} ranks [{h}]", [sum_in_rank_order(parts[:, :m]) for m in rows]
    if shapes.experts:
        yield from _expert_outputs(shapes, rows, device)
    kind = "attention by FlashAttention 3" if shapes.flash_attention_3 else "attention"
    kind = "attention on E4M3" if shapes.fp8_cache else kind
    kind += "" if shapes.kv_window is None else " in a window"
    yield (
        f"{kind} [{shapes.heads}, {shapes.groups}, {d}]",
        list(_attention_outputs(shapes, device, functions.attention or attention)),
    )
    logits = _values((7, shapes.matrices["head"][0]), device, 9).float() * 8
    yield "log-softmax", [log_softmax(logits[:m]) for m in (1, 7)]


def _expert_outputs(shapes: Shapes, rows: Iterable[int], device: torch.device) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the choice of experts, and the weighted sum of given outputs."""
    most, k = max(rows), shapes.experts_per_token
    logits = _values((most, shapes.experts), device, 13)
    chosen = [choose_experts(logits[:m], k, True) for m in rows]
    yield f"choice of {k} among {shapes.experts} experts", [t for both in chosen for t in both]
    y = _values((most * k, shapes.hidden_size), device, 14)
    sums = [combine(y[: m * k], weights, ids) for m, (weights, ids) in zip(rows, chosen, strict=True)]
    yield f"sum of {k} experts [{shapes.hidden_size}]", sums


def _attention_outputs(
    shapes: Shapes, device: torch.device, attention: Callable[..., tuple[Tensor, Tensor | None]]
) -> Iterator[Tensor]:
    """Yield attention of a whole sequence, of its last token alone, and of both beside a second sequence."""
    length = LENGTH if shapes.kv_window is None else LENGTH_IN_WINDOW
    in_pages = 2 * length // PAGE, PAGE, shapes.groups, shapes.head_dim
    keys, values = (_values(in_pages, device, seed) for seed in (10, 11))
    q = _values((2 * length, shapes.heads, shapes.head_dim), device, 12)
    pages = torch.arange(in_pages[0], dtype=torch.int32, device=device).view(2, -1)
    scale, cache_scales = shapes.head_dim**-0.5, list[Tensor]()
    if shapes.fp8_cache:
        cache_scales = [torch.full((1,), x, device=device) for x in CACHE_SCALES]
        key_codes, value_codes = (torch.empty_like(t, dtype=torch.float8_e4m3fn) for t in (keys, values))
        pages_of_codes = key_codes, value_codes, torch.arange(2 * length, device=device)
        write_pages(keys.flatten(0, 1), values.flatten(0, 1), *pages_of_codes, *cache_scales)
        keys, values = key_codes, value_codes
        yield from (keys, values)

    def attend(queries: Tensor, starts: list[int], lengths: list[int]) -> Tensor:
        starts_tensor, lengths_tensor = (torch.tensor(t, dtype=torch.int32, device=device) for t in (starts, lengths))
        sequences, in_window = (pages[: len(lengths)], starts_tensor, lengths_tensor), dict[str, Any]()
        if shapes.kv_window is not None:
            in_window = {"prompt_lengths": torch.full_like(lengths_tensor, PROMPT), "window": WINDOW}
        return attention(queries, keys, values, *sequences, scale, *cache_scales, **in_window)[0]

    yield attend(q[:length], [0, length], [length])
    yield attend(q[length - 1 : length], [0, 1], [length])
    yield attend(q[length - 1 :], [0, 1, 1 + length], [length, length])


def _values(shape: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    """Return bf16 values in (-2, 2) that integer arithmetic makes, so that every machine makes the same."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count, device=device) * 48271 + 7919 * (seed + 1)) % 65537 * (seed + 3) % 4093
    return ((numbers - 2046).float() / 1024).bfloat16().view(shape)


def _digest(outputs: list[Tensor]) -> str:
    """Return 16 hexadecimal digits of all bits: a sum of whole numbers, which no order changes."""
    total = 0
    for i, output in enumerate(outputs):
        bits = output.contiguous().flatten().view(torch.int16 if output.element_size() == 2 else torch.int32).long()
        places = torch.arange(len(bits), device=bits.device) * 2 + 2 * i + 1
        mixed = bits * places * MULTIPLIER  # modulo 2^64
        total = (total + int((mixed ^ (mixed >> 29)).sum()) * (2 * i + 1)) % 2**64
    return f"{total:016x}"
