"""The demo of NeMo RL's own loop, and its recipe, conf/nemo_rl/tiny_cpu.yaml."""

import re
import subprocess
import sys

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
from tests.conftest import RECIPES
from tests.nemo_rl import runs

RECIPE = RECIPES / "nemo_rl/tiny_cpu.yaml"


def test_without_a_checkout_the_demo_ends_before_it_makes_a_model(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("NEMO_RL_SRC", raising=False)
    assert main(["demo", "--loop", "nemo", "--runs", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("nemo-fp8rl: NEMO_RL_SRC is not set: clone https://github.com/NVIDIA-NeMo/RL")
    assert said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.nemo_rl
@runs.needs_checkout
def test_the_demo_ends_in_a_table_with_exact_agreement_and_the_log_folder(tmp_path):
    command = [sys.executable, "-m", "nemo_fp8rl.cli", "demo", "--loop", "nemo", "--steps", "2"]
    command += ["--warm-up-steps", "5", "--runs", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=runs.environment(tmp_path), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = dict(re.findall(r"^│ (.*?) +│ (.*?) +│$", done.stdout, re.MULTILINE))
    mismatch = runs.logged(tmp_path / "demo-1/nemo_rl")["train/token_mult_prob_error"]
    assert len(mismatch) == 2
    assert rows["token_mult_prob_error, largest"] == f"{max(mismatch):.6f}"
    assert max(mismatch) < 1.001  # on CPUs with AMX the last bits differ
    assert f"\nlog folder: {tmp_path}/demo-1/nemo_rl/exp_001; next:\n" in done.stdout
    assert {"reward, first step", "reward, last step"} <= rows.keys()


@pytest.mark.nemo_rl
@runs.needs_checkout
def test_nulls_that_nemo_rls_schema_allows_do_not_end_the_loop(warm, tmp_path):
    keys = [f"policy.model_name={warm}/warm", f"data.train.data_path={warm}/data.jsonl", "grpo.max_num_steps=1"]
    keys += ["grpo.val_period=1", "grpo.max_val_samples=32", "grpo.val_batch_size=32"]
    keys += ["data.train.split_validation_size=0.05", "policy.generation.top_k=-1"]
    keys += [f"{key}=null" for key in (NULLS[:1] if find_checkout().version.startswith("0.7") else NULLS)]
    values = runs.run(tmp_path / "logs", f"logger.log_dir={tmp_path}/logs", *keys, recipe=RECIPE)
    assert len(values["train/reward"]) == len(values["validation/accuracy"]) == 1


NULLS = (  # of main; v0.7.0 allows fewer
    *("data.max_input_seq_length", "data.validation", "data.default.system_prompt_file"),
    *("policy.logprob_chunk_size", "policy.tokenizer.chat_template_kwargs"),
    *("policy.generation.stop_strings", "policy.generation.stop_token_ids"),
    *("policy.megatron_cfg.scheduler.lr_decay_iters", "policy.megatron_cfg.recompute_modules"),
    *("loss_fn.ratio_clip_c", "loss_fn.kl_input_clamp_value", "loss_fn.kl_output_clamp_value"),
    *("checkpointing.metric_name", "checkpointing.checkpoint_must_save_by", "checkpointing.model_save_format"),
)
