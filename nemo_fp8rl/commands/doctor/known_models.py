"""Sizes of released models, those of NeMo RL's recipes among them: what the doctor reads of their config.json.

The table serves where a model's config.json is not on this machine; `model_shapes.config_of` prefers the file.
Source: huggingface.co/<name>/blob/main/config.json; for newer families as transformers' configuration classes (whose
defaults are a released model's) and Megatron Bridge's providers repeat it. The tests compare the parameters with the
published counts.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "vocab_size",
)
"""The keys of a row, in order."""
TIED = {"tie_word_embeddings": True}


def _model(model_type: str, *sizes: int, **keys: Any) -> dict[str, Any]:
    return {"model_type": model_type, **dict(zip(SIZES, sizes, strict=True)), **keys}


LLAMA_8B = (4096, 14336, 32, 32, 8, 128256)
LLAMA_70B = (8192, 28672, 80, 64, 8, 128256)
QWEN2_0_5B = _model("qwen2", 896, 4864, 24, 14, 2, 151936, **TIED)
QWEN2_1_5B = _model("qwen2", 1536, 8960, 28, 12, 2, 151936, **TIED)
QWEN2_3B = _model("qwen2", 2048, 11008, 36, 16, 2, 151936, **TIED)
QWEN2_7B = _model("qwen2", 3584, 18944, 28, 28, 4, 152064)
QWEN2_14B = _model("qwen2", 5120, 13824, 48, 40, 8, 152064)
QWEN2_32B = _model("qwen2", 5120, 27648, 64, 40, 8, 152064)
QWEN2_72B = _model("qwen2", 8192, 29568, 80, 64, 8, 152064)
QWEN3 = {
    "0.6B": _model("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, **TIED),
    "1.7B": _model("qwen3", 2048, 6144, 28, 16, 8, 151936, head_dim=128, **TIED),
    "4B": _model("qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128, **TIED),
    "8B": _model("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "14B": _model("qwen3", 5120, 17408, 40, 40, 8, 151936, head_dim=128),
    "32B": _model("qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128),
}
QWEN3_MOE = {
    "30B-A3B": _model(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        head_dim=128, norm_topk_prob=True,
    ),
    "235B-A22B": _model(
        "qwen3_moe", 4096, 12288, 94, 64, 4, 151936, moe_intermediate_size=1536, num_experts=128,
        num_experts_per_tok=8, head_dim=128, norm_topk_prob=True,
    ),
    "480B-A35B": _model(
        "qwen3_moe", 6144, 8192, 62, 96, 8, 151936, moe_intermediate_size=2560, num_experts=160,
        num_experts_per_tok=8, head_dim=128, norm_topk_prob=True,
    ),
}  # fmt: skip
MOONLIGHT = _model(
    "deepseek_v3", 2048, 11264, 27, 16, 16, 163840, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
    num_experts_per_tok=6, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip
DEEPSEEK_V3 = _model(
    "deepseek_v3", 7168, 18432, 61, 128, 128, 129280, moe_intermediate_size=2048, n_routed_experts=256,
    n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip
GLM_5 = _model(
    "glm_moe_dsa", 6144, 12288, 78, 64, 64, 154880, moe_intermediate_size=2048, n_routed_experts=256,
    n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=2048,
    qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, index_n_heads=32, index_head_dim=128,
)  # fmt: skip
GPT_OSS_20B = _model(
    "gpt_oss", 2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
    sliding_window=128,
)  # fmt: skip


def _qwen3_5(hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int, **keys: Any) -> dict[str, Any]:
    """Sizes of a Qwen3.5; those of its gated delta nets that it does not give are the same in all of them."""
    family = "qwen3_5_moe" if "num_experts" in keys else "qwen3_5"
    text = {
        "model_type": f"{family}_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "vocab_size": 248320,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "max_position_embeddings": 262144,
        **keys,
    }
    return {"model_type": family, "text_config": text, "vision_config": {}}


def _nemotron_h(pattern: str, hidden: int, heads: int, kv_heads: int, mamba: int, **keys: Any) -> dict[str, Any]:
    """Sizes of a Nemotron-H; mamba: its heads of Mamba 2."""
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "mamba_num_heads": mamba,
        "hybrid_override_pattern": pattern,
    }
    equal = {"head_dim": 128, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "vocab_size": 131072}
    return {"model_type": "nemotron_h", **sizes, **equal, **keys}


QWEN3_5 = {
    "9B": _qwen3_5(4096, 32, 16, 4, 32, intermediate_size=12288),
    "35B-A3B": _qwen3_5(
        2048, 40, 16, 2, 32, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "397B-A17B": _qwen3_5(
        4096, 60, 32, 2, 64, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    ),
}  # fmt: skip
NEMOTRON_NANO_2_9B = _nemotron_h(
    "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    *(4480, 40, 8, 128), mamba_head_dim=80, intermediate_size=15680,
)  # fmt: skip
NEMOTRON_NANO_2_12B = _nemotron_h(
    "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
    *(5120, 40, 8, 128), mamba_head_dim=80, intermediate_size=20480,
)  # fmt: skip
NEMOTRON_3_NANO = _nemotron_h(
    "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    *(2688, 32, 2, 64), mamba_head_dim=64, n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
    n_shared_experts=1, moe_shared_expert_intermediate_size=3712,
)  # fmt: skip
NEMOTRON_3_SUPER = _nemotron_h(
    "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    *(4096, 32, 2, 128), mamba_head_dim=64, n_routed_experts=512, num_experts_per_tok=22, moe_intermediate_size=2688,
    n_shared_experts=1, moe_shared_expert_intermediate_size=5376, moe_latent_size=1024,
)  # fmt: skip
ENCODERS: dict[str, Any] = {"vision_config": {}, "audio_config": {}}
OMNI = ENCODERS | {"model_type": "qwen2_5_omni_text"}
QWEN2_5_OMNI = {"3B": QWEN2_3B | OMNI | {"tie_word_embeddings": False}, "7B": QWEN2_7B | OMNI}
QWEN3_OMNI = QWEN3_MOE["30B-A3B"] | ENCODERS | {"model_type": "qwen3_omni_moe_text", "vocab_size": 152064}

DEEPSEEK_GUIDE = "Follow instructions in https://github.com/NVIDIA-NeMo/RL/blob/main/docs/guides/deepseek.md"
"""The model_name of NeMo RL's recipes for DeepSeek-V3: that guide makes the bfloat16 checkpoint of this one model."""

