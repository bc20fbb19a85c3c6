"""Load the examples of supervised training: conversations and prompts with answers, or documents."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.data.conversations import ConversationReader
from nemo_fp8rl.data.documents import cut_documents
from nemo_fp8rl.data.examples import Example, digest_examples
from nemo_fp8rl.data.order import count_steps
from nemo_fp8rl.data.prompts import open_tokenizer, read_split, template_notes
from nemo_fp8rl.data.records import Record
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.hf.model_config import HfConfig


class ExampleSets(NamedTuple):
    """The examples of a run and their tokenizer.

    last_step:  the steps that sft.max_num_steps and sft.max_num_epochs leave
    notes:      sentences for the user about what the model will see
    date:       the date that the chat template prints; None if it prints none
    """

    tokenizer: PromptTokenizer
    train: list[Example]
    validation: list[Example]
    last_step: int
    notes: tuple[str, ...] = ()
    date: datetime | None = None

    def digests(self) -> dict[str, str]:
        """Return the digest that a resumed run must have, too. Held-out examples decide no weight."""
        return {"examples": digest_examples(self.train)}


def load_examples(cfg: Config, hf: HfConfig, date: datetime | None = None) -> ExampleSets:
    """Load the recipe's examples. Raises UserError for invalid records, and when too few examples remain.

    date: what a chat template prints that asks for the date: that of a run's start, None for now
    """
    train_records, val_records = read_split(cfg, any_answer=True)
    tokenizer = open_tokenizer(cfg, hf.vocab_size, date)
    length, size, notes = cfg.policy.max_total_sequence_length, cfg.policy.train_global_batch_size, []
    if cfg.data.train.kind == "text":
        train, val = (cut_documents(records, tokenizer, length) for records in (train_records, val_records))
        notes.append(f"{len(train_records)} documents, cut into {len(train)} sequences of {length} tokens")
    else:
        conversations = ConversationReader(tokenizer)
        train, val = (
            [example for record in records for example in _examples(record, tokenizer, conversations)]
            for records in (train_records, val_records)
        )
        notes += template_notes(tokenizer.renderer, tokenizer.tokenizer.decode(train[0].token_ids))
        notes += _turn_end_notes(tokenizer, conversations, hf, cfg)
    tokenizer.check_token(max(int(e.token_ids.max()) for e in (*train, *val) if len(e.token_ids)), hf.vocab_size)
    num_train, num_all = len(train), len(train) + len(val)
    train, val = _fitting(train, length), _fitting(val, length)
    if dropped := num_all - len(train) - len(val):
        notes.append(
            f"{dropped} of {num_all} examples are left out: they have more than policy.max_total_sequence_length="
            f"{length} tokens"
        )
    if len(train) < size:
        rest = f" ({num_train - len(train)} more have above policy.max_total_sequence_length={length} tokens)"
        raise UserError(
            f"data.train.data_path: {len(train)} training examples{rest * (num_train > len(train))} are fewer than "
            f"policy.train_global_batch_size={size}, those of a step; lower it or give more data"
        )
    if not val:
        raise UserError(
            f"no held-out example of at most policy.max_total_sequence_length={length} tokens is left; raise it, or "
            "data.train.split_validation_size"
        )
    steps = count_steps(cfg.sft.max_num_steps, cfg.sft.max_num_epochs, len(train), size)
    if steps < cfg.sft.max_num_steps:
        notes.append(f"sft.max_num_epochs={cfg.sft.max_num_epochs} ends the run after {steps} steps")
    return ExampleSets(tokenizer, train, val, steps, tuple(notes), date or tokenizer.renderer.printed_date)


def _examples(record: Record, tokenizer: PromptTokenizer, conversations: ConversationReader) -> list[Example]:
    last = record.last_message
    if not str(last.get("content") or "").strip() and not last.get("tool_calls"):
        raise UserError(f"{record.place}: there is no answer of text, and sft trains on answers; write one")
    if record.chat and not tokenizer.renderer.is_plain:
        return conversations.read(record)
    _, prompt = tokenizer.renderer.render(record)
    return [Example.of_parts((prompt, False), (tokenizer.tokenize_answer(record.answer), True))]


def _turn_end_notes(
    tokenizer: PromptTokenizer, conversations: ConversationReader, hf: HfConfig, cfg: Config
) -> list[str]:
    """Return a sentence about ends of answers at which engines would not stop."""
    stops = {tokenizer.eos_token_id, *hf.eos_token_ids, *cfg.policy.generation.stop_token_ids}
    others = sorted(conversations.turn_ends - stops)
    if not others:
        return []
    names = ", ".join(f"{tokenizer.tokenizer.decode([token])} ({token})" for token in others)
    return [
        f"the chat template ends answers with {names}, which is no end of a sequence for {cfg.policy.model_name}: "
        f"training on answers of its own then needs policy.generation.stop_token_ids={others}"
    ]


def _fitting(examples: Sequence[Example], length: int) -> list[Example]:
    """Return the examples that fit and have a loss."""
    return [example for example in examples if len(example.token_ids) <= length and example.has_loss]
