"""The choices that a rank made for its machine, which are stored with the run."""

import torch

from nemo_fp8rl.common.machine import instructions
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.fp8 import kernels
from nemo_fp8rl.hf.model_config import HfConfig
from nemo_fp8rl.hf.shared_operations import operation_shapes
from nemo_fp8rl.ops.alignment import choose_alignment
from nemo_fp8rl.policy.interface import PolicyDescription
from nemo_fp8rl.policy.layer_specs import trainer_fingerprint
from nemo_fp8rl.policy.layers.attention import CoreAttention
from nemo_fp8rl.policy.layers.kv_cache import TrainerKvCache
from nemo_fp8rl.policy.layers.linears import Fp8MatmulLayer
from nemo_fp8rl.policy.weights.fp8_params import is_fp8


def describe_rank(
    cfg: Config, hf: HfConfig, model: torch.nn.Module, kv_cache: TrainerKvCache | None
) -> PolicyDescription:
    """Return the choices of a rank; its shared operations run once, to take their fingerprint.

    kv_cache:  None without an FP8 cache
    """
    device, alignment = next(model.parameters()).device, choose_alignment(cfg.nemo_fp8rl)
    layers = (module for module in model.modules() if isinstance(module, Fp8MatmulLayer | CoreAttention))
    fingerprint: frozenset[tuple[str, str]] = frozenset()  # empty where the rank computes by other operations
    if alignment == "shared_ops":
        fingerprint = trainer_fingerprint(operation_shapes(hf, cfg), device)
    return PolicyDescription(
        kernels=frozenset(layer.kernel_name for layer in layers if layer.kernel_name),
        quantizers=frozenset(filter(None, [_quantizer(cfg, model, device)])),
        alignments=frozenset([alignment]),
        cache_roundings=frozenset([kv_cache.rounding] if kv_cache is not None and kv_cache.rounding else []),
        instruction_sets=frozenset([instructions()]),
        fingerprint=fingerprint,
        optimizer_states=frozenset(filter(None, [_optimizer_states(cfg, model)])),
    )


def _optimizer_states(cfg: Config, model: torch.nn.Module) -> str:
    keys = cfg.policy.megatron_cfg.optimizer
    if not keys.use_precision_aware_optimizer:
        return ""
    master = f"{keys.main_params_dtype} masters"
    # Megatron keeps float32 masters of FP8 weights, and float32 weights are their masters
    if keys.store_param_remainders and keys.main_params_dtype == "fp32" and not any(map(is_fp8, model.parameters())):
        master = "16-bit remainders of masters" if cfg.policy.precision == "bfloat16" else master
    return f"{master}, {keys.exp_avg_dtype} and {keys.exp_avg_sq_dtype} moments"


def _quantizer(cfg: Config, model: torch.nn.Module, device: torch.device) -> str:
    """Name what quantizes the weights of a rank for a refit; "" without FP8 engines."""
    if not cfg.nemo_fp8rl.quantizes_rollout:
        return ""
    if any(map(is_fp8, model.parameters())):
        return "none: weights are sent as they are held"
    return kernels.describe(kernels.resolve("auto", device.type))
