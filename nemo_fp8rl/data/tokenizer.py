"""Text to tokens and back, by the checkpoint's own tokenizer and chat template."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nemo_fp8rl.batch import Completion, Prompt
from nemo_fp8rl.common.errors import UserError, one_line
from nemo_fp8rl.config.policy_schema import PolicyConfig
from nemo_fp8rl.data.jsonl import Record
from nemo_fp8rl.hf.hub import checkpoint_folder


class PromptTokenizer:
    """The tokenizer of an HF checkpoint, by its folder or its name on the hub; code in the folder is never run."""

    def __init__(self, policy: PolicyConfig) -> None:
        from transformers import AutoTokenizer

        self.name = name = policy.tokenizer.name
        folder = checkpoint_folder(name, "policy.tokenizer.name")
        with reading_tokenizer(name):
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            eos_token_id = self.tokenizer.eos_token_id
        if eos_token_id is None:
            raise UserError(f"policy.tokenizer.name: {name} has no eos_token; set it in tokenizer_config.json")
        pad = self.tokenizer.pad_token_id
        self.pad_token_id: int = eos_token_id if pad is None else pad
        self.template_kwargs = policy.tokenizer.chat_template_kwargs or {}
        self.max_prompt_tokens = policy.generation.vllm_cfg.max_model_len - 1

    @property
    def eos_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    def prompts(self, records: Sequence[Record], vocab_size: int) -> list[Prompt]:
        """Tokenize. Prompts that leave no room for an answer are dropped; `index` is the record's position.

        Raises UserError when a prompt is empty, or is not of the model's tokens.
        """
        prompts = [Prompt(i, r.prompt, r.answer, tuple(self._encode(r.prompt))) for i, r in enumerate(records)]
        prompts = [prompt for prompt in prompts if len(prompt.token_ids) <= self.max_prompt_tokens]
        for prompt in prompts:
            if not prompt.token_ids:
                raise UserError(
                    f"policy.tokenizer.name: {self.name} gives no tokens for prompt {prompt.index} "
                    f"({prompt.text[:40]!r}); give a folder with a whole tokenizer, or remove the prompt if it is empty"
                )
        self.check_known(prompts, vocab_size)
        return prompts

    def check_known(self, texts: Iterable[Prompt | Completion], vocab_size: int) -> None:
        """Raises UserError where one has a token that the model does not."""
        largest = max((token for text in texts for token in text.token_ids), default=0)
        if largest >= vocab_size:
            raise UserError(
                f"policy.tokenizer.name: {self.name} gives token {largest}, but the model's vocab_size is "
                f"{vocab_size}; give the tokenizer that belongs to policy.model_name"
            )

    def answer_tokens(self, text: str) -> list[int]:
        """The tokens of an answer, closed by the end of the sequence."""
        return [*self.tokenizer(text, add_special_tokens=False).input_ids, self.eos_token_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token on its own, special ones included; a part of a letter's bytes gives U+FFFD."""
        return [self.tokenizer.decode([token_id]) for token_id in token_ids]

    def _encode(self, text: str) -> list[int]:
        if not self.tokenizer.chat_template:
            return self.tokenizer(text).input_ids
        message: list[dict[str, Any]] = [{"role": "user", "content": text}]
        try:
            tokens = self.tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_dict=False, **self.template_kwargs
            )
        except Exception as error:  # whatever the template's code raises
            raise UserError(
                f"policy.tokenizer.name: the chat template of {self.name} (chat_template.jinja, or in "
                f"tokenizer_config.json) fails on a prompt ({_message(error)}); mend it, or "
                "policy.tokenizer.chat_template_kwargs"
            ) from None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise UserError(
                "policy.tokenizer.chat_template_kwargs are for the template's own variables: with "
                f"{sorted(self.template_kwargs)} a prompt is no list of tokens"
            )
        return tokens


@contextmanager
def reading_tokenizer(name: str) -> Iterator[None]:
    """Turn what transformers raises on a tokenizer's files into a UserError: its errors have no class in common."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"policy.tokenizer.name: {name} holds no tokenizer that can be read ({_message(error)}); give a folder "
            "with sound tokenizer.json, tokenizer_config.json and config.json, or a name on the hub"
        ) from None


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)[:200]}"
