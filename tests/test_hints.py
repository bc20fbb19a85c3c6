"""grpo.hints: which prompts are asked again, with which text and seed, what trains, and a resume."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_fp8rl.batch import Completion, Prompt
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.stopwatch import Stopwatch
from nemo_fp8rl.config.policy_schema import PolicyConfig, TokenizerConfig
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.data.records import FieldNames, Record, parse_record
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.generation.interface import Sampling, sample_seed
from nemo_fp8rl.rollout.collect import Rollout, collect_rollout
from nemo_fp8rl.rollout.hints import hint_metrics
from nemo_fp8rl.train import train
from tests.conftest import RECIPES

ON = "grpo.hints.enabled=true"
TEMPLATE = "grpo.hints.template='{hint};{prompt}'"
SHARES = (0.25, 0.5, 0.75)
SIZE = 2
SOLUTION = "7+8=15;9"
"""Eight tokens of the tiny tokenizer, which has one for each character."""
OF_THE_PROCESS = ("timing", "performance", "memory", "generation", "refit")


class FakeEngine:
    """Answers by a table: a prompt is right from a stage on, or never. It records each call."""

    def __init__(self, tokenizer: PromptTokenizer, right_from: dict[str, int | None], shown: dict[str, int]) -> None:
        """right_from: question -> stage of the first right answer; shown: what the model sees -> its stage"""
        self.tokenizer, self.right_from, self.shown = tokenizer, right_from, shown
        self.calls: list[tuple[list[str], list[int]]] = []

    def generate(self, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int], sampling, answered):
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        self.calls.append((texts, list(seeds)))
        return [[self._answer(text, i) for i in range(sampling.num_generations)] for text in texts]

    def _answer(self, text: str, number: int) -> Completion:
        """One of the answers is right; a wrong one has two tokens and was cut off."""
        stage = self.right_from[text.rpartition(";")[2]]
        if stage is not None and self.shown[text] >= stage and number == 0:
            return Completion(tuple(self.tokenizer.tokenize_answer("95")), (0.0,) * 3, "stop", 0)
        return Completion((2, 2), (0.0, 0.0), "length", 0)


def hinted(question: str, stage: int) -> str:
    """What the model sees of a stage, by the published rule with tokens for characters."""
    count = int(np.rint(np.float64(SHARES[stage - 1]) * np.float64(len(SOLUTION)))) if stage else 0
    return f"{SOLUTION[:count]};{question}" if stage else question


def collected(
    cfg, right_from: dict[str, int | None], without: Sequence[str] = (), step: int = 3, rounds: int = 1
) -> tuple[Rollout, FakeEngine]:
    """A step of these questions, in order; `without` have no solution. Each round has an equal part of them."""
    tokenizer = PromptTokenizer(cfg.policy)
    records = [Record(text, "95", solution="" if text in without else SOLUTION) for text in right_from]
    prompts = tokenizer.tokenize(records, 64)
    shown = {hinted(text, stage): stage for text in right_from for stage in range(4)}
    engine = FakeEngine(tokenizer, right_from, shown)
    part = len(prompts) // rounds
    sampling = Sampling(num_generations=SIZE, max_new_tokens=3, temperature=1.0, stop_token_ids=())
    clock = Stopwatch(lambda _: None)
    rollout = collect_rollout(
        cfg, engine, tokenizer, sampling, clock, step, lambda i: prompts[i * part : (i + 1) * part]
    )
    return rollout, engine


def sizes(prompts: int) -> tuple[str, ...]:
    rows = f"policy.train_global_batch_size={SIZE * prompts}", f"policy.train_micro_batch_size={SIZE * prompts}"
    return (f"grpo.num_prompts_per_step={prompts}", f"grpo.num_generations_per_prompt={SIZE}", *rows)


def seeds_of(cfg, positions: Sequence[int | str], step: int = 3) -> list[int]:
    return [sample_seed(cfg.grpo.seed, step, position) for position in positions]


TABLE: dict[str, int | None] = {"1+1=": 0, "2+2=": 1, "3+3=": None, "4+4=": 2, "5+5=": 3, "6+6=": 0, "7+7=": None}


def test_failed_groups_are_asked_stage_by_stage_all_of_a_stage_in_one_call(recipe):
    cfg = recipe(*sizes(len(TABLE)), ON, TEMPLATE)
    rollout, engine = collected(cfg, TABLE, without=["7+7="])
    first, one, two, three = ["2+2=", "3+3=", "4+4=", "5+5="], [1, 2, 3, 4], [2, 3, 4], [2, 4]
    questions = list(TABLE)
    assert engine.calls == [
        (questions, seeds_of(cfg, range(7))),
        ([hinted(text, 1) for text in first], seeds_of(cfg, [f"{i}/hint 1" for i in one])),
        ([hinted(questions[i], 2) for i in two], seeds_of(cfg, [f"{i}/hint 2" for i in two])),
        ([hinted(questions[i], 3) for i in three], seeds_of(cfg, [f"{i}/hint 3" for i in three])),
    ]
    assert engine.calls[1][0][0] == "7+;2+2=", "a quarter of eight tokens"
    assert [prompt.hint_stage for prompt in rollout.prompts[::SIZE]] == [0, 1, 3, 2, 3, 0, 0]
    assert [prompt.text for prompt in rollout.prompts[::SIZE]] == questions
    assert [prompt.rendered for prompt in rollout.prompts[::SIZE]] == [
        hinted(text, stage) for text, stage in zip(questions, [0, 1, 3, 2, 3, 0, 0], strict=True)
    ]
    assert all(prompt.fields["rendered_prompt"] == prompt.rendered for prompt in rollout.prompts)
    assert rollout.rewards.view(-1, SIZE).tolist() == [[1, 0], [1, 0], [0, 0], [1, 0], [1, 0], [1, 0], [0, 0]]


def test_answers_of_all_stages_are_in_the_counts(recipe):
    rollout, engine = collected(recipe(*sizes(len(TABLE)), ON, TEMPLATE), TABLE, without=["7+7="])
    asked = sum(len(texts) for texts, _ in engine.calls)
    right = sum(stage is not None for stage in TABLE.values())
    assert len(rollout.all_rewards) == SIZE * asked == 2 * (7 + 4 + 3 + 2)
    assert rollout.generated_tokens == 2 * (SIZE * asked - right) + 3 * right
    assert rollout.truncated_answers == SIZE * asked - right
    assert rollout.unhinted_rewards.tolist() == rollout.all_rewards[:14].tolist()
    found = hint_metrics(recipe().grpo.hints, rollout.prompts, rollout.unhinted_rewards)
    assert found == pytest.approx(
        {
            "hinted_ratio": 4 / 7,
            **{"hinted_ratio/stage_1": 1 / 7, "hinted_ratio/stage_2": 1 / 7, "hinted_ratio/stage_3": 2 / 7},
            "unhinted_reward": 2 / 14,
        }
    )


@pytest.mark.parametrize(
    ("keys", "without", "step"),
    [
        pytest.param((), (), 3, id="off"),
        pytest.param((ON, TEMPLATE), tuple(TABLE), 3, id="no solution"),
        pytest.param((ON, TEMPLATE, "grpo.hints.start_step=3"), (), 3, id="before the start"),
    ],
)
def test_without_hints_the_engine_is_asked_once(recipe, keys, without, step):
    cfg = recipe(*sizes(len(TABLE)), *keys)
    rollout, engine = collected(cfg, TABLE, without, step)
    assert engine.calls == [(list(TABLE), seeds_of(cfg, range(7), step))]
    assert {prompt.hint_stage for prompt in rollout.prompts} == {0}
    assert torch.equal(rollout.all_rewards, rollout.unhinted_rewards)
    assert torch.equal(rollout.all_rewards, rollout.rewards)


def test_hints_begin_after_the_steps_without_them(recipe):
    cfg = recipe(*sizes(len(TABLE)), ON, TEMPLATE, "grpo.hints.start_step=3")
    assert len(collected(cfg, TABLE, step=4)[1].calls) == 4


def test_dynamic_sampling_sees_groups_after_their_hints(recipe):
    """Two prompts a round; of the first round only the hint makes a group with a signal, the second adds another."""
    dynamic = ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=2")
    cfg = recipe(*sizes(2), ON, TEMPLATE, *dynamic)
    table: dict[str, int | None] = {"1+1=": 1, "2+2=": None, "3+3=": 0, "4+4=": None}
    rollout, engine = collected(cfg, table, without=["4+4="], rounds=2)
    assert [(prompt.text, prompt.hint_stage) for prompt in rollout.prompts[::SIZE]] == [("1+1=", 1), ("3+3=", 0)]
    assert [seeds for _, seeds in engine.calls] == [
        seeds_of(cfg, [0, 1]),
        *(seeds_of(cfg, ids) for ids in (["0/hint 1", "1/hint 1"], ["1/hint 2"], ["1/hint 3"], [2, 3])),
    ]
    assert rollout.rounds == 2 and len(rollout.all_rewards) == SIZE * 8 and len(rollout.unhinted_rewards) == SIZE * 4


def test_a_hint_that_leaves_no_room_for_an_answer_is_not_given(recipe):
    """Four tokens of a question, and five or seven with a hint: the last stage would fill the context of ten."""
    keys = "policy.max_total_sequence_length=10", "policy.generation.max_new_tokens=3"
    rollout, engine = collected(recipe(*sizes(1), ON, TEMPLATE, *keys), {"3+3=": None})
    assert [texts for texts, _ in engine.calls] == [["3+3="], ["7+;3+3="], ["7+8=;3+3="]]
    assert len(engine.calls[-1][0][0]) == 9, "one token is left"
    assert rollout.prompts[0].hint_stage == 2


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.5, 0.7, 0.75, 0.9])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 10, 30])
def test_a_share_is_of_whole_tokens_by_the_published_rounding(recipe, share, count):
    solution = ("123+456=579;" * 3)[:count]
    tokenizer = PromptTokenizer(recipe().policy)
    (prompt,) = tokenizer.tokenize([Record("1+1=", "2", solution=solution)], 64)
    found = tokenizer.add_hint(prompt, share, 1, "{prompt}>{hint}")
    expected = solution[: int(np.rint(np.float64(share) * np.float64(count)))]
    assert (found.rendered if found else "1+1=>") == f"1+1=>{expected}"


def test_a_stage_that_adds_no_token_asks_nothing(recipe):
    """Of one token, a quarter and a half are none, and three quarters are all of it."""
    tokenizer = PromptTokenizer(recipe().policy)
    (prompt,) = tokenizer.tokenize([Record("1+1=", "2", solution="2")], 64)
    found = [tokenizer.add_hint(prompt, share, 1, "{prompt}{hint}") for share in SHARES]
    assert [hint and hint.rendered for hint in found] == [None, None, "1+1=2"]
    assert tokenizer.add_hint(found[2], 0.75, 2, "{prompt}{hint}").token_ids == found[2].token_ids


def test_a_part_of_a_character_is_left_out(recipe, tmp_path):
    """A tokenizer of single bytes: é has two of them, the sign of the euro three."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({token: i for i, token in enumerate(["<eos>", *alphabet])}, []))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<eos>").save_pretrained(tmp_path)
    tokenizer = tokenizer_at(recipe, tmp_path, "default")
    (prompt,) = tokenizer.tokenize([Record("é?", "2", solution="aé€b")], 300)
    hints = [tokenizer.add_hint(prompt, count / 7, 1, "{prompt}{hint}") for count in range(1, 8)]
    assert [hint.rendered.removeprefix("é?") for hint in hints] == ["a", "a", "aé", "aé", "aé", "aé€", "aé€b"]


