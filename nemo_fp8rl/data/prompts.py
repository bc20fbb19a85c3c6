"""From a recipe to prompts: files, split, verifier's name and tokens, checked before a model loads."""

from nemo_fp8rl.batch import Prompt
from nemo_fp8rl.config import Config
from nemo_fp8rl.data.jsonl import read_jsonl
from nemo_fp8rl.data.split import split_records
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.errors import UserError
from nemo_fp8rl.rewards import VERIFIERS


def load_prompts(cfg: Config, vocab_size: int) -> tuple[PromptTokenizer, list[Prompt], list[Prompt]]:
    """(tokenizer, training prompts, validation prompts). Raises UserError for anything wrong with them."""
    if cfg.data.default.env_name not in VERIFIERS:
        raise UserError(
            f"data.default.env_name={cfg.data.default.env_name!r} is no verifier; choose one of {', '.join(VERIFIERS)}"
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
    held_out = val_records[: cfg.grpo.max_val_samples]
    return tokenizer, tokenizer.prompts(train_records, vocab_size), tokenizer.prompts(held_out, vocab_size)
