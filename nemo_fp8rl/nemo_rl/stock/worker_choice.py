"""A recipe's FP8 engine as one that takes FP8: the keys that say so, and the policy whose workers stream it."""

from collections.abc import Mapping
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.generation.fp8_method.quantization_config import config_for_vllm_fp8
from nemo_fp8rl.nemo_rl.recipe.precision import engine_fp8_layers, read_precision
from nemo_fp8rl.nemo_rl.stock.bf16_layers import with_bf16_layers
from nemo_fp8rl.nemo_rl.stock.fp8_stream import CHOICE
from nemo_fp8rl.nemo_rl.stock.stock_limits import NO_LATENT_CACHE, why_not

TRAINER_WORKER = "nemo_fp8rl.nemo_rl.stock.megatron_worker.Fp8MegatronPolicyWorker"
ENGINE_WORKER = "nemo_fp8rl.nemo_rl.stock.vllm_worker.Fp8Worker"
STOCK_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
MLP = ("gate_proj", "up_proj", "down_proj")
LINEARS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
    *(f"{mlp}.{name}" for mlp in ("mlp", "mlp.shared_expert", "mlp.shared_experts") for name in MLP),
    *("mlp.gate", "mlp.experts"),
)
"""Modules of a decoder layer that vLLM makes by the model's quantization, in Llama, Qwen, its mixtures and DeepSeek V3.

A name that a model lacks does no harm, and a module that is not here is refused by `agreement`.
"""
KV_CACHE = "kv_cache_dtype"
OVERRIDES = "hf_config_overrides"
"""Key of the policy block. NeMo RL's `setup` puts what it says in place of any vllm_kwargs.hf_overrides."""
E8M0 = "VLLM_USE_DEEP_GEMM_E8M0"
"""Variable by which vLLM, with DeepGEMM by default, quantizes weights once more to scales that are powers of two."""


def choose(policy: dict[str, Any], num_hidden_layers: int, version: str, latent: bool = False) -> None:
    """Change NeMo RL's `policy` block, where it asks for FP8: vLLM's own FP8 in the engine, loaded by our worker class.

    The engine's `precision` becomes bfloat16, so that NeMo RL leaves vLLM as it is; what is FP8 stands in
    hf_config_overrides, which `setup` hands to vLLM, and `policy_factory` gives the trainer the recipe's own. Scales of
    activations are then vLLM's kernels' own choice, powers of two by DeepGEMM alone. An FP8 KV cache is vLLM's own, too
    (`say_kv_cache`). A trainer in FP8 keeps the engine's first and last layers in bfloat16. latent: whether the model
    has latent attention. Raises UserError for what this version's workers cannot have.
    """
    precision = read_precision(policy)
    if refusal := why_not(policy, version):
        raise UserError(refusal)
    if latent and precision.kv_fp8:
        raise UserError(NO_LATENT_CACHE)
    if precision.flow == "bf16":
        return
    generation = policy["generation"]
    vllm = generation["vllm_cfg"]
    layers = engine_fp8_layers(vllm, num_hidden_layers)
    linears = (f"model.layers.{i}.{name}" for i in range(num_hidden_layers) for name in LINEARS)
    if precision.flow == "fp8_e2e":
        policy["megatron_cfg"] = with_bf16_layers(policy["megatron_cfg"], layers, num_hidden_layers)
    overrides = policy.get(OVERRIDES) or {}
    policy[CHOICE] = {
        "scale_format": precision.scale_format,
        "fp8_layers": {"first": layers.first, "end": layers.end, "ignored": list(layers.ignored)},
        OVERRIDES: overrides,
    }
    quantization = config_for_vllm_fp8(linears, precision.scale_format, layers)
    del quantization["fp8_layers"]  # vLLM reads the modules; NeMo RL logs this to TensorBoard, which takes no such list
    policy[OVERRIDES] = {**overrides, "quantization_config": quantization}
    kwargs = generation["vllm_kwargs"] = dict(generation.get("vllm_kwargs") or {})
    kwargs["worker_cls"] = ENGINE_WORKER
    vllm["precision"] = "bfloat16"
    if precision.kv_fp8:  # of which NeMo RL makes nothing unless the precision is FP8
        kwargs[KV_CACHE] = vllm[KV_CACHE]
        vllm[KV_CACHE] = "auto"
    if precision.scale_format == "fp32":
        vllm["env_vars"] = {**(vllm.get("env_vars") or {}), E8M0: "0"}


def policy_factory(config: Any, **arguments: Any) -> Any:
    """NeMo RL's policy, with workers that stream FP8 where `choose` said so; for its `setup(policy_factory=...)`."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.models.policy.lm_policy import Policy

    if CHOICE not in config:
        return Policy(config=config, **arguments)
    from nemo_rl.utils.venvs import create_local_venv_on_each_node

    python = ACTOR_ENVIRONMENT_REGISTRY[STOCK_WORKER]
    if python.startswith("uv"):  # a command to make an environment with, which NeMo RL would name after our class
        python = create_local_venv_on_each_node(python, STOCK_WORKER)
    ACTOR_ENVIRONMENT_REGISTRY[TRAINER_WORKER] = python
    config = {**config, OVERRIDES: config[CHOICE][OVERRIDES], "generation": _with_kv_cache(config["generation"])}
    return Policy(config=config, **arguments, worker_extension_cls_fqn=TRAINER_WORKER)


def say_kv_cache(generation: Any, policy: Mapping[str, Any]) -> None:
    """Tell NeMo RL's loop of the engines' FP8 KV cache, if `choose` gave them one: it calibrates its scales for those
    that say so in their `cfg`, and refits with them. For after `setup`, which takes the word for patches of vLLM.
    """
    if CHOICE in policy:
        generation.cfg = _with_kv_cache(generation.cfg)


def _with_kv_cache(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The block `generation` with what vLLM is told in place of what NeMo RL was, a copy."""
    vllm = {**generation["vllm_cfg"], KV_CACHE: generation["vllm_kwargs"].get(KV_CACHE, "auto")}
    return {**generation, "vllm_cfg": vllm}