ROWS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("meta-llama/Llama-2-7b{,-chat}-hf", _model("llama", 4096, 11008, 32, 32, 32, 32000), 4096),
    ("meta-llama/Llama-2-13b{,-chat}-hf", _model("llama", 5120, 13824, 40, 40, 40, 32000), 4096),
    ("meta-llama/Llama-2-70b{,-chat}-hf", _model("llama", 8192, 28672, 80, 64, 8, 32000), 4096),
    ("meta-llama/Meta-Llama-3-8B{,-Instruct}", _model("llama", *LLAMA_8B), 8192),
    ("meta-llama/Meta-Llama-3-70B{,-Instruct}", _model("llama", *LLAMA_70B), 8192),
    ("meta-llama/{,Meta-}Llama-3.1-8B{,-Instruct}", _model("llama", *LLAMA_8B), 131072),
    ("meta-llama/{,Meta-}Llama-3.1-70B{,-Instruct}", _model("llama", *LLAMA_70B), 131072),
    (
        "meta-llama/{,Meta-}Llama-3.1-405B{,-Instruct}",
        _model("llama", 16384, 53248, 126, 128, 8, 128256),
        131072,
    ),
    (
        "meta-llama/Llama-3.2-1B{,-Instruct}",
        _model("llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, **TIED),
        131072,
    ),
    (
        "meta-llama/Llama-3.2-3B{,-Instruct}",
        _model("llama", 3072, 8192, 28, 24, 8, 128256, head_dim=128, **TIED),
        131072,
    ),
    ("meta-llama/Llama-3.3-70B-Instruct", _model("llama", *LLAMA_70B), 131072),
    ("nvidia/Llama-3.1-Nemotron-70B-Instruct-HF", _model("llama", *LLAMA_70B), 131072),
    ("allenai/Llama-3.1-Tulu-3-8B{,-SFT,-DPO}", _model("llama", *LLAMA_8B[:-1], 128264), 131072),
    ("allenai/Llama-3.1-Tulu-3-70B{,-SFT,-DPO}", _model("llama", *LLAMA_70B[:-1], 128264), 131072),
    ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", _model("llama", *LLAMA_8B), 131072),
    ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", _model("llama", *LLAMA_70B), 131072),
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", _model("llama", 2048, 5632, 22, 32, 4, 32000), 2048),
    ("HuggingFaceTB/SmolLM2-135M{,-Instruct}", _model("llama", 576, 1536, 30, 9, 3, 49152, **TIED), 8192),
    ("HuggingFaceTB/SmolLM2-360M{,-Instruct}", _model("llama", 960, 2560, 32, 15, 5, 49152, **TIED), 8192),
    ("HuggingFaceTB/SmolLM2-1.7B{,-Instruct}", _model("llama", 2048, 8192, 24, 32, 32, 49152, **TIED), 8192),
    ("Qwen/Qwen2-0.5B", QWEN2_0_5B, 131072),
    ("Qwen/Qwen2-1.5B", QWEN2_1_5B, 131072),
    ("Qwen/Qwen2-7B", QWEN2_7B, 131072),
    ("Qwen/Qwen2-72B", QWEN2_72B, 131072),
    ("Qwen/Qwen2-0.5B-Instruct", QWEN2_0_5B, 32768),
    ("Qwen/Qwen2-1.5B-Instruct", QWEN2_1_5B, 32768),
    ("Qwen/Qwen2-7B-Instruct", QWEN2_7B, 32768),
    ("Qwen/Qwen2-72B-Instruct", QWEN2_72B, 32768),
    ("Qwen/Qwen2.5-{,Coder-}0.5B{,-Instruct}", QWEN2_0_5B, 32768),
    ("Qwen/Qwen2.5-1.5B", QWEN2_1_5B, 131072),
    ("Qwen/Qwen2.5-1.5B-Instruct", QWEN2_1_5B, 32768),
    ("Qwen/Qwen2.5-Coder-1.5B{,-Instruct}", QWEN2_1_5B, 32768),
    ("Qwen/Qwen2.5-{,Coder-}3B{,-Instruct}", QWEN2_3B, 32768),
    ("Qwen/Qwen2.5-7B", QWEN2_7B, 131072),
    ("Qwen/Qwen2.5-7B-Instruct", QWEN2_7B, 32768),
    ("Qwen/Qwen2.5-Coder-7B{,-Instruct}", QWEN2_7B, 32768),
    ("Qwen/Qwen2.5-14B", QWEN2_14B, 131072),
    ("Qwen/Qwen2.5-14B-Instruct", QWEN2_14B, 32768),
    ("Qwen/Qwen2.5-Coder-14B{,-Instruct}", QWEN2_14B, 32768),
    ("Qwen/Qwen2.5-32B", QWEN2_32B, 131072),
    ("Qwen/Qwen2.5-32B-Instruct", QWEN2_32B, 32768),
    ("Qwen/Qwen2.5-Coder-32B{,-Instruct}", QWEN2_32B, 32768),
    ("Qwen/Qwen2.5-72B", QWEN2_72B, 131072),
    ("Qwen/Qwen2.5-72B-Instruct", QWEN2_72B, 32768),
    ("Qwen/Qwen2{,.5}-Math-1.5B{,-Instruct}", QWEN2_1_5B, 4096),
    ("Qwen/Qwen2{,.5}-Math-7B{,-Instruct}", QWEN2_7B, 4096),
    ("Qwen/Qwen2{,.5}-Math-72B{,-Instruct}", QWEN2_72B, 4096),
    ("Qwen/QwQ-32B", QWEN2_32B, 40960),
    ("Qwen/QwQ-32B-Preview", QWEN2_32B, 32768),
    (
        "{deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B,agentica-org/DeepScaleR-1.5B-Preview}",
        QWEN2_1_5B | {"tie_word_embeddings": False},
        131072,
    ),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", QWEN2_7B, 131072),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", QWEN2_14B, 131072),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", QWEN2_32B, 131072),
    ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", QWEN3["8B"], 131072),
    *((f"Qwen/Qwen3-{size}", sizes, 40960) for size, sizes in QWEN3.items()),
    *((f"Qwen/Qwen3-{size}-Base", sizes, 32768) for size, sizes in QWEN3.items() if size != "32B"),
    ("Qwen/Qwen3-4B-{Instruct,Thinking}-2507", QWEN3["4B"], 262144),
    ("Qwen/Qwen3-30B-A3B", QWEN3_MOE["30B-A3B"], 40960),
    ("Qwen/Qwen3-30B-A3B-Base", QWEN3_MOE["30B-A3B"], 32768),
    ("Qwen/Qwen3-30B-A3B-{Instruct,Thinking}-2507", QWEN3_MOE["30B-A3B"], 262144),
    ("Qwen/Qwen3-Coder-30B-A3B-Instruct", QWEN3_MOE["30B-A3B"], 262144),
    ("Qwen/Qwen3-235B-A22B", QWEN3_MOE["235B-A22B"], 40960),
    ("Qwen/Qwen3-235B-A22B-{Instruct,Thinking}-2507", QWEN3_MOE["235B-A22B"], 262144),
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct", QWEN3_MOE["480B-A35B"], 262144),
    ("moonshotai/Moonlight-16B-A3B{,-Instruct}", MOONLIGHT, 8192),
    ("{deepseek-ai/DeepSeek-V3,deepseek-ai/DeepSeek-V3-Base,deepseek-ai/DeepSeek-R1}", DEEPSEEK_V3, 163840),
    (DEEPSEEK_GUIDE, DEEPSEEK_V3, 163840),
    ("zai-org/GLM-5{,.1}", GLM_5, 202752),
    ("openai/gpt-oss-20b", GPT_OSS_20B, 131072),
    *((f"Qwen/Qwen3.5-{size}", sizes, 262144) for size, sizes in QWEN3_5.items()),
    *((f"Qwen/Qwen3.5-{size}-Base", QWEN3_5[size], 262144) for size in ("9B", "35B-A3B")),
    ("nvidia/NVIDIA-Nemotron-Nano-9B-v2{,-Base}", NEMOTRON_NANO_2_9B, 131072),
    ("nvidia/NVIDIA-Nemotron-Nano-12B-v2{,-Base}", NEMOTRON_NANO_2_12B, 131072),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B{,-Base}-BF16", NEMOTRON_3_NANO, 262144),
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B{,-Base}-BF16", NEMOTRON_3_SUPER, 262144),
    (
        "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16",
        NEMOTRON_3_NANO | {"vision_config": {}, "sound_config": {}},
        262144,
    ),
    ("Qwen/Qwen2.5-VL-3B-Instruct", QWEN2_3B | {"model_type": "qwen2_5_vl", "vision_config": {}}, 128000),
    *((f"Qwen/Qwen2.5-Omni-{size}", sizes, 32768) for size, sizes in QWEN2_5_OMNI.items()),
    ("Qwen/Qwen3-Omni-30B-A3B-Instruct", QWEN3_OMNI, 65536),
)
"""(names, with braces as in a shell; sizes; max_position_embeddings)."""


def _expand_braces(names: str) -> Iterator[str]:
    parts = [part.split(",") for part in re.split(r"[{}]", names)]
    return ("".join(words) for words in itertools.product(*parts))


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    name: {**sizes, "max_position_embeddings": positions}
    for names, sizes, positions in ROWS
    for name in _expand_braces(names)
}
"""Name on the hub -> the part of its config.json that the doctor reads."""
