"""Choose the worker classes that stream and load FP8, in a recipe's own keys, and build the policy with them."""

from collections.abc import Mapping
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.generation.fp8_method.quantization_config import config_for_vllm_fp8
from nemo_fp8rl.nemo_rl.recipe.precision import engine_fp8_layers, read_precision
from nemo_fp8rl.nemo_rl.stock.bf16_layers import add_bf16_layers
from nemo_fp8rl.nemo_rl.stock.fp8_stream import STREAM_KEY
from nemo_fp8rl.nemo_rl.stock.stock_limits import LATENT_CACHE_UNSUPPORTED, why_policy_unsupported

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
"""Modules of a decoder layer that vLLM builds by the model's quantization: Llama, Qwen, its mixtures and DeepSeek V3.

A name that a model lacks does no harm; a module that this list lacks is refused by `layer_agreement`.
"""
KV_CACHE = "kv_cache_dtype"
OVERRIDES = "hf_config_overrides"
"""Key of the policy block. NeMo RL's `setup` replaces vllm_kwargs.hf_overrides by its value."""
E8M0 = "VLLM_USE_DEEP_GEMM_E8M0"
"""Variable that makes vLLM quantize weights again to power-of-two scales; with DeepGEMM it is set by default."""


def choose_workers(policy: dict[str, Any], num_hidden_layers: int, survives_refit: bool, latent: bool = False) -> None:
    """Change an FP8 `policy` block of NeMo RL so that the engine uses vLLM's own FP8, loaded by `Fp8Worker`.

    The engine's `precision` becomes bfloat16, so that NeMo RL does not patch vLLM. hf_config_overrides says what is
    FP8: NeMo RL's `setup` passes it to vLLM, and `policy_factory` gives the trainer the recipe's original value. The
    scales of activations are then the choice of vLLM's kernels; only DeepGEMM takes powers of two. An FP8 KV cache is
    vLLM's own, too (`declare_kv_cache`). A trainer in FP8 keeps the engine's first and last layers in bfloat16.

    num_hidden_layers:  layers of the model
    survives_refit:     as `Checkout.engines_survive_fp8_refit`
    latent:             whether the model has latent attention
    Raises: UserError if the workers of this version cannot run the block
    """
    precision = read_precision(policy)
    if refusal := why_policy_unsupported(policy, survives_refit):
        raise UserError(refusal)
    if latent and precision.kv_fp8:
        raise UserError(LATENT_CACHE_UNSUPPORTED)
    if precision.flow == "bf16":
        return
    generation = policy["generation"]
    vllm = generation["vllm_cfg"]
    layers = engine_fp8_layers(policy, num_hidden_layers)
    linears = (f"model.layers.{i}.{name}" for i in range(num_hidden_layers) for name in LINEARS)
    if precision.flow == "fp8_e2e":
        policy["megatron_cfg"] = add_bf16_layers(policy["megatron_cfg"], layers, num_hidden_layers)
    overrides = policy.get(OVERRIDES) or {}
    policy[STREAM_KEY] = {
        "scale_format": precision.scale_format,
        "fp8_layers": {"first": layers.first, "end": layers.end, "ignored": list(layers.ignored_words)},
        OVERRIDES: overrides,
    }
    quantization = config_for_vllm_fp8(linears, precision.scale_format, layers)
    # vLLM reads the list of modules; NeMo RL logs the block to TensorBoard, which does not take the nested list.
    del quantization["fp8_layers"]
    policy[OVERRIDES] = {**overrides, "quantization_config": quantization}
    kwargs = generation["vllm_kwargs"] = dict(generation.get("vllm_kwargs") or {})
    kwargs["worker_cls"] = ENGINE_WORKER
    vllm["precision"] = "bfloat16"
    if precision.kv_fp8:  # NeMo RL passes its own key to vLLM only if the precision is FP8
        kwargs[KV_CACHE] = vllm[KV_CACHE]
        vllm[KV_CACHE] = "auto"
    if precision.scale_format == "fp32":
        vllm["env_vars"] = {**(vllm.get("env_vars") or {}), E8M0: "0"}


def policy_factory(config: Any, policy_class: Any = None, **arguments: Any) -> Any:
    """Build NeMo RL's policy, with workers that stream FP8 if `choose_workers` chose them.

    It is the argument policy_factory of NeMo RL's `setup`.

    policy_class: NeMo RL's Policy or a subclass; None is Policy
    """
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.models.policy.lm_policy import Policy

    build = policy_class or Policy
    if STREAM_KEY not in config:
        return build(config=config, **arguments)
    from nemo_rl.utils.venvs import create_local_venv_on_each_node

    python = ACTOR_ENVIRONMENT_REGISTRY[STOCK_WORKER]
    if python.startswith("uv"):  # a command that makes an environment, which NeMo RL would name after our class
        python = create_local_venv_on_each_node(python, STOCK_WORKER)
    ACTOR_ENVIRONMENT_REGISTRY[TRAINER_WORKER] = python
    config = {**config, OVERRIDES: config[STREAM_KEY][OVERRIDES], "generation": _with_kv_cache(config["generation"])}
    return build(config=config, **arguments, worker_extension_cls_fqn=TRAINER_WORKER)


def declare_kv_cache(generation: Any, policy: Mapping[str, Any]) -> None:
    """Declare the engines' FP8 KV cache in `generation.cfg`, if `choose_workers` chose one.

    NeMo RL's loop calibrates scales and refits with them if the key is there. Call this after NeMo RL's `setup`, which
    would patch vLLM because of the key.
    """
    if STREAM_KEY in policy:
        generation.cfg = _with_kv_cache(generation.cfg)


def _with_kv_cache(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the block `generation` in which NeMo RL's key has vLLM's value."""
    vllm = {**generation["vllm_cfg"], KV_CACHE: generation["vllm_kwargs"].get(KV_CACHE, "auto")}
    return {**generation, "vllm_cfg": vllm}