def tokenizer_at(recipe, folder: Path, template: str) -> PromptTokenizer:
    policy: PolicyConfig = recipe().policy
    return PromptTokenizer(replace(policy, tokenizer=TokenizerConfig(str(folder), template)))


CHAT = "{% for m in messages %}{{ m.role[0] }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}a>{% endif %}"
CHAT = CHAT.replace("{{ m.role[0] }}", "{{ {'system': 0, 'user': 1, 'assistant': 2}[m.role] }}").replace("a>", "2>")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("1+1=", "1>7+8=;1+1=;2>"),
        ([("system", "0"), ("user", "1+1=")], "0>0;1>7+8=;1+1=;2>"),
        ([("user", "3"), ("assistant", "4"), ("user", "1+1=")], "1>3;2>4;1>7+8=;1+1=;2>"),
        ([("user", "1+1="), ("assistant", "2"), ("system", "3")], None),
    ],
)
def test_a_hint_is_in_the_users_last_message(recipe, tiny, messages, expected):
    tokenizer = tokenizer_at(recipe, tiny / "model", CHAT)
    prompt = messages if isinstance(messages, str) else [{"role": role, "content": text} for role, text in messages]
    row = {"prompt": prompt, "answer": "2", "solution": SOLUTION}
    record = parse_record(row, "line 1", FieldNames(solution="solution"))
    (prompt,) = tokenizer.tokenize([record], 64)
    found = tokenizer.add_hint(prompt, 0.5, 2, "{hint};{prompt}")
    assert (found and found.rendered) == expected
    if found:
        again = tokenizer.add_hint(found, 0.75, 3, "{hint};{prompt}")
        assert again.rendered == expected.replace("7+8=;", "7+8=15;"), "of the question, not of the hint before"
        assert (again.index, again.text, again.answer, again.hint_stage) == (0, prompt.text, "2", 3)


