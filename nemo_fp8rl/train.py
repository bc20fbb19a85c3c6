"""The loop: prompts -> generation -> rewards -> advantages -> loss -> optimizer step -> refit, one call a stage."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nemo_fp8rl.algorithms.advantages import group_advantages
from nemo_fp8rl.algorithms.loss import GrpoLoss
from nemo_fp8rl.algorithms.mismatch import mismatch_metrics
from nemo_fp8rl.batch import Completion, Prompt, TrainBatch, collate, num_rows, rows
from nemo_fp8rl.config import Config
from nemo_fp8rl.data import PromptOrder, read_jsonl, split_records
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.display import Display
from nemo_fp8rl.errors import UserError
from nemo_fp8rl.generation.base import Generation, Sampling
from nemo_fp8rl.generation.vllm import VllmGeneration
from nemo_fp8rl.interrupt import GracefulStop
from nemo_fp8rl.policy.base import Policy
from nemo_fp8rl.policy.hf_config import read_hf_config
from nemo_fp8rl.policy.megatron import MegatronPolicy
from nemo_fp8rl.refit.bridge import RefitBridge
from nemo_fp8rl.rewards import VERIFIERS
from nemo_fp8rl.rundir import RunDirectory


@dataclass
class Stage:
    """The parts of a run, built once."""

    cfg: Config
    tokenizer: PromptTokenizer
    train_prompts: list[Prompt]
    val_prompts: list[Prompt]
    policy: Policy
    generation: Generation
    bridge: RefitBridge
    sampling: Sampling


def train(cfg: Config, resume: bool = False) -> bool:
    """Run GRPO to grpo.max_num_steps. Returns False when it was interrupted (and can be resumed)."""
    loss = GrpoLoss(cfg.loss_fn)
    tokenizer, train_prompts, val_prompts = load_prompts(cfg)
    with RunDirectory(cfg, resume) as run, GracefulStop() as stop:
        display = Display(cfg.nemo_fp8rl.flow, cfg.grpo.max_num_steps, run.done)
        policy = MegatronPolicy(cfg)
        run.load_checkpoint(policy)
        generation = VllmGeneration(cfg)
        bridge = RefitBridge(policy, generation, first_version=run.done)
        sampling = _sampling(cfg, tokenizer)
        stage = Stage(cfg, tokenizer, train_prompts, val_prompts, policy, generation, bridge, sampling)
        order = PromptOrder(len(train_prompts), cfg.grpo.num_prompts_per_step, cfg.grpo.seed)
        saved = run.done
        try:
            with display:
                first_refit = bridge.refit()
                if run.done == 0:
                    display.say(f"{len(train_prompts)} prompts, {len(val_prompts)} held out, run in {run.path}")
                    if cfg.grpo.val_at_start:
                        start = first_refit.metrics() | validate(stage)
                        run.log(0, start)
                        display.say(f"validation accuracy at start {start['validation/accuracy']:.3f}")
                for step in range(run.done + 1, cfg.grpo.max_num_steps + 1):
                    metrics = train_step(stage, loss, step, [train_prompts[i] for i in order.indices(step)])
                    if _validates(cfg, step):
                        metrics |= validate(stage)
                    run.log(step, metrics)
                    display.step(step, _shown(metrics))
                    last = step == cfg.grpo.max_num_steps or stop.requested
                    if cfg.checkpointing.enabled and (last or step % cfg.checkpointing.save_period == 0):
                        run.save_checkpoint(step, policy)
                        saved = step
                    if stop.requested and step < cfg.grpo.max_num_steps:
                        display.say(f"stopped after step {step}, checkpoint of step {saved}: --resume continues it")
                        return False
        finally:
            generation.shutdown()
            policy.shutdown()
    return True


def train_step(stage: Stage, loss: GrpoLoss, step: int, prompts: Sequence[Prompt]) -> dict[str, float]:
    """One round of the loop; its metrics, under NeMo RL's names."""
    cfg, clock = stage.cfg, Stopwatch()
    begin = time.perf_counter()
    with clock("generate"):
        seeds = [sample_seed(cfg.grpo.seed, step, prompt) for prompt in prompts]
        groups = stage.generation.generate([p.token_ids for p in prompts], seeds, stage.sampling)
    completions = [completion for group in groups for completion in group]
    stale = {c.policy_version for c in completions} - {stage.bridge.version}
    assert not stale, f"completions of versions {stale}, the trainer is at {stage.bridge.version}"

    asked = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
    with clock("reward"):
        rewards = score(stage, asked, completions)
    batch = collate(asked, completions, stage.tokenizer.pad_token_id)
    with clock("logprob"):
        batch["prev_logprobs"] = stage.policy.logprobs(batch)
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
        trained = optimize(stage.policy, batch, loss, cfg.policy.train_global_batch_size)
    refit = stage.bridge.refit()

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


