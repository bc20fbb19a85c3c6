"""Convert a NeMo RL recipe to this package's `Config`, for trainer and engines.

`keys` maps each key to its meaning here, `precision` reads the keys that choose a number format. The blocks of the loop
(grpo, data, env, logger, checkpointing) remain NeMo RL's; `recipe_for_train` converts them for `nemo-fp8rl train`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import complete
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.config.yaml_tree import register_resolvers
from nemo_fp8rl.generation.engine_checks import check_engine
from nemo_fp8rl.hf.hub import pin_commits
from nemo_fp8rl.hf.model_config import check_context, read_hf_config
from nemo_fp8rl.nemo_rl.recipe.gpu_division import divide_gpus, is_colocated
from nemo_fp8rl.nemo_rl.recipe.keys import COPIED_KEYS, KV_WINDOW, MOVED_KEYS, at, check_keys
from nemo_fp8rl.nemo_rl.recipe.precision import bf16_layer_keys, read_precision
from nemo_fp8rl.nemo_rl.recipe.recipe_checks import check_for_package_workers, check_setup, loss_keys
from nemo_fp8rl.nemo_rl.recipe.value_types import normalize, require
from nemo_fp8rl.policy.weights.layout import check_layout

MEGATRON_DEFAULTS: dict[str, dict[str, Any]] = {
    "policy.megatron_cfg.optimizer": {"weight_decay": 0.01, "adam_beta2": 0.999},
    "policy.megatron_cfg.scheduler": {"lr_decay_style": "linear"},
    "policy.megatron_cfg.distributed_data_parallel_config": {"grad_reduce_in_fp32": False},
}
"""Megatron's defaults, where ours differ, of keys that NeMo RL hands on to Megatron and that a recipe leaves out."""


def convert_recipe(master: Mapping[str, Any]) -> Config:
    """Convert NeMo RL's MasterConfig, given as a mapping with resolved interpolations.

    Raises: UserError, with the key, for a value that trainer or engines do not support
    """
    return pin_commits(complete_for_model(convert_keys(master)))


def convert_keys(master: Mapping[str, Any]) -> Config:
    """Convert the keys without reading the model's files."""
    master = normalize(master)
    check_keys(master)
    require(master, "policy.model_name")
    check_for_package_workers(master)
    check_setup(master)
    policy = master["policy"]
    precision = read_precision(policy)
    values: dict[str, Any] = {}
    for path, names in COPIED_KEYS.items():
        block = at(master, path, {}) or {}
        target = values
        for part in path.split("."):
            target = target.setdefault(part, {})
        target.update(MEGATRON_DEFAULTS.get(path, {}))
        target.update({name: block[name] for name in names if block.get(name) is not None})
    _fill_policy(values, policy, precision.kv_fp8)
    # The estimator's name is needed by the checks of the keys that go with reinforce_plus_plus.
    if (name := at(master, "grpo.adv_estimator.name", "grpo")) == "reinforce_plus_plus":
        values["grpo"]["adv_estimator"] = {"name": name}
    values["loss_fn"] = loss_keys(master)
    values["cluster"] = _cluster(master)
    shared = is_colocated(policy["generation"]) and values["cluster"]["backend"] == "ray"
    values["policy"]["generation"]["colocated"] = {"enabled": shared}
    values["data"] = {"train": {"data_path": "NeMo RL's"}}  # a placeholder: NeMo RL's loop reads the data
    values["nemo_fp8rl"] = precision.complete(master.get("nemo_fp8rl") or {})
    register_resolvers()  # defaults of `Config` refer to other keys
    return complete("the recipe for NeMo RL", values, values)


def complete_for_model(cfg: Config) -> Config:
    """Check the config against the model's files and add the tokens that end the model's answers."""
    hf = read_hf_config(cfg.policy.model_name)
    check_context(hf, cfg.policy.max_total_sequence_length)
    check_engine(hf, cfg)
    check_layout(hf, cfg)
    generation = cfg.policy.generation  # vLLM adds the checkpoint's end tokens itself; this package's engine does not
    stop_token_ids = tuple(sorted({*generation.stop_token_ids, *hf.eos_token_ids}))
    return replace(cfg, policy=replace(cfg.policy, generation=replace(generation, stop_token_ids=stop_token_ids)))


def _fill_policy(values: dict[str, Any], policy: Mapping[str, Any], kv_fp8: bool) -> None:
    """Fill the keys of `values["policy"]` that NeMo RL's block `policy` spells differently."""
    target, generation = values["policy"], policy["generation"]
    megatron, vllm_cfg = target["megatron_cfg"], target["generation"]["vllm_cfg"]
    scheduler, decay = policy["megatron_cfg"].get("scheduler") or {}, megatron["optimizer"].get("weight_decay")
    for key in ("start_weight_decay", "end_weight_decay"):
        if scheduler.get(key, decay) != decay:
            raise UserError(
                f"policy.megatron_cfg.scheduler.{key} must be optimizer.weight_decay={decay}, got {scheduler[key]}"
            )
    if scheduler.get("lr_decay_iters") is None:  # NeMo RL's default is the length of the run
        steps = policy["megatron_cfg"].get("train_iters", values["grpo"]["max_num_steps"])
        megatron["scheduler"]["lr_decay_iters"] = steps
    if (chunk := policy.get("logprob_chunk_size")) is not None:
        target["logprob_chunk_size"] = chunk
    megatron["offload_between_phases"] = is_colocated(generation)
    vllm_cfg["sleep_level"] = int(is_colocated(generation))  # as NeMo RL's own engines sleep
    target["generation"]["stop_token_ids"] = list(generation.get("stop_token_ids") or ())
    target["generation"]["stop_strings"] = list(generation.get("stop_strings") or ())
    vllm_cfg.update(bf16_layer_keys(policy))
    vllm_cfg["kv_cache_dtype"] = "fp8" if kv_fp8 else "auto"
    vllm_cfg["kv_window"] = at({"policy": policy}, KV_WINDOW, None)
    experts, tensor = at(generation, "vllm_cfg.expert_parallel_size", 1), vllm_cfg.get("tensor_parallel_size", 1)
    if experts not in (1, tensor):
        raise UserError(
            f"policy.generation.vllm_cfg.expert_parallel_size={experts}: the experts of an engine are spread over all "
            f"of its processes or none; set it to 1 or to tensor_parallel_size={tensor}"
        )
    vllm_cfg["expert_parallel_size"] = experts
    kwargs = generation.get("vllm_kwargs") or {}
    if num_bytes := kwargs.get("kv_cache_memory_bytes"):
        vllm_cfg["kv_cache_memory_gib"] = num_bytes / 2**30
    for key, nemo_rl_key in MOVED_KEYS.items():
        if key.startswith("policy.generation.vllm_cfg.") and (value := at({"policy": policy}, nemo_rl_key, None)):
            vllm_cfg[key.rpartition(".")[2]] = value


def _cluster(master: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block cluster: each GPU of NeMo RL's becomes a trainer rank or an engine process."""
    trainer, engines = divide_gpus(master)
    tensor = at(master, "policy.generation.vllm_cfg.tensor_parallel_size", None) or 1
    if engines % tensor:
        raise UserError(
            f"policy.generation.vllm_cfg.tensor_parallel_size={tensor} does not divide the {engines} GPUs of generation"
        )
    in_process = trainer == engines == 1 and is_colocated(master["policy"]["generation"])
    return {
        "backend": "in_process" if in_process else "ray",
        "train_ranks": trainer,
        "generation_engines": engines // tensor,
    }