def test_neither_question_nor_solution_is_searched_for_places(recipe, tiny):
    tokenizer = tokenizer_at(recipe, tiny / "model", "default")
    renderer = tokenizer.renderer
    seen: list[str] = []
    renderer.render = lambda record: (seen.append(record.prompt), [2])  # the tiny tokenizer has no braces
    tokenizer.tokenizer = lambda text, **_: SimpleNamespace(input_ids=[*text])
    tokenizer.decode = "".join
    tokenizer.add_hint(Prompt(0, "a{hint}", "", (2,), solution="{prompt}bb"), 0.8, 1, "{prompt} {hint}!")
    assert seen == ["a{hint} {prompt}!"]


def test_a_solution_is_text_of_its_field_or_nothing():
    def solution(name: str, **row: object) -> str:
        return parse_record({"prompt": "1", "answer": "2"} | row, "line 1", FieldNames(solution=name)).solution

    assert solution("solution", solution="x y") == "x y"
    assert solution("extra.worked", extra={"worked": "x"}) == "x"
    assert solution("answer") == "2", "a derivation in the answer, as GSM8K's"
    assert [solution("solution", solution=value) for value in (None, "", " \n")] == ["", "", ""]
    assert solution("solution") == solution("", solution=["any"]) == ""
    with pytest.raises(UserError, match=r'line 1: "solution" is \["x"\], which is no text; .*data.train.solution_key'):
        solution("solution", solution=["x"])


