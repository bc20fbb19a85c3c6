"""Print the parameters of models as vLLM builds them from the keys of `choose_workers`, without allocating memory.

vLLM's own FP8 config decides which layers are FP8. Its kernels depend on the machine, so emulated methods with
parameters of the same names and dtypes take their place.

Usage: python -m tests.nemo_rl.built_models FOLDER MODEL...
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.model_loader.utils import initialize_model

from nemo_fp8rl.fp8 import LinearRecipe
from nemo_fp8rl.generation.fp8_method.on_cpu.emulated_experts import EmulatedMoEMethod
from nemo_fp8rl.generation.fp8_method.on_cpu.emulated_linear import EmulatedLinearMethod
from nemo_fp8rl.nemo_rl.stock.worker_choice import choose_workers
from tests.nemo_rl.stock.fake_trainer import policy
from tests.nemo_rl.stock.test_layer_agreement import LAYERS, MODELS, WORDS

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "dtype": "bfloat16",
}


def use_emulated_fp8() -> None:
    """Replace vLLM's FP8 methods by emulated ones; vLLM still chooses the layers."""
    fp8.Fp8LinearMethod = lambda config: EmulatedLinearMethod(LinearRecipe())
    fp8.Fp8MoEMethod = lambda config, layer: EmulatedMoEMethod(layer.moe_config, LinearRecipe())


def build(name: str, folder: Path) -> dict[str, Any]:
    """Return the model's parameters (name -> dtype) and packed_modules_mapping."""
    family, architecture, sizes = MODELS[name]
    AutoConfig.for_model(family, **COMMON | sizes, architectures=[architecture]).save_pretrained(folder / name)
    cfg = policy(quantization_ignored_layer_kws=WORDS)
    choose_workers(cfg, LAYERS, survives_refit=True)
    arguments = EngineArgs(
        model=str(folder / name), skip_tokenizer_init=True, max_model_len=64, enforce_eager=True, load_format="dummy",
        hf_overrides=cfg["hf_config_overrides"],
    )  # fmt: skip
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/init", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"):
            model = initialize_model(vllm_config=config)
        destroy_model_parallel()  # a mixture has one more group, so groups are made anew for each model
    parameters = {name: str(parameter.dtype) for name, parameter in model.named_parameters()}
    return {"parameters": parameters, "fused": config.quant_config.packed_modules_mapping}


if __name__ == "__main__":
    use_emulated_fp8()
    torch.set_default_dtype(torch.bfloat16)
    print(json.dumps({name: build(name, Path(sys.argv[1])) for name in sys.argv[2:]}))
