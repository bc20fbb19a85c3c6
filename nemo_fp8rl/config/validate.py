"""Ranges, and values that contradict each other: what the types of a recipe cannot say. Every message names the key."""

import math
from collections.abc import Mapping
from typing import Any

from nemo_fp8rl.algorithms.gates import check_gates
from nemo_fp8rl.algorithms.loss_config import resolved_correction
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.secret_variables import has_password, looks_secret
from nemo_fp8rl.config.schema import Config

ABOVE_0 = (
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "grpo.max_num_steps",
    "grpo.max_val_samples",
    "grpo.dynamic_sampling_max_gen_batches",
    "sft.max_num_steps",
    "checkpointing.save_period",
    "checkpointing.keep_top_k",
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    "policy.logprob_batch_size",
    "policy.logprob_chunk_size",
    "policy.max_total_sequence_length",
    "policy.dynamic_batching.train_mb_tokens",
    "policy.dynamic_batching.logprob_mb_tokens",
    "policy.dynamic_batching.sequence_length_round",
    "policy.sequence_packing.train_mb_tokens",
    "policy.sequence_packing.logprob_mb_tokens",
    "policy.generation.max_new_tokens",
    "policy.generation.temperature",
    "policy.generation.top_p",
    "policy.generation.top_k",
    "policy.generation.vllm_cfg.max_model_len",
    "policy.generation.vllm_cfg.max_num_seqs",
    "policy.generation.vllm_cfg.max_num_batched_tokens",
    "policy.generation.vllm_cfg.tensor_parallel_size",
    "policy.generation.vllm_cfg.kv_cache_memory_gib",
    "policy.generation.vllm_cfg.gpu_memory_utilization",
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage",
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage",
    "policy.megatron_cfg.context_parallel_size",
    "policy.megatron_cfg.expert_model_parallel_size",
    "policy.megatron_cfg.expert_tensor_parallel_size",
    "policy.megatron_cfg.optimizer.lr",
    "policy.megatron_cfg.optimizer.adam_eps",
    "policy.megatron_cfg.optimizer.clip_grad",
    "policy.megatron_cfg.scheduler.lr_decay_iters",
    "cluster.train_ranks",
    "cluster.generation_engines",
    "cluster.engine_timeout_seconds",
    "nemo_fp8rl.refit.bucket_bytes",
)
AT_LEAST_0 = (
    "grpo.val_period",
    "grpo.seed",
    "sft.seed",
    "policy.generation.val_temperature",
    "cluster.max_engine_restarts",
    "policy.generation.vllm_cfg.num_first_layers_in_bf16",
    "policy.generation.vllm_cfg.num_last_layers_in_bf16",
    "policy.megatron_cfg.optimizer.min_lr",
    "policy.megatron_cfg.optimizer.weight_decay",
    "policy.megatron_cfg.optimizer.adam_beta1",
    "policy.megatron_cfg.optimizer.adam_beta2",
    "policy.megatron_cfg.scheduler.lr_warmup_iters",
    "policy.megatron_cfg.scheduler.lr_warmup_init",
)
BELOW = {
    "grpo.seed": 2**32,  # the engine hands it to numpy
    "policy.megatron_cfg.optimizer.adam_beta1": 1,
    "policy.megatron_cfg.optimizer.adam_beta2": 1,
    "cluster.engine_timeout_seconds": 1e6,  # poll(2) counts milliseconds in 32 bits
}
AT_MOST = {
    "policy.generation.vllm_cfg.gpu_memory_utilization": 1,
    "policy.generation.top_p": 1,
    "policy.generation.temperature": 2,  # vLLM's limits
    "policy.generation.val_temperature": 2,
}
LOWEST_TEMPERATURE = 0.01
"""vLLM samples at this one where it is asked for a lower."""