def write_data(path: Path, solutions: Sequence[str | None]) -> Path:
    rows = [{"prompt": f"{i + 10}+1=", "answer": str(i + 11), "worked": text} for i, text in enumerate(solutions)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_counts_solutions_and_refuses_data_without_any(recipe, tmp_path):
    long = "1" * 80  # three quarters of it leave no room in 64 tokens
    data = write_data(tmp_path / "data.jsonl", [SOLUTION] * 70 + [long] * 5 + [None] * 15)
    few = "data.train.split_validation_size=0.2", f"data.train.data_path={data}"
    keys = *few, ON, "data.train.solution_key=worked"
    (note,) = [note for note in load_prompts(recipe(*keys), 64).notes if note.startswith("grpo.hints")]
    with_solution = [p for p in load_prompts(recipe(*keys), 64).train if p.solution]
    too_long = sum(prompt.solution == long for prompt in with_solution)
    assert note.startswith(f"grpo.hints: {len(with_solution)} of 72 training prompts have a solution; {too_long} of ")
    with pytest.raises(UserError, match=r'no training prompt has a solution in "solution" \(data.train.solution_'):
        load_prompts(recipe(*few, ON), 64)
    with pytest.raises(UserError, match=r"gives token \d+, but the model's vocab_size is 15"):
        load_prompts(recipe(*keys, "grpo.hints.template='{prompt};{hint}'"), 15)
    assert not any(note.startswith("grpo.hints") for note in load_prompts(recipe(*few), 64).notes)


def test_solutions_are_a_part_of_the_data_that_a_resumed_run_must_have(recipe, tmp_path):
    def digests(text: str, *keys: str) -> dict[str, str]:
        data = write_data(tmp_path / "data.jsonl", [text] * 90)
        return load_prompts(recipe(f"data.train.data_path={data}", *keys), 64).digests()

    hints = ON, "data.train.solution_key=worked"
    assert digests("1+2", *hints)["training"] != digests("1+3", *hints)["training"]
    assert digests("1+2", *hints)["tokens"] == digests("1+3", *hints)["tokens"]
    assert digests("1+2") == digests("1+3")


def rows_of(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(OF_THE_PROCESS)} for row in rows]


def weights_of(folder: Path, step: int) -> bytes:
    return (folder / f"checkpoints/step_{step}/policy/weights/model.safetensors").read_bytes()


