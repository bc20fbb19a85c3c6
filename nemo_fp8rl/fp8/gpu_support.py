"""The FP8 support of GPUs, by CUDA compute capability. No torch: a recipe is checked against GPUs before torch loads.

FP8 tensor cores come with Ada (8.9). Transformer Engine's blockwise recipe, which trains, needs Hopper (9.0):
`check_fp8_block_scaling_support` in
https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/quantization.py
"""

Capability = tuple[int, int]

ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)

CAPABILITIES: dict[str, Capability] = {
    **{"v100": (7, 0), "t4": (7, 5), "a100": (8, 0), "a10": (8, 6), "a10g": (8, 6), "a40": (8, 6)},
    **{"l4": ADA, "l40": ADA, "l40s": ADA},
    **{"h100": HOPPER, "h20": HOPPER, "h200": HOPPER, "gh200": HOPPER},
    **{"b200": BLACKWELL, "gb200": BLACKWELL, "b300": (10, 3), "gb300": (10, 3)},
}
"""Compute capability by the name of the GPU, in lower case; Ray calls that name a node's accelerator type."""


def why_no_fp8(gpu: str, capability: Capability, training: bool) -> str:
    """Return why this GPU cannot multiply in FP8, as a clause with its name; empty if it can.

    training: True for blockwise FP8 in forward and backward, as an fp8_e2e trainer needs; an engine only multiplies
              forward
    """
    if capability < ADA:
        use, needed = "FP8 needs", ADA
    elif training and capability < HOPPER:
        use, needed = "blockwise FP8 training needs", HOPPER
    else:
        return ""
    return f"{use} a GPU of compute capability {_dotted(needed)} or higher, and {gpu} has {_dotted(capability)}"


def _dotted(capability: Capability) -> str:
    return "{}.{}".format(*capability)
