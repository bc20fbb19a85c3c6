"""A key that came after the first runs must say what they had, or those runs cannot be resumed."""

from pathlib import Path

from nemo_fp8rl.common.field_rules import EarlierRuns, all_fields
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.run.resume import may_change

FIRST = (Path(__file__).parent / "keys_of_all_runs.txt").read_text().split()


def test_a_new_key_has_a_value_of_earlier_runs_or_may_change():
    fields = [field for field in all_fields(Config) if not field.block and field.key not in FIRST]
    assert [f.key for f in fields if f.marker(EarlierRuns) is None and not may_change(f.key)] == []
    assert any(field.key == "loss_fn.ratio_clip_adaptive" for field in fields)
