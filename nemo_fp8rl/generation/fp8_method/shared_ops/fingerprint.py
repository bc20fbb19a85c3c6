"""The engine's fingerprint: the shared operations, and the FP8 product of the kernel that its layers take."""

from typing import Any

import torch
from vllm.config import set_current_vllm_config

from nemo_fp8rl.generation.fp8_method.shared_ops.experts import expert_product
from nemo_fp8rl.generation.fp8_method.shared_ops.linears import fp8_product
from nemo_fp8rl.hf.shared_operations import Shapes
from nemo_fp8rl.ops.fingerprint import Fingerprint, Functions, fingerprint
from nemo_fp8rl.ops.flash_attention import attention_on_pages


def engine_fingerprint(shapes: Shapes, device: torch.device, vllm_config: Any) -> Fingerprint:
    """Return the digests of an engine's operations; vllm_config decides which kernels vLLM has."""
    attention = attention_on_pages if shapes.flash_attention_3 else None
    with set_current_vllm_config(vllm_config):
        return fingerprint(shapes, device, Functions(fp8_product, expert_product, attention))
