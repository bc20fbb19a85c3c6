"""Rules between keys of engines and of the turns that trainer and engines take."""

from nemo_fp8rl.algorithms.loss_config import resolve_correction
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config


def check_colocated(cfg: Config) -> None:
    key, vllm_cfg = "policy.generation.colocated.enabled=true", cfg.policy.generation.vllm_cfg
    engines, share, ranks = cfg.cluster.generation_engines, vllm_cfg.tensor_parallel_size, cfg.cluster.train_ranks
    if engines * share != ranks:
        raise UserError(
            f"{key}: cluster.generation_engines={engines} of policy.generation.vllm_cfg.tensor_parallel_size={share} "
            f"have {engines * share} processes, and each shares the GPU of one of cluster.train_ranks={ranks}"
        )
    if not (vllm_cfg.sleep_level and cfg.policy.megatron_cfg.offload_between_phases):
        raise UserError(
            f"{key}: trainer and engines use one memory in turns: set policy.generation.vllm_cfg.sleep_level to 1 or "
            "2 and policy.megatron_cfg.offload_between_phases=true"
        )


def check_elasticity(cfg: Config) -> None:
    """Raise UserError for numbers of engines that contradict each other, or that this recipe's engines cannot have."""
    cluster = cfg.cluster
    least, first, most = cluster.least_engines, cluster.generation_engines, cluster.most_engines
    if not least <= first <= most:
        raise UserError(
            f"cluster.generation_engines={first} is not between cluster.min_generation_engines={least} and "
            f"cluster.max_generation_engines={most}: change one of them"
        )
    if least == most:
        return
    keys = f"cluster.min_generation_engines={least} and cluster.max_generation_engines={most}"
    fixes = {
        "cluster.backend=ray": cluster.backend == "in_process",
        "policy.generation.colocated.enabled=false": cfg.policy.generation.colocated.enabled,
        "policy.generation.vllm_cfg.sleep_level=0": cfg.policy.generation.vllm_cfg.sleep_level > 0,
    }
    if due := [fix for fix, is_due in fixes.items() if is_due]:
        raise UserError(
            f"{keys}: engines that join and leave need processes, and memory, of their own: set {' and '.join(due)}, "
            "or leave both keys out"
        )


def check_updates_in_flight(cfg: Config) -> None:
    key, vllm_cfg = "grpo.async_grpo.in_flight_weight_updates=true", cfg.policy.generation.vllm_cfg
    if not vllm_cfg.async_engine:
        raise UserError(f"{key} needs an engine that pauses: set policy.generation.vllm_cfg.async_engine=true")
    if cfg.policy.generation.colocated.enabled or vllm_cfg.sleep_level:
        raise UserError(
            f"{key}: engines generate while the trainer trains, and cannot give it their memory: set "
            "policy.generation.colocated.enabled=false and policy.generation.vllm_cfg.sleep_level=0"
        )
    if cfg.fp8_kv_cache and not cfg.grpo.async_grpo.recompute_kv_cache_after_weight_updates:
        raise UserError(
            f"{key} with policy.generation.vllm_cfg.kv_cache_dtype=fp8: a refit brings other scales, by which the keys "
            "of answers in progress would be read wrongly; set "
            "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true, or kv_cache_dtype=auto"
        )
    if cfg.policy.router_replay.enabled:
        raise UserError(
            f"{key} with policy.router_replay.enabled=true: routers of several versions choose the experts of one "
            "answer; set one of them to false"
        )


def check_asynchronous(cfg: Config) -> None:
    """Raise UserError where our own loop cannot generate ahead with this recipe (`rollout.sources`)."""
    if not cfg.grpo.async_grpo.enabled:
        return
    key, generation = "grpo.async_grpo.enabled=true", cfg.policy.generation
    if not generation.vllm_cfg.async_engine:
        raise UserError(
            f"{key} needs an engine that answers while the trainer works: set policy.generation.vllm_cfg."
            "async_engine=true"
        )
    turns = {
        "policy.generation.colocated.enabled=false": generation.colocated.enabled,
        "policy.generation.vllm_cfg.sleep_level=0": generation.vllm_cfg.sleep_level > 0,
        "policy.megatron_cfg.offload_between_phases=false": cfg.policy.megatron_cfg.offload_between_phases,
    }
    if fixes := [fix for fix, is_due in turns.items() if is_due]:
        raise UserError(f"{key}: trainer and engines work at once and need their memory: set {' and '.join(fixes)}")
    correction = resolve_correction(cfg.loss_fn, cfg.nemo_fp8rl.correction)
    if correction.weight == "none" and not correction.bypass:
        raise UserError(
            f"{key} trains on answers of older weights, which needs importance weights: set "
            "nemo_fp8rl.correction.preset=tis, or loss_fn.use_importance_sampling_correction=true"
        )
