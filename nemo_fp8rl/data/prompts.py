"""Load a recipe's prompts: files, split, tokens and the verifier's name are checked before a model loads."""

import hashlib
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from nemo_fp8rl.batch import Prompt
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.run_schema import TrainDataConfig, ValidationDataConfig
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.data.chat_template import PromptRenderer
from nemo_fp8rl.data.dataset import read_dataset
from nemo_fp8rl.data.order import count_steps
from nemo_fp8rl.data.records import SOLUTION_FIELD, FieldNames, Record
from nemo_fp8rl.data.rewards import VERIFIERS, load_scorer
from nemo_fp8rl.data.split import split_records
from nemo_fp8rl.data.tokenizer import PromptTokenizer

LONGEST = 300
"""Characters of a prompt that are shown at the start of a run."""


class PromptSets(NamedTuple):
    """The prompts of a run and their tokenizer.

    num_too_long:  how many prompts were dropped because no token of an answer would fit behind them
    notes:         sentences for the user about what the model will see
    date:          the date that the chat template prints; None if it prints none
    """

    tokenizer: PromptTokenizer
    train: list[Prompt]
    validation: list[Prompt]
    num_too_long: int
    notes: tuple[str, ...] = ()
    date: datetime | None = None

    def limit_steps(self, cfg: Config) -> tuple[Config, str]:
        """Return the recipe with the steps that grpo.max_num_epochs leaves, and the key to raise for more."""
        grpo = cfg.grpo
        steps = count_steps(grpo.max_num_steps, grpo.max_num_epochs, len(self.train), grpo.num_prompts_per_step)
        limit = "grpo.max_num_epochs" if steps < grpo.max_num_steps else "grpo.max_num_steps"
        return replace(cfg, grpo=replace(grpo, max_num_steps=steps)), limit

    def digests(self) -> dict[str, str]:
        """Return digests, 16 hex digits each, of questions, answers and tokens, in order.

        A resumed run must have the same digests.
        """
        contents = {
            "training": [_content(p) for p in self.train],
            "validation": [_content(p) for p in self.validation],
            "tokens": [p.token_ids for p in (*self.train, *self.validation)],
        }
        return {kind: hashlib.sha256(repr(content).encode()).hexdigest()[:16] for kind, content in contents.items()}


def load_prompts(cfg: Config, vocab_size: int, date: datetime | None = None) -> PromptSets:
    """Load the recipe's prompts. Raises UserError for invalid prompts, and when too few remain.

    date: what a chat template prints that asks for the date: that of a run's start, None for now
    """
    if cfg.data.train.kind == "text":
        raise UserError("data.train.kind=text: documents have no answers, which a reward needs; they are for sft")
    scorer = load_scorer(cfg.data.default.env_name)
    any_answer = cfg.data.default.env_name not in VERIFIERS
    train_records, val_records = read_split(cfg, any_answer, with_solutions=cfg.grpo.hints.enabled)
    scorer.check_fields([(record.place, record.fields) for record in (*train_records, *val_records)])
    tokenizer = open_tokenizer(cfg, vocab_size, date)
    held_out = val_records[: cfg.grpo.max_val_samples]
    train, val = tokenizer.tokenize(train_records, vocab_size), tokenizer.tokenize(held_out, vocab_size)
    num_too_long = len(train_records) + len(held_out) - len(train) - len(val)
    dropped = f" after {num_too_long} were dropped that policy.generation.vllm_cfg.max_model_len has no room for"
    longer = "raise it (by default it is policy.max_total_sequence_length)"
    if len(train) < cfg.grpo.num_prompts_per_step:
        raise UserError(
            f"data.train.data_path: {len(train)} training prompts{dropped * (num_too_long > 0)} are fewer than "
            f"grpo.num_prompts_per_step={cfg.grpo.num_prompts_per_step}; "
            + (f"{longer} or shorten prompts" if num_too_long else "lower it or add prompts")
        )
    if not val:
        raise UserError(f"no validation prompt is left{dropped}; {longer} or add shorter prompts")
    printed = date or tokenizer.renderer.printed_date
    notes = _notes(tokenizer, train, cfg)
    if cfg.grpo.hints.enabled:
        notes = (*notes, _note_on_hints(tokenizer, train, cfg, vocab_size))
    prompts = PromptSets(tokenizer, train, val, num_too_long, notes, printed)
    steps = prompts.limit_steps(cfg)[0].grpo.max_num_steps
    if steps < cfg.grpo.max_num_steps:
        note = f"grpo.max_num_epochs={cfg.grpo.max_num_epochs} ends the run after {steps} steps"
        return prompts._replace(notes=(*prompts.notes, note))
    return prompts


