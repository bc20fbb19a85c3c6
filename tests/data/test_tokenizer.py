"""Prompts become tokens by the checkpoint's own tokenizer, with its chat template when it has one."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nemo_fp8rl.config import PolicyConfig, TokenizerConfig
from nemo_fp8rl.data.jsonl import Record
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.errors import UserError

TEMPLATE = "{% for m in messages %}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}{{ mark }}"


def tokenizer_of(recipe, folder: Path, **kwargs) -> PromptTokenizer:
    policy: PolicyConfig = recipe(f"policy.tokenizer.name={folder}").policy
    object.__setattr__(policy, "tokenizer", TokenizerConfig(str(folder), kwargs or None))
    return PromptTokenizer(policy)


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """The tiny tokenizer, saved apart so that a test may change it."""
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_without_template_the_text_itself_is_the_prompt(recipe, folder):
    tokenizer = tokenizer_of(recipe, folder)
    (prompt,) = tokenizer.prompts([Record("12+34=", "46")], 64)
    assert tokenizer.decode(prompt.token_ids) == "12+34="
    assert (prompt.index, prompt.text, prompt.answer) == (0, "12+34=", "46")


def test_chat_template_wraps_the_prompt_and_takes_the_recipes_arguments(recipe, folder):
    saved = AutoTokenizer.from_pretrained(folder)
    saved.chat_template = TEMPLATE
    saved.save_pretrained(folder)
    tokenizer = tokenizer_of(recipe, folder, mark=";")
    (prompt,) = tokenizer.prompts([Record("1+2", "3")], 64)
    assert tokenizer.decode(prompt.token_ids) == ">1+2=;"


def test_answers_end_with_the_end_token(recipe, folder):
    tokenizer = tokenizer_of(recipe, folder)
    tokens = tokenizer.answer_tokens("95")
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokens) == "95"


def test_prompt_that_fills_the_context_is_refused(recipe, folder):
    tokenizer = tokenizer_of(recipe, folder)
    assert tokenizer.prompts([Record("1" * 63, "1")], 64)
    with pytest.raises(
        UserError, match=r"1 prompts are longer than the context: the first has 64 tokens.*max_model_len"
    ):
        tokenizer.prompts([Record("1+1=", "2"), Record("1" * 64, "1")], 64)


def test_folder_without_tokenizer_is_refused(recipe, tmp_path):
    with pytest.raises(UserError, match=r"policy\.tokenizer\.name"):
        tokenizer_of(recipe, tmp_path / "nothing")


def test_tokenizer_without_end_token_is_refused(recipe, folder):
    saved = AutoTokenizer.from_pretrained(folder)
    saved.eos_token = None
    saved.save_pretrained(folder)
    with pytest.raises(UserError, match="eos_token"):
        tokenizer_of(recipe, folder)
