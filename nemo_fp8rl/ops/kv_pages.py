"""Keys and values as an FP8 KV cache stores them, in pages.

    code = E4M3(x / scale)     float32, the quotient rounded to nearest, at most 448 in size, then to nearest even
    read = code * scale        float32, then one rounding to the dtype of the queries (`attention`)

vLLM's own kernel computes x / scale by the GPU's quick division (v1/attention/ops/triton_reshape_and_cache_flash.py),
which may miss the nearest float32, and then a value between two codes gets another one. Scales of the trainer are
powers of two, for which division and product are exact.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE_VALUES = 1 << 12
"""Values of a program's tile, about. It changes no bit."""
LARGEST = tl.constexpr(448.0)


@triton.jit
def encode(x, scale):
    """Return the codes of x; NaN of NaN."""
    y = tl.div_rn(x.to(tl.float32), scale)
    y = tl.where(y > LARGEST, LARGEST, tl.where(y < -LARGEST, -LARGEST, y))
    return y.to(tl.float8e4nv)


@triton.jit(do_not_specialize=["tokens", "page_size"])
def write_kernel(
    key, value, k_cache, v_cache, slots, k_scale, v_scale, tokens, groups, page_size, d,
    stride_key_token, stride_key_group, stride_value_token, stride_value_group,
    stride_k_page, stride_k_slot, stride_k_group, stride_v_page, stride_v_slot, stride_v_group,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    group, i = tl.arange(0, GROUPS)[None, :, None], tl.arange(0, BLOCK_D)[None, None, :]
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
    page, place, inside = slot // page_size, slot % page_size, (slot >= 0) & (group < groups) & (i < d)
    k = tl.load(key + token * stride_key_token + group * stride_key_group + i, mask=inside, other=0.0)
    v = tl.load(value + token * stride_value_token + group * stride_value_group + i, mask=inside, other=0.0)
    k_at = page * stride_k_page + place * stride_k_slot + group * stride_k_group + i
    v_at = page * stride_v_page + place * stride_v_slot + group * stride_v_group + i
    tl.store(k_cache + k_at, encode(k, tl.load(k_scale)), mask=inside)
    tl.store(v_cache + v_at, encode(v, tl.load(v_scale)), mask=inside)


def write_pages(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: Tensor, v_scale: Tensor
) -> None:
    """Write the codes of keys and values into pages.

    key, value:        [at least as many tokens as slots, groups, d], values of a head side by side
    k_cache, v_cache:  float8_e4m3fn [pages, page_size, groups, d], of any strides but the last
    slots:             integers [tokens], page * page_size + place in the page; a token with a negative slot is left out
    k_scale, v_scale:  float32, one value each; multiplies codes
    """
    tokens, page_size, (groups, d) = len(slots), k_cache.size(1), key.shape[1:]
    if any(x.stride(-1) != 1 for x in (key, value, k_cache, v_cache)):
        raise ValueError("keys and values of one head must be side by side in memory, in pages as well")
    padded_groups, block = triton.next_power_of_2(groups), triton.next_power_of_2(d)
    per_program = max(1, TILE_VALUES // (padded_groups * block))
    if tokens:
        write_kernel[(triton.cdiv(tokens, per_program),)](
            key, value, k_cache, v_cache, slots, k_scale, v_scale, tokens, groups, page_size, d,
            *key.stride()[:2], *value.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            TOKENS=per_program, GROUPS=padded_groups, BLOCK_D=block,
        )  # fmt: skip
