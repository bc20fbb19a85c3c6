"""Checks that ranks, batches and lengths divide one another.

Sources: NeMo RL shards a step by data-parallel rank and global batch (`shard_by_batch_size` in
https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/distributed/batched_data_dict.py) and states the multiples of
sequence lengths (`_get_pack_sequence_parameters_for_megatron` in
https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/models/megatron/data.py; packs are padded to 128 tokens for
blockwise FP8). Transformer Engine's FP8 matmuls need multiples of 16 tokens, 8 in the forward alone
(`assert_dim_for_fp8_exec` in
https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/utils.py).
"""

from collections.abc import Iterator

from nemo_fp8rl.commands.doctor.finding import Finding
from nemo_fp8rl.commands.doctor.recipe_plan import ENGINE, TRAINER, Plan
from nemo_fp8rl.fp8 import FP8_TOKENS
from nemo_fp8rl.nemo_rl.stock.layout_limits import why_layout_unsupported, why_sizes_indivisible

TOPIC = "batches"


def check_batches(plan: Plan) -> Iterator[Finding]:
    of_nemo_rl = (
        []
        if plan.uses_package_workers
        else [*_multiples(plan), *(_error(refusal) for refusal in why_layout_unsupported(plan.values))]
    )
    found = [*_ranks(plan), *_samples(plan), *of_nemo_rl, *_lengths(plan)]
    yield from found
    if not any(finding.level == "error" for finding in found):
        steps = plan.rollouts // plan.policy["train_global_batch_size"]
        yield Finding(
            "ok",
            TOPIC,
            f"{plan.trainer_gpus} trainer GPUs = TP {plan.tensor} x PP {plan.pipeline} x CP {plan.context} x DP "
            f"{plan.data}; {plan.rollouts} samples = {steps} optimizer step{'s' * (steps > 1)} of "
            f"{plan.policy['train_global_batch_size']}",
        )


def _error(text: str) -> Finding:
    return Finding("error", TOPIC, text)


def _ranks(plan: Plan) -> Iterator[Finding]:
    if plan.trainer_gpus <= 0:
        yield _error(f"policy.generation.colocated.resources takes all {plan.engine_gpus} GPUs")
        return
    model = plan.tensor * plan.pipeline * plan.context
    if plan.trainer_gpus % model:
        yield _error(
            f"{plan.trainer_gpus} trainer GPUs are no multiple of {model}, {TRAINER}.tensor_model_parallel_size x "
            "pipeline_model_parallel_size x context_parallel_size"
        )
    experts = plan.expert_tensor * plan.expert * plan.pipeline
    if plan.shape.experts and plan.trainer_gpus % experts:
        yield _error(
            f"{plan.trainer_gpus} trainer GPUs are no multiple of {experts}, {TRAINER}.expert_tensor_parallel_size x "
            "expert_model_parallel_size x pipeline_model_parallel_size"
        )
    if plan.shape.experts and plan.shape.experts % plan.expert:
        yield _error(f"{TRAINER}.expert_model_parallel_size={plan.expert} does not divide {plan.shape.experts} experts")
    if not plan.shape.experts and plan.expert > 1:
        yield _error(f"{TRAINER}.expert_model_parallel_size={plan.expert}: the model has no experts; set it to 1")
    if plan.shape.experts and plan.tensor > 1 and not plan.sequence_parallel:
        yield _error(f"{TRAINER}.tensor_model_parallel_size={plan.tensor} with experts needs sequence_parallel=true")
    if sum(len(stage) for stage in plan.stages) != plan.shape.layers:
        yield _error(
            f"{TRAINER}.pipeline_model_parallel_size={plan.pipeline} does not share {plan.shape.layers} layers "
            "equally; set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
        )
    engine = plan.engine_tensor * plan.engine_pipeline
    if plan.engine_gpus % engine:
        yield _error(
            f"{plan.engine_gpus} engine GPUs are no multiple of {engine}, {ENGINE}.tensor_parallel_size x "
            "pipeline_parallel_size"
        )
    if plan.engine_expert > 1 and plan.engine_expert % plan.engine_tensor:
        yield _error(
            f"{ENGINE}.expert_parallel_size={plan.engine_expert} must be a multiple of tensor_parallel_size="
            f"{plan.engine_tensor}"
        )
    if not plan.uses_package_workers:
        yield from _engines_of_nemo_rl(plan)