def lookup(cfg: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def check(cfg: Config) -> None:
    """Raise UserError when values are out of range or contradict each other: what types alone cannot say."""
    _check_ranges(cfg)
    if cfg.grpo.num_generations_per_prompt < 2:
        raise UserError("grpo.num_generations_per_prompt must be 2 or more: one sample has no group to compare with")
    _check_parallel_sizes(cfg)
    _check_batch_sizes(cfg)
    _check_schedule(cfg)
    _check_sampling(cfg)
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
            "FP8 weights are quantized from the bfloat16 parameter"
        )
    if cfg.nemo_fp8rl.fp8_param and not cfg.nemo_fp8rl.trainer_fp8:
        raise UserError(
            f"nemo_fp8rl.fp8_param=true is of the trainer's FP8 layers, and nemo_fp8rl.flow={cfg.nemo_fp8rl.flow} has "
            "none: set it to false, or flow=fp8_e2e"
        )
    if policy.precision == "float32" and cfg.fp8_kv_cache:
        raise UserError(
            "policy.generation.vllm_cfg.kv_cache_dtype=fp8 needs policy.precision=bfloat16, got float32: "
            "set kv_cache_dtype=auto"
        )
    if cfg.nemo_fp8rl.kv == "rollout" and not cfg.fp8_kv_cache:
        raise UserError(
            "nemo_fp8rl.kv=rollout says what the trainer makes of an FP8 KV cache, and there is none: set "
            "policy.generation.vllm_cfg.kv_cache_dtype=fp8, or leave nemo_fp8rl.kv out"
        )
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
        _check_colocated(cfg)
    _check_environment(cfg)
    check_tracker(cfg.logger.mlflow.tracking_uri)
    _check_folders(cfg)


def _check_folders(cfg: Config) -> None:
    """Empty text is the working directory, and below it the root of the disk."""
    for key, value in (
        ("logger.log_dir", cfg.logger.log_dir),
        ("checkpointing.checkpoint_dir", cfg.checkpointing.checkpoint_dir),
    ):
        if not value.strip():
            raise UserError(f"{key}={value!r}: name a folder")


