"""The numbers of a recipe by name: parallel layout, batches, precision. Derived numbers are defined here alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nemo_fp8rl.commands.doctor.models.shape import Shape
from nemo_fp8rl.commands.doctor.models.sizes import Weight
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.fp8rl_schema import Flow
from nemo_fp8rl.config.policy_schema import PeftConfig
from nemo_fp8rl.config.typed_tree import to_block
from nemo_fp8rl.fp8 import FP8, Format, with_lines
from nemo_fp8rl.fp8.layers import LAYER, Fp8Layers, fused_projections
from nemo_fp8rl.hf.adapters import FUSED_NAMES, gets_adapter
from nemo_fp8rl.hf.divisibility import pipeline_stages
from nemo_fp8rl.nemo_rl.recipe.gpu_division import divide_gpus, is_colocated
from nemo_fp8rl.nemo_rl.recipe.keys import COPIED_KEYS, PEFT
from nemo_fp8rl.nemo_rl.recipe.precision import Precision, engine_fp8_layers, knows_quant_cfg, read_precision

TRAINER = "policy.megatron_cfg"
IN_MEGATRON = {
    **{"qkv_proj": "linear_qkv", "o_proj": "linear_proj"},
    **{"gate_up_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2"},
}
"""Fused name of a linear -> its last name in Megatron."""
ENGINE = "policy.generation.vllm_cfg"


@dataclass(frozen=True)
class Plan:
    """A resolved recipe for NeMo RL and the shape of its model."""

    values: Mapping[str, Any]
    shape: Shape

    @property
    def policy(self) -> Mapping[str, Any]:
        return self.values["policy"]

    @property
    def megatron(self) -> Mapping[str, Any]:
        return self.policy["megatron_cfg"]

    @property
    def generation(self) -> Mapping[str, Any]:
        return self.policy["generation"]

    @property
    def vllm(self) -> Mapping[str, Any]:
        return self.generation["vllm_cfg"]

    @property
    def vllm_kwargs(self) -> Mapping[str, Any]:
        return self.generation.get("vllm_kwargs") or {}

    # GPUs

    @property
    def is_colocated(self) -> bool:
        return is_colocated(self.generation)

    @property
    def trainer_gpus(self) -> int:
        return divide_gpus(self.values).trainer

    @property
    def engine_gpus(self) -> int:
        return divide_gpus(self.values).engines

    # The trainer's layout

    @property
    def tensor(self) -> int:
        return self.megatron["tensor_model_parallel_size"]

    @property
    def pipeline(self) -> int:
        return self.megatron["pipeline_model_parallel_size"]

    @property
    def context(self) -> int:
        return self.megatron.get("context_parallel_size") or 1

    @property
    def expert(self) -> int:
        return self.megatron.get("expert_model_parallel_size") or 1

    @property
    def expert_tensor(self) -> int:
        return self.megatron.get("expert_tensor_parallel_size") or 1

    @property
    def sequence_parallel(self) -> bool:
        return bool(self.megatron.get("sequence_parallel")) and self.tensor > 1

    @property
    def data(self) -> int:
        """Number of replicas of the dense part."""
        return max(1, self.trainer_gpus // (self.tensor * self.pipeline * self.context))

    @property
    def expert_data(self) -> int:
        """Number of replicas of the experts."""
        return max(1, self.trainer_gpus // (self.expert_tensor * self.expert * self.pipeline))

    @cached_property
    def stages(self) -> list[range]:
        """The layers of each pipeline stage."""
        sizes = (self.megatron.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
        return pipeline_stages(self.shape.layers, self.pipeline, *sizes)

    # The engine's layout

    @property
    def engine_tensor(self) -> int:
        return self.vllm.get("tensor_parallel_size") or 1

    @property
    def engine_pipeline(self) -> int:
        return self.vllm.get("pipeline_parallel_size") or 1

    @property
    def engine_expert(self) -> int:
        return self.vllm.get("expert_parallel_size") or 1

    @property
    def engine_expert_tensor(self) -> int:
        """Number of ranks that share the matrices of an expert; 1 if experts are spread over ranks."""
        return 1 if self.engine_expert > 1 else self.engine_tensor

    @property
    def uses_package_workers(self) -> bool:
        """True for the package's trainer and engines. `auto` takes NeMo RL's workers on GPUs where these do."""
        workers = self.values["nemo_fp8rl"]["workers"]
        return bool(workers == "ours" or (workers == "auto" and self.format is not FP8))

    @property
    def takes_deltas(self) -> bool:
        """True if the package's refit may send deltas; `auto` does not if the trainer frees memory between phases."""
        mode = self.values["nemo_fp8rl"]["refit"]["mode"]
        return mode == "delta" or (mode == "auto" and not self.is_colocated)

    # Precision as the recipe states it; `nemo_rl/recipe/precision.py` checks it

    @cached_property
    def precision(self) -> Precision | None:
        """The precision of both sides; None if they do not agree."""
        try:
            return read_precision(self.policy)
        except UserError:
            return None

    @property
    def flow(self) -> Flow:
        """The flow; of FP8 if the two sides do not agree."""
        if self.precision is not None:
            return self.precision.flow
        return "fp8_e2e" if self.quantizes_training else "fp8_rollout"

    @property
    def format(self) -> Format:
        """The format of quantized weights; FP8 if nothing is quantized, or if the two sides do not agree."""
        if self.precision is None or self.precision.format is None:
            return FP8
        block = self.precision.weight_block or self.values["nemo_fp8rl"].get("weight_block")
        return with_lines(self.precision.format) if block == "line" else self.precision.format

    @property
    def quantizes_training(self) -> bool:
        blocks = (self.megatron.get(name) or {} for name in ("fp8_cfg", "fp4_cfg"))
        return any(block.get("enabled") for block in blocks) or knows_quant_cfg(self.policy.get("quant_cfg"))

    @property
    def fp8_param(self) -> bool:
        """True if the trainer keeps no weights but the FP8 ones."""
        fp8 = self.megatron.get("fp8_cfg") or {}
        return bool(fp8.get("enabled") and fp8.get("fp8_param"))

    @property
    def quantizes_rollout(self) -> bool:
        per_token = (self.generation.get("nvfp4_pertoken_rollout") or {}).get("enabled")
        is_fp8 = self.vllm.get("precision") == "fp8"
        return bool(is_fp8 or per_token) or knows_quant_cfg(self.generation.get("quant_cfg"))

    @property
    def kv_fp8(self) -> bool:
        return self.vllm.get("kv_cache_dtype", "auto") != "auto"

    @property
    def pow2(self) -> bool:
        return bool(self.vllm.get("pow2_weight_scaling_factors"))

    @cached_property
    def engine_layers(self) -> Fp8Layers:
        if not self.quantizes_rollout:
            return Fp8Layers.none()
        return engine_fp8_layers(self.policy, self.shape.layers)

    def is_fp8_in_engine(self, weight: Weight) -> bool:
        """Return whether the engine quantizes a weight: every linear that no ignored word names."""
        names = (weight.name, *fused_projections(weight.name))
        ignored = any(word in name for word in self.engine_layers.ignored_words for name in names)
        return weight.linear and not ignored and self._is_in_fp8_layer(weight)

    def is_fp8_on_the_wire(self, weight: Weight) -> bool:
        """Return whether `nemo_rl/stock/fp8_stream.py` quantizes a weight."""
        return self.engine_layers.quantizes(weight.name)

    def is_fp8_in_trainer(self, weight: Weight) -> bool:
        """Return whether the trainer holds a weight in FP8.

        The package's trainer has the engine's FP8 weights, NeMo RL's every linear of its FP8 decoder layers.
        """
        if self.uses_package_workers:
            return self.quantizes_training and self.is_fp8_in_engine(weight)
        return self.quantizes_training and weight.linear and self._is_in_fp8_layer(weight)

    def _is_in_fp8_layer(self, weight: Weight) -> bool:
        layer = LAYER.search(weight.name)
        return layer is not None and int(layer[1]) in self.engine_layers

    # Adapters

    @cached_property
    def peft(self) -> PeftConfig:
        """The block policy.megatron_cfg.peft. Raises: UserError, with the key, for a value that it cannot have"""
        block = self.megatron.get("peft") or {}
        known = {name: block[name] for name in COPIED_KEYS[PEFT] if block.get(name) is not None}
        return to_block(known, PeftConfig, f"{PEFT}.")

    def gets_adapter(self, weight: Weight) -> bool:
        """Return whether a weight has an adapter. A linear that Megatron names otherwise goes by its own last name."""
        layer = LAYER.search(weight.name)
        if not (self.peft.enabled and weight.linear and layer):
            return False
        leaf = weight.name.removesuffix(".weight").rpartition(".")[2]
        leaf = FUSED_NAMES.get(leaf, leaf)
        above = "self_attention." if ".self_attn." in weight.name else "mlp." + "experts." * weight.of_expert
        return gets_adapter(f"decoder.layers.{layer[1]}.{above}{IN_MEGATRON.get(leaf, leaf)}", self.peft)

    # Batches

    @property
    def rollouts(self) -> int:
        grpo = self.values["grpo"]
        return grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"]

    @property
    def longest(self) -> int:
        return self.policy["max_total_sequence_length"]

    @property
    def packing(self) -> Mapping[str, Any] | None:
        block = self.policy.get("sequence_packing") or {}
        return block if block.get("enabled") else None

    @property
    def dynamic(self) -> Mapping[str, Any] | None:
        block = self.policy.get("dynamic_batching") or {}
        return block if block.get("enabled") else None

    @property
    def microbatch_tokens(self) -> int:
        """The largest number of tokens of a forward and backward."""
        by_tokens = self.packing or self.dynamic
        return by_tokens["train_mb_tokens"] if by_tokens else self.longest * self.policy["train_micro_batch_size"]
