"""The supervised warm-up: GRPO needs a policy that answers some prompts correctly, or all advantages are 0."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.batch import Completion, collate
from nemo_fp8rl.common.atomic_files import check_output, new_folder
from nemo_fp8rl.common.display import Display
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.data.order import PromptOrder
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.hf.adapters import KEY
from nemo_fp8rl.hf.hub import pin_commits
from nemo_fp8rl.hf.model_config import check_context, read_hf_config
from nemo_fp8rl.policy.rank_group import MegatronPolicy, deaths_as_user_errors
from nemo_fp8rl.run.signals import stop_on_signals
from nemo_fp8rl.run.stop_flag import StopFlag


def sft(cfg: Config, output: Path) -> bool:
    """Train on the answers of the data and write an HF checkpoint; a step takes policy.train_global_batch_size prompts.

    output:   the folder of the checkpoint
    Returns:  False if the training was interrupted; nothing is written then
    Raises:   UserError if `output` exists, or if a prompt with its answer does not fit the model
    """
    check_output(output)
    if cfg.policy.megatron_cfg.peft.enabled:
        raise UserError(f"{KEY}.enabled=true: sft writes a whole checkpoint; set it to false")
    cfg = _plain_sampling(pin_commits(cfg))
    hf = read_hf_config(cfg.policy.model_name)
    check_context(hf, cfg.policy.max_total_sequence_length)
    loaded = load_prompts(cfg, hf.vocab_size)
    tokenizer, prompts = loaded.tokenizer, loaded.train
    if missing := [prompt for prompt in prompts if not prompt.answer]:
        raise UserError(f"{missing[0].place}: there is no answer of text, and sft trains on answers; write one")
    answers = [Completion(tuple(tokenizer.tokenize_answer(p.answer)), (), "stop", 0) for p in prompts]
    longest = max(len(p.token_ids) + len(a.token_ids) for p, a in zip(prompts, answers, strict=True))
    if longest > cfg.policy.max_total_sequence_length:
        raise UserError(
            f"data.train.data_path: a prompt with its answer has {longest} tokens, above "
            f"policy.max_total_sequence_length={cfg.policy.max_total_sequence_length}; raise it"
        )
    tokenizer.check_vocabulary(answers, hf.vocab_size)
    order = PromptOrder(len(prompts), cfg.policy.train_global_batch_size, cfg.sft.seed)
    with deaths_as_user_errors(), ExitStack() as stack:
        policy = MegatronPolicy(cfg)
        stack.callback(policy.shutdown)
        with Display("warm-up", cfg.sft.max_num_steps) as display, stop_on_signals(StopFlag()) as stop:
            display.say(loaded.notes[0])
            for step in range(1, cfg.sft.max_num_steps + 1):
                chosen = order.indices(step)
                batch = collate([prompts[i] for i in chosen], [answers[i] for i in chosen], tokenizer.pad_token_id)
                metrics = policy.train_step(batch, NllLoss())
                if step % 10 == 0 or step == cfg.sft.max_num_steps:
                    display.show_step(
                        step, {"loss": f"{metrics['loss']:.3f}", "grad_norm": f"{metrics['grad_norm']:.2f}"}
                    )
                if stop.is_set:
                    display.say(f"stopped after step {step}; nothing was written")
                    return False
        with new_folder(output) as folder:
            policy.save(folder, optimizer=False)
            for path in (folder / "weights").iterdir():
                path.rename(folder / path.name)
            (folder / "weights").rmdir()
    return True


def _plain_sampling(cfg: Config) -> Config:
    """Return the recipe without a reference policy and with plain sampling.

    The loss is that of the model's unchanged distribution, without temperature, top_p and top_k.
    """
    generation = replace(cfg.policy.generation, temperature=1.0, top_p=1.0, top_k=None)
    loss_fn = replace(cfg.loss_fn, reference_policy_kl_penalty=0.0)
    return replace(cfg, policy=replace(cfg.policy, generation=generation), loss_fn=loss_fn)