def validate(stage: Stage) -> dict[str, float]:
    """Accuracy on the held-out prompts, one answer each at policy.generation.val_temperature."""
    clock, prompts = Stopwatch(), stage.val_prompts
    generation_cfg = stage.cfg.policy.generation
    sampling = Sampling(
        1, generation_cfg.max_new_tokens, generation_cfg.val_temperature, stage.sampling.stop_token_ids, logprobs=False
    )
    with clock("validation"):
        seeds = [sample_seed(stage.cfg.grpo.seed, 0, prompt) for prompt in prompts]
        groups = stage.generation.generate([p.token_ids for p in prompts], seeds, sampling)
        rewards = score(stage, prompts, [group[0] for group in groups])
    return {"validation/accuracy": float(rewards.mean())} | clock.metrics()


def score(stage: Stage, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> torch.Tensor:
    """float32 [B] rewards in 0..1."""
    verifier = VERIFIERS[stage.cfg.data.default.env_name]
    texts = [stage.tokenizer.decode(completion.token_ids) for completion in completions]
    return torch.tensor([verifier(text, prompt.answer) for text, prompt in zip(texts, prompts, strict=True)])


def load_prompts(cfg: Config) -> tuple[PromptTokenizer, list[Prompt], list[Prompt]]:
    """(tokenizer, training prompts, validation prompts); what is wrong with them is said before a model loads."""
    if cfg.data.default.env_name not in VERIFIERS:
        raise UserError(
            f"data.default.env_name={cfg.data.default.env_name!r} is no verifier; choose one of {', '.join(VERIFIERS)}"
        )
    hf = read_hf_config(cfg.policy.model_name)
    if cfg.policy.max_total_sequence_length > hf.max_position_embeddings:
        raise UserError(
            f"policy.max_total_sequence_length={cfg.policy.max_total_sequence_length} is above the model's "
            f"max_position_embeddings={hf.max_position_embeddings}; lower it"
        )
    validation = cfg.data.validation
    train_records, val_records = split_records(
        read_jsonl(cfg.data.train.data_path),
        read_jsonl(validation.data_path, "data.validation.data_path") if validation else None,
        cfg.data.train.split_validation_size,
        cfg.data.train.seed,
    )
    if len(train_records) < cfg.grpo.num_prompts_per_step:
        raise UserError(
            f"data.train.data_path: {len(train_records)} training prompts are fewer than "
            f"grpo.num_prompts_per_step={cfg.grpo.num_prompts_per_step}; lower it or add prompts"
        )
    tokenizer = PromptTokenizer(cfg.policy)
    return tokenizer, tokenizer.prompts(train_records), tokenizer.prompts(val_records[: cfg.grpo.max_val_samples])


def sample_seed(seed: int, step: int, prompt: Prompt) -> int:
    """The engine's seed for a prompt at a step: the same in every process, engine and resumed run."""
    return random.Random(f"{seed}/{step}/{prompt.index}").getrandbits(31)


class Stopwatch:
    """`with clock("train"): ...` adds to timing/train, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        return {f"timing/{name}": value for name, value in self.seconds.items()}


def _sampling(cfg: Config, tokenizer: PromptTokenizer) -> Sampling:
    generation = cfg.policy.generation
    stops = {tokenizer.eos_token_id, *read_hf_config(cfg.policy.model_name).eos_token_ids}
    return Sampling(
        cfg.grpo.num_generations_per_prompt, generation.max_new_tokens, generation.temperature, tuple(sorted(stops))
    )


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
