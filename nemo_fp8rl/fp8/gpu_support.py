"""What of FP8 a GPU has, by its CUDA compute capability. No torch: a recipe is held against GPUs before it is loaded.

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
"""Compute capability by the GPU's name, which Ray calls a node's accelerator type, in lower case."""


def why_no_fp8(gpu: str, capability: Capability, training: bool) -> str:
    """Why this GPU cannot multiply in FP8, a clause with its name; empty if it can. training: by blocks, forward and
    backward, as an fp8_e2e trainer does, where an engine multiplies forward.
    """
    if capability < ADA:
        what, needed = "FP8 needs", ADA
    elif training and capability < HOPPER:
        what, needed = "blockwise FP8 training needs", HOPPER
    else:
        return ""
    return f"{what} a GPU of compute capability {_dotted(needed)} or higher, and {gpu} has {_dotted(capability)}"


def _dotted(capability: Capability) -> str:
    return "{}.{}".format(*capability)
