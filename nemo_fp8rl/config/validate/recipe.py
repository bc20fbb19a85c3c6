"""Rules between keys of a recipe, which no single field can say. Every message names the key and the fix."""

import math
from collections.abc import Mapping
from typing import Any

from nemo_fp8rl.algorithms.gates import check_gates
from nemo_fp8rl.algorithms.loss_config import resolve_correction
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.secret_variables import has_password, looks_secret
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.config.validate.generation import check_colocated, check_elasticity, check_updates_in_flight
from nemo_fp8rl.config.validate.hints import check_hints
from nemo_fp8rl.config.validate.training import check_training, lookup
from nemo_fp8rl.config.validate.trajectories import check_trajectories


def check(cfg: Config, has_rollouts: bool = True) -> None:
    """Raise UserError for values that contradict each other; has_rollouts: see `recipe.load`."""
    if has_rollouts:
        check_trajectories(cfg)
        check_hints(cfg.grpo.hints)
        _check_rollout_size(cfg)
    check_training(cfg)
    cfg.loss_fn.check()
    _check_algorithm(cfg)
    policy, vllm = cfg.policy, cfg.policy.generation.vllm_cfg
    if vllm.max_model_len > policy.max_total_sequence_length:
        raise UserError(
            f"policy.generation.vllm_cfg.max_model_len={vllm.max_model_len} is above "
            f"policy.max_total_sequence_length={policy.max_total_sequence_length}, the trainer's limit; lower it"
        )
    if policy.precision == "float32" and cfg.nemo_fp8rl.flow != "bf16":
        raise UserError(
            f"nemo_fp8rl.flow={cfg.nemo_fp8rl.flow} needs policy.precision=bfloat16, got float32: "
            "weights are quantized from the bfloat16 parameter"
        )
    _check_number_format(cfg)
    _check_quantized_training(cfg)
    _check_noise(cfg)
    if cfg.updates_in_flight:
        check_updates_in_flight(cfg)
    if policy.precision != "bfloat16" and cfg.fp8_kv_cache:
        raise UserError(
            f"policy.generation.vllm_cfg.kv_cache_dtype=fp8 needs policy.precision=bfloat16, got {policy.precision}: "
            "set kv_cache_dtype=auto"
        )
    if cfg.nemo_fp8rl.kv == "rollout" and not cfg.fp8_kv_cache and vllm.kv_window is None:
        raise UserError(
            "nemo_fp8rl.kv=rollout says what the trainer makes of an FP8 KV cache or of a window, and there is none: "
            "set policy.generation.vllm_cfg.kv_cache_dtype=fp8 or kv_window, or leave nemo_fp8rl.kv out"
        )
    if has_rollouts:
        check_elasticity(cfg)
    if cfg.cluster.backend == "in_process" and (cfg.cluster.train_ranks, cfg.cluster.generation_engines) != (1, 1):
        raise UserError(
            "cluster.train_ranks and cluster.generation_engines above 1 need processes of their own: set "
            "cluster.backend=ray"
        )
    if cfg.nemo_fp8rl.workers == "nemo_rl":
        raise UserError(
            "nemo_fp8rl.workers=nemo_rl: NeMo RL's workers are for its loops (nemo-fp8rl nemo); set it to ours"
        )
    if cfg.policy.generation.colocated.enabled:
        check_colocated(cfg)
    _check_environment(cfg)
    check_tracker(cfg.logger.mlflow.tracking_uri)


def _check_rollout_size(cfg: Config) -> None:
    batch, rows = cfg.policy.train_global_batch_size, cfg.trained_batch_size
    if rows % batch:
        product = "grpo.num_prompts_per_step * grpo.num_generations_per_prompt"
        if cfg.grpo.trajectory_sampling.keep_pairs < 1:
            product += " * grpo.trajectory_sampling.keep_pairs"
        raise UserError(
            f"policy.train_global_batch_size={batch} does not divide the {rows} samples of a step ({product})"
        )
    if cfg.loss_fn.force_on_policy_ratio and batch != rows:
        raise UserError(
            f"loss_fn.force_on_policy_ratio=true is for one update a rollout: set policy.train_global_batch_size="
            f"{rows}, all samples of a step"
        )


