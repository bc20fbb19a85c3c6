"""Reading prompts and answers in the forms that people have, and saying what is wrong with a line."""

import bz2
import gzip
import json
import lzma
import re
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.dataset import read_dataset
from nemo_fp8rl.data.records import FieldNames, Record
from tests.refusals import refusal_of

GOOD = '{"prompt": "1+1=", "answer": "2"}\n'
USER = {"role": "user", "content": "1+1="}
ASSISTANT = {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Be brief."}
TEXT = st.text().filter(str.strip)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("dataset") / "data.jsonl"


def refusal(path, content: str | bytes, names: FieldNames | None = None) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal_of(read_dataset, path, names)
    assert str(path) in message
    return message


def read_row(path, row: dict, names: FieldNames | None = None) -> Record:
    path.write_text(json.dumps(row) + "\n")
    (record,) = read_dataset(path, names)
    return record


def test_records_come_in_order_and_other_fields_are_kept_for_rewards(path):
    path.write_text('{"prompt": "a", "answer": "b", "level": 3}\n\n  \n{"answer": "d", "prompt": "c"}')
    first, second = read_dataset(path)
    assert [first, second] == [Record("a", "b"), Record("c", "d")]
    assert first.fields["level"] == 3
    assert second.place == f"{path}, line 4"
    assert read_dataset(str(path)) == [first, second]


def test_a_byte_order_mark_is_no_part_of_the_first_line(path):
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert read_dataset(path) == [Record("1+1=", "2")]


def test_windows_line_ends_are_read(path):
    path.write_bytes(GOOD.replace("\n", "\r\n").encode() * 2)
    assert read_dataset(path) == [Record("1+1=", "2")] * 2


@settings(deadline=None, max_examples=60)
@given(records=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), ascii_only=st.booleans())
def test_any_text_survives(path, records, ascii_only):
    lines = [json.dumps({"prompt": p, "answer": a}, ensure_ascii=ascii_only) for p, a in records]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert read_dataset(path) == [Record(p, a) for p, a in records]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_unicode_line_separators_inside_a_text_do_not_end_its_line(path, separator):
    path.write_text(json.dumps({"prompt": f"a{separator}b", "answer": "c"}, ensure_ascii=False), encoding="utf-8")
    assert read_dataset(path) == [Record(f"a{separator}b", "c")]


@settings(deadline=None, max_examples=100)
@given(content=st.one_of(st.binary(max_size=60), st.text('{}[]":, \n\\u0d8promtanswe12', max_size=60).map(str.encode)))
def test_any_bytes_give_records_or_a_user_error(path, content):
    path.write_bytes(content)
    try:
        records = read_dataset(path)
    except UserError:
        return
    assert records
    assert all(isinstance(r.prompt, str) and isinstance(r.answer, str) for r in records)


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a", "answer": ',
        "{'prompt': 'a', 'answer': 'b'}",
        "not json",
        '{"prompt": "a"} {"prompt": "b"}',
        '["prompt", "answer"]',
        '"text"',
        "3",
        "null",
        pytest.param("[" * 100_000, id="nested deeper than Python recurses"),
        pytest.param('{"prompt": "a", "answer": "b", "id": ' + "1" * 5000 + "}", id="longer than int() takes"),
        '{"prompt": "1+1=", "prompt": "2+2=", "answer": "4"}',
        '{"prompt": "a", "answer": "b", "more": {"x": 1, "x": 2}}',
        '{"prompt": "a", "answer": NaN}',
    ],
)
def test_a_malformed_line_is_named_by_its_number(path, line):
    assert "line 3:" in refusal(path, f"{GOOD}\n{line}\n{GOOD}")


