"""GPUs: their memory, and the number formats of their hardware and libraries.

Sources:
- Memory: the total that nvidia-smi shows.
- Compute capabilities, and the formats that need them: `fp8/gpu_support.py`.
- Transformer Engine's blockwise recipe also needs CUDA 12.9; on Blackwell it is emulated by MXFP8, which has
  power-of-two scales alone: `check_fp8_block_scaling_support`, and the recipe's use, in
  https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/quantization.py;
  NeMo RL says the same: https://github.com/NVIDIA-NeMo/RL/blob/main/docs/fp8.md
- DeepGEMM runs on Hopper and Blackwell; with E8M0 scales, vLLM's default on both, weights are quantized again:
  https://github.com/vllm-project/vllm/blob/main/vllm/utils/deep_gemm.py. NeMo RL switches E8M0 off where
  use_deep_gemm is true: https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/models/generation/vllm/quantization/fp8.py;
  with nemo_fp8rl.workers=nemo_rl it is off for float32 scales (`nemo_rl/stock/worker_choice.py`).
  On Blackwell the kernels themselves take E8M0 scales: https://github.com/deepseek-ai/DeepGEMM#notices
- An FP8 KV cache in FlashAttention needs version 3 on Hopper or 4 on Blackwell:
  https://github.com/vllm-project/vllm/blob/main/vllm/v1/attention/backends/fa_utils.py
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_fp8rl.commands.doctor.finding import Finding
from nemo_fp8rl.commands.doctor.recipe_plan import ENGINE, TRAINER, Plan
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import FP8
from nemo_fp8rl.fp8.gpu_support import ADA, BLACKWELL, CAPABILITIES, HOPPER, NAMES, Capability
from nemo_fp8rl.nemo_rl.recipe.gpu_division import why_gpu_unsupported
from nemo_fp8rl.nemo_rl.recipe.keys import at
from nemo_fp8rl.nemo_rl.stock.stock_limits import LATENT_CACHE_UNSUPPORTED

TOPIC = "hardware"
KERNELS_OF_VLLM = {"mxfp8": "CUTLASS", "nvfp4": "CUTLASS or FlashInfer", "nvfp4_a16": "Marlin"}
"""Format -> the kernels of vLLM that multiply it."""
MOE_BACKEND = "policy.generation.vllm_kwargs.moe_backend"


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_mib: int

    @property
    def capability(self) -> Capability:
        """CUDA's compute capability."""
        return CAPABILITIES[self.name]

    @property
    def memory(self) -> int:
        """Bytes."""
        return self.memory_mib * 2**20


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 81920),
        Gpu("l40s", 46068),
        Gpu("h100", 81559),
        Gpu("h20", 97871),
        Gpu("h200", 143771),
        Gpu("b200", 183359),
        Gpu("gb200", 189471),
    )
}


def gpu_by_name(name: str) -> Gpu:
    if name.lower() not in GPUS:
        raise UserError(f"--gpu {name} is not known; known are {', '.join(GPUS)}")
    return GPUS[name.lower()]


def check_hardware(plan: Plan, gpu: Gpu) -> Iterator[Finding]:
    if not plan.quantizes_rollout:
        yield Finding("ok", TOPIC, f"nothing in this recipe is quantized; it runs on any GPU, {gpu.name} too")
        return
    if refusal := why_gpu_unsupported(plan.flow, gpu.name, gpu.capability):
        yield Finding("error", TOPIC, refusal)
        if gpu.capability < ADA or plan.format is not FP8:
            return
    elif plan.quantizes_training:
        yield _trainer(plan, gpu)
    yield _package_engine(plan, gpu) if plan.uses_package_workers else _engine(plan, gpu)
    if plan.kv_fp8:
        yield _cache(plan, gpu)


def _trainer(plan: Plan, gpu: Gpu) -> Finding:
    if plan.format is not FP8:
        name = NAMES[plan.flow.removesuffix("_e2e")]
        text = f"our trainer on {gpu.name} multiplies the values of {name} in bfloat16: it is no faster than bfloat16"
        return Finding("ok", TOPIC, text)
    if gpu.capability < BLACKWELL:
        return Finding("ok", TOPIC, f"{gpu.name} (Hopper) trains by the blockwise recipe, with CUDA 12.9 or newer")
    if not plan.pow2:
        return Finding(
            "error",
            TOPIC,
            f"{TRAINER}.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES='1': Transformer Engine refuses float32 scales on "
            f"{gpu.name} (Blackwell); set it to '0' and {ENGINE}.pow2_* to true",
        )
    return Finding(
        "warn",
        TOPIC,
        f"on {gpu.name} (Blackwell) Transformer Engine emulates the blockwise recipe by MXFP8: scales stay powers of "
        "two, speed is not Hopper's",
    )


