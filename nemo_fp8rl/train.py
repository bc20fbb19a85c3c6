"""The loop: prompts -> generation -> rewards -> advantages -> loss -> optimizer step -> refit, one call per stage.

With grpo.async_grpo the prompts of later steps are answered meanwhile (`rollout.sources`); all else is the same.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from nemo_fp8rl.algorithms.importance_bins import Bin
from nemo_fp8rl.algorithms.loss import GrpoLoss
from nemo_fp8rl.algorithms.mismatch import log_weight_histogram
from nemo_fp8rl.algorithms.policy_update import (
    average_steps,
    check_versions,
    describe_empty_steps,
    describe_overflows,
    judge_and_correct,
    train_on_batch,
)
from nemo_fp8rl.assemble import backends, build_bridge, describe_alignments, explained_by, refit_or_stop
from nemo_fp8rl.batch import Prompt, ScoredBatch, collate, collate_prompts
from nemo_fp8rl.common.display import Display
from nemo_fp8rl.common.errors import StepRefused
from nemo_fp8rl.common.machine import describe_processors
from nemo_fp8rl.common.stopwatch import Stopwatch
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.config.validate.generation import check_asynchronous
from nemo_fp8rl.data.order import PromptOrder
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.generation.elastic_engines import ElasticEngines
from nemo_fp8rl.generation.engine_checks import check_for_driver
from nemo_fp8rl.generation.interface import Generation, Sampling, sample_seed
from nemo_fp8rl.hf.hub import pin_commits
from nemo_fp8rl.hf.model_config import check_context, read_hf_config
from nemo_fp8rl.policy.interface import Policy
from nemo_fp8rl.policy.model_digests import model_digests
from nemo_fp8rl.policy.sharpness import sharpness_metrics
from nemo_fp8rl.policy.weights.norm_noise import describe_small_noise, sigma_of
from nemo_fp8rl.refit.bridge import RefitBridge
from nemo_fp8rl.rollout.collect import (
    PromptsOfRound,
    Rollout,
    collect_rollout,
    compute_advantages,
    pick_further_prompts,
    score_answers,
    signal_metrics,
)
from nemo_fp8rl.rollout.fault_counts import FaultCounts
from nemo_fp8rl.rollout.sources import Collect, RolloutsAhead, RolloutsInTurn, RolloutSource
from nemo_fp8rl.rollout.step_metrics import step_metrics
from nemo_fp8rl.rollout.trajectories import Trajectories, sample_trajectories
from nemo_fp8rl.run.directory import RunDirectory
from nemo_fp8rl.run.learning_signal import LearningWatch
from nemo_fp8rl.run.pod_stop import stop_on_pod_request
from nemo_fp8rl.run.resume import recorded_date, recorded_recipe
from nemo_fp8rl.run.samples import pick_samples
from nemo_fp8rl.run.signals import stop_on_signals
from nemo_fp8rl.run.step_end import end_step, save_if_refused
from nemo_fp8rl.run.step_log import Sample
from nemo_fp8rl.run.stop_flag import StopFlag
from nemo_fp8rl.run.summary import format_figures


@dataclass(frozen=True)
class LoopParts:
    """The objects that every step uses, built once per run.

    explained:         the mismatch above which a step is alarming
    explained_newest:  the same of answers from the trainer's version alone
    on_phase:          called with the name of each phase that begins, for the display
    """

    cfg: Config
    tokenizer: PromptTokenizer
    val_prompts: list[Prompt]
    policy: Policy
    generation: Generation
    bridge: RefitBridge
    engines: ElasticEngines
    rollouts: RolloutSource
    sampling: Sampling
    loss: GrpoLoss
    explained: float
    explained_newest: float
    on_phase: Callable[[str], None]


@dataclass(frozen=True)
class StepOutcome:
    """The results of a step.

    metrics:      under NeMo RL's names
    notes:        sentences for the user
    alarm:        a sentence that must not be missed, or ""
    log_weights:  histogram of the importance weights
    samples:      a few answers
    """

    metrics: dict[str, float]
    notes: list[str]
    alarm: str
    log_weights: list[Bin]
    samples: list[Sample]


def train(cfg: Config, resume: bool = False, restartable: bool = False, resume_hint: str = "--resume") -> bool:
    """Run GRPO to grpo.max_num_steps; return False when the run was interrupted (and can be resumed).

    resume, restartable:  see RunDirectory
    resume_hint:          the option or command that an interrupted run names for its continuation
    """
    check_asynchronous(cfg)
    loss = GrpoLoss(cfg.loss_fn, cfg.nemo_fp8rl.correction)
    cfg = pin_commits(cfg, recorded_recipe(cfg) if resume or restartable else {})
    hf = read_hf_config(cfg.policy.model_name)
    check_context(hf, cfg.policy.max_total_sequence_length)
    check_for_driver(hf, cfg)
    prompts = load_prompts(cfg, hf.vocab_size, recorded_date(cfg) if resume or restartable else None)
    tokenizer, train_prompts, val_prompts, num_too_long = prompts[:4]
    cfg, limit = prompts.limit_steps(cfg)
    order = PromptOrder(len(train_prompts), cfg.grpo.num_prompts_per_step, cfg.grpo.seed)
    sampling = Sampling.of_recipe(cfg.policy.generation, cfg.grpo.num_generations_per_prompt)
    eos = {tokenizer.eos_token_id, *hf.eos_token_ids, *sampling.stop_token_ids}
    sampling = replace(sampling, stop_token_ids=tuple(sorted(eos)))

    def prompts_of_step(step: int) -> PromptsOfRound:
        first = [train_prompts[i] for i in order.indices(step)]
        return lambda round_: (
            pick_further_prompts(train_prompts, first, cfg.grpo.seed, step, round_) if round_ else first
        )

    with (
        RunDirectory(cfg, resume, restartable, prompts.digests() | model_digests(cfg, hf), prompts.date) as run,
        Display(cfg.nemo_fp8rl.flow, max(cfg.grpo.max_num_steps, run.completed_steps), run.completed_steps) as display,
        ExitStack() as stack,
    ):
        if run.has_all_steps:
            steps = run.completed_steps
            above = f" above {steps}" if limit == "grpo.max_num_steps" else ""
            display.say(f"{run.path} has its {steps} steps; raise {limit}{above} for more")
            return True
        if run.restart_notice:
            display.say(run.restart_notice)
        policy, generation = stack.enter_context(backends(cfg, run.load_checkpoint))
        stop = stack.enter_context(stop_on_pod_request(StopFlag()))
        stack.enter_context(stop_on_signals(stop))  # after Ray has started, which sets signal handlers of its own
        bridge = build_bridge(cfg, policy, generation, first_version=run.completed_steps)
        run.add_choices(_machine_choices(cfg, policy, generation, bridge))
        precision = hf.family.experts, policy.describe().is_aligned
        explained = explained_by(cfg, *precision, cfg.grpo.async_grpo.enabled), explained_by(cfg, *precision)
        collect = partial(collect_rollout, cfg, generation, tokenizer, sampling)
        rollouts = _rollout_source(cfg, collect, prompts_of_step, display.show_phase)
        engines = stack.enter_context(ElasticEngines(generation, bridge))
        built = policy, generation, bridge, engines, rollouts, sampling, loss, *explained
        parts = LoopParts(cfg, tokenizer, val_prompts, *built, display.show_phase)
        faults = FaultCounts(generation, display.say)
        display.show_phase("first refit")
        if cfg.fp8_kv_cache and not run.completed_steps:
            policy.calibrate_kv(collate_prompts(prompts_of_step(1)(0), tokenizer.pad_token_id))
        generation.prepare_for_generation()
        first_refit = refit_or_stop(bridge)
        display.say(f"{len(train_prompts)} prompts, {len(val_prompts)} held out, run in {run.path}")
        for note in prompts.notes:
            display.say(note)
        if num_too_long:
            display.say(f"{num_too_long} prompts dropped: no room for an answer in vllm_cfg.max_model_len")
        for notice in filter(None, (_length_notice(cfg), describe_small_noise(cfg))):
            display.say(notice)
        width = max(map(len, run.choices))
        display.say("\n".join(f"  {name:{width}}  {value}" for name, value in run.choices.items()))
        if run.completed_steps == 0 and cfg.grpo.val_at_start:
            start = first_refit.metrics() | validate(parts)
            faults.report_new("start")
            start |= faults.take_row()
            run.log(0, start)
            display.say(f"validation accuracy at start {start['validation/accuracy']:.3f}")
        return run_steps(parts, run, display, faults, stop, resume_hint)


def run_steps(
    parts: LoopParts,
    run: RunDirectory,
    display: Display,
    faults: FaultCounts,
    stop: StopFlag,
    resume_hint: str,
) -> bool:
    """Take the remaining steps, with their validations, logs and checkpoints; return False when the run was stopped."""
    cfg, policy = parts.cfg, parts.policy
    latest_metrics: dict[str, float] = {}
    earlier_rows = run.read_metrics()
    for row in earlier_rows:
        latest_metrics |= row
    watch = LearningWatch(earlier_rows, run.recipe)
    parts.rollouts.begin(run.completed_steps + 1)
    for step in range(run.completed_steps + 1, run.last_step + 1):
        for note in parts.engines.follow(run.path):
            display.say(note)
        with save_if_refused(run, policy, step):
            outcome = train_step(parts, step)
        for note in outcome.notes:
            display.say(note)
        if outcome.alarm:
            display.warn(f"step {step}: {outcome.alarm}")
        if sentence := watch.look(step, outcome.metrics):
            display.say(sentence)
        faults.report_new(f"step {step}")
        with_validation = _is_validation_step(cfg, step)
        metrics = outcome.metrics | (validate(parts) if with_validation else {})
        faults.report_new(f"step {step}")
        metrics |= faults.take_row() | parts.engines.metrics()
        if cfg.policy.generation.vllm_cfg.kv_window is not None:
            metrics |= parts.generation.take_cache_metrics()
        run.log(step, metrics, outcome.log_weights, outcome.samples if with_validation or step == 1 else None)
        latest_metrics |= metrics
        if not end_step(run, policy, display, stop, step, format_figures(latest_metrics), resume_hint):
            return False
    return True


def _rollout_source(
    cfg: Config, collect: Collect, prompts_of_step: Callable[[int], PromptsOfRound], on_phase: Callable[[str], None]
) -> RolloutSource:
    if not cfg.grpo.async_grpo.enabled:
        return RolloutsInTurn(collect, prompts_of_step)
    age, last = cfg.grpo.async_grpo.max_trajectory_age_steps, cfg.grpo.max_num_steps
    return RolloutsAhead(collect, prompts_of_step, age, last, on_phase)


def _length_notice(cfg: Config) -> str:
    """Return a sentence about answers that the context ends before max_new_tokens; "" where there are none."""
    generation = cfg.policy.generation
    length, limit = generation.vllm_cfg.max_model_len, generation.max_new_tokens
    if limit < length:
        return ""
    return (
        f"policy.generation.max_new_tokens={limit}, but a prompt and its answer have {length} tokens at most "
        "(policy.max_total_sequence_length, vllm_cfg.max_model_len): longer answers are cut off there"
    )


def _machine_choices(cfg: Config, policy: Policy, generation: Generation, bridge: RefitBridge) -> dict[str, str]:
    """Return the choices that the recipe leaves to the machines."""
    trainer, engines = policy.describe(), generation.describe()
    choices = {"refit": bridge.description, "align": describe_alignments(trainer.alignments, cfg)}
    choices["quantizer"] = ", ".join(sorted(trainer.quantizers)) or "none"
    if trainer.cache_roundings:
        choices["kv rounding"] = ", ".join(sorted(trainer.cache_roundings))
    if trainer.optimizer_states:
        choices["optimizer states"] = ", ".join(sorted(trainer.optimizer_states))
    return choices | {
        "trainer_kernels": ", ".join(sorted(trainer.kernels)) or "none in FP8",
        "engine_kernels": ", ".join(sorted(engines.kernels)),
        "processors": describe_processors(trainer.instruction_sets, engines.instruction_sets),
    }


def train_step(parts: LoopParts, step: int) -> StepOutcome:
    """Take one step of the loop. Raises StepRefused, at any of its optimizer steps."""
    cfg, clock = parts.cfg, Stopwatch(parts.on_phase)
    start_time = time.perf_counter()
    offload = cfg.policy.megatron_cfg.offload_between_phases
    memory = {"memory/offloaded_bytes": parts.policy.offload_after_refit()} if offload else {}
    try:
        rollout = parts.rollouts.take(step, clock)
    except StepRefused:  # the caller saves what is trained, in the memory that the engines give back
        parts.generation.finish_generation()
        raise
    parts.generation.finish_generation()
    completions = rollout.completions
    assert all(len(c.logprobs) == len(c.token_ids) for c in completions), "a completion lacks log-probs"
    version, ahead = parts.bridge.version, cfg.grpo.async_grpo
    check_versions(completions, version, ahead.max_trajectory_age_steps if ahead.enabled else 0)

    batch, sharpness, trajectories = score_batch(parts, rollout, step, clock)
    samples = pick_samples(trajectories.rollout, batch, parts.tokenizer)
    log_weights = log_weight_histogram(batch.prev_logprobs, batch.generation_logprobs, batch.token_mask)
    # the mismatch is of all answers with log-probs, once each, also of those that the loss leaves out
    limits = parts.explained, cfg.nemo_fp8rl.mismatch_alarm == "stop"
    newest = version, parts.explained_newest
    how = cfg.nemo_fp8rl.gates, parts.loss.correction
    rows = trajectories.train_rows
    judgement = judge_and_correct(batch, batch.token_mask, *how, *limits, *newest, sharpness, rows)
    notes = [f"step {step}: {sentence}" for sentence in judgement.warnings]
    per_rollout = cfg.policy.megatron_cfg.scheduler.per_rollout
    with clock("train"):
        if offload:
            parts.policy.prepare_for_training()
        steps, skipped = train_on_batch(
            judgement.batch,
            lambda part: parts.policy.train_step(part, parts.loss, schedules=not per_rollout),
            cfg.policy.train_global_batch_size,
            judgement.skip_update,
        )
        if per_rollout:
            parts.policy.step_schedule()
    reasons = describe_overflows(steps), "" if judgement.skip_update else describe_empty_steps(skipped)
    notes += [f"step {step}: {sentence}" for sentence in reasons if sentence]
    if judgement.skip_update:
        skipped = 1  # a gate skips the whole step
    if cfg.fp8_kv_cache:
        with clock("kv_calibration"):
            parts.policy.calibrate_kv(judgement.batch)
    if offload:
        parts.policy.offload_before_refit()
    parts.on_phase("refit")
    parts.generation.prepare_for_generation()
    refit = refit_or_stop(parts.bridge)
    parts.rollouts.begin(step + 1)

    signal = signal_metrics(cfg, parts.tokenizer, rollout)
    trained = average_steps(steps) | signal | sharpness | trajectories.metrics
    metrics = step_metrics(cfg, rollout, judgement, trained, skipped)
    if cfg.nemo_fp8rl.noise.enabled:
        metrics["noise/sigma"] = sigma_of(cfg.nemo_fp8rl.noise, version, cfg.grpo.max_num_steps)
    metrics |= clock.metrics() | refit.metrics() | memory | parts.rollouts.metrics()
    metrics["performance/generation_tokens_per_sec"] = rollout.generated_tokens / rollout.generate_seconds
    metrics["timing/total_step_time"] = time.perf_counter() - start_time
    return StepOutcome(metrics, notes, judgement.alarm, log_weights, samples)


def score_batch(
    parts: LoopParts, rollout: Rollout, step: int, clock: Stopwatch
) -> tuple[ScoredBatch, dict[str, float], Trajectories]:
    """Return the kept answers with the trainer's log-probs, rewards and advantages, the sharpness metrics, the choice.

    The metrics are empty at a step that does not measure them.
    """
    cfg, sharpness = parts.cfg, dict[str, float]()
    period = cfg.nemo_fp8rl.sharpness.period
    batch = collate(rollout.prompts, rollout.completions, parts.tokenizer.pad_token_id, cfg.grpo.async_grpo.enabled)
    if cfg.grpo.overlong_filtering:
        answered = [float(completion.finish_reason == "stop") for completion in rollout.completions]
        batch = replace(batch, sample_mask=torch.tensor(answered))
    trajectories = sample_trajectories(cfg, rollout, batch, step)
    batch, advantages = trajectories.batch, trajectories.advantages
    reference_logprobs = None
    with clock("logprob"):
        if period and step % period == 0:
            prev_logprobs, values = parts.policy.logprobs_and_sharpness(batch)
            sharpness = sharpness_metrics(values, batch.token_mask)
        else:
            prev_logprobs = parts.policy.logprobs(batch)
        if cfg.loss_fn.reference_policy_kl_penalty:
            reference_logprobs = parts.policy.reference_logprobs(batch)
    if advantages is None:
        advantages = compute_advantages(cfg, rollout, batch, prev_logprobs, reference_logprobs)
    scored = ScoredBatch(
        **vars(batch),
        rewards=trajectories.rollout.rewards,
        prev_logprobs=prev_logprobs,
        advantages=advantages,
        reference_policy_logprobs=reference_logprobs,
    )
    return scored, sharpness, trajectories


def validate(parts: LoopParts) -> dict[str, float]:
    """Return the accuracy on the held-out prompts, one answer each at policy.generation.val_temperature."""
    clock, prompts = Stopwatch(parts.on_phase), parts.val_prompts
    sampling = replace(
        parts.sampling, num_generations=1, temperature=parts.cfg.policy.generation.val_temperature, logprobs=False
    )
    error = parts.policy.weight_error() if parts.cfg.nemo_fp8rl.quantizes_rollout else {}
    if parts.cfg.policy.megatron_cfg.offload_between_phases:
        parts.policy.offload_after_refit()
    with clock("validation", len(prompts)) as on_progress:
        seeds = [sample_seed(parts.cfg.grpo.seed, 0, position) for position in range(len(prompts))]
        groups = parts.generation.generate([p.token_ids for p in prompts], seeds, sampling, on_progress)
        rewards = score_answers(parts.cfg, parts.tokenizer, prompts, [group[0] for group in groups])
    return {"validation/accuracy": float(rewards.mean())} | error | clock.metrics()


def _is_validation_step(cfg: Config, step: int) -> bool:
    periodic = cfg.grpo.val_period > 0 and step % cfg.grpo.val_period == 0
    return periodic or (cfg.grpo.val_at_end and step == cfg.grpo.max_num_steps)