def test_a_key_that_occurs_twice_is_named(path):
    line = '{"prompt": "1+1=", "prompt": "2+2=", "answer": "4"}'
    assert 'line 1: the key "prompt" occurs twice' in refusal(path, line)


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        (72, ("72",)),
        (1.5, ("1.5",)),
        (-3, ("-3",)),
        (["4", "four"], ("4", "four")),
        ([4, "four", 4], ("4", "four")),
        (0, ("0",)),
    ],
)
def test_numbers_count_as_their_text_and_lists_as_accepted_answers(path, answer, texts):
    record = read_row(path, {"prompt": "a", "answer": answer})
    assert (record.answer, *record.other_answers) == texts
    assert record.fields["answer"] == answer


@pytest.mark.parametrize("value", [True, False, {"a": "b"}, [], [["a"]], [None], [True], "", "  \n", ["4", ""]])
def test_an_answer_that_no_model_can_give_is_named(path, value):
    line = json.dumps({"prompt": "a", "answer": value})
    assert re.search(r'line 2: "answer" ', refusal(path, f"{GOOD}{line}\n"))


@pytest.mark.parametrize("value", [True, {"a": "b"}, [], "", None])
def test_a_reward_of_the_users_own_may_have_any_answer(path, value):
    record = read_row(path, {"prompt": "a", "answer": value}, FieldNames(any_answer=True))
    assert record.answer == ""
    assert record.fields["answer"] == value


@pytest.mark.parametrize("value", [2, 1.5, True, {"a": "b"}, ["a"], [], "", "   ", [{"role": "user"}], [[]]])
def test_a_prompt_that_is_no_text_and_no_conversation_is_named(path, value):
    line = json.dumps({"prompt": value, "answer": "b"})
    assert re.search(r'line 2: "prompt"', refusal(path, f"{GOOD}{line}\n"))


@pytest.mark.parametrize("field", ["prompt", "answer"])
def test_a_missing_field_is_named_with_those_that_are_there(path, field):
    for value in ({}, {field: None}):
        row = {**{name: "x" for name in ("prompt", "answer") if name != field}, "level": 3, **value}
        message = refusal(path, json.dumps(row))
        assert f'line 1: "{field}" is missing' in message
        assert "level" in message
        assert "_key" in message


def test_a_conversation_is_a_prompt_and_a_single_question_is_its_text(path):
    record = read_row(path, {"prompt": [USER], "answer": "2"})
    assert (record.prompt, record.messages) == ("1+1=", [USER])
    assert record.question == Record("1+1=", "2").question
    record = read_row(path, {"prompt": [SYSTEM, USER], "answer": "2"})
    assert record.prompt == "[system]\nBe brief.\n[user]\n1+1="
    assert record.messages == [SYSTEM, USER]
    assert record.fields["prompt"] == [SYSTEM, USER]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [SYSTEM, USER, ASSISTANT]},
        {"messages": [SYSTEM, USER], "answer": "2"},
        {"messages": [{**SYSTEM, "tool_calls": None}, USER, ASSISTANT]},
        {"prompt": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "1+1="}]}], "answer": 2},
        {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "1+1="},
                           {"from": "gpt", "value": "2"}]},
        {"conversations": [SYSTEM, USER, ASSISTANT]},
    ],
    ids=["messages", "messages and answer", "nulls of a table", "parts", "sharegpt", "conversations"],
)  # fmt: skip
def test_forms_of_a_conversation(path, row):
    record = read_row(path, row)
    assert (record.messages, record.answer) == ([SYSTEM, USER], "2")


