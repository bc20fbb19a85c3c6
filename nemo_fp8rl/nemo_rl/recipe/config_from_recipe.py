"""A NeMo RL recipe as our `Config`. `keys` has what each of its keys is here, `precision` those that say what is FP8.

The loop's own blocks (grpo, data, env, logger, checkpointing) stay NeMo RL's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import completed
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.config.yaml_tree import register_resolvers
from nemo_fp8rl.generation.engine_checks import check_engine
from nemo_fp8rl.hf.hub import with_commits
from nemo_fp8rl.hf.model_config import check_context, read_hf_config
from nemo_fp8rl.nemo_rl.recipe.gpu_division import divide, is_colocated
from nemo_fp8rl.nemo_rl.recipe.keys import COPIED, at, check_keys
from nemo_fp8rl.nemo_rl.recipe.precision import read_precision
from nemo_fp8rl.nemo_rl.recipe.recipe_checks import check_set_up, check_without_set_up, loss_keys
from nemo_fp8rl.nemo_rl.recipe.value_types import require
from nemo_fp8rl.policy.weights.layout import check_layout


def from_nemo_rl(master: Mapping[str, Any]) -> Config:
    """master: NeMo RL's MasterConfig as a mapping, interpolations resolved. Raises UserError, naming the key."""
    return with_commits(for_model(of_keys(master)))


def of_keys(master: Mapping[str, Any]) -> Config:
    """What the keys alone say, without the model's files."""
    check_keys(master)
    require(master, "policy.model_name")
    check_without_set_up(master)
    check_set_up(master)
    policy = master["policy"]
    precision = read_precision(policy)
    values: dict[str, Any] = {}
    for block, names in COPIED.items():
        given = at(master, block, {}) or {}
        target = values
        for part in block.split("."):
            target = target.setdefault(part, {})
        target.update({name: given[name] for name in names if given.get(name) is not None})
    _fill_policy(values, policy, precision.kv_fp8)
    if (name := at(master, "grpo.adv_estimator.name", "grpo")) == "reinforce_plus_plus":  # for what goes with it
        values["grpo"]["adv_estimator"] = {"name": name}
    values["loss_fn"] = loss_keys(master)
    values["cluster"] = _cluster(master)
    shared = is_colocated(policy["generation"]) and values["cluster"]["backend"] == "ray"
    values["policy"]["generation"]["colocated"] = {"enabled": shared}
    values["data"] = {"train": {"data_path": "NeMo RL's"}}  # which its own loop reads
    values["nemo_fp8rl"] = {
        **(master.get("nemo_fp8rl") or {}),
        "flow": precision.flow,
        "scale_format": precision.scale_format,
        "fp8_param": precision.fp8_param,
    }
    register_resolvers()  # defaults of ours refer to other keys
    return completed("the recipe for NeMo RL", values, values)


def for_model(cfg: Config) -> Config:
    """The config checked against the model, with the tokens that end the model's answers."""
    hf = read_hf_config(cfg.policy.model_name)
    check_context(hf, cfg.policy.max_total_sequence_length)
    check_engine(hf, cfg)
    check_layout(hf, cfg)
    generation = cfg.policy.generation  # vLLM would add what the checkpoint ends with; our engine is told
    stop = tuple(sorted({*generation.stop_token_ids, *hf.eos_token_ids}))
    return replace(cfg, policy=replace(cfg.policy, generation=replace(generation, stop_token_ids=stop)))


def _fill_policy(values: dict[str, Any], policy: Mapping[str, Any], kv_fp8: bool) -> None:
    """What NeMo RL says in other words."""
    ours, generation = values["policy"], policy["generation"]
    megatron, vllm_cfg = ours["megatron_cfg"], ours["generation"]["vllm_cfg"]
    scheduler, decay = policy["megatron_cfg"].get("scheduler") or {}, megatron["optimizer"].get("weight_decay")
    for key in ("start_weight_decay", "end_weight_decay"):
        if scheduler.get(key, decay) != decay:
            raise UserError(
                f"policy.megatron_cfg.scheduler.{key} must be optimizer.weight_decay={decay}, got {scheduler[key]}"
            )
    if scheduler.get("lr_decay_iters") is None:  # NeMo RL: the run's length
        steps = policy["megatron_cfg"].get("train_iters", values["grpo"]["max_num_steps"])
        megatron["scheduler"]["lr_decay_iters"] = steps
    if (chunk := policy.get("logprob_chunk_size")) is not None:
        ours["logprob_chunk_size"] = chunk
    megatron["offload_between_phases"] = is_colocated(generation)
    vllm_cfg["sleep_level"] = int(is_colocated(generation))  # as NeMo RL's own engines sleep
    ours["generation"]["stop_token_ids"] = list(generation.get("stop_token_ids") or ())
    ours["generation"]["stop_strings"] = list(generation.get("stop_strings") or ())
    vllm_cfg["quantization_ignored_layer_kws"] = list(vllm_cfg.get("quantization_ignored_layer_kws") or ())
    vllm_cfg["kv_cache_dtype"] = "fp8" if kv_fp8 else "auto"
    experts, tensor = at(generation, "vllm_cfg.expert_parallel_size", 1), vllm_cfg.get("tensor_parallel_size", 1)
    if experts not in (1, tensor):
        raise UserError(
            f"policy.generation.vllm_cfg.expert_parallel_size={experts}: the experts of an engine are spread over all "
            f"of its processes or none; set it to 1 or to tensor_parallel_size={tensor}"
        )
    vllm_cfg["expert_parallel_size"] = experts
    kwargs = generation.get("vllm_kwargs") or {}
    if bytes_ := kwargs.get("kv_cache_memory_bytes"):
        vllm_cfg["kv_cache_memory_gib"] = bytes_ / 2**30
    same = ("attention_backend", "max_num_seqs", "max_num_batched_tokens")
    vllm_cfg |= {key: kwargs[key] for key in same if kwargs.get(key)}


def _cluster(master: Mapping[str, Any]) -> dict[str, Any]:
    """NeMo RL's GPUs are our ranks, and the processes of our engines: on a CPU, processes."""
    trainer, engines = divide(master)
    share = at(master, "policy.generation.vllm_cfg.tensor_parallel_size", None) or 1
    if engines % share:
        raise UserError(
            f"policy.generation.vllm_cfg.tensor_parallel_size={share} does not divide the {engines} GPUs of generation"
        )
    alone = trainer == engines == 1 and is_colocated(master["policy"]["generation"])
    return {
        "backend": "in_process" if alone else "ray",
        "train_ranks": trainer,
        "generation_engines": engines // share,
    }