def _check_number_format(cfg: Config) -> None:
    choice, name = cfg.nemo_fp8rl, cfg.nemo_fp8rl.flow.rpartition("_")[0]
    if cfg.policy.precision == "float16" and name not in ("", "fp8"):
        raise UserError(
            f"nemo_fp8rl.flow={choice.flow} needs policy.precision=bfloat16, got float16: the kernels of its format "
            "take bfloat16 activations; set that, or flow=fp8_e2e"
        )
    if cfg.policy.precision == "float16" and choice.fp8_param:
        raise UserError(
            "nemo_fp8rl.fp8_param=true needs policy.precision=bfloat16, got float16: the bytes of such weights were "
            "compared with those of bfloat16 parameters alone; set fp8_param=false"
        )
    if choice.fp8_param and choice.flow != "fp8_e2e":
        raise UserError(
            f"nemo_fp8rl.fp8_param=true concerns the trainer's FP8 layers, and with nemo_fp8rl.flow={choice.flow} it "
            "has none: set it to false, or flow=fp8_e2e"
        )
    if choice.weight_block == "line" and name in ("", "fp8"):
        raise UserError(
            f"nemo_fp8rl.weight_block=line is for MXFP8 and NVFP4, and nemo_fp8rl.flow={choice.flow} has blocks of its "
            "own: leave it out, or take a flow of these formats"
        )
    if choice.scale_format == "fp32" and name == "mxfp8":
        raise UserError(
            f"nemo_fp8rl.scale_format=fp32: scales of nemo_fp8rl.flow={choice.flow} are powers of two by the format: "
            "set it to pow2"
        )


def _check_quantized_training(cfg: Config) -> None:
    choice, fp4 = cfg.nemo_fp8rl, cfg.nemo_fp8rl.fp4
    key = f"nemo_fp8rl.flow={choice.flow}"
    if choice.backward != "auto" and not choice.quantizes_training:
        raise UserError(
            f"nemo_fp8rl.backward={choice.backward} is of a trainer that quantizes, and with {key} it does not: set it "
            "to auto, or a flow that ends with _e2e"
        )
    if choice.quantizes_training and choice.backward == "native" and not choice.format.has_native_backward:
        raise UserError(
            f"nemo_fp8rl.backward=native with {key}: activations stay in bfloat16, so no matmul has quantized "
            "operands; set it to auto, dequantized or high_precision"
        )
    trains_in_fp4 = choice.quantizes_training and choice.format.is_fp4
    if fp4.estimator == "differentiable" and not trains_in_fp4:
        raise UserError(
            f"nemo_fp8rl.fp4.estimator=differentiable with {key}: the trainer's weights are not in FP4; set it to "
            "straight_through, or flow=nvfp4_e2e"
        )
    if fp4.clamp_quantile is None:
        return
    clamp = f"nemo_fp8rl.fp4.clamp_quantile={fp4.clamp_quantile}"
    if not (trains_in_fp4 and choice.format.token_block):
        raise UserError(
            f"{clamp} with {key}: activations are not in FP4 on both sides; set it to null, or flow=nvfp4_e2e"
        )
    trainer, engine = (
        "policy.megatron_cfg.tensor_model_parallel_size",
        "policy.generation.vllm_cfg.tensor_parallel_size",
    )
    if lookup(cfg, trainer) != lookup(cfg, engine):
        raise UserError(
            f"{clamp}: ranks take the quantiles of their part of a token, so {trainer}={lookup(cfg, trainer)} and "
            f"{engine}={lookup(cfg, engine)} must be equal; set clamp_quantile to null, or both to one size"
        )


def _check_noise(cfg: Config) -> None:
    noise = cfg.nemo_fp8rl.noise
    if not noise.enabled:
        return
    if noise.sigma_end > noise.sigma_start:
        raise UserError(
            f"nemo_fp8rl.noise.sigma_end={noise.sigma_end} must not be above nemo_fp8rl.noise.sigma_start="
            f"{noise.sigma_start}: the noise falls from stage to stage"
        )
    if noise.where == "both" and cfg.grpo.async_grpo.enabled:
        raise UserError(
            "nemo_fp8rl.noise.where=both with grpo.async_grpo.enabled=true: a batch has answers of several versions, "
            "and the trainer computes with the noise of one; set where=engine, or async_grpo.enabled=false"
        )


