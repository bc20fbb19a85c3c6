"""The loop: prompts -> generation -> rewards -> advantages -> loss -> optimizer step -> refit, one call a stage."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from nemo_fp8rl.algorithms.advantages import group_advantages
from nemo_fp8rl.algorithms.loss import GrpoLoss
from nemo_fp8rl.algorithms.mismatch import mismatch_metrics
from nemo_fp8rl.batch import Completion, Prompt, TrainBatch, collate, num_rows, rows
from nemo_fp8rl.config import Config
from nemo_fp8rl.data import PromptOrder
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.display import Display
from nemo_fp8rl.generation.base import Generation, Sampling
from nemo_fp8rl.generation.vllm import VllmGeneration
from nemo_fp8rl.hf.config import check_context, read_hf_config
from nemo_fp8rl.interrupt import GracefulStop
from nemo_fp8rl.policy.base import Policy
from nemo_fp8rl.policy.megatron import MegatronPolicy
from nemo_fp8rl.refit.bridge import RefitBridge
from nemo_fp8rl.rewards import VERIFIERS
from nemo_fp8rl.rundir import RunDirectory
from nemo_fp8rl.timing import Stopwatch


@dataclass(frozen=True)
class Parts:
    """What a run consists of, built once."""

    cfg: Config
    tokenizer: PromptTokenizer
    val_prompts: list[Prompt]
    policy: Policy
    generation: Generation
    bridge: RefitBridge
    sampling: Sampling


def train(cfg: Config, resume: bool = False) -> bool:
    """Run GRPO to grpo.max_num_steps. Returns False when it was interrupted (and can be resumed)."""
    loss = GrpoLoss(cfg.loss_fn)
    hf = read_hf_config(cfg.policy.model_name)
    check_context(hf, cfg.policy.max_total_sequence_length)
    tokenizer, train_prompts, val_prompts = load_prompts(cfg, hf.vocab_size)
    order = PromptOrder(len(train_prompts), cfg.grpo.num_prompts_per_step, cfg.grpo.seed)
    sampling = Sampling(
        num_generations=cfg.grpo.num_generations_per_prompt,
        max_new_tokens=cfg.policy.generation.max_new_tokens,
        temperature=cfg.policy.generation.temperature,
        stop_token_ids=tuple(sorted({tokenizer.eos_token_id, *hf.eos_token_ids})),
    )
    last = cfg.grpo.max_num_steps
    with (
        RunDirectory(cfg, resume) as run,
        Display(cfg.nemo_fp8rl.flow, last, run.done) as display,
        backends(cfg, run) as (policy, generation),
        GracefulStop() as stop,  # after Ray, which sets signal handlers of its own
    ):
        parts = Parts(
            cfg, tokenizer, val_prompts, policy, generation, RefitBridge(policy, generation, run.done), sampling
        )
        first_refit = parts.bridge.refit()
        display.say(f"{len(train_prompts)} prompts, {len(val_prompts)} held out, run in {run.path}")
        display.say(", ".join(f"{name} {value}" for name, value in run.choices.items()))
        if run.done == 0 and cfg.grpo.val_at_start:
            start = first_refit.metrics() | validate(parts)
            run.log(0, start)
            display.say(f"validation accuracy at start {start['validation/accuracy']:.3f}")
        for step in range(run.done + 1, last + 1):
            metrics = train_step(parts, loss, step, [train_prompts[i] for i in order.indices(step)])
            if _validates(cfg, step):
                metrics |= validate(parts)
            run.log(step, metrics)
            display.step(step, _shown(metrics))
            ends = step == last or stop.requested
            if cfg.checkpointing.enabled and (ends or step % cfg.checkpointing.save_period == 0):
                run.save_checkpoint(step, policy)
            if stop.requested and step < last:
                saved = f"checkpoint of step {run.done}: --resume continues it" if run.done else "no checkpoint"
                display.say(f"stopped after step {step}, {saved}")
                return False
    return True


@contextmanager
def backends(cfg: Config, run: RunDirectory) -> Iterator[tuple[Policy, Generation]]:
    """The policy, at the run's last checkpoint, and the engines; both end with the block."""
    with ExitStack() as stack:
        policy = MegatronPolicy(cfg)
        stack.callback(policy.shutdown)
        run.load_checkpoint(policy)
        generation = VllmGeneration(cfg)
        stack.callback(generation.shutdown)
        yield policy, generation


