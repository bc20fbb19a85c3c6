"""`nemo-fp8rl sft`: supervised training on answers or on raw text, in any flow, in a run directory as `train`'s."""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nemo_fp8rl.algorithms.gates import apply_gates
from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.algorithms.metric_names import SHARPNESS
from nemo_fp8rl.algorithms.policy_update import describe_overflows
from nemo_fp8rl.batch import RolloutBatch
from nemo_fp8rl.common.atomic_files import check_output, new_folder
from nemo_fp8rl.common.display import Display
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.machine import describe_processors
from nemo_fp8rl.common.stopwatch import Stopwatch
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.data.examples import Example, collate_examples
from nemo_fp8rl.data.order import PromptOrder
from nemo_fp8rl.data.supervised import ExampleSets, load_examples
from nemo_fp8rl.hf.hub import pin_commits
from nemo_fp8rl.hf.model_config import check_context, read_hf_config
from nemo_fp8rl.policy.interface import Policy
from nemo_fp8rl.policy.model_digests import model_digests
from nemo_fp8rl.policy.rank_group import MegatronPolicy, deaths_as_user_errors
from nemo_fp8rl.policy.sharpness import sharpness_metrics
from nemo_fp8rl.run.directory import RunDirectory
from nemo_fp8rl.run.pod_stop import stop_on_pod_request
from nemo_fp8rl.run.resume import recorded_date, recorded_recipe
from nemo_fp8rl.run.signals import stop_on_signals
from nemo_fp8rl.run.step_end import end_step, save_if_refused
from nemo_fp8rl.run.stop_flag import StopFlag


@dataclass(frozen=True)
class LoopParts:
    """The objects that every step uses."""

    cfg: Config
    examples: ExampleSets
    policy: Policy
    run: RunDirectory
    display: Display


def sft(
    cfg: Config,
    output: Path | None = None,
    resume: bool = False,
    restartable: bool = False,
    resume_hint: str = "--resume",
) -> bool:
    """Train to sft.max_num_steps or max_num_epochs; a step takes policy.train_global_batch_size examples.

    output:   a new folder for the final HF checkpoint, or the adapters; None leaves it in the run's checkpoints
    resume, restartable:  see RunDirectory
    resume_hint:  the option or command that an interrupted run names for its continuation
    Returns:  False if the training was interrupted (and can be resumed); `output` is not written then
    Raises:   UserError if `output` exists, and for bad data; GateStop where a gate on the sharpness ends the run
    """
    _check_gates(cfg)
    if output:
        check_output(output)
    cfg = pin_commits(cfg, recorded_recipe(cfg) if resume or restartable else {})
    hf = read_hf_config(cfg.policy.model_name)
    check_context(hf, cfg.policy.max_total_sequence_length)
    examples = load_examples(cfg, hf, recorded_date(cfg) if resume or restartable else None)
    cfg = replace(cfg, sft=replace(cfg.sft, max_num_steps=examples.last_step))
    plain = _without_engine(cfg)
    digests = examples.digests() | model_digests(plain, hf)
    with (
        RunDirectory(cfg, resume, restartable, digests, examples.date, "sft") as run,
        Display("sft", max(run.last_step, run.completed_steps), run.completed_steps) as display,
        deaths_as_user_errors(),
        ExitStack() as stack,
    ):
        if run.has_all_steps:
            display.say(f"{run.path} has its {run.completed_steps} steps; raise sft.max_num_steps or epochs for more")
            if output:
                _copy_weights(run.checkpoints / f"step_{run.completed_steps}/policy", output)
            return True
        if run.restart_notice:
            display.say(run.restart_notice)
        policy = MegatronPolicy(plain)
        stack.callback(policy.shutdown)
        run.load_checkpoint(policy)
        stop = stack.enter_context(stop_on_pod_request(StopFlag()))
        stack.enter_context(stop_on_signals(stop))  # after Ray has started, which sets signal handlers of its own
        trainer = policy.describe()
        kernels = ", ".join(sorted(trainer.kernels)) or "none in FP8"
        run.add_choices({"trainer_kernels": kernels, "processors": describe_processors(trainer.instruction_sets, ())})
        display.say(f"{len(examples.train)} examples, {len(examples.validation)} held out, run in {run.path}")
        for note in examples.notes:
            display.say(note)
        parts = LoopParts(plain, examples, policy, run, display)
        if not _run_steps(parts, stop, resume_hint):
            return False
        if output:
            _save_weights(policy, output)
    return True


def _run_steps(parts: LoopParts, stop: StopFlag, resume_hint: str) -> bool:
    """Take the remaining steps; return False when the run was stopped."""
    cfg, examples, policy, run = parts.cfg, parts.examples, parts.policy, parts.run
    order = PromptOrder(len(examples.train), cfg.policy.train_global_batch_size, cfg.sft.seed)
    if not run.completed_steps and cfg.sft.val_at_start:
        run.log(0, _validate(parts))
    for step in range(run.completed_steps + 1, run.last_step + 1):
        start_time, clock = time.perf_counter(), Stopwatch(parts.display.show_phase)
        batch = collate_examples([examples.train[i] for i in order.indices(step)], examples.tokenizer.pad_token_id)
        sharpness = _sharpness_before(parts, step, batch, clock)
        with save_if_refused(run, policy, step):
            for sentence in apply_gates(cfg.nemo_fp8rl.gates, sharpness)[1]:
                parts.display.say(f"step {step}: {sentence}")
            with clock("train"):
                trained = policy.train_step(batch, NllLoss())
            if sentence := describe_overflows([trained]):
                parts.display.say(f"step {step}: {sentence}")
        metrics = {f"train/{name}": value for name, value in (trained | sharpness).items()} | clock.metrics()
        metrics["train/epoch"] = step * batch.num_rows / len(examples.train)
        metrics["train/num_tokens"] = float(batch.token_mask[:, 1:].sum())
        metrics["performance/train_tokens_per_sec"] = float(batch.input_lengths.sum()) / clock.seconds["train"]
        if _is_validation_step(cfg, step):
            metrics |= _validate(parts)
        metrics["timing/total_step_time"] = time.perf_counter() - start_time
        run.log(step, metrics)
        if not end_step(run, policy, parts.display, stop, step, _figures(metrics), resume_hint):
            return False
    return True


