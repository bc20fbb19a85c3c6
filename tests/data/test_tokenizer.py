"""Prompts become tokens by the checkpoint's own tokenizer, with its chat template when it has one."""

import json
import re
from datetime import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.policy_schema import PolicyConfig, TokenizerConfig
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.data.records import Record
from nemo_fp8rl.data.tokenizer import PromptTokenizer

DATED = (
    "{% if date is not defined %}{% set date = strftime_now('%d%m') %}{% endif %}{{ date }}+{{ messages[0].content }}"
)
TEMPLATE = "{% for m in messages %}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}{{ mark }}"


def tokenizer_of(recipe, folder: Path, template: str | None = "default", date=None, **kwargs) -> PromptTokenizer:
    policy: PolicyConfig = recipe(f"policy.tokenizer.name={folder}").policy
    object.__setattr__(policy, "tokenizer", TokenizerConfig(str(folder), template, kwargs or None))
    return PromptTokenizer(policy, date)


def seen(tokenizer: PromptTokenizer, record: Record) -> str:
    """What the model sees, from the tokens; the recorded text must be the same."""
    (prompt,) = tokenizer.tokenize([record], 64)
    text = tokenizer.tokenizer.decode(prompt.token_ids)
    assert prompt.rendered == text
    assert prompt.fields["rendered_prompt"] == text
    return text


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
    with pytest.raises(UserError, match=r"30 were dropped .*max_model_len .*num_prompts_per_step=288; raise it .by"):
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


@pytest.mark.parametrize("arguments", [{"tokenize": False}, {"return_tensors": "pt"}, {"add_generation_prompt": False}])
def test_arguments_of_the_tokenizer_are_no_variables_of_the_template(recipe, folder, arguments):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(UserError, match=r"chat_template_kwargs are for .* is an argument of the tokenizer; remove it"):
        tokenizer_of(recipe, folder, **arguments)


@pytest.mark.parametrize("has_template", [False, True])
def test_null_default_a_file_and_a_text_choose_the_template(recipe, folder, has_template, tmp_path):
    if has_template:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    record = Record("1+2", "3")
    own = ">1+2=" if has_template else "1+2"
    assert seen(tokenizer_of(recipe, folder), record) == own
    assert seen(tokenizer_of(recipe, folder, "Default"), record) == own
    assert seen(tokenizer_of(recipe, folder, None), record) == "1+2"
    assert seen(tokenizer_of(recipe, folder, "{{ messages[0].content }};"), record) == "1+2;"
    (tmp_path / "mine.jinja").write_text("+{{ messages[0].content }}")
    assert seen(tokenizer_of(recipe, folder, str(tmp_path / "mine.jinja")), record) == "+1+2"


@pytest.mark.parametrize(("template", "message"), [("chatml", "is no template"), ("no/such.jinja", "cannot be read")])
def test_what_is_no_template_is_refused(recipe, folder, template, message):
    with pytest.raises(UserError, match=f"policy.tokenizer.chat_template=.*{message}"):
        tokenizer_of(recipe, folder, template)


def test_a_conversation_reaches_the_template_whole(recipe, folder):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ {'system': '+', 'user': '>'}[m.role] }}{{ m.content }}{% endfor %}"
        "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    )
    chat = {"messages": [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]}
    chat["tools"] = [{"type": "function", "function": {"name": "34"}}]
    assert seen(tokenizer_of(recipe, folder), Record("12", "3", chat=json.dumps(chat))) == "+1>234"


def test_a_conversation_without_template_is_refused_with_its_line(recipe, folder):
    chat = json.dumps(
        {"messages": [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}], "tools": None}
    )
    record = Record("12", "3", chat=chat, place="data.jsonl, line 7")
    with pytest.raises(UserError, match=r"^data.jsonl, line 7: .* has no chat template; set policy.tokenizer.chat_t"):
        tokenizer_of(recipe, folder).tokenize([record], 64)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    with pytest.raises(UserError, match=r"fails on data.jsonl, line 7 .*System role not supported"):
        tokenizer_of(recipe, folder).tokenize([record], 64)


def test_the_date_is_that_of_the_runs_start_unless_the_recipe_says_it(recipe, folder):
    (folder / "chat_template.jinja").write_text(DATED)
    date = datetime(2024, 12, 31, 23, 59)
    tokenizer = tokenizer_of(recipe, folder, date=date)
    assert seen(tokenizer, Record("1+2", "3")) == "3112+1+2"
    assert tokenizer.renderer.printed_date
    policy = recipe(f"policy.tokenizer.name={folder}", "policy.tokenizer.chat_template_kwargs={date: '01'}").policy
    tokenizer = PromptTokenizer(policy, date)
    assert seen(tokenizer, Record("1+2", "3")) == "01+1+2"
    assert not tokenizer.renderer.printed_date


def test_a_run_says_what_the_model_sees_and_what_is_odd_about_its_data(recipe, folder):
    (folder / "chat_template.jinja").write_text(DATED.replace("%m", ""))
    rows = [{"prompt": f"{i}+1", "answer": f"= #### {i}"} for i in range(100)] + [{"prompt": "7+1", "answer": "9"}]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = recipe(f"policy.tokenizer.name={folder}", f"data.train.data_path={folder}/data.jsonl")
    loaded = load_prompts(cfg, 64, datetime(2024, 12, 31))
    template, date, different, marked = loaded.notes
    assert re.search(rf"through the chat template of {folder}; the model sees, for instance, '31\+\d+\+1'", template)
    assert "prints the date: 2024-12-31" in date
    assert loaded.date == datetime(2024, 12, 31)
    assert "1 prompts occur with different answers, '7+1' is one" in different
    assert "env_name=math compares the results" in marked