def _check_environment(cfg: Config) -> None:
    trainer, engine = cfg.policy.megatron_cfg.env_vars or {}, cfg.policy.generation.vllm_cfg.env_vars or {}
    for block, variables in (("megatron_cfg", trainer), ("generation.vllm_cfg", engine)):
        if "CUDA_VISIBLE_DEVICES" in variables:
            raise UserError(
                f"policy.{block}.env_vars.CUDA_VISIBLE_DEVICES: which GPUs a process has is said by Ray; remove it, or "
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
    """Raise UserError for an environment variable that looks like a secret. key: where they stand."""
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


def _check_colocated(cfg: Config) -> None:
    here, vllm_cfg = "policy.generation.colocated.enabled=true", cfg.policy.generation.vllm_cfg
    engines, share, ranks = cfg.cluster.generation_engines, vllm_cfg.tensor_parallel_size, cfg.cluster.train_ranks
    if engines * share != ranks:
        raise UserError(
            f"{here}: cluster.generation_engines={engines} of policy.generation.vllm_cfg.tensor_parallel_size={share} "
            f"have {engines * share} processes, and each shares the GPU of one of cluster.train_ranks={ranks}"
        )
    if not (vllm_cfg.sleep_level and cfg.policy.megatron_cfg.offload_between_phases):
        raise UserError(
            f"{here}: trainer and engines have one memory in turns: set policy.generation.vllm_cfg.sleep_level to 1 or "
            "2 and policy.megatron_cfg.offload_between_phases=true"
        )


def _check_algorithm(cfg: Config) -> None:
    resolved_correction(cfg.loss_fn, cfg.nemo_fp8rl.correction)  # what the two say of each other
    check_gates(cfg.nemo_fp8rl.gates)
    if cfg.loss_fn.force_on_policy_ratio and cfg.policy.train_global_batch_size != cfg.rollout_batch_size:
        raise UserError(
            f"loss_fn.force_on_policy_ratio=true is for one update a rollout: set policy.train_global_batch_size="
            f"{cfg.rollout_batch_size}, all samples of a step"
        )
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
    coefficient = shaping.stop_properly_penalty_coef
    if coefficient is not None and not 0 <= coefficient <= 1:
        raise UserError(f"grpo.reward_shaping.stop_properly_penalty_coef={coefficient} must lie in 0..1")
    if shaping.enabled and coefficient is None:
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


def _check_ranges(cfg: Config) -> None:
    """Comparisons are written so that NaN fails them."""
    for key in (*ABOVE_0, *AT_LEAST_0):
        value = lookup(cfg, key)
        if value is None:
            continue
        if key in ABOVE_0 and not 0 < value < math.inf:
            raise UserError(f"{key} must be a finite number above 0, got {value}")
        if key in AT_LEAST_0 and not 0 <= value < math.inf:
            raise UserError(f"{key} must be a finite number, 0 or more, got {value}")
        if key in BELOW and not value < BELOW[key]:
            raise UserError(f"{key} must be below {BELOW[key]}, got {value}")
        if key in AT_MOST and not value <= AT_MOST[key]:
            raise UserError(f"{key} must be at most {AT_MOST[key]}, got {value}")


def _check_schedule(cfg: Config) -> None:
    optimizer, scheduler = cfg.policy.megatron_cfg.optimizer, cfg.policy.megatron_cfg.scheduler
    here = "policy.megatron_cfg"
    if scheduler.lr_warmup_iters >= scheduler.lr_decay_iters:
        raise UserError(
            f"{here}.scheduler.lr_warmup_iters={scheduler.lr_warmup_iters} must be below "
            f"{here}.scheduler.lr_decay_iters={scheduler.lr_decay_iters}"
        )
    for key, value in (
        ("optimizer.min_lr", optimizer.min_lr),
        ("scheduler.lr_warmup_init", scheduler.lr_warmup_init),
    ):
        if value > optimizer.lr:
            raise UserError(f"{here}.{key}={value} must not be above {here}.optimizer.lr={optimizer.lr}")


def _check_sampling(cfg: Config) -> None:
    generation = cfg.policy.generation
    for key, others in (("temperature", ""), ("val_temperature", ", or 0 for the likeliest tokens")):
        if 0 < getattr(generation, key) < LOWEST_TEMPERATURE:
            raise UserError(
                f"policy.generation.{key}={getattr(generation, key)}: vLLM does not sample below {LOWEST_TEMPERATURE}; "
                f"set that or more{others}"
            )
    if "" in generation.stop_strings:
        raise UserError("policy.generation.stop_strings has an empty text, which ends every answer at once; remove it")


def _check_parallel_sizes(cfg: Config) -> None:
    """What the model's sizes do not decide; the rest is `policy.layout`'s."""
    parallel, ranks, here = cfg.policy.megatron_cfg, cfg.cluster.train_ranks, "policy.megatron_cfg"
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size
    if ranks % (tensor * pipeline * context):
        raise UserError(
            f"cluster.train_ranks={ranks} is not a multiple of {here}.tensor_model_parallel_size={tensor} times "
            f"{here}.pipeline_model_parallel_size={pipeline} times {here}.context_parallel_size={context}"
        )
    if parallel.sequence_parallel and tensor == 1:
        raise UserError(f"{here}.sequence_parallel=true needs {here}.tensor_model_parallel_size above 1")


def _check_batch_sizes(cfg: Config) -> None:
    policy, ranks = cfg.policy, cfg.data_parallel_size
    if cfg.rollout_batch_size % policy.train_global_batch_size:
        raise UserError(
            f"policy.train_global_batch_size={policy.train_global_batch_size} does not divide the "
            f"{cfg.rollout_batch_size} samples of a step (grpo.num_prompts_per_step * grpo.num_generations_per_prompt)"
        )
    dynamic, packing = policy.dynamic_batching, policy.sequence_packing
    if dynamic.enabled and packing.enabled:
        raise UserError("policy.dynamic_batching and policy.sequence_packing are both enabled; enable one of them")
    budgets = [f"dynamic_batching.{name}" for name in ("train_mb_tokens", "logprob_mb_tokens") if dynamic.enabled]
    budgets += [f"sequence_packing.{name}" for name in ("train_mb_tokens", "logprob_mb_tokens") if packing.enabled]
    for key in budgets:
        if lookup(policy, key) < policy.max_total_sequence_length:
            raise UserError(
                f"policy.{key}={lookup(policy, key)} holds no sample of "
                f"policy.max_total_sequence_length={policy.max_total_sequence_length} tokens; raise it"
            )
    by_tokens = dynamic.enabled or packing.enabled
    if by_tokens and policy.train_global_batch_size % ranks:
        raise UserError(
            f"{_replicas(cfg)} does not divide policy.train_global_batch_size={policy.train_global_batch_size}"
        )
    if not by_tokens and policy.train_global_batch_size % (policy.train_micro_batch_size * ranks):
        raise UserError(
            f"policy.train_micro_batch_size={policy.train_micro_batch_size} times {_replicas(cfg)} does not "
            f"divide policy.train_global_batch_size={policy.train_global_batch_size}"
        )


def _replicas(cfg: Config) -> str:
    """The number of data-parallel ranks, by the keys that make it."""
    if cfg.data_parallel_size == cfg.cluster.train_ranks:
        return f"cluster.train_ranks={cfg.cluster.train_ranks}"
    return f"the {cfg.data_parallel_size} replicas of the model on cluster.train_ranks={cfg.cluster.train_ranks}"
