"""Reading prompts, and saying what is wrong with a line."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.jsonl import Record, read_jsonl

GOOD = '{"prompt": "1+1=", "answer": "2"}\n'


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("jsonl") / "data.jsonl"


def refusal(path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        read_jsonl(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_records_come_in_order_and_other_fields_are_ignored(path):
    path.write_text('{"prompt": "a", "answer": "b", "level": 3}\n\n  \n{"answer": "", "prompt": "c"}')
    assert read_jsonl(path) == [Record("a", "b"), Record("c", "")]
    assert read_jsonl(str(path)) == read_jsonl(path)


def test_a_byte_order_mark_is_no_part_of_the_first_line(path):
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert read_jsonl(path) == [Record("1+1=", "2")]


def test_windows_line_ends_are_read(path):
    path.write_bytes(GOOD.replace("\n", "\r\n").encode() * 2)
    assert read_jsonl(path) == [Record("1+1=", "2")] * 2


@settings(deadline=None, max_examples=60)
@given(records=st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=4), ascii_only=st.booleans())
def test_any_text_survives(path, records, ascii_only):
    lines = [json.dumps({"prompt": p, "answer": a}, ensure_ascii=ascii_only) for p, a in records]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert read_jsonl(path) == [Record(p, a) for p, a in records]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_unicode_line_separators_inside_a_text_do_not_end_its_line(path, separator):
    path.write_text(json.dumps({"prompt": f"a{separator}b", "answer": "c"}, ensure_ascii=False), encoding="utf-8")
    assert read_jsonl(path) == [Record(f"a{separator}b", "c")]


@settings(deadline=None, max_examples=100)
@given(content=st.one_of(st.binary(max_size=60), st.text('{}[]":, \n\\u0d8promtanswe12', max_size=60).map(str.encode)))
def test_any_bytes_give_records_or_a_user_error(path, content):
    path.write_bytes(content)
    try:
        records = read_jsonl(path)
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
    ],
)
def test_a_malformed_line_is_named_by_its_number(path, line):
    assert "line 3:" in refusal(path, f"{GOOD}\n{line}\n{GOOD}")


@pytest.mark.parametrize("field", ["prompt", "answer"])
@pytest.mark.parametrize("value", [None, 2, 1.5, True, ["a"], {"a": "b"}])
def test_a_field_that_is_not_text_is_named(path, field, value):
    line = json.dumps({"prompt": "a", "answer": "b", field: value})
    assert re.search(rf'line 2: "{field}"', refusal(path, f"{GOOD}{line}\n"))


@pytest.mark.parametrize("field", ["prompt", "answer"])
def test_a_missing_field_is_named(path, field):
    line = json.dumps({name: "x" for name in ("prompt", "answer") if name != field})
    assert f'line 1: "{field}"' in refusal(path, line)


@pytest.mark.parametrize("content", ["", "\n", "  \n\t\n"])
def test_a_file_without_records_is_refused(path, content):
    assert "no record" in refusal(path, content)


def test_bytes_that_are_not_utf8_are_refused(path):
    assert "UTF-8" in refusal(path, GOOD.encode() + b'{"prompt": "\xff", "answer": "b"}\n')


def test_a_missing_file_is_named_with_its_key(path):
    with pytest.raises(UserError, match=r"data\.validation\.data_path: .*nowhere\.jsonl"):
        read_jsonl(path.parent / "nowhere.jsonl", "data.validation.data_path")
    with pytest.raises(UserError, match=r"data\.train\.data_path: .*nowhere\.jsonl"):
        read_jsonl(path.parent / "nowhere.jsonl")


def test_a_folder_is_refused(path):
    with pytest.raises(UserError, match=re.escape(str(path.parent))):
        read_jsonl(path.parent)
