"""What NeMo RL's own workers assert of batches and layout, most of it when they are there already; no torch, so that
`doctor` may ask.

Sources: `Policy` (https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/models/policy/lm_policy.py), the trainer's set-up
(nemo_rl/models/megatron/setup.py) and `setup` (nemo_rl/algorithms/grpo.py); alike in v0.7.0, but that the fused
log-probs are main's.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_fp8rl.nemo_rl.keys import at

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
    if (context or 1) > 1 and not packing:
        yield (
            f"{TRAINER}.context_parallel_size={context} needs {PACKING}=true in NeMo RL's trainer: set that, or "
            "context_parallel_size=1"
        )
    if packing and at(values, f"{TRAINER}.use_fused_linear_logprobs", False):
        yield f"{TRAINER}.use_fused_linear_logprobs=true is not for packed sequences: set it, or {PACKING}, to false"
    if (chunk := at(values, "policy.logprob_chunk_size", None)) and not at(
        values, f"{TRAINER}.defer_fp32_logits", False
    ):
        yield (
            f"policy.logprob_chunk_size={chunk} needs {TRAINER}.defer_fp32_logits=true in NeMo RL's trainer: set that, "
            "or logprob_chunk_size=null"
        )
    yield from _ratio_refusals(values)


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
