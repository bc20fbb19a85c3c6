"""Which alignment `nemo_fp8rl.align` means on this machine, for trainer and engine alike."""

from typing import Literal

from nemo_fp8rl.config.fp8rl_schema import Fp8RlConfig

Alignment = Literal["none", "vllm_cpu", "shared_ops"]
"""How the parts of the model that are not FP8 matmuls round.

none:        the trainer as Megatron does, the engine as vLLM does
vllm_cpu:    the trainer as vLLM's kernels for CPUs
shared_ops:  both sides by the operations of `ops`
"""


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def choose_alignment(choice: Fp8RlConfig) -> Alignment:
    """Return the alignment of a run with these keys on this machine."""
    if choice.align == "none":
        return "none"
    if has_gpu():
        return "shared_ops" if choice.align == "vllm" else "none"
    return "vllm_cpu"