def _engine(plan: Plan, gpu: Gpu) -> Finding:
    on_wire = plan.values["nemo_fp8rl"]["workers"] == "nemo_rl"
    deep_gemm = plan.vllm.get("use_deep_gemm")
    if on_wire:  # vLLM's FP8 replaces NeMo RL's there, so NeMo RL's key does not apply
        deep_gemm = (plan.vllm.get("env_vars") or {}).get("VLLM_USE_DEEP_GEMM", "1") != "0"
    if gpu.capability < HOPPER:
        return Finding(
            "warn", TOPIC, f"{gpu.name} has no DeepGEMM: vLLM's Triton kernels serve, without power-of-two activations"
        )
    if plan.pow2 and not deep_gemm:
        off, fix = ("use_deep_gemm=false", "set it to true")
        if on_wire:
            off, fix = ("env_vars.VLLM_USE_DEEP_GEMM='0'", "remove it")
        return Finding(
            "warn",
            TOPIC,
            f"{ENGINE}.{off}: without DeepGEMM vLLM's kernels do not round activations' scales to powers "
            f"of two as pow2_activation_scaling_factors asks; {fix}",
        )
    if not plan.pow2 and on_wire and gpu.capability >= BLACKWELL:
        return Finding(
            "error",
            TOPIC,
            f"DeepGEMM on {gpu.name} takes no float32 scales, and nemo_fp8rl.workers=nemo_rl gives it the trainer's as "
            "they are; set pow2_*_scaling_factors=true on both sides",
        )
    if not plan.pow2 and (gpu.capability >= BLACKWELL or not (deep_gemm or on_wire)):
        return Finding(
            "warn",
            TOPIC,
            f"float32 scales do not reach DeepGEMM on {gpu.name} as they are: rounded up to powers of two (E8M0), "
            "nearly all weights get other values than the trainer's; set pow2_*_scaling_factors=true on both sides",
        )
    kernels, experts = "DeepGEMM" if deep_gemm else "CUTLASS or Triton", at(plan.values, MOE_BACKEND, None)
    of_experts = f" (experts: {MOE_BACKEND}={experts})" if experts else ""
    return Finding("ok", TOPIC, f"{kernels} on {gpu.name}{of_experts} multiplies the values that the refit sends")


def _package_engine(plan: Plan, gpu: Gpu) -> Finding:
    if plan.format is not FP8:
        name = plan.flow.rpartition("_")[0]
        if gpu.capability < BLACKWELL and plan.format.token_block is not None:
            text = f"our engines on {gpu.name} multiply {NAMES[name]} by Marlin in bfloat16, after they round"
            text += " activations: memory and bytes shrink, and only Blackwell is faster"
            return Finding("warn", TOPIC, text)
        text = f"our engines on {gpu.name} multiply {NAMES[name]} by {KERNELS_OF_VLLM[name]}"
        return Finding("ok", TOPIC, text)
    hopper = HOPPER <= gpu.capability < BLACKWELL  # elsewhere generation/fp8_method/gpu_linear.py skips DeepGEMM
    kernels = "DeepGEMM, CUTLASS or Triton" if hopper else "CUTLASS or Triton"
    return Finding("ok", TOPIC, f"our engines on {gpu.name} multiply what the refit sends, by {kernels}")


def _cache(plan: Plan, gpu: Gpu) -> Finding:
    if plan.shape.kv_lora_rank and not plan.uses_package_workers:
        return Finding("error", TOPIC, LATENT_CACHE_UNSUPPORTED)
    if plan.uses_package_workers and at(plan.values, "nemo_fp8rl.align", None) == "vllm":
        return Finding("ok", TOPIC, f"trainer and engines on {gpu.name} share the attention that reads an FP8 KV cache")
    backend = plan.vllm_kwargs.get("attention_backend")
    if backend is None and not HOPPER <= gpu.capability < BLACKWELL:
        backend = "FLASHINFER"  # vLLM's choice
    graphs = str(at(plan.vllm_kwargs, "compilation_config.cudagraph_mode", "FULL")).upper() != "PIECEWISE"
    if str(backend).upper() == "FLASHINFER" and plan.vllm.get("enforce_eager") is False and graphs:
        return Finding(
            "warn" if plan.uses_package_workers else "error",
            TOPIC,
            f"an FP8 KV cache on {gpu.name}: where vLLM takes FlashInfer for it, {ENGINE}.enforce_eager must not be "
            "false, as a CUDA graph would keep the scales of the first version; set it to true, or "
            "policy.generation.vllm_kwargs.attention_backend=TRITON_ATTN",
        )
    if gpu.capability < HOPPER:
        return Finding("warn", TOPIC, f"an FP8 KV cache on {gpu.name} has no FlashAttention; another backend serves")
    version = 3 if gpu.capability < BLACKWELL else 4
    return Finding("ok", TOPIC, f"an FP8 KV cache on {gpu.name} works with FlashAttention {version} or FlashInfer")
