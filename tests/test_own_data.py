"""Whole runs on a user's own rewards and conversations, as docs/rewards.md says."""

import json
import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.report.page import report
from nemo_fp8rl.data.rewards import Answered, load_scorer
from tests.conftest import RECIPES

PAGE = (Path(__file__).parents[1] / "docs/rewards.md").read_text()
SHORT = ("grpo.val_at_start=false", "grpo.val_period=0", "grpo.val_at_end=false", "checkpointing.save_period=100")
DATED = (
    "{% if date is not defined %}{% set date = strftime_now('%d') %}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ date }}="
)


@pytest.fixture
def words(warm_overrides, tmp_path, monkeypatch):
    """words(*overrides) -> the arguments of `train` for a short run in the working directory, which is the test's."""
    monkeypatch.chdir(tmp_path)

    def make(*overrides: str) -> list[str]:
        return ["train", "--config", str(RECIPES / "tiny_cpu.yaml"), *warm_overrides, *SHORT, *overrides]

    return make


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def test_the_rewards_of_the_page_work_as_they_stand(words, tmp_path):
    (code,) = re.findall(r"```python\n# my_rewards\.py\n(.*?)```", PAGE, re.DOTALL)
    (command,) = re.findall(r"nemo-fp8rl (train .*my_rewards.*)", PAGE)
    Path("my_rewards.py").write_text(code)
    arguments = [word for word in command.split()[3:] if not word.startswith("logger.")]
    assert main([*words("grpo.max_num_steps=1"), *arguments, f"logger.log_dir={tmp_path}/run"]) == 0
    (row,) = rows(tmp_path / "run")
    assert -0.05 <= row["train/reward"] < 1
    (samples,) = rows(tmp_path / "run", "samples.jsonl")
    for sample in samples["samples"]:
        right, length = round(sample["reward"] + 0.03), sample["num_tokens"] - (sample["tokens"][-1] == "<eos>")
        assert sample["reward"] == pytest.approx(right - 0.01 * length, abs=1e-6)
    answered = [Answered(text, ("46",), {"answer": 46}) for text in ("46", " 46", "47")]
    assert load_scorer("my_rewards:all_at_once").score(answered) == [1.0, 1.0, 0.0]
    assert load_scorer("my_rewards:short_and_right").score(answered) == pytest.approx([0.98, 0.97, -0.02])


def test_a_reward_that_fails_names_the_sample_and_the_mended_run_goes_on(words, tmp_path, tiny, capsys):
    Path("late.py").write_text(
        "import pathlib\n"
        "def score(completion, answer):\n"
        "    if pathlib.Path('broken').exists() and pathlib.Path('run/metrics.jsonl').read_text():\n"
        "        return {}[completion]\n"
        "    return completion == answer\n"
    )
    Path("broken").touch()
    run = words("grpo.max_num_steps=2", "data.default.env_name=late:score", f"logger.log_dir={tmp_path}/run")
    assert main(run) == 2
    (message,) = capsys.readouterr().err.splitlines()
    place = rf"{tiny}/data\.jsonl, line \d+, prompt number \d+ \(prompt '\d+\+\d+=', completion '.*'\)"
    raised = r"nemo-fp8rl: step 2: data\.default\.env_name=late:score raised KeyError: .* \(late\.py, line 4\)"
    assert re.fullmatch(rf"{raised} for {place}; mend the function", message)
    Path("broken").unlink()
    assert main([*run, "--resume"]) == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_conversations_with_a_dated_template_go_on_on_another_day(words, tmp_path, tiny, monkeypatch, capsys):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.chat_template = DATED
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    chats = [([("system", str(a)), ("user", f"{a}+7")], a + 7) for a in range(1, 41)]
    lines = [{"prompt": [{"role": r, "content": c} for r, c in chat], "answer": [s, f"0{s}"]} for chat, s in chats]
    Path("chats.json").write_text(json.dumps(lines))
    data = ("data.train.data_path=chats.json", "data.train.split_validation_size=0.1")
    run = words(f"policy.tokenizer.name={tmp_path}/tokenizer", *data, f"logger.log_dir={tmp_path}/run")
    assert main([*run, "grpo.max_num_steps=1"]) == 0
    today = datetime.now()
    assert f"prints the date: {today:%Y-%m-%d}" in capsys.readouterr().out

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=1)

    monkeypatch.setattr("nemo_fp8rl.data.tokenizer.datetime", Tomorrow)
    assert main([*run, "grpo.max_num_steps=100", "grpo.max_num_epochs=1", "--resume"]) == 0
    assert "grpo.max_num_epochs=1 ends the run after 2 steps" in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    said_by_recipe = f"policy.tokenizer.chat_template_kwargs={{date: '{today:%d}'}}"
    assert main([*run, "grpo.max_num_steps=2", "--resume", said_by_recipe]) == 0
    assert main([*run, "grpo.max_num_steps=2", "--resume", "policy.tokenizer.chat_template_kwargs={date: '99'}"]) == 2
    assert "tokens of the prompts are not those that the run began with" in capsys.readouterr().err
    (samples,) = rows(tmp_path / "run", "samples.jsonl")
    first = samples["samples"][0]
    assert re.fullmatch(rf"(\d+)\1\+7{today:%d}=", first["rendered_prompt"])
    assert first["prompt"].startswith("[system]\n")
    assert first["rendered_prompt"] in report([tmp_path / "run"], tmp_path / "report.html").read_text()
