"""Checks, before anything is loaded, whether model and machine allow what a recipe requires of the engine."""

import shutil

import psutil
import torch

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.vllm_version import NEWER, vllm_version
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.fp8.gpu_support import nearest_flow, why_flow_unsupported
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.hf.adapters import KEY, read_adapters
from nemo_fp8rl.hf.divisibility import Dimension, check_divides
from nemo_fp8rl.hf.fp8_layers import (
    attention_dimensions,
    check_kernel_widths,
    mlp_dimension,
    requested_fp8_layers,
)
from nemo_fp8rl.hf.model_config import HfConfig
from nemo_fp8rl.hf.shared_operations import check_shared_operations, chooses_flash_attention_3
from nemo_fp8rl.ops import flash_attention
from nemo_fp8rl.ops.alignment import choose_alignment
from nemo_fp8rl.workers import joins_cluster

KEY_PREFIX = "policy.generation.vllm_cfg"
CPU_BACKEND = "CPU_ATTN"
"""vLLM's name of its attention on a CPU, the only one there."""
WINDOW_BACKENDS = "TRITON_ATTN", "FLASH_ATTN"
"""vLLM's backends for GPUs with masks of a windowed cache (`kv_window.on_gpu`); null takes the first."""
CACHE_BLOCK = 128
"""Tokens of a block of vLLM's KV cache on CPU; fewer on GPUs."""


def check_for_driver(hf: HfConfig, cfg: Config) -> None:
    """Run `check_engine` and `check_machine_of_driver`."""
    check_engine(hf, cfg)
    check_machine_of_driver(hf, cfg)


def check_machine_of_driver(hf: HfConfig, cfg: Config) -> None:
    """Run `check_machine`, unless workers will run in a Ray cluster that exists already."""
    if cfg.cluster.backend == "in_process" or not joins_cluster():
        check_machine(hf, cfg, trains=True)


def check_engine(hf: HfConfig, cfg: Config) -> None:
    """Raise UserError, naming the key, for tokens, a layout or a KV cache that this model cannot have anywhere."""
    for token in cfg.policy.generation.stop_token_ids:
        if not 0 <= token < hf.vocab_size:
            raise UserError(
                f"policy.generation.stop_token_ids: {token} is no token of a model of {hf.vocab_size}; remove it"
            )
    _check_parallel(hf, cfg)
    _check_kv_memory(hf, cfg)


def check_machine(hf: HfConfig, cfg: Config, trains: bool = False) -> None:
    """Raise UserError, naming the key, for what vLLM cannot do on this machine.

    trains:  the trainer will run on this machine as well; its FP8 requires more of a GPU
    """
    if choose_alignment(cfg.nemo_fp8rl) == "shared_ops":
        check_shared_operations(hf, cfg)
        if chooses_flash_attention_3(cfg):
            flash_attention.check_machine()
    window = cfg.policy.generation.vllm_cfg.kv_window
    if window is not None and vllm_version() < NEWER:
        raise UserError(vllm_compat.refuse_window(window))
    if torch.cuda.is_available():
        _check_gpu(hf, cfg, trains)
    else:
        _check_cpu(hf, cfg)


def _check_gpu(hf: HfConfig, cfg: Config, trains: bool) -> None:
    if (quantile := cfg.nemo_fp8rl.fp4.clamp_quantile) is not None:
        raise UserError(
            f"nemo_fp8rl.fp4.clamp_quantile={quantile}: only engines on a CPU clamp activations; set it to null"
        )
    vllm = cfg.policy.generation.vllm_cfg
    has_own_mask = vllm.kv_window is None or choose_alignment(cfg.nemo_fp8rl) == "shared_ops"
    if not has_own_mask and (backend := vllm.attention_backend or WINDOW_BACKENDS[0]).upper() not in WINDOW_BACKENDS:
        raise UserError(
            f"{KEY_PREFIX}.attention_backend={backend} cannot hide what {KEY_PREFIX}.kv_window={vllm.kv_window} leaves "
            f"out; set it to {' or '.join(WINDOW_BACKENDS)}"
        )
    tensor, expert = vllm.tensor_parallel_size, vllm.expert_parallel_size
    if tensor > expert and read_adapters(hf, cfg.policy.megatron_cfg.peft).adapts_experts():
        raise UserError(
            f"{KEY_PREFIX}.tensor_parallel_size={tensor} with {KEY}: on a GPU no kernel adds adapters to experts whose "
            f"matrices ranks share; set {KEY_PREFIX}.expert_parallel_size={tensor}"
        )
    if not cfg.nemo_fp8rl.quantizes_rollout:
        return
    flow, capability = cfg.nemo_fp8rl.flow, torch.cuda.get_device_capability()
    if refusal := why_flow_unsupported(flow, torch.cuda.get_device_name(), capability, trains):
        raise UserError(f"nemo_fp8rl.flow={flow}: {refusal}; set nemo_fp8rl.flow={nearest_flow(flow, capability)}")
    check_kernel_widths(hf, cfg)