def _engines_of_nemo_rl(plan: Plan) -> Iterator[Finding]:
    """Yield findings on the assertions and assumptions of NeMo RL's VllmGeneration."""
    asynchronous = plan.vllm.get("async_engine")
    if plan.engine_pipeline > 1 and not asynchronous:
        yield _error(f"{ENGINE}.pipeline_parallel_size={plan.engine_pipeline} needs {ENGINE}.async_engine=true")
    if plan.engine_expert in (1, plan.engine_tensor):
        return
    if asynchronous:
        yield _error(
            f"{ENGINE}.expert_parallel_size={plan.engine_expert} with async_engine=true must be tensor_parallel_size="
            f"{plan.engine_tensor}"
        )
    together = plan.engine_expert * plan.engine_pipeline
    if plan.engine_gpus % together:
        yield _error(
            f"{plan.engine_gpus} engine GPUs are no multiple of {together}, among which {ENGINE}.expert_parallel_size="
            f"{plan.engine_expert} spreads the experts"
        )


def _samples(plan: Plan) -> Iterator[Finding]:
    micro = None if plan.packing or plan.dynamic else plan.policy["train_micro_batch_size"]
    batch = plan.policy["train_global_batch_size"]
    logprob = None if micro is None or plan.uses_package_workers else plan.policy.get("logprob_batch_size")
    yield from map(_error, why_sizes_indivisible(plan.rollouts, batch, plan.data, micro, logprob))


def _multiples(plan: Plan) -> Iterator[Finding]:
    """Yield findings on the multiples of tokens to which NeMo RL's trainer pads; the package's pads as it needs."""
    multiples = {"make_sequence_length_divisible_by": plan.policy.get("make_sequence_length_divisible_by") or 1}
    if plan.dynamic:  # a microbatch is rounded up to it, at most to the length of the batch, which the other key rounds
        multiples["dynamic_batching.sequence_length_round"] = plan.dynamic["sequence_length_round"]
    parts = plan.tensor if plan.sequence_parallel else 1
    needed, tokens = (2 * plan.context if plan.context > 1 else 1) * parts, FP8_TOKENS * plan.context * parts
    for key, multiple in multiples.items():
        if multiple % needed:
            yield _error(
                f"policy.{key}={multiple} must be a multiple of {needed} (twice context_parallel_size, times "
                "tensor_model_parallel_size under sequence_parallel)"
            )
        elif plan.quantizes_training and not plan.packing and multiple % tokens:
            yield _error(
                f"policy.{key}={multiple} must be a multiple of {tokens}: FP8 matmuls need multiples of {FP8_TOKENS} "
                "tokens on each rank; or enable policy.sequence_packing, which pads packs to 128"
            )


def _lengths(plan: Plan) -> Iterator[Finding]:
    model_length = plan.vllm.get("max_model_len") or plan.longest
    if model_length > plan.longest:
        yield _error(
            f"{ENGINE}.max_model_len={model_length} is above policy.max_total_sequence_length={plan.longest}, the "
            "trainer's limit; lower it"
        )
    elif model_length < plan.longest:
        yield Finding(
            "warn",
            TOPIC,
            f"{ENGINE}.max_model_len={model_length} cuts answers off below policy.max_total_sequence_length="
            f"{plan.longest}",
        )
    if plan.longest > plan.shape.max_positions:
        yield Finding(
            "warn",
            TOPIC,
            f"policy.max_total_sequence_length={plan.longest} is above the {plan.shape.max_positions} positions of "
            "the model",
        )