def _check_environment(cfg: Config) -> None:
    trainer, engine = cfg.policy.megatron_cfg.env_vars or {}, cfg.policy.generation.vllm_cfg.env_vars or {}
    for block, variables in (("megatron_cfg", trainer), ("generation.vllm_cfg", engine)):
        if "CUDA_VISIBLE_DEVICES" in variables:
            raise UserError(
                f"policy.{block}.env_vars.CUDA_VISIBLE_DEVICES: Ray decides which GPUs a process has; remove it, or "
                "set it in the environment of the whole run"
            )
        check_no_secret(f"policy.{block}.env_vars", variables)
    differ = (name for name in trainer.keys() & engine.keys() if trainer[name] != engine[name])
    if cfg.cluster.backend == "in_process" and (name := next(differ, None)):
        raise UserError(
            f"policy.megatron_cfg.env_vars.{name}={trainer[name]} and policy.generation.vllm_cfg.env_vars.{name}="
            f"{engine[name]}: trainer and engine are one process; set them alike, or cluster.backend=ray"
        )


def check_no_secret(key: str, variables: Mapping[str, Any]) -> None:
    """Raise UserError for an environment variable that looks like a secret; `key` names their block."""
    if secret := next((name for name, value in variables.items() if looks_secret(str(name), str(value))), None):
        raise UserError(
            f"{key}.{secret} looks like a secret, which config.yaml, trackers and a job's script would show: remove "
            f"it, and set {secret} in the environment of the whole run"
        )


def check_tracker(tracking_uri: str | None) -> None:
    """Raise UserError for a password in MLflow's address."""
    if tracking_uri and has_password(tracking_uri):
        raise UserError(
            "logger.mlflow.tracking_uri holds a password, which config.yaml and a job's script would show: set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment instead"
        )


def _check_algorithm(cfg: Config) -> None:
    resolve_correction(cfg.loss_fn, cfg.nemo_fp8rl.correction)
    check_gates(cfg.nemo_fp8rl.gates, cfg.nemo_fp8rl.sharpness.period)
    grpo, shaping = cfg.grpo, cfg.grpo.reward_shaping
    if cfg.loss_fn.use_kl_in_reward and grpo.adv_estimator.name != "reinforce_plus_plus":
        raise UserError(
            "loss_fn.use_kl_in_reward=true needs grpo.adv_estimator.name=reinforce_plus_plus: other estimators give a "
            "sample one advantage, not one a token"
        )
    if cfg.loss_fn.use_kl_in_reward and not cfg.loss_fn.reference_policy_kl_penalty:
        raise UserError("loss_fn.use_kl_in_reward=true needs loss_fn.reference_policy_kl_penalty above 0")
    kind = cfg.loss_fn.reference_policy_kl_type
    if cfg.loss_fn.use_kl_in_reward and kind != "k1":
        # E[k grad log pi] = grad KL for k1 alone; k2 and k3 give about a twentieth of it (arXiv 2510.01555)
        raise UserError(
            f"loss_fn.use_kl_in_reward=true with loss_fn.reference_policy_kl_type={kind} is hardly a penalty: in a "
            "reward only k1 has the KL's gradient; set it to k1, or use_kl_in_reward=false"
        )
    if cfg.loss_fn.use_kl_in_reward and (cfg.policy.generation.top_p < 1 or cfg.policy.generation.top_k):
        raise UserError(
            "loss_fn.use_kl_in_reward=true takes its KL of all tokens' probabilities, not of those that "
            "policy.generation.top_p and top_k leave: set top_p=1 and top_k=null, or use_kl_in_reward=false"
        )
    if shaping.enabled and shaping.stop_properly_penalty_coef is None:
        for name in ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length"):
            value = getattr(shaping, name)
            if value is None or not 0 < value < math.inf:
                raise UserError(f"grpo.reward_shaping.{name} must be a finite number above 0, got {value}")
        buffer, longest = shaping.overlong_buffer_length or 0, shaping.max_response_length or 0
        if buffer > longest:
            raise UserError(
                f"grpo.reward_shaping.overlong_buffer_length={buffer} must not be above "
                f"grpo.reward_shaping.max_response_length={longest}"
            )
