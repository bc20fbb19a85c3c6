"""Load a recipe's prompts: files, split, tokens and the verifier's name are checked before a model loads."""

import hashlib
from typing import NamedTuple

from nemo_fp8rl.batch import Prompt
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.data.jsonl import read_jsonl
from nemo_fp8rl.data.rewards import check_verifier
from nemo_fp8rl.data.split import split_records
from nemo_fp8rl.data.tokenizer import PromptTokenizer


class PromptSets(NamedTuple):
    """The prompts of a run and their tokenizer.

    num_too_long:  how many prompts were dropped because no token of an answer would fit behind them
    """

    tokenizer: PromptTokenizer
    train: list[Prompt]
    validation: list[Prompt]
    num_too_long: int

    def digests(self) -> dict[str, str]:
        """Return digests, 16 hex digits each, of questions, answers and tokens, in order.

        A resumed run must have the same digests.
        """
        contents = {
            "training": [(p.text, p.answer) for p in self.train],
            "validation": [(p.text, p.answer) for p in self.validation],
            "tokens": [p.token_ids for p in (*self.train, *self.validation)],
        }
        return {kind: hashlib.sha256(repr(content).encode()).hexdigest()[:16] for kind, content in contents.items()}


def load_prompts(cfg: Config, vocab_size: int) -> PromptSets:
    """Load the recipe's prompts. Raises UserError for invalid prompts, and when too few remain."""
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
        tokenizer.pad_token_id = 0  # the model embeds padding, too, though nothing reads the result
    held_out = val_records[: cfg.grpo.max_val_samples]
    train, val = tokenizer.tokenize(train_records, vocab_size), tokenizer.tokenize(held_out, vocab_size)
    num_too_long = len(train_records) + len(held_out) - len(train) - len(val)
    dropped = f" after {num_too_long} were dropped that policy.generation.vllm_cfg.max_model_len has no room for"
    if len(train) < cfg.grpo.num_prompts_per_step:
        raise UserError(
            f"data.train.data_path: {len(train)} training prompts{dropped * (num_too_long > 0)} are fewer than "
            f"grpo.num_prompts_per_step={cfg.grpo.num_prompts_per_step}; lower it or add prompts"
        )
    if not val:
        raise UserError(f"no validation prompt is left{dropped}; raise it or add shorter prompts")
    return PromptSets(tokenizer, train, val, num_too_long)