def read_split(cfg: Config, any_answer: bool, with_solutions: bool = False) -> tuple[list[Record], list[Record]]:
    """Return the records of training and validation.

    any_answer:      see `FieldNames`
    with_solutions:  read the reference solutions of the file for training
    """
    solution = cfg.data.train.solution_key or SOLUTION_FIELD

    def read(data: TrainDataConfig | ValidationDataConfig, block: str) -> list[Record]:
        is_text = cfg.data.train.kind == "text"
        names = FieldNames(block, data.input_key, data.output_key, any_answer=any_answer, is_text=is_text)
        if with_solutions and isinstance(data, TrainDataConfig):
            names = replace(names, solution=solution)
        return read_dataset(data.data_path, names, data.split)

    return split_records(
        read(cfg.data.train, "data.train"),
        read(cfg.data.validation, "data.validation") if cfg.data.validation else None,
        cfg.data.train.split_validation_size,
        cfg.data.train.seed,
    )


def open_tokenizer(cfg: Config, vocab_size: int, date: datetime | None) -> PromptTokenizer:
    """Return the recipe's tokenizer, whose padding a model of this vocabulary can embed."""
    tokenizer = PromptTokenizer(cfg.policy, date)
    if tokenizer.pad_token_id >= vocab_size:
        tokenizer.pad_token_id = 0  # the model embeds padding, too, though nothing reads the result
    return tokenizer


def template_notes(renderer: PromptRenderer, text: str) -> list[str]:
    """Return sentences about the chat template, with the beginning of a text as an example."""
    beginning = repr(text[:LONGEST]) + ("..." if len(text) > LONGEST else "")
    notes = [f"{renderer.description}; the model sees, for instance, {beginning}"]
    if renderer.printed_date:
        notes.append(f"the chat template prints the date: {renderer.printed_date:%Y-%m-%d}, in all of this run")
    return notes


def _note_on_hints(tokenizer: PromptTokenizer, train: list[Prompt], cfg: Config, vocab_size: int) -> str:
    """Return a sentence about the solutions. Raises UserError without any, and for tokens that the model lacks."""
    hints, key = cfg.grpo.hints, cfg.data.train.solution_key
    with_solution = [prompt for prompt in train if prompt.solution]
    if not with_solution:
        raise UserError(
            f'grpo.hints.enabled=true, and no training prompt has a solution in "{key or SOLUTION_FIELD}" '
            f"(data.train.solution_key={'null' if key is None else key}): name the field of the solutions there, or "
            "set grpo.hints.enabled=false"
        )
    last = hints.shares[-1], len(hints.shares), hints.template
    longest = [hint for prompt in with_solution if (hint := tokenizer.add_hint(prompt, *last))]
    tokenizer.check_token(max((token for prompt in longest for token in prompt.token_ids), default=0), vocab_size)
    note = f"grpo.hints: {len(with_solution)} of {len(train)} training prompts have a solution"
    if rest := len(with_solution) - len(longest):
        note += f"; {rest} of these cannot take the longest hint and leave room for an answer"
    return note


def _notes(tokenizer: PromptTokenizer, train: list[Prompt], cfg: Config) -> tuple[str, ...]:
    notes = template_notes(tokenizer.renderer, train[0].rendered)
    answers: dict[tuple[int, ...], set[str]] = {}
    for prompt in train:
        answers.setdefault(prompt.token_ids, set()).add(prompt.answer)
    if several := [ids for ids, different in answers.items() if len(different) > 1]:
        text = next(prompt.text for prompt in train if prompt.token_ids == several[0])
        notes.append(f"{len(several)} prompts occur with different answers, {text[:60]!r} is one")
    if cfg.data.default.env_name == "exact_match" and sum("####" in prompt.answer for prompt in train) > len(train) / 2:
        notes.append(
            "answers hold a derivation and, behind ####, a result, and env_name=exact_match compares all of it; "
            "data.default.env_name=math compares the results"
        )
    return tuple(notes)


def _content(prompt: Prompt) -> tuple[object, ...]:
    """Return what an answer's reward, or a hint, depends on.

    Texts alone have the form that earlier versions recorded.
    """
    solution = (prompt.solution,) if prompt.solution else ()
    if prompt.other_answers or not prompt.answer:
        return prompt.text, prompt.answer, prompt.other_answers, repr(prompt.fields.get("answer")), *solution
    return prompt.text, prompt.answer, *solution