@pytest.mark.parametrize("form", ["list", "text"])
def test_tools_are_kept_for_the_template(path, form):
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"answer": "2", "tools": tools if form == "list" else json.dumps(tools)}
    for prompt in ([USER], "1+1="):
        record = read_row(path, {"prompt": prompt, **row})
        assert (record.messages, record.tools) == ([USER], tools)
        assert record.question != Record("1+1=", "2").question


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER, ASSISTANT], "answer": "2"}, "ends with an assistant's message and"),
        ({"messages": [ASSISTANT]}, "no text before the answer"),
        ({"messages": [USER]}, '"answer" is missing'),
        ({"messages": [SYSTEM, {"role": "user", "content": " "}], "answer": "2"}, "no text before the answer"),
        ({"messages": [{"role": 3, "content": "x"}], "answer": "2"}, 'message 1: "role" is missing or not text'),
        ({"messages": [USER, {"role": "tool", "content": 3}], "answer": "2"}, 'message 2: "content" is 3'),
        ({"messages": ["1+1="], "answer": "2"}, 'message 1 is "1+1="'),
        ({"conversations": [{"from": "bot", "value": "x"}], "answer": "2"}, '"from" is "bot"'),
        ({"prompt": "x", "messages": [USER], "answer": "2"}, "prompt and messages are both there"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "2"}, "only parts of text are read"),
        ({"prompt": [USER], "answer": "2", "tools": "add"}, '"tools" must be a list'),
    ],
)
def test_a_conversation_that_cannot_be_read_is_named(path, row, message):
    assert f"line 1: {''}" in (text := refusal(path, json.dumps(row)))
    assert message in text


def test_keys_name_the_fields_and_a_missing_one_is_named_with_its_key(path):
    row = {"question": "1+1=", "solution": "#### 2", "answer": "other"}
    record = read_row(path, row, FieldNames("data.train", "question", "solution"))
    assert record == Record("1+1=", "#### 2")
    nested = {"prompt": [USER], "reward_model": {"ground_truth": "2"}, "data_source": "verl"}
    assert read_row(path, nested, FieldNames("data.train", None, "reward_model.ground_truth")).answer == "2"
    message = refusal(path, json.dumps(row), FieldNames("data.validation", "q", "solution"))
    assert '"q" (data.validation.input_key) is missing; the line has question, solution, answer' in message
    message = refusal(path, json.dumps(row), FieldNames("data.train", "question", "a"))
    assert '"a" (data.train.output_key) is missing' in message


@pytest.mark.parametrize("content", ["", "\n", "  \n\t\n", "[]"])
def test_a_file_without_records_is_refused(path, content):
    assert "no record" in refusal(path, content)


def test_bytes_that_are_not_utf8_are_refused(path):
    assert "UTF-8" in refusal(path, GOOD.encode() + b'{"prompt": "\xff", "answer": "b"}\n')


def test_a_missing_file_is_named_with_its_key(path):
    with pytest.raises(UserError, match=r"data\.validation\.data_path: .*nowhere\.jsonl"):
        read_dataset(path.parent / "nowhere.jsonl", FieldNames("data.validation"))
    with pytest.raises(UserError, match=r"data\.train\.data_path: .*nowhere\.jsonl"):
        read_dataset(path.parent / "nowhere.jsonl")
    assert "hf download openai/gsm8k" in refusal_of(read_dataset, "openai/gsm8k")


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_read_and_its_elements_are_numbered(path, indent):
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": 3}]
    path.write_text(json.dumps(rows, indent=indent))
    assert read_dataset(path) == [Record("a", "b"), Record("c", "3")]
    assert "element 2: " in refusal(path, json.dumps([*rows[:1], {"prompt": "c"}], indent=indent))


@pytest.mark.parametrize(
    "compress", [gzip.compress, bz2.compress, lzma.compress, lambda data: zstandard.ZstdCompressor().compress(data)]
)
def test_compressed_files_are_read_whatever_their_name(path, compress):
    path.write_bytes(compress(GOOD.encode()))
    assert read_dataset(path) == [Record("1+1=", "2")]
    assert "line 2:" in refusal(path, compress(f"{GOOD}x\n".encode()))
    assert "cannot be decompressed" in refusal(path, compress(GOOD.encode() * 50)[:-9])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"PK\x03\x04 ", "a ZIP archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x80\x04\x95 ", "pickle"),
        (b"<!DOCTYPE html>", "a web page"),
        (b"SQLite format 3\x00", "SQLite"),
        (b'{\n "prompt": "a",\n "answer": "b"\n}', "one JSON object over several lines"),
    ],
)
def test_what_a_file_is_instead_is_said_by_name(path, content, what):
    assert what in refusal(path, content)


def test_a_table_of_text_is_refused_by_its_name(tmp_path):
    assert "is CSV by its name" in refusal(tmp_path / "data.csv", "prompt,answer\n1,2\n")


