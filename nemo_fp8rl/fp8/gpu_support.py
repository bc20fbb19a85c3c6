"""The number formats of GPUs, by CUDA compute capability. No torch: a recipe is checked before torch loads.

FP8 tensor cores come with Ada (8.9). Transformer Engine's blockwise recipe, which trains, needs Hopper (9.0):
`check_fp8_block_scaling_support` in
https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/quantization.py
Blackwell (10.0) multiplies MXFP8 and NVFP4. Before it, from Ampere (8.0) on, vLLM's Marlin kernels multiply such
weights with bfloat16 activations; our engine rounds these to the format's values first, so that it computes the
trainer's function. Trainers emulate these formats on any GPU.
"""

Capability = tuple[int, int]

AMPERE, ADA, HOPPER, BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)

CAPABILITIES: dict[str, Capability] = {
    **{"v100": (7, 0), "t4": (7, 5), "a100": (8, 0), "a10": (8, 6), "a10g": (8, 6), "a40": (8, 6)},
    **{"l4": ADA, "l40": ADA, "l40s": ADA},
    **{"h100": HOPPER, "h20": HOPPER, "h200": HOPPER, "gh200": HOPPER},
    **{"b200": BLACKWELL, "gb200": BLACKWELL, "b300": (10, 3), "gb300": (10, 3)},
}
"""Compute capability by the name of the GPU, in lower case; Ray calls that name a node's accelerator type."""


NEEDED = {"fp8": ADA, "mxfp8": AMPERE, "nvfp4": AMPERE, "nvfp4_a16": AMPERE}
"""The lowest compute capability at which an engine multiplies in a format, by the format's name in nemo_fp8rl.flow."""
NAMES = {"fp8": "FP8", "mxfp8": "MXFP8", "nvfp4": "NVFP4 with 4-bit activations", "nvfp4_a16": "NVFP4"}


def why_flow_unsupported(flow: str, gpu: str, capability: Capability, trains: bool) -> str:
    """Return why this GPU cannot run a flow, as a clause with its name; empty if it can.

    flow:   nemo_fp8rl.flow
    trains: True if the GPU trains as well; an engine only multiplies forward
    """
    name, _, side = flow.rpartition("_")
    if name in NEEDED and capability < NEEDED[name]:
        use, needed = f"{NAMES[name]} needs", NEEDED[name]
    elif name == "fp8" and side == "e2e" and trains and capability < HOPPER:
        use, needed = "blockwise FP8 training needs", HOPPER
    else:
        return ""
    return f"{use} a GPU of compute capability {_dotted(needed)} or higher, and {gpu} has {_dotted(capability)}"


def nearest_flow(flow: str, capability: Capability) -> str:
    """Return the flow that a GPU runs in the place of one that it cannot run."""
    rollout = flow.rpartition("_")[0] + "_rollout"
    return "bf16" if why_flow_unsupported(rollout, "", capability, trains=True) else rollout


def _dotted(capability: Capability) -> str:
    return "{}.{}".format(*capability)