def train_step(parts: Parts, loss: GrpoLoss, step: int, prompts: Sequence[Prompt]) -> dict[str, float]:
    """One round of the loop; its metrics, under NeMo RL's names."""
    cfg, clock = parts.cfg, Stopwatch()
    begin = time.perf_counter()
    with clock("generate"):
        seeds = [sample_seed(cfg.grpo.seed, step, position) for position in range(len(prompts))]
        groups = parts.generation.generate([p.token_ids for p in prompts], seeds, parts.sampling)
    completions = [completion for group in groups for completion in group]
    assert all(len(c.logprobs) == len(c.token_ids) for c in completions), "a completion lacks log-probs"
    stale = {c.policy_version for c in completions} - {parts.bridge.version}
    assert not stale, f"completions of versions {stale}, the trainer is at {parts.bridge.version}"

    asked = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
    with clock("reward"):
        rewards = score(parts, asked, completions)
    batch = collate(asked, completions, parts.tokenizer.pad_token_id)
    with clock("logprob"):
        batch["prev_logprobs"] = parts.policy.logprobs(batch)
    group_ids = torch.arange(len(prompts)).repeat_interleave(cfg.grpo.num_generations_per_prompt)
    advantages = group_advantages(
        rewards,
        group_ids,
        normalize_rewards=cfg.grpo.normalize_rewards,
        use_leave_one_out_baseline=cfg.grpo.use_leave_one_out_baseline,
    )
    batch["advantages"] = advantages[:, None] * batch["token_mask"]
    mismatch = mismatch_metrics(batch["prev_logprobs"], batch["generation_logprobs"], batch["token_mask"])

    with clock("train"):
        trained = optimize(parts.policy, batch, loss, cfg.policy.train_global_batch_size)
    refit = parts.bridge.refit()

    tokens = float(batch["token_mask"].sum())
    train_metrics = trained | mismatch
    train_metrics |= {
        "reward": float(rewards.mean()),
        "mean_gen_tokens_per_sample": tokens / len(completions),
        "truncation_rate": sum(c.finish_reason == "length" for c in completions) / len(completions),
        "global_valid_toks": tokens,
    }
    metrics = {f"train/{name}": value for name, value in train_metrics.items()}
    metrics |= clock.metrics() | refit.metrics()
    return metrics | {"timing/total_step_time": time.perf_counter() - begin}


def optimize(policy: Policy, batch: TrainBatch, loss: GrpoLoss, global_batch_size: int) -> dict[str, float]:
    """One optimizer step for every `global_batch_size` samples; metrics are means over the steps."""
    steps = [
        policy.train_step(rows(batch, start, start + global_batch_size), loss)
        for start in range(0, num_rows(batch), global_batch_size)
    ]
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}


def validate(parts: Parts) -> dict[str, float]:
    """Accuracy on the held-out prompts, one answer each at policy.generation.val_temperature."""
    clock, prompts = Stopwatch(), parts.val_prompts
    sampling = replace(
        parts.sampling, num_generations=1, temperature=parts.cfg.policy.generation.val_temperature, logprobs=False
    )
    with clock("validation"):
        seeds = [sample_seed(parts.cfg.grpo.seed, 0, position) for position in range(len(prompts))]
        groups = parts.generation.generate([p.token_ids for p in prompts], seeds, sampling)
        rewards = score(parts, prompts, [group[0] for group in groups])
    return {"validation/accuracy": float(rewards.mean())} | clock.metrics()


def score(parts: Parts, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> torch.Tensor:
    """float32 [B] rewards in 0..1."""
    verifier = VERIFIERS[parts.cfg.data.default.env_name]
    texts = [parts.tokenizer.decode(completion.token_ids) for completion in completions]
    return torch.tensor([verifier(text, prompt.answer) for text, prompt in zip(texts, prompts, strict=True)])


def sample_seed(seed: int, step: int, position: int) -> int:
    """The engine's seed for a prompt of a step: the same in every process and resumed run.

    By position, not by prompt: a step across an epoch's border may hold a prompt twice, with other samples.
    """
    return random.Random(f"{seed}/{step}/{position}").getrandbits(31)


def _validates(cfg: Config, step: int) -> bool:
    periodic = cfg.grpo.val_period > 0 and step % cfg.grpo.val_period == 0
    return periodic or (cfg.grpo.val_at_end and step == cfg.grpo.max_num_steps)


def _shown(metrics: dict[str, float]) -> dict[str, str]:
    shown = {
        "reward": f"{metrics['train/reward']:.3f}",
        "mismatch": f"{metrics['train/token_mult_prob_error']:.5f}",
        "refit": f"{metrics['timing/refit'] * 1e3:.0f} ms",
        "step": f"{metrics['timing/total_step_time']:.2f} s",
    }
    if "validation/accuracy" in metrics:
        shown["accuracy"] = f"{metrics['validation/accuracy']:.3f}"
    return shown
