"""The rendering of prompts by the chat template that `policy.tokenizer.chat_template`, NeMo RL's key, chooses.

    default       the tokenizer's own template; a tokenizer without one gets the text with its own special tokens
    null          no template: the contents of the messages, without special tokens
    FILE.jinja    the template in the file
    other text    is itself the template

A template may print the date, as Llama 3.2's does. The date is then that of the run's start, also in a resumed run.
"""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.policy_schema import TokenizerConfig
from nemo_fp8rl.data.records import Record

PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""NeMo RL's template for null (data/chat_templates.py, passthrough_prompt_response)."""
KEY = "policy.tokenizer.chat_template"
TOKENIZER_ARGUMENTS = {
    *("conversation", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""Arguments of transformers' apply_chat_template that are no variables of a template."""


def why_no_template(value: str | None) -> str:
    """Return why the value of the key is no template; empty if it is one, or if the tokenizer's or a file is meant."""
    if value is None or value.lower() == "default" or value.endswith(".jinja") or "{" in value:
        return ""
    return (
        f"{KEY}={value!r} is no template: it has no {{{{ }}}}, so every prompt would be this text; give default, null, "
        "a file that ends in .jinja, or a template"
    )


class PromptRenderer:
    """Renders prompts as text, and text as tokens.

    printed_date:  the date that a template has printed; None until one asks for it
    """

    def __init__(self, tokenizer: Any, cfg: TokenizerConfig, date: datetime) -> None:
        """Raises: UserError for a template or arguments that cannot be used"""
        self.tokenizer, self.name, self.date = tokenizer, cfg.name, date
        self.printed_date: datetime | None = None
        self.variables: Mapping[str, Any] = cfg.chat_template_kwargs or {}
        if arguments := sorted(TOKENIZER_ARGUMENTS & self.variables.keys()):
            raise UserError(
                "policy.tokenizer.chat_template_kwargs are for the template's own variables, and "
                f"{', '.join(arguments)} is an argument of the tokenizer; remove it"
            )
        if reason := why_no_template(cfg.chat_template):
            raise UserError(reason)
        self.is_plain = False
        self.template: str | None = None
        if cfg.chat_template is None:
            self.template = PASSTHROUGH
            self.description = f"{KEY}=null: prompts are their texts, without special tokens"
        elif cfg.chat_template.lower() == "default":
            self.is_plain = not (tokenizer.chat_template or self.variables.get("chat_template"))
            self.description = (
                f"{cfg.name} has no chat template: prompts are their texts, with the tokenizer's special tokens"
                if self.is_plain
                else f"prompts go through the chat template of {cfg.name}"
            )
        elif cfg.chat_template.endswith(".jinja"):
            self.template = _read_template(cfg.chat_template)
            self.description = f"prompts go through the chat template in {cfg.chat_template}"
        else:
            self.template = cfg.chat_template
            self.description = f"prompts go through the recipe's {KEY}"

    def render(self, record: Record) -> tuple[str, list[int]]:
        """Return what the model sees, as text and as tokens. Raises UserError, with the line, where that fails."""
        if self.is_plain:
            if len(record.messages) > 1 or record.tools:
                raise UserError(
                    f"{record.place}: the prompt is a conversation, and {self.name} has no chat template; set {KEY}"
                )
            tokens = self.tokenizer(record.prompt).input_ids
            return self.tokenizer.decode(tokens), tokens
        text = self.render_messages(record.messages, record.tools, record.place, add_generation_prompt=True)
        return text, self.tokenizer(text, add_special_tokens=False).input_ids

    def render_messages(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, place: str, add_generation_prompt: bool = False
    ) -> str:
        """Return messages as the template writes them. Raises UserError, with the place, where that fails."""
        arguments = {"tools": tools, "chat_template": self.template, "strftime_now": self._format_date}
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **{**arguments, **self.variables},
            )
        except Exception as error:  # the template's code may raise anything
            where = f" on {place}" if place else " on a prompt"
            raise UserError(
                f"policy.tokenizer.name: the chat template of {self.name} ({KEY}, chat_template.jinja, or in "
                f"tokenizer_config.json) fails{where} ({type(error).__name__}: {single_line(error)[:200]}); mend it, "
                "the messages, or policy.tokenizer.chat_template_kwargs"
            ) from None

    def _format_date(self, form: str) -> str:
        self.printed_date = self.date
        return self.date.strftime(form)


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{KEY}={path} cannot be read ({single_line(error)}); give a file of UTF-8 text") from None
