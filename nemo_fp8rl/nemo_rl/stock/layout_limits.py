"""Limits on batch sizes and parallel layout that NeMo RL's own workers assert, most of them after they have started.

Checking them here costs no GPU time. Free of torch, for `doctor`. Sources: `Policy`
(https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/models/policy/lm_policy.py), the trainer's setup
(nemo_rl/models/megatron/setup.py), `setup` (nemo_rl/algorithms/grpo.py) and `shard_by_batch_size`
(nemo_rl/distributed/batched_data_dict.py). v0.7.0 has the same limits, without the fused log-probs.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_fp8rl.nemo_rl.recipe.gpu_division import divide_gpus
from nemo_fp8rl.nemo_rl.recipe.keys import at

MEGATRON_CFG = "policy.megatron_cfg"
PACKING, DYNAMIC = "policy.sequence_packing.enabled", "policy.dynamic_batching.enabled"
ON_POLICY = "loss_fn.force_on_policy_ratio"
UNCHECKED = "NRL_IGNORE_TP_ACCURACY_CHECK"
"""Environment variable of the driver: NeMo RL's scripts set it for some recipes, and force_on_policy_ratio sets it."""


def why_layout_unsupported(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each reason why NeMo RL cannot train with the parallel layout of the resolved recipe."""
    packing, dynamic = at(values, PACKING, False), at(values, DYNAMIC, False)
    pipeline = at(values, f"{MEGATRON_CFG}.pipeline_model_parallel_size", 1)
    context = at(values, f"{MEGATRON_CFG}.context_parallel_size", 1)
    if dynamic and pipeline > 1:
        yield (
            f"{DYNAMIC}=true is for one pipeline stage in NeMo RL's trainer, got {pipeline}: set it to false, or "
            f"{MEGATRON_CFG}.pipeline_model_parallel_size=1"
        )
    if dynamic and packing:
        yield f"{DYNAMIC} and {PACKING} exclude each other in NeMo RL's trainer: set one of them to false"
    yield from _budgets(values, {"sequence_packing": packing, "dynamic_batching": dynamic})
    if (context or 1) > 1 and not packing:
        yield (
            f"{MEGATRON_CFG}.context_parallel_size={context} needs {PACKING}=true in NeMo RL's trainer: set that, or "
            "context_parallel_size=1"
        )
    if at(values, f"{MEGATRON_CFG}.use_fused_linear_logprobs", False):
        unsupported = f"{MEGATRON_CFG}.use_fused_linear_logprobs=true does not support"
        if packing:
            yield f"{unsupported} packed sequences: set it, or {PACKING}, to false"
        top_k, top_p = (at(values, f"policy.generation.{name}", None) for name in ("top_k", "top_p"))
        if (top_k or 0) > 0 or top_p not in (None, 1):
            yield (
                f"{unsupported} top-k or top-p: set it to false, or policy.generation.top_k=null and "
                "policy.generation.top_p=1.0"
            )
    if (chunk := at(values, "policy.logprob_chunk_size", None)) and not at(
        values, f"{MEGATRON_CFG}.defer_fp32_logits", False
    ):
        yield (
            f"policy.logprob_chunk_size={chunk} needs {MEGATRON_CFG}.defer_fp32_logits=true in NeMo RL's trainer: set "
            "that, or logprob_chunk_size=null"
        )
    yield from _why_ratio_unsupported(values)


def _budgets(values: Mapping[str, Any], enabled: Mapping[str, bool]) -> Iterator[str]:
    """Yield a sentence for each microbatch that has no room for a padded sequence of full length.

    Source: NeMo RL's packing/algorithms.py
    """
    longest = at(values, "policy.max_total_sequence_length", 0)
    padded = -(-longest // (multiple := at(values, "policy.make_sequence_length_divisible_by", 1) or 1)) * multiple
    for block in (block for block, is_enabled in enabled.items() if is_enabled):
        for key in (f"policy.{block}.{name}" for name in ("train_mb_tokens", "logprob_mb_tokens")):
            if (tokens := at(values, key, None)) is not None and tokens < padded:
                padding = f", padded to {padded}" if padded > longest else ""
                yield f"{key}={tokens} holds no sequence of policy.max_total_sequence_length={longest} tokens{padding}"


def why_batch_indivisible(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each reason why the samples of a step do not divide into equal batches.

    They are divided into optimizer steps, data-parallel replicas and microbatches. values: the resolved recipe.
    """
    dimensions = ("tensor_model", "pipeline_model", "context")
    sizes = (at(values, f"{MEGATRON_CFG}.{dimension}_parallel_size", 1) for dimension in dimensions)
    any_size = at(values, PACKING, False) or at(values, DYNAMIC, False)
    yield from why_sizes_indivisible(
        at(values, "grpo.num_prompts_per_step", 1) * at(values, "grpo.num_generations_per_prompt", 1),
        values["policy"]["train_global_batch_size"],
        max(1, divide_gpus(values).trainer // math.prod(size or 1 for size in sizes)),
        None if any_size else values["policy"]["train_micro_batch_size"],
        None if any_size else at(values, "policy.logprob_batch_size", None),
    )


def why_sizes_indivisible(
    samples: int, batch: int, replicas: int, micro: int | None, logprob: int | None = None
) -> Iterator[str]:
    """Do the work of `why_batch_indivisible` on plain numbers.

    samples:   samples of a step
    batch:     samples of an optimizer step
    replicas:  data-parallel replicas of the model
    micro:     samples of a training microbatch, None if its size is not fixed
    logprob:   samples of a log-prob microbatch, None if its size is not fixed
    """
    if samples % batch:
        yield (
            f"policy.train_global_batch_size={batch} does not divide the {samples} samples of a step "
            "(grpo.num_prompts_per_step x grpo.num_generations_per_prompt)"
        )
    if batch % replicas:
        yield f"policy.train_global_batch_size={batch} is no multiple of the {replicas} data-parallel replicas"
    elif micro and batch // replicas % micro:
        yield (
            f"policy.train_micro_batch_size={micro} does not divide the {batch // replicas} samples of a replica "
            f"(policy.train_global_batch_size={batch} over {replicas})"
        )
    elif logprob and samples // replicas % logprob:
        yield f"policy.logprob_batch_size={logprob} does not divide the {samples // replicas} samples of a replica"


def _why_ratio_unsupported(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what NeMo RL asserts for the ratio of new to old log-probs: batches of two sizes round differently."""
    step = at(values, "grpo.num_prompts_per_step", 1) * at(values, "grpo.num_generations_per_prompt", 1)
    if at(values, ON_POLICY, False):
        if (batch := at(values, "policy.train_global_batch_size", step)) != step:
            yield (
                f"{ON_POLICY}=true is for one optimizer step a batch of {step}: set policy.train_global_batch_size="
                f"{step}, got {batch}"
            )
        return
    tensor = at(values, f"{MEGATRON_CFG}.tensor_model_parallel_size", 1)
    train = at(values, "policy.train_micro_batch_size", None)
    logprob = at(values, "policy.logprob_batch_size", train)
    if tensor >= 4 and train != logprob and not os.environ.get(UNCHECKED):
        yield (
            f"{MEGATRON_CFG}.tensor_model_parallel_size={tensor}: from 4 on NeMo RL requires equal microbatches for "
            f"log-probs and training; set policy.logprob_batch_size={train} as policy.train_micro_batch_size, got "
            f"{logprob}, or in the environment {UNCHECKED}=1"
        )
