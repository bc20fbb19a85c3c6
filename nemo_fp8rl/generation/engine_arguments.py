"""The arguments of vLLM's engine for a recipe."""

from typing import Any

import torch

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.fp8 import FP8
from nemo_fp8rl.fp8.gpu_support import HOPPER
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.engine_checks import WINDOW_BACKENDS, one_sequence_gib
from nemo_fp8rl.generation.fp8_method.quantization_config import quantization_config
from nemo_fp8rl.hf.adapters import read_adapters
from nemo_fp8rl.hf.fp8_layers import engine_fp8_layers
from nemo_fp8rl.hf.hub import checkpoint_folder
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.shared_operations import chooses_flash_attention_3
from nemo_fp8rl.ops.alignment import choose_alignment

WORKER_EXTENSION = "nemo_fp8rl.generation.weights.worker_extension.RefitWorkerExtension"
CPU_BATCHED_TOKENS = 8192
"""Maximum number of tokens in a forward on a CPU: vLLM's default for offline generation."""


GRAPHS_KEEP_SCALES = (
    "policy.generation.vllm_cfg.kv_cache_dtype=fp8: vLLM takes FlashInfer's attention here, whose CUDA graphs keep the "
    "scales of the first version; set policy.generation.vllm_cfg.enforce_eager=true, or attention_backend=TRITON_ATTN"
)


def engine_arguments(cfg: Config, load_format: str) -> dict[str, Any]:
    """Return the keywords of vLLM's EngineArgs for this recipe."""
    vllm_cfg, hf = cfg.policy.generation.vllm_cfg, read_hf_config(cfg.policy.model_name)
    cache_gib, batched_tokens = vllm_cfg.kv_cache_memory_gib, vllm_cfg.max_num_batched_tokens
    eager, backend = vllm_cfg.enforce_eager, vllm_cfg.attention_backend and vllm_cfg.attention_backend.upper()
    fp8_layers, is_aligned = engine_fp8_layers(hf, cfg), choose_alignment(cfg.nemo_fp8rl) == "shared_ops"
    uses_flash_attention_3 = is_aligned and chooses_flash_attention_3(cfg)
    if is_aligned and fp8_layers and cfg.nemo_fp8rl.format != FP8:
        raise UserError(
            f"nemo_fp8rl.align=vllm has no operations of nemo_fp8rl.flow={cfg.nemo_fp8rl.flow} on a GPU; set "
            "nemo_fp8rl.align=none, or a flow of fp8"
        )
    if is_aligned:
        backend = "CUSTOM" if torch.cuda.is_available() else None  # as generation/fp8_method/shared_ops registers it
    if eager is None:
        eager = not torch.cuda.is_available() or (cfg.fp8_kv_cache and _graphs_would_keep_scales(backend))
    overrides: dict[str, Any] = {"architectures": [hf.family.architecture]}  # vLLM goes by it, and it may be left out
    if vllm_cfg.kv_window is not None:
        overrides["rswa_window"] = vllm_cfg.kv_window  # vLLM reads it from the model's config
        if torch.cuda.is_available():
            backend = backend or WINDOW_BACKENDS[0]
    adapters = read_adapters(hf, cfg.policy.megatron_cfg.peft)
    if fp8_layers or is_aligned or adapters:
        overrides["quantization_config"] = quantization_config(
            cfg.nemo_fp8rl.scale_format,
            fp8_layers,
            is_aligned,
            uses_flash_attention_3,
            cfg.nemo_fp8rl.format,
            cfg.nemo_fp8rl.fp4.clamp_quantile,
            adapters,
        )
    if torch.cuda.is_available():
        device_arguments: dict[str, Any] = {"enable_sleep_mode": vllm_cfg.sleep_level > 0}
    else:
        cache_gib = cache_gib or max(1.0, one_sequence_gib(hf, cfg))
        batched_tokens = batched_tokens or max(CPU_BATCHED_TOKENS, vllm_cfg.max_model_len)
        # a prompt with a seed cannot be split there (generators on a CPU have no offset)
        device_arguments = {"enable_chunked_prefill": False}
    return {
        "model": str(checkpoint_folder(cfg.policy.model_name, weights=load_format != "dummy")),
        "tokenizer": str(checkpoint_folder(cfg.policy.tokenizer.name, "policy.tokenizer.name")),
        "skip_tokenizer_init": vllm_cfg.skip_tokenizer_init and not cfg.policy.generation.stop_strings,
        "dtype": cfg.policy.precision,
        "hf_overrides": overrides,
        "load_format": load_format,
        "worker_extension_cls": WORKER_EXTENSION,
        "tensor_parallel_size": vllm_cfg.tensor_parallel_size,
        # None would be Ray within a placement group
        "distributed_executor_backend": "mp" if vllm_cfg.tensor_parallel_size > 1 else None,
        "enable_expert_parallel": vllm_cfg.expert_parallel_size > 1,
        "max_model_len": vllm_cfg.max_model_len,
        "attention_backend": backend,
        "max_num_seqs": vllm_cfg.max_num_seqs,
        "max_num_batched_tokens": batched_tokens,
        "kv_cache_dtype": vllm_cfg.kv_cache_dtype,
        "enforce_eager": eager,
        "gpu_memory_utilization": vllm_cfg.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if cache_gib is None else int(cache_gib * 2**30),
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "generation_config": "vllm",  # not the checkpoint's sampling defaults
        "enable_return_routed_experts": cfg.policy.router_replay.enabled and vllm_compat.has_route_output(),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": cfg.grpo.seed,
        **device_arguments,
    }


def _graphs_would_keep_scales(backend: str | None) -> bool:
    """True where CUDA graphs would keep the scales of an FP8 cache: with FlashInfer's attention.

    Other backends read the scales from memory (triton_attn.py, flash_attn.py: `layer._k_scale`), so that their graphs
    stay valid. Without a requested backend vLLM chooses (vllm/platforms/cuda.py): FlashInfer, except on Hopper, where
    FlashAttention 3 takes an FP8 cache.
    """
    return is_flashinfer(backend) if backend else torch.cuda.get_device_capability()[0] != HOPPER[0]


def is_flashinfer(kernel: str) -> bool:
    """True for FlashInfer's attention backend, by vLLM's name or by the text in `EngineDescription.kernels`."""
    return kernel.endswith("FLASHINFER")  # TRITON_FLASHINFER, too
