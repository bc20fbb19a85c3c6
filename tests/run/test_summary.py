"""The end of a run: its table shows nothing as exact that is not, and its commands can be pasted."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from nemo_fp8rl.common.format_numbers import format_exactly, format_share
from nemo_fp8rl.config.policy_schema import MegatronConfig, PeftConfig
from nemo_fp8rl.run.summary import make_summary, next_commands


def shown(table: object) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue()


def test_the_table_has_first_and_last_means_and_phases():
    rows = [{"step": 0, "validation/accuracy": 0.25}]
    for step in (1, 2):
        rows.append({"step": step, "train/reward": step / 4, "train/token_mult_prob_error": 1.0 + 4e-9 * (step - 1)})
        rows[-1] |= {"train/exact_logprob_fraction": 1.0, "timing/total_step_time": 2.0, "timing/train": 1.5}
        rows[-1] |= {"refit/bytes": 2e6, "train/frac_reward_zero_std": 2.0 - step}
    text = shown(make_summary(rows, "fp8_e2e"))
    for words in ("0.250, 0.500", "0.250, 0.250", "1.000000002", "100 %", "2 MB", "2.000 s", "1.500 s (75%)"):
        assert words in text
    assert "equal rewards" in text
    assert "generate" not in text


def test_a_run_without_a_step_has_a_table():
    assert "0 steps" in shown(make_summary([], "bf16"))


def test_commands_quote_paths_and_name_the_latest_checkpoint(tmp_path):
    folder = tmp_path / "my run"
    for step in (2, 10):
        (folder / f"checkpoints/step_{step}").mkdir(parents=True)
    cfg = SimpleNamespace(
        logger=SimpleNamespace(log_dir=str(folder)),
        checkpointing=SimpleNamespace(checkpoint_dir=str(folder / "checkpoints")),
        grpo=SimpleNamespace(max_num_steps=10, max_num_epochs=3),
        nemo_fp8rl=SimpleNamespace(quantizes_rollout=True),
        policy=SimpleNamespace(megatron_cfg=MegatronConfig()),
    )
    text = next_commands(cfg, 10).plain
    assert f"nemo-fp8rl report '{folder}'" in text
    assert f"--checkpoint '{Path(folder)}/checkpoints/step_10/policy/weights'" in text
    cfg.policy.megatron_cfg = MegatronConfig(peft=PeftConfig(enabled=True))
    assert "/checkpoints/step_10/policy/adapter'" in next_commands(cfg, 10).plain
    assert "--resume grpo.max_num_steps=20" in text
    assert (
        "--resume grpo.max_num_epochs=6 grpo.max_num_steps=10" in next_commands(cfg, 9).plain
    )  # the epochs have ended it
    cfg.nemo_fp8rl.quantizes_rollout = False
    assert "export" not in next_commands(cfg, 10).plain


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1"), (1.00003, "1.00003"), (1.0000000001, "1.0000000001"), (0.99999999, "0.99999999"), (5e-7, "5e-7")],
)
def test_only_an_exact_value_looks_exact(value, text):
    assert format_exactly(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(1.0, "100 %"), (0.0, "0 %"), (0.5, "50 %"), (0.9999999, "99.99999 %"), (0.8143, "81.4 %")]
)
def test_only_all_is_100_percent(share, text):
    assert format_share(share) == text
