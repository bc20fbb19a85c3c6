"""docs/config.md, docs/config_policy.md and docs/config_fp8rl.md against the blocks of a recipe."""

from pathlib import Path

import pytest

from nemo_fp8rl.common.field_rules import MayChange, all_fields
from nemo_fp8rl.config.reference import COMMAND, first_sentence, meanings, pages
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.run.resume import may_change

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", pages())
def test_the_pages_of_keys_are_up_to_date(name):
    assert (DOCS / name).read_text() == pages()[name], f"renew it: {COMMAND}"


def test_every_key_has_a_meaning_of_one_line():
    blocks = {Config: "", **{f.block or f.element: f.key for f in all_fields(Config) if f.block or f.element}}
    texts = {(key, name): text for block, key in blocks.items() for name, text in meanings(block).items()}
    blocks_of_blocks = {tuple(f.key.rpartition(".")[::2]) for f in all_fields(Config) if f.block}
    values = {key: text for key, text in texts.items() if key not in blocks_of_blocks}
    assert [key for key, text in values.items() if not text.endswith(".")] == []
    assert [key for key, text in values.items() if not 0 < len(first_sentence(text)) <= 110] == []


def test_keys_of_a_block_that_may_change_may_change():
    assert may_change("cluster.train_ranks") and may_change("nemo_fp8rl.refit.mode") and may_change("grpo.val_period")
    assert not may_change("grpo.max_val_samples") and not may_change("policy.generation.vllm_cfg.env_vars.A")
    assert any(field.marker(MayChange) for field in all_fields(Config))