def _check_parallel(hf: HfConfig, cfg: Config) -> None:
    vllm = cfg.policy.generation.vllm_cfg
    tensor, expert = vllm.tensor_parallel_size, vllm.expert_parallel_size
    fp8 = requested_fp8_layers(hf, cfg)
    block = cfg.nemo_fp8rl.format.line_block[1]
    divided = attention_dimensions(hf, fp8, block) + ([mlp_dimension(hf, fp8, block)] if expert == 1 else [])
    check_divides(f"{KEY_PREFIX}.tensor_parallel_size", tensor, *divided)
    if expert == 1:
        return
    if not hf.family.experts:
        raise UserError(f"{KEY_PREFIX}.expert_parallel_size={expert}: the model has no experts; set it to 1")
    if expert != tensor:
        raise UserError(
            f"{KEY_PREFIX}.expert_parallel_size={expert} must be 1 or {KEY_PREFIX}.tensor_parallel_size={tensor}: vLLM "
            "spreads the experts over all processes of an engine"
        )
    check_divides(f"{KEY_PREFIX}.expert_parallel_size", expert, Dimension("num_experts", hf.num_experts))


def _check_cpu(hf: HfConfig, cfg: Config) -> None:
    """Raise UserError for what vLLM cannot do on a CPU; on a GPU vLLM itself refuses what it has no kernel for.

    An FP8 cache needs vectors of 32 values (vLLM's cpu_attn.py, _get_attn_isa). The emulated cache does not, but a
    recipe shall run on all CPUs or on none.
    """
    expert = cfg.policy.generation.vllm_cfg.expert_parallel_size
    if expert > 1 and not cfg.nemo_fp8rl.quantizes_rollout:
        raise UserError(
            f"{KEY_PREFIX}.expert_parallel_size={expert} with nemo_fp8rl.flow=bf16: vLLM cannot spread bfloat16 "
            "experts on a CPU; set it to 1"
        )
    if (backend := cfg.policy.generation.vllm_cfg.attention_backend) and backend.upper() != CPU_BACKEND:
        raise UserError(
            f"{KEY_PREFIX}.attention_backend={backend}: on a CPU vLLM has the backend {CPU_BACKEND} alone; leave it out"
        )
    if shutil.which("lscpu") is None:
        raise UserError("on a CPU vLLM asks the program lscpu for the cores, and it is not here: install util-linux")
    _check_free_memory(cfg)
    if not cfg.fp8_kv_cache:
        return
    if hf.head_dim % 32:
        raise UserError(
            f"{KEY_PREFIX}.kv_cache_dtype=fp8 cannot hold this model: its head_dim={hf.head_dim} is not a multiple "
            "of 32; set kv_cache_dtype=auto"
        )


def _check_kv_memory(hf: HfConfig, cfg: Config) -> None:
    """Raise UserError for a cache without room for one sequence of the whole context and vLLM's reserved block."""
    vllm, gib = cfg.policy.generation.vllm_cfg, one_sequence_gib(hf, cfg)
    if vllm.kv_cache_memory_gib is not None and gib > vllm.kv_cache_memory_gib:
        raise UserError(
            f"{KEY_PREFIX}.kv_cache_memory_gib={vllm.kv_cache_memory_gib:g} cannot hold one sequence of "
            f"{KEY_PREFIX}.max_model_len={vllm.max_model_len} tokens, which takes {gib:.3g} GiB; raise the first or "
            "lower the second"
        )


def _check_free_memory(cfg: Config) -> None:
    """Raise UserError for a cache larger than free memory. vLLM checks it as well, in a process without output."""
    free, gib = psutil.virtual_memory().available / 2**30, cfg.policy.generation.vllm_cfg.kv_cache_memory_gib or 0
    if gib > free:
        raise UserError(
            f"{KEY_PREFIX}.kv_cache_memory_gib={gib:g} is more than this machine has free ({free:.1f} GiB); lower it"
        )


def one_sequence_gib(hf: HfConfig, cfg: Config) -> float:
    """Return the GiB that the cache of each process of an engine needs at least.

    A window (kv_window) needs no less: vLLM starts no engine whose cache cannot hold one whole context, and a request
    that was preempted takes the blocks of all its tokens when it is resumed.
    """
    vllm = cfg.policy.generation.vllm_cfg
    value_bytes = 1 if cfg.fp8_kv_cache else 4 if cfg.policy.precision == "float32" else 2
    heads = hf.num_key_value_heads // vllm.tensor_parallel_size
    tokens = (-(-vllm.max_model_len // CACHE_BLOCK) + 1) * CACHE_BLOCK
    return tokens * 2 * hf.num_hidden_layers * heads * hf.head_dim * value_bytes / 2**30