def _check_gates(cfg: Config) -> None:
    for i, gate in enumerate(cfg.nemo_fp8rl.gates):
        if gate.metric in SHARPNESS and gate.action == "skip_step":
            raise UserError(
                f"nemo_fp8rl.gates[{i}].action=skip_step: sft takes every step, so a gate on {gate.metric} can warn or "
                "stop; set it to one of these"
            )


def _sharpness_before(parts: LoopParts, step: int, batch: RolloutBatch, clock: Stopwatch) -> dict[str, float]:
    """Return the sharpness metrics of a step's batch before the step; empty where the step does not measure them."""
    period = parts.cfg.nemo_fp8rl.sharpness.period
    if not period or step % period:
        return {}
    with clock("sharpness"):
        return sharpness_metrics(parts.policy.logprobs_and_sharpness(batch)[1], batch.token_mask)


def _validate(parts: LoopParts) -> dict[str, float]:
    """Return validation/loss: the mean negative log-likelihood of held-out tokens with a loss."""
    clock, total, tokens = Stopwatch(parts.display.show_phase), 0.0, 0.0
    with clock("validation"):
        for batch in _held_out_batches(parts):
            mask, logprobs = batch.token_mask[:, 1:], parts.policy.logprobs(batch)[:, 1:]
            total -= float(torch.where(mask > 0, logprobs, 0.0).double().sum())
            tokens += float(mask.sum())
    return {"validation/loss": total / tokens} | clock.metrics()


def _held_out_batches(parts: LoopParts) -> Iterator[RolloutBatch]:
    sft, replicas, pad = parts.cfg.sft, parts.cfg.data_parallel_size, parts.examples.tokenizer.pad_token_id
    size, examples = sft.val_global_batch_size, parts.examples.validation
    for start in range(0, len(examples), size)[: sft.val_batches or None]:
        part = examples[start : start + size]
        # replicas have equal numbers of rows, because those that share experts run their microbatches together
        yield collate_examples([*part, *[_without_loss(part[0])] * (-len(part) % replicas)], pad)


def _without_loss(example: Example) -> Example:
    return replace(example, loss_mask=torch.zeros_like(example.loss_mask))


def _is_validation_step(cfg: Config, step: int) -> bool:
    is_periodic = cfg.sft.val_period > 0 and step % cfg.sft.val_period == 0
    return is_periodic or (cfg.sft.val_at_end and step == cfg.sft.max_num_steps)


def _figures(metrics: dict[str, float]) -> dict[str, str]:
    figures = {"loss": f"{metrics['train/loss']:.3f}", "grad_norm": f"{metrics['train/grad_norm']:.2f}"}
    if "validation/loss" in metrics:
        figures["held-out loss"] = f"{metrics['validation/loss']:.3f}"
    tokens = f"{metrics['performance/train_tokens_per_sec']:,.0f}"
    return figures | {"tokens/s": tokens, "step": f"{metrics['timing/total_step_time']:.2f} s"}


def _save_weights(policy: Policy, output: Path) -> None:
    with new_folder(output) as folder:
        policy.save(folder, optimizer=False)
        for part in ("weights", "adapter"):
            if (folder / part).is_dir():
                _move_up(folder / part)


def _copy_weights(checkpoint: Path, output: Path) -> None:
    part = next(checkpoint / name for name in ("weights", "adapter") if (checkpoint / name).is_dir())
    with new_folder(output) as folder:
        shutil.copytree(part, folder, dirs_exist_ok=True)


def _move_up(folder: Path) -> None:
    for path in folder.iterdir():
        path.rename(folder.parent / path.name)
    folder.rmdir()


def _without_engine(cfg: Config) -> Config:
    """Return the recipe for a trainer alone: no reference policy, no KV cache, no noise, one seed, plain sampling.

    The loss is that of the model's unchanged distribution, without temperature, top_p and top_k. A token sees its whole
    sequence: an example may have several answers, or none, so a window has no place to start.
    """
    generation = cfg.policy.generation
    vllm_cfg = replace(generation.vllm_cfg, kv_cache_dtype="auto", kv_window=None)
    generation = replace(generation, temperature=1.0, top_p=1.0, top_k=None, vllm_cfg=vllm_cfg)
    return replace(
        cfg,
        policy=replace(cfg.policy, generation=generation),
        loss_fn=replace(cfg.loss_fn, reference_policy_kl_penalty=0.0),
        grpo=replace(cfg.grpo, seed=cfg.sft.seed),  # of random roundings and of dropout
        nemo_fp8rl=replace(cfg.nemo_fp8rl, noise=replace(cfg.nemo_fp8rl.noise, enabled=False)),
    )
