"""The dtype in config.json."""

import json

import pytest

from nemo_fp8rl.hf.config_dtype import write_dtype


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        ({"dtype": "float16", "a": 1}, {"dtype": "bfloat16", "a": 1}),
        ({"torch_dtype": "float16"}, {"torch_dtype": "bfloat16"}),
        ({"torch_dtype": "bfloat16", "dtype": "float32"}, {"torch_dtype": "bfloat16", "dtype": "bfloat16"}),
        ({"dtype": None}, {"dtype": "bfloat16"}),
        ({"a": 1}, {"a": 1, "torch_dtype": "bfloat16"}),
    ],
)
def test_every_spelling_is_changed_and_a_missing_one_added(tmp_path, config, changed):
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_dtype(tmp_path / "config.json", "bfloat16")
    assert json.loads((tmp_path / "config.json").read_text()) == changed


def test_a_right_file_keeps_its_bytes(tmp_path):
    (tmp_path / "config.json").write_text('{"dtype":   "bfloat16"}')
    write_dtype(tmp_path / "config.json", "bfloat16")
    assert (tmp_path / "config.json").read_text() == '{"dtype":   "bfloat16"}'
