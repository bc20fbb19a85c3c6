"""A fake of NeMo RL's Megatron worker that streams given weights, and the policy block of an FP8 recipe."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nemo_fp8rl.nemo_rl.stock.fp8_stream import Fp8Stream

WEIGHT = "model.layers.1.mlp.down_proj.weight"

KV_SCALES = [f"model.layers.{i}.self_attn.{x}_scale" for i in range(2) for x in ("attn.q", "k", "v")]

POLICY = {
    "megatron_cfg": {"enabled": True, "fp8_cfg": {"enabled": True}, "env_vars": None},
    "generation": {
        "vllm_cfg": {
            "precision": "fp8",
            "pow2_weight_scaling_factors": True,
            "pow2_activation_scaling_factors": True,
            "num_first_layers_in_bf16": 1,
        },
    },
}


def policy(**vllm_cfg: object) -> dict:
    generation = {"vllm_cfg": POLICY["generation"]["vllm_cfg"] | vllm_cfg, "vllm_kwargs": {"moe_backend": "triton"}}
    return {**POLICY, "generation": generation}


class FakeMegatronWorker:
    """Streams what it holds; the real one gathers it from GPUs."""

    def __init__(self, cfg: dict, weights: dict[str, Tensor]) -> None:
        self.cfg, self.weights = cfg, weights

    def _is_fp8_export(self) -> bool:
        return False

    def _iter_params_with_optional_kv_scales(self, kv_scales=None, conversion_tasks=None) -> Iterator:
        yield from self.weights.items()
        if self.cfg["generation"]["vllm_cfg"].get("kv_cache_dtype", "auto") != "auto":
            for name in KV_SCALES:
                yield name, torch.tensor([(kv_scales or {}).get(name, 1.0)])

    def prepare_refit_info(self) -> dict:
        return {name: (x.shape, x.dtype) for name, x in self._iter_params_with_optional_kv_scales()}


class StreamingWorker(Fp8Stream, FakeMegatronWorker):
    pass


def weights() -> dict[str, Tensor]:
    names = [WEIGHT, "model.layers.0.mlp.down_proj.weight", "model.norm.weight"]
    return {name: torch.randn(256, 384).bfloat16() for name in names}
