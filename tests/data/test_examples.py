"""On which tokens supervised training has its loss: answers with the token that ends them, or all of a document."""

import json
import string
from pathlib import Path

import pytest
import vllm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.data.examples import collate_examples, digest_examples
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.data.records import Record
from nemo_fp8rl.data.supervised import load_examples
from nemo_fp8rl.hf.model_config import read_hf_config
from tests.conftest import RECIPES

TEMPLATES = Path(vllm.__file__).parent / "transformers_utils/chat_templates"
CHATML, QWEN3 = TEMPLATES / "template_chatml.jinja", TEMPLATES / "template_minicpmv45.jinja"
"""ChatML, whose last message has no end; and a Qwen3, which leaves out thoughts before the last question."""
QWEN25 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TALK = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+2"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "3+4"},
    {"role": "assistant", "content": "7"},
]


@pytest.fixture
def model(tiny, tmp_path) -> Path:
    """The tiny model's config.json with a tokenizer of characters and Qwen2.5's special tokens."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *string.printable))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    more = {"extra_special_tokens": list(SPECIAL[1:])}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[0])
    fast.add_special_tokens({"additional_special_tokens": more["extra_special_tokens"]})
    fast.save_pretrained(tmp_path / "model")
    config = json.loads((tiny / "model/config.json").read_text()) | {"vocab_size": 128, "eos_token_id": 0}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    return tmp_path / "model"


@pytest.fixture
def examples(model, tmp_path):
    """examples(rows, "key=value", ...) -> what `sft` trains on; the rows are both training and held-out data."""

    def make(rows, *overrides):
        for name in ("train", "held_out"):
            more = [] if name == "train" else [{"prompt": "held", "answer": "out", "text": "held out"}]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in more or rows))
        paths = (f"data.train.data_path={tmp_path}/train.jsonl", f"data.validation.data_path={tmp_path}/held_out.jsonl")
        sizes = ("policy.train_global_batch_size=1", "policy.train_micro_batch_size=1")
        keys = [*paths, f"policy.model_name={model}", *sizes, "policy.max_total_sequence_length=256", *overrides]
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"defaults: {RECIPES}/tiny_cpu.yaml\ndata: {{validation: {{data_path: x}}}}\n")
        cfg = load(recipe, keys)
        return load_examples(cfg, read_hf_config(model))

    return make


def shown(sets) -> list[str]:
    """Each training example as text, with the tokens of the loss in brackets."""
    decode = sets.tokenizer.tokenizer.decode
    texts = []
    for example in sets.train:
        text, inside = "", False
        for token, has_loss in zip(example.token_ids, example.loss_mask.tolist(), strict=True):
            text += ("[" if has_loss and not inside else "]" if inside and not has_loss else "") + decode([token])
            inside = has_loss
        texts.append(text + "]" * inside)
    return texts


def template(text: str) -> str:
    return f"policy.tokenizer.chat_template={json.dumps(text)}"


def test_the_loss_is_on_every_answer_and_the_token_that_ends_it(examples):
    (text,) = shown(sets := examples([{"messages": TALK}], template(QWEN25)))
    assert text == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n[3<|im_end|>]\n"
        "<|im_start|>user\n3+4<|im_end|>\n<|im_start|>assistant\n[7<|im_end|>]"
    )
    (note,) = [note for note in sets.notes if "stop_token_ids" in note]
    assert note.startswith("the chat template ends answers with <|im_end|> (2), which is no end of a sequence for ")
    assert "policy.generation.stop_token_ids=[2]" in note


def test_conversations_of_sharegpt_and_an_answer_of_its_own_field_are_the_same(examples):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[m["role"]], "value": m["content"]} for m in TALK]
    expected = shown(examples([{"messages": TALK}], template(QWEN25)))
    assert shown(examples([{"conversations": sharegpt}], template(QWEN25))) == expected
    assert shown(examples([{"messages": TALK[:-1], "answer": "7"}], template(QWEN25))) == expected


def test_a_template_that_ends_answers_only_before_a_question(examples):
    (text,) = shown(examples([{"messages": TALK[1:]}], f"policy.tokenizer.chat_template={CHATML}"))
    assert text == (
        "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n[3<|im_end|>]\n"
        "<|im_start|>user\n3+4<|im_end|>\n<|im_start|>assistant\n[7<|im_end|>]"
    )


def test_a_template_that_leaves_out_earlier_thoughts_makes_an_example_of_each_answer(examples):
    thinking = [m | ({"reasoning": "I add."} if m["role"] == "assistant" else {}) for m in TALK[1:]]
    keys = (f"policy.tokenizer.chat_template={QWEN3}", "policy.tokenizer.chat_template_kwargs={enable_thinking: null}")
    texts = shown(examples([{"messages": thinking}], *keys))
    assert texts == [
        "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n[<think>\nI add.\n</think>\n\n3<|im_end|>]",
        "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\n3+4<|im_end|>\n"
        "<|im_start|>assistant\n[<think>\nI add.\n</think>\n\n7<|im_end|>]",
    ]


def test_an_answer_that_the_generation_prompt_does_not_begin_is_refused(examples):
    """Without thinking the prompt ends with empty thoughts, which this answer has not."""
    thinking = [TALK[1], TALK[2] | {"reasoning": "I add."}]
    with pytest.raises(UserError, match=r"train\.jsonl, line 1, message 2: .* generation prompt, .*enable_thinking"):
        examples([{"messages": thinking}], f"policy.tokenizer.chat_template={QWEN3}")


def test_calls_of_tools_are_answers(examples):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    calls = "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    with_calls = QWEN25.replace("{{ m.content }}", calls)
    (text,) = shown(examples([{"messages": [TALK[1], call]}], template(with_calls)))
    assert text.endswith("<|im_start|>assistant\n[add<|im_end|>]")


def test_without_an_end_of_the_template_the_last_answer_ends_with_the_sequence(examples):
    null = "policy.tokenizer.chat_template=null"
    assert shown(examples([{"messages": TALK[1:3]}], null)) == ["1+2[3<|endoftext|>]"]
    with pytest.raises(UserError, match=r"line 1, message 3: the chat template writes no special token at the end"):
        examples([{"messages": TALK}], null)


def test_a_prompt_is_what_a_reward_would_ask_and_its_answer_ends_the_sequence(examples, model, tmp_path):
    (text,) = shown(sets := examples([{"prompt": "1+2=", "answer": 3}], template(QWEN25)))
    assert text == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n[3<|endoftext|>]"
    prompts = sets.tokenizer.tokenize([Record("1+2=", "3")], 128)
    assert tuple(sets.train[0].token_ids[:-2].tolist()) == prompts[0].token_ids


def test_documents_become_sequences_of_equal_length_with_ends_between_them(examples):
    rows = [{"text": "abcdef"}, {"text": "ghi"}]
    sets = examples(rows, "data.train.kind=text", "policy.max_total_sequence_length=5")
    assert shown(sets) == ["[abcde]", "[ef<|endoftext|>gh]", "[hi<|endoftext|>]"]
    predicted = [sets.tokenizer.tokenizer.decode(example.token_ids[1:]) for example in sets.train]
    assert "".join(predicted) == "bcdef<|endoftext|>ghi<|endoftext|>"  # each token once, but the first


def test_longer_examples_are_left_out_and_counted(examples):
    rows = [{"prompt": "1", "answer": "2"}, {"prompt": "1", "answer": "2" * 300}]
    sets = examples(rows)
    assert len(sets.train) == 1
    assert any(note.startswith("1 of 3 examples are left out: they have more than ") for note in sets.notes)


@pytest.mark.parametrize(
    ("row", "override", "message"),
    [
        ({"prompt": "1+2="}, "", r"line 1: there is no answer of text, and sft trains on answers; write one"),
        ({"messages": TALK[:2]}, "", r"line 1: there is no answer of text"),
        ({"messages": TALK[2:3]}, "", r'line 1: "messages" has no text before the answer'),
        ({"prompt": "1"}, "data.train.kind=text", r'line 1: "text" is missing, .*set data\.train\.input_key to the'),
        ({"text": " "}, "data.train.kind=text", r'line 1: "text" is " ", which is no text'),
        ({"text": 3}, "data.train.kind=text", r'line 1: "text" is 3, which is no text'),
    ],
)
def test_a_bad_record_is_refused_with_its_line(examples, row, override, message):
    with pytest.raises(UserError, match=message):
        examples([row], *filter(None, [override]))


def test_documents_have_no_reward(tiny):
    cfg = load(RECIPES / "tiny_cpu.yaml", [f"data.train.data_path={tiny}/data.jsonl", "data.train.kind=text"])
    with pytest.raises(UserError, match=r"data\.train\.kind=text: documents have no answers"):
        load_prompts(cfg, 64)


def test_a_batch_has_the_tokens_and_a_digest_all_of_them(examples):
    sets = examples([{"prompt": "1+2=", "answer": "3"}, {"prompt": "10=", "answer": "10"}])
    batch = collate_examples(sets.train, pad_token_id=7)
    assert batch.input_ids.tolist()[0] == [*sets.train[0].token_ids.tolist()]
    assert batch.input_lengths.tolist() == [6, 6]
    assert batch.token_mask.tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    masks = [type(e)(e.token_ids, e.loss_mask.roll(1)) for e in sets.train]
    assert len({digest_examples(sets.train), digest_examples(sets.train[::-1]), digest_examples(masks)}) == 3