def fill(folder: Path, **files: str) -> Path:
    for name, answer in files.items():
        file = folder / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"prompt": "a", "answer": answer}) + "\n")
    return folder


def test_a_folder_of_files_is_read_by_split(tmp_path):
    folder = fill(tmp_path, data__train_dot_jsonl="1", data__test_dot_jsonl="2", data__dev_dot_jsonl="3")
    (folder / "README.md").write_text("a dataset")
    assert [record.answer for record in read_dataset(folder)] == ["1"]
    assert [record.answer for record in read_dataset(folder, split="test")] == ["2"]
    assert [record.answer for record in read_dataset(folder, split="validation")] == ["3"]
    assert "has the splits test, train, validation" in refusal_of(read_dataset, folder, None, "prod")


def test_a_folder_of_parts_is_read_in_order_and_configurations_are_not_mixed(tmp_path):
    folder = fill(tmp_path / "parts", **{f"train-0000{i}-of-00002_dot_jsonl": str(i) for i in (1, 0)})
    assert [record.answer for record in read_dataset(folder)] == ["0", "1"]
    fill(tmp_path / "two", main__train_dot_jsonl="1", socratic__train_dot_jsonl="2")
    assert "in main and socratic; give one of these" in refusal_of(read_dataset, tmp_path / "two")
    assert [record.answer for record in read_dataset(tmp_path / "two/main")] == ["1"]
    fill(tmp_path / "mixed", train_dot_jsonl="1", train_dot_json="2")
    assert "as .json and as .jsonl" in refusal_of(read_dataset, tmp_path / "mixed")
    (tmp_path / "empty").mkdir()
    assert "holds no file of a dataset" in refusal_of(read_dataset, tmp_path / "empty")
    assert "data.train.split=test: " in refusal_of(read_dataset, folder / "train-00000-of-00002.jsonl", None, "test")


def test_without_pyarrow_a_table_is_one_sentence(path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs pyarrow: pip install pyarrow" in refusal(path, b"PAR1" + bytes(range(256)) + b"PAR1")


ROWS = [
    {"question": "1+1=", "answer": 2, "level": None, "messages": [USER, {**ASSISTANT, "name": "x"}]},
    {"question": "1+2=", "answer": 3, "level": 2.5,
     "messages": [{**USER, "content": "1+2="}, {**ASSISTANT, "content": "3"}]},
]  # fmt: skip


def test_parquet_and_arrow_files_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow, as `make test-nemo-rl` has")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    for name, make in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
        with make(tmp_path / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table)
    names = FieldNames("data.train", "question")
    for file in ("train-00000-of-00001.parquet", "stream.arrow", "file.arrow"):
        records = read_dataset(tmp_path / file, names)
        assert records == [Record("1+1=", "2"), Record("1+2=", "3")]
        assert records[1].place == f"{tmp_path / file}, row 2"
        chat = FieldNames("data.train", "messages", "none")
        assert [(r.prompt, r.answer) for r in read_dataset(tmp_path / file, chat)] == [("1+1=", "2"), ("1+2=", "3")]
    (tmp_path / "stream.arrow").write_bytes(b"\xff\xff\xff\xff ")
    assert "cannot be read as a table" in refusal_of(read_dataset, tmp_path / "stream.arrow")


def test_what_the_library_datasets_saves_is_read(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs datasets, as `make test-nemo-rl` has")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    file = str(tmp_path / "rows.jsonl")
    data = datasets.load_dataset("json", data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
    data.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "two")
    names = FieldNames("data.train", "question")
    assert [record.answer for record in read_dataset(tmp_path / "one", names)] == ["2", "3"]
    assert [record.answer for record in read_dataset(tmp_path / "two", names)] == ["2", "3"]
    assert [record.answer for record in read_dataset(tmp_path / "two", names, "test")] == ["2", "3"]
    assert "has the splits train, test" in refusal_of(read_dataset, tmp_path / "two", names, "dev")