@pytest.fixture
def start(warm_overrides, tiny, tmp_path):
    """start(run, "key=value", ..., solutions=..., resume=...) trains on additions with worked solutions."""

    def start(run: str, *overrides: str, last: str = "", resume: bool = False) -> Path:
        data = tmp_path / "data.jsonl"
        rows = [json.loads(line) for line in (tiny / "data.jsonl").read_text().splitlines()]
        solutions = [f"{row['prompt']}{row['answer']}" for row in rows]
        if last:
            solutions = [text if row["prompt"] == last else None for row, text in zip(rows, solutions, strict=True)]
        lines = (row | {"solution": text} for row, text in zip(rows, solutions, strict=True))
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        quiet = ("grpo.val_at_start=false", "grpo.val_period=0", "checkpointing.save_period=1")
        paths = f"data.train.data_path={data}", f"logger.log_dir={tmp_path}/{run}"
        cfg = load(RECIPES / "tiny_cpu.yaml", [*warm_overrides, *quiet, *paths, *overrides])
        assert train(cfg, resume=resume)
        return tmp_path / run

    return start


HINTS = (ON, TEMPLATE, "grpo.hints.shares=[0.5, 0.9]")


@pytest.mark.long
def test_hints_train_and_a_resumed_run_is_the_same(start, monkeypatch):
    validated, original = [], EnginePool.generate

    def generate(pool, prompts, seeds, sampling, *more):
        if sampling.num_generations == 1:
            validated.extend(prompts)
        return original(pool, prompts, seeds, sampling, *more)

    monkeypatch.setattr(EnginePool, "generate", generate)
    whole = start("whole", *HINTS, "grpo.max_num_steps=2")
    one, two = rows_of(whole)
    for row in (one, two):
        stages = [row[f"train/hinted_ratio/stage_{stage}"] for stage in (1, 2)]
        assert 0 < row["train/hinted_ratio"] == pytest.approx(sum(stages)) and stages[1] > 0
        assert row["train/unhinted_reward"] <= row["train/filtered_reward"]
        assert row["train/grad_norm"] > 0
        asked = row["train/generated_tokens"] / row["train/mean_gen_tokens_per_sample"]
        assert asked > 16 * 4 and asked == pytest.approx(round(asked / 4) * 4), "groups of four answers"
    assert "train/hinted_ratio" in two and "validation/accuracy" in two
    assert len(validated) == 32 and max(map(len, validated)) == len("12+34="), "no hint in a validation"
    samples = [json.loads(line)["samples"] for line in (whole / "samples.jsonl").read_text().splitlines()]
    stages_of_samples = {sample["hint_stage"] for of_step in samples for sample in of_step}
    assert stages_of_samples & {1, 2}
    for of_step in samples:
        for sample in of_step:
            assert (sample["rendered_prompt"] != sample["prompt"]) == (sample["hint_stage"] > 0)
    start("parts", *HINTS, "grpo.max_num_steps=1")
    parts = start("parts", *HINTS, "grpo.max_num_steps=2", resume=True)
    assert rows_of(parts)[1] == rows_of(whole)[1]
    assert weights_of(parts, 2) == weights_of(whole, 2)


@pytest.mark.long
def test_prompts_without_a_solution_train_as_without_hints(start, tiny):
    """One question has a solution, and it is not among those of the first step."""
    off = start("off", "grpo.max_num_steps=1")
    cfg = load(RECIPES / "tiny_cpu.yaml", [f"policy.model_name={tiny}/warm", f"data.train.data_path={tiny}/data.jsonl"])
    last = load_prompts(cfg, 64).train[-1].text
    on = start("on", *HINTS, "grpo.max_num_steps=1", last=last)
    (before,), (after,) = rows_of(off), rows_of(on)
    assert {key: after[key] for key in before} == before
    assert after["train/hinted_ratio"] == 0 and after["train/unhinted_reward"] == before["train/reward"]
    assert weights_of(off, 1) == weights_of(on, 1)


@pytest.mark.long
def test_answers_ahead_of_the_trainer_have_hints_too(start):
    ahead = "grpo.async_grpo.enabled=true", "policy.generation.vllm_cfg.async_engine=true"
    for row in rows_of(start("ahead", *HINTS, *ahead, "grpo.max_num_steps=2")):
        assert row["train/hinted_ratio/stage_2"] > 0 and row["train/grad_norm"] > 0
        assert row["train/version_lag_max"] == row["step"] - 1
