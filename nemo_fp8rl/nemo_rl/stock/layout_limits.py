"""What NeMo RL's own workers assert of batches and layout, most of it when they are there already; no torch, so that
`doctor` may ask.

Sources: `Policy` (https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/models/policy/lm_policy.py), the trainer's set-up
(nemo_rl/models/megatron/setup.py), `setup` (nemo_rl/algorithms/grpo.py) and `shard_by_batch_size`
(nemo_rl/distributed/batched_data_dict.py); alike in v0.7.0, but that the fused log-probs are main's.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_fp8rl.nemo_rl.recipe.gpu_division import divide
from nemo_fp8rl.nemo_rl.recipe.keys import at

TRAINER = "policy.megatron_cfg"
PACKING, DYNAMIC = "policy.sequence_packing.enabled", "policy.dynamic_batching.enabled"
ON_POLICY = "loss_fn.force_on_policy_ratio"
UNCHECKED = "NRL_IGNORE_TP_ACCURACY_CHECK"
"""Variable of the driver's: NeMo RL's scripts have it for some of its recipes, and force_on_policy_ratio sets it."""


def why_no_layout(values: Mapping[str, Any]) -> Iterator[str]:
    """Why NeMo RL cannot train with the recipe's layout, a sentence each. values: the resolved recipe."""
    packing, dynamic = at(values, PACKING, False), at(values, DYNAMIC, False)
    pipeline, context = (at(values, f"{TRAINER}.{name}_parallel_size", 1) for name in ("pipeline_model", "context"))
    if dynamic and pipeline > 1:
        yield (
            f"{DYNAMIC}=true is for one pipeline stage in NeMo RL's trainer, got {pipeline}: set it to false, or "
            f"{TRAINER}.pipeline_model_parallel_size=1"
        )
    if dynamic and packing:
        yield f"{DYNAMIC} and {PACKING} exclude each other in NeMo RL's trainer: set one of them to false"
    yield from _budgets(values, {"sequence_packing": packing, "dynamic_batching": dynamic})
    if (context or 1) > 1 and not packing:
        yield (
            f"{TRAINER}.context_parallel_size={context} needs {PACKING}=true in NeMo RL's trainer: set that, or "
            "context_parallel_size=1"
        )
    if at(values, f"{TRAINER}.use_fused_linear_logprobs", False):
        here = f"{TRAINER}.use_fused_linear_logprobs=true is not for"
        if packing:
            yield f"{here} packed sequences: set it, or {PACKING}, to false"
        top_k, top_p = (at(values, f"policy.generation.{name}", None) for name in ("top_k", "top_p"))
        if (top_k or 0) > 0 or top_p not in (None, 1):
            yield (
                f"{here} top-k or top-p, of which it knows nothing: set it to false, or policy.generation.top_k=null "
                "and policy.generation.top_p=1.0"
            )
    if (chunk := at(values, "policy.logprob_chunk_size", None)) and not at(
        values, f"{TRAINER}.defer_fp32_logits", False
    ):
        yield (
            f"policy.logprob_chunk_size={chunk} needs {TRAINER}.defer_fp32_logits=true in NeMo RL's trainer: set that, "
            "or logprob_chunk_size=null"
        )
    yield from _ratio_refusals(values)


def _budgets(values: Mapping[str, Any], enabled: Mapping[str, bool]) -> Iterator[str]:
    """A sequence of full length, padded, must find room in a microbatch (packing/algorithms.py)."""
    longest = at(values, "policy.max_total_sequence_length", 0)
    padded = -(-longest // (multiple := at(values, "policy.make_sequence_length_divisible_by", 1) or 1)) * multiple
    for block in (block for block, on in enabled.items() if on):
        for key in (f"policy.{block}.{name}" for name in ("train_mb_tokens", "logprob_mb_tokens")):
            if (tokens := at(values, key, None)) is not None and tokens < padded:
                to = f", padded to {padded}" if padded > longest else ""
                yield f"{key}={tokens} holds no sequence of policy.max_total_sequence_length={longest} tokens{to}"


def why_no_shares(values: Mapping[str, Any]) -> Iterator[str]:
    """Why a step's samples cannot be shared among optimizer steps, replicas and microbatches, each in a sentence."""
    sizes = (at(values, f"{TRAINER}.{name}_parallel_size", 1) for name in ("tensor_model", "pipeline_model", "context"))
    any_size = at(values, PACKING, False) or at(values, DYNAMIC, False)
    yield from why_not_shared(
        at(values, "grpo.num_prompts_per_step", 1) * at(values, "grpo.num_generations_per_prompt", 1),
        values["policy"]["train_global_batch_size"],
        max(1, divide(values).trainer // math.prod(size or 1 for size in sizes)),
        None if any_size else values["policy"]["train_micro_batch_size"],
        None if any_size else at(values, "policy.logprob_batch_size", None),
    )


def why_not_shared(
    samples: int, batch: int, replicas: int, micro: int | None, logprob: int | None = None
) -> Iterator[str]:
    """`why_no_shares` by numbers. micro, logprob: samples of a microbatch that trains, and of one for log-probs; None
    where they are of any number.
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


def _ratio_refusals(values: Mapping[str, Any]) -> Iterator[str]:
    """What it asserts for the ratio of new and old log-probs, which batches of two sizes round otherwise."""
    step = at(values, "grpo.num_prompts_per_step", 1) * at(values, "grpo.num_generations_per_prompt", 1)
    if at(values, ON_POLICY, False):
        if (batch := at(values, "policy.train_global_batch_size", step)) != step:
            yield (
                f"{ON_POLICY}=true is for one optimizer step a batch of {step}: set policy.train_global_batch_size="
                f"{step}, got {batch}"
            )
        return
    tensor = at(values, f"{TRAINER}.tensor_model_parallel_size", 1)
    train = at(values, "policy.train_micro_batch_size", None)
    logprob = at(values, "policy.logprob_batch_size", train)
    if tensor >= 4 and train != logprob and not os.environ.get(UNCHECKED):
        yield (
            f"{TRAINER}.tensor_model_parallel_size={tensor}: from 4 on NeMo RL takes log-probs in the batches it trains"
            f" in; set policy.logprob_batch_size={train} as policy.train_micro_batch_size, got {logprob}, or in the "
            f"environment {UNCHECKED}=1"
        )
