"""From a recipe to prompts: files, split, verifier's name and tokens, checked before a model loads."""

import hashlib
from typing import NamedTuple

from nemo_fp8rl.batch import Prompt
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.data.jsonl import read_jsonl
from nemo_fp8rl.data.rewards import check_verifier
from nemo_fp8rl.data.split import split_records
from nemo_fp8rl.data.tokenizer import PromptTokenizer


class Prompts(NamedTuple):
    """too_long: how many of either kind were dropped, as no token of an answer would fit behind them."""

    tokenizer: PromptTokenizer
    train: list[Prompt]
    validation: list[Prompt]
    too_long: int

    def digests(self) -> dict[str, str]:
        """Digests, 16 hex digits, of what is asked and compared with, in order: a resumed run must have the same."""
        of = {
            "training": [(p.text, p.answer) for p in self.train],
            "validation": [(p.text, p.answer) for p in self.validation],
            "tokens": [p.token_ids for p in (*self.train, *self.validation)],
        }
        return {kind: hashlib.sha256(repr(what).encode()).hexdigest()[:16] for kind, what in of.items()}


def load_prompts(cfg: Config, vocab_size: int) -> Prompts:
    """The recipe's prompts. Raises UserError for anything wrong with them, and when too few are left."""
    check_verifier(cfg.data.default.env_name)
    validation = cfg.data.validation
    train_records, val_records = split_records(
        read_jsonl(cfg.data.train.data_path),
        read_jsonl(validation.data_path, "data.validation.data_path") if validation else None,
        cfg.data.train.split_validation_size,
        cfg.data.train.seed,
    )
    tokenizer = PromptTokenizer(cfg.policy)
    if tokenizer.pad_token_id >= vocab_size:
        tokenizer.pad_token_id = 0  # padding is embedded, too, though nothing reads it
    held_out = val_records[: cfg.grpo.max_val_samples]
    train, val = tokenizer.prompts(train_records, vocab_size), tokenizer.prompts(held_out, vocab_size)
    too_long = len(train_records) + len(held_out) - len(train) - len(val)
    dropped = f" after {too_long} were dropped that policy.generation.vllm_cfg.max_model_len has no room for"
    if len(train) < cfg.grpo.num_prompts_per_step:
        raise UserError(
            f"data.train.data_path: {len(train)} training prompts{dropped * (too_long > 0)} are fewer than "
            f"grpo.num_prompts_per_step={cfg.grpo.num_prompts_per_step}; lower it or add prompts"
        )
    if not val:
        raise UserError(f"no validation prompt is left{dropped}; raise it or add shorter prompts")
    return Prompts(tokenizer, train, val, too_long)
