"""Convert text to tokens and back, by the checkpoint's tokenizer and a chat template."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

from nemo_fp8rl.batch import Prompt
from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.policy_schema import PolicyConfig
from nemo_fp8rl.data.chat_template import PromptRenderer
from nemo_fp8rl.data.records import Record
from nemo_fp8rl.hf.hub import checkpoint_folder

INCOMPLETE = "\ufffd"
"""The end of a text whose last token ends within a character."""


class PromptTokenizer:
    """The tokenizer of an HF checkpoint in a folder or on the hub. Code in the folder is never run."""

    def __init__(self, policy: PolicyConfig, date: datetime | None = None) -> None:
        """date: what a chat template prints that asks for the date; None is now"""
        from transformers import AutoTokenizer

        self.name = name = policy.tokenizer.name
        folder = checkpoint_folder(name, "policy.tokenizer.name")
        with tokenizer_errors(name):
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            eos_token_id = self.tokenizer.eos_token_id
        if eos_token_id is None:
            raise UserError(f"policy.tokenizer.name: {name} has no eos_token; set it in tokenizer_config.json")
        pad = self.tokenizer.pad_token_id
        self.pad_token_id: int = eos_token_id if pad is None else pad
        self.renderer = PromptRenderer(self.tokenizer, policy.tokenizer, date or datetime.now().replace(microsecond=0))
        self.max_prompt_tokens = policy.generation.vllm_cfg.max_model_len - 1

    @property
    def eos_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    def tokenize(self, records: Sequence[Record], vocab_size: int) -> list[Prompt]:
        """Return the records as prompts, without those that leave no room for an answer.

        Prompt.index is the record's position. Raises UserError for an empty prompt, or a token that the model lacks.
        """
        prompts = [self._prompt(index, record) for index, record in enumerate(records)]
        prompts = [prompt for prompt in prompts if len(prompt.token_ids) <= self.max_prompt_tokens]
        for prompt in prompts:
            if not prompt.token_ids:
                raise UserError(
                    f"policy.tokenizer.name: {self.name} gives no tokens for prompt {prompt.index} "
                    f"({prompt.text[:40]!r}); give a folder with a whole tokenizer, or remove the prompt if it is empty"
                )
        self.check_token(max((token for prompt in prompts for token in prompt.token_ids), default=0), vocab_size)
        return prompts

    def check_token(self, largest: int, vocab_size: int) -> None:
        """Raise UserError where the largest token of the texts is beyond the model's vocabulary."""
        if largest >= vocab_size:
            raise UserError(
                f"policy.tokenizer.name: {self.name} gives token {largest}, but the model's vocab_size is "
                f"{vocab_size}; give the tokenizer that belongs to policy.model_name"
            )

    def tokenize_answer(self, text: str) -> list[int]:
        """Return the tokens of an answer, followed by the end of the sequence."""
        return [*self.tokenizer(text, add_special_tokens=False).input_ids, self.eos_token_id]

    def add_hint(self, prompt: Prompt, share: float, stage: int, template: str) -> Prompt | None:
        """Return the prompt with the beginning of its solution in the user's message; it may have a hint already.

        share:     of the tokens of the solution, rounded to whole tokens (of two equally near numbers, to the even one)
        template:  text with {prompt} and {hint}
        Returns:   None without a solution, for a share of no token, where the last message is not the user's, and where
                   no room is left for an answer
        Source: GHPO, arXiv 2507.10628, whose released code takes shares of characters and cuts the question where the
                hinted prompt is too long
        """
        hint = self._first_tokens(prompt.solution, share) if prompt.solution else ""
        if not hint.strip():
            return None
        if prompt.chat:
            chat = json.loads(prompt.chat)
            last = chat["messages"][-1]
            if last["role"] != "user":
                return None
            last["content"] = _fill_template(template, last["content"], hint)
            record = Record(prompt.text, "", chat=json.dumps(chat, ensure_ascii=False), place=prompt.place)
        else:
            record = Record(_fill_template(template, prompt.text, hint), "", place=prompt.place)
        rendered, token_ids = self.renderer.render(record)
        if len(token_ids) > self.max_prompt_tokens:
            return None
        fields = {**prompt.fields, "rendered_prompt": rendered}
        return replace(prompt, token_ids=tuple(token_ids), rendered=rendered, fields=fields, hint_stage=stage)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token, special tokens included; an incomplete character becomes U+FFFD."""
        return [self.tokenizer.decode([token_id]) for token_id in token_ids]

    def _prompt(self, index: int, record: Record) -> Prompt:
        rendered, tokens = self.renderer.render(record)
        fields = {**record.fields, "rendered_prompt": rendered}
        return Prompt(
            *(index, record.prompt, record.answer, tuple(tokens), record.other_answers, rendered),
            fields=fields,
            place=record.place,
            chat=record.chat,
            solution=record.solution,
        )

    def _first_tokens(self, text: str, share: float) -> str:
        """Return the text of the first tokens, as many as the share of all, without a character that is cut."""
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        count = round(share * len(token_ids))
        part = self.decode(token_ids[:count])
        while part.endswith(INCOMPLETE) and INCOMPLETE not in text:
            count -= 1
            part = self.decode(token_ids[:count])
        return part


def _fill_template(template: str, question: str, hint: str) -> str:
    """Return the question with the hint. Neither is searched for places of the template."""
    before, _, after = template.partition("{hint}")
    return f"{before.replace('{prompt}', question)}{hint}{after.replace('{prompt}', question)}"


@contextmanager
def tokenizer_errors(name: str) -> Iterator[None]:
    """Convert any error of transformers in the block to a UserError: its errors for bad files share no class."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"policy.tokenizer.name: {name} holds no tokenizer that can be read ({type(error).__name__}: "
            f"{single_line(error)[:200]}); give a folder with sound tokenizer.json, tokenizer_config.json and "
            "config.json, or a name on the hub"
        ) from None
