"""Prompts become tokens by the checkpoint's own tokenizer, with its chat template when it has one."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.policy_schema import PolicyConfig, TokenizerConfig
from nemo_fp8rl.data.jsonl import Record
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.data.tokenizer import PromptTokenizer

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
    (prompt,) = tokenizer.tokenize([Record("12+34=", "46")], 64)
    assert tokenizer.decode(prompt.token_ids) == "12+34="
    assert (prompt.index, prompt.text, prompt.answer) == (0, "12+34=", "46")


def test_chat_template_wraps_the_prompt_and_takes_the_recipes_arguments(recipe, folder):
    saved = AutoTokenizer.from_pretrained(folder)
    saved.chat_template = TEMPLATE
    saved.save_pretrained(folder)
    tokenizer = tokenizer_of(recipe, folder, mark=";")
    (prompt,) = tokenizer.tokenize([Record("1+2", "3")], 64)
    assert tokenizer.decode(prompt.token_ids) == ">1+2=;"


def test_answers_end_with_the_end_token(recipe, folder):
    tokenizer = tokenizer_of(recipe, folder)
    tokens = tokenizer.tokenize_answer("95")
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokens) == "95"


def test_prompts_that_fill_the_context_are_dropped_and_counted(recipe, folder):
    tokenizer = tokenizer_of(recipe, folder)
    lengths = (3, 64, 63, 200)
    kept = tokenizer.tokenize([Record("1" * n, "1") for n in lengths], 64)
    assert [(p.index, len(p.token_ids)) for p in kept] == [(0, 3), (2, 63)]
    lines = [json.dumps({"prompt": f"{i:0{64 if i % 10 == 0 else 5}}", "answer": str(i)}) for i in range(300)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    overrides = (f"policy.tokenizer.name={folder}", f"data.train.data_path={folder}/data.jsonl")
    loaded = load_prompts(recipe(*overrides), 64)
    assert loaded.num_too_long == 30
    assert len(loaded.train) + len(loaded.validation) == 270
    with pytest.raises(UserError, match=r"30 were dropped .*max_model_len .*grpo\.num_prompts_per_step=288"):
        load_prompts(recipe(*overrides, "grpo.num_prompts_per_step=288", "policy.train_global_batch_size=64"), 64)


def test_folder_without_tokenizer_is_refused(recipe, tmp_path):
    with pytest.raises(UserError, match=r"policy\.tokenizer\.name"):
        tokenizer_of(recipe, tmp_path / "nothing")


def test_tokenizer_without_end_token_is_refused(recipe, folder):
    saved = AutoTokenizer.from_pretrained(folder)
    saved.eos_token = None
    saved.save_pretrained(folder)
    with pytest.raises(UserError, match="eos_token"):
        tokenizer_of(recipe, folder)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "null"),
        ("tokenizer.json", "\0"),
    ],
)
def test_a_file_that_transformers_cannot_read_is_one_line(recipe, folder, file, text):
    (folder / file).write_text(text)
    with pytest.raises(
        UserError, match=f"policy.tokenizer.name: {folder} holds no tokenizer that can be read"
    ) as caught:
        tokenizer_of(recipe, folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"rms_norm_eps": None}, {"rms_norm_eps": "x"}, {"tie_word_embeddings": None}, {"eos_token_id": "x"}]
)
def test_the_models_config_beside_a_tokenizer_may_be_wrong(recipe, folder, tiny, change):
    """transformers may read it to find the tokenizer's class; then it is named."""
    config = json.loads((tiny / "model/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"policy\.tokenizer\.name"):
        tokenizer_of(recipe, folder)


@pytest.mark.parametrize(
    "template",
    ["{% for %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ messages.__class__.__mro__ }}{{ ''.__class__() }}"],
    ids=["syntax", "raised", "division", "security"],
)
def test_a_chat_template_that_fails_is_named(recipe, folder, template):
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = tokenizer_of(recipe, folder)
    with pytest.raises(UserError, match=r"policy\.tokenizer\.name: the chat template of") as caught:
        tokenizer.tokenize([Record("1+2", "3")], 64)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [{"tokenize": False}, {"return_tensors": "pt"}])
def test_arguments_of_the_template_that_make_no_tokens_are_refused(recipe, folder, arguments):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = tokenizer_of(recipe, folder, **arguments)
    with pytest.raises(UserError, match=r"chat_template_kwargs are for .* a prompt is no list of tokens"):
        tokenizer.tokenize([Record("1+2", "3")], 64)
