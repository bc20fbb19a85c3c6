"""Every key of a recipe for NeMo RL that our own loop reads as well means the same in both, or is refused.

`MEANINGS` is the table: each key with the test that shows it. A key that is new in either place fails the first test.
"""

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_fp8rl.algorithms.advantages import group_advantages, reinforce_plus_plus_advantages
from nemo_fp8rl.algorithms.loss_config import LossConfig
from nemo_fp8rl.batch import Completion
from nemo_fp8rl.common.field_rules import NemoRl, all_fields, fields_of
from nemo_fp8rl.config.grpo_schema import AdvEstimatorConfig, RewardShapingConfig
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.data.order import count_steps
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.data.rewards import VERIFIERS
from nemo_fp8rl.nemo_rl.recipe import keys as trainer_keys
from nemo_fp8rl.nemo_rl.recipe import recipe_for_train
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
from nemo_fp8rl.nemo_rl.recipe.config_from_recipe import convert_keys
from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe
from nemo_fp8rl.nemo_rl.recipe.recipe_for_train import DEFAULTS, convert_keys_for_train, load_for_train
from nemo_fp8rl.rollout.collect import shape_rewards
from tests.nemo_rl import runs
from tests.refusals import refusal_of

SAME_PARTS = "test_trainer_and_engines_are_those_of_nemo_rls_loop"
TOKENS = "test_both_loops_show_the_model_the_same_tokens"
DATA = "test_both_loops_read_the_same_questions_and_answers"
REWARDS = "test_both_loops_give_the_same_rewards"
ADVANTAGES = "test_both_loops_compute_the_same_advantages"
SHAPING = "test_both_loops_shape_rewards_alike"
LENGTH = "test_a_run_has_as_many_steps_in_both_loops"
DEFAULTS_TEST = "test_keys_that_are_left_out_have_nemo_rls_values"
WHOLE_RUN = "tests/nemo_rl/recipe/test_recipe_for_train.py: test_both_loops_give_the_same_rewards_and_losses"
CONVERTED = "test_a_value_arrives_where_our_loop_reads_it"
LOSS = "tests/nemo_rl/adapters/test_loss_conformance.py"
AHEAD = "tests/nemo_rl/recipe/test_recipe_for_train.py: test_an_asynchronous_recipe_runs_ahead_in_our_loop"
IN_FLIGHT = "tests/generation/test_in_flight.py: test_every_token_is_of_the_version_that_it_names"
HELD_OUT = "test_the_share_held_out_is_nemo_rls"
OTHER_ORDER = "; which prompts come when differs, as the seed goes into another generator"

MEANINGS: dict[str, str] = {
    **{f"policy.tokenizer.{name}": TOKENS for name in ("name", "chat_template", "chat_template_kwargs")},
    **{f"grpo.{name}": WHOLE_RUN for name in ("num_prompts_per_step", "num_generations_per_prompt")},
    **{f"grpo.{name}": LENGTH for name in ("max_num_steps", "max_num_epochs")},
    **{f"grpo.{name}": ADVANTAGES for name in ("normalize_rewards", "use_leave_one_out_baseline", "adv_estimator")},
    **{f"grpo.adv_estimator.{field.name}": ADVANTAGES for field in fields(AdvEstimatorConfig)},
    **{f"grpo.{name}": SHAPING for name in ("reward_shaping", "overlong_filtering")},
    **{f"grpo.reward_shaping.{field.name}": SHAPING for field in fields(RewardShapingConfig)},
    **{f"grpo.{name}": DEFAULTS_TEST for name in ("val_period", "val_at_start", "val_at_end")},
    "grpo.max_val_samples": "test_validation_takes_whole_batches_as_nemo_rl_does",
    "grpo.use_dynamic_sampling": "test_what_means_something_else_is_refused",
    "grpo.dynamic_sampling_max_gen_batches": CONVERTED + "; NeMo RL allows one round more before it ends the run",
    **{f"grpo.async_grpo.{name}": AHEAD for name in ("enabled", "max_trajectory_age_steps")},
    **{f"grpo.async_grpo.{name}_weight_updates": IN_FLIGHT for name in ("in_flight", "recompute_kv_cache_after")},
    "grpo.seed": CONVERTED + OTHER_ORDER,
    **{f"checkpointing.{name}": CONVERTED for name in ("enabled", "checkpoint_dir", "save_period", "keep_top_k")},
    **{f"logger.{name}": CONVERTED for name in ("log_dir", "tensorboard_enabled")},
    **{f"data.train.{name}": DATA for name in ("data_path", "input_key", "output_key", "split")},
    **{f"data.validation.{name}": DATA for name in ("data_path", "input_key", "output_key", "split")},
    **{f"data.train.{name}": HELD_OUT + OTHER_ORDER for name in ("split_validation_size", "seed")},
    "data.default.env_name": REWARDS,
    **{f"loss_fn.{field.name}": LOSS for field in fields(LossConfig)},
}  # fmt: skip
"""Key -> the test that both loops do the same with it; keys of trainer and engines are in SAME_PARTS."""
OURS_ALONE = {
    *("loss_fn.loss_agg_mode", "loss_fn.loss_scale_factor", "loss_fn.entropy_coefficient"),
    *("loss_fn.ratio_clip_adaptive", "loss_fn.off_policy_mask_threshold"),
}


def test_every_key_that_both_loops_read_has_a_test():
    shared = {field.key for field in all_fields(Config) if field.marker(NemoRl)}
    parts = {key for key in shared if key.startswith(("policy.", "nemo_fp8rl.")) and key not in MEANINGS}
    inner = {f"grpo.{name}.{field.name}" for name, kind in (
        ("adv_estimator", AdvEstimatorConfig), ("reward_shaping", RewardShapingConfig),
    ) for field in fields_of(kind)}  # fmt: skip
    loss = {f"loss_fn.{field.name}" for field in fields(LossConfig)}
    assert MEANINGS.keys() == shared - parts | inner | loss
    copied = {f"{block}.{name}" for block, names in trainer_keys.COPIED_KEYS.items() for name in names}
    assert {key for key in parts if key.startswith("policy.")} <= copied | trainer_keys.MOVED_KEYS.keys() | {
        "policy.generation.vllm_cfg.kv_cache_memory_gib"
    }
    for place in MEANINGS.values():
        name = place.partition(";")[0]
        file, _, test = name.partition(": ") if name.startswith("tests/") else (__file__, "", name)
        text = (Path(__file__).parents[3] / file).read_text()
        assert f"def {test}" in text, place


# ------------------------------------------------------------------------------------------- with NeMo RL's own code


@pytest.fixture(scope="module")
def nemo_rl() -> Any:
    from nemo_fp8rl.nemo_rl.compat import prepare

    return prepare()


@pytest.fixture
def keys(tiny, tmp_path) -> list[str]:
    """Overrides of the shipped recipe for the tiny model, without a template of their own."""
    overrides = [key for key in runs.overrides(tiny, tmp_path / "logs") if "chat_template" not in key]
    return [key.replace(f"{tiny}/warm", f"{tiny}/model") for key in overrides]


with_nemo_rl = [pytest.mark.nemo_rl, runs.needs_checkout]


def marked(test: Any) -> Any:
    for mark in with_nemo_rl:
        test = mark(test)
    return test


@marked
def test_trainer_and_engines_are_those_of_nemo_rls_loop(keys):
    """Both loops build them from one conversion; ours then changes the keys of MEANINGS alone."""
    values = load_recipe(runs.RECIPE, keys).values
    theirs, ours = convert_keys(values).policy, convert_keys_for_train(runs.RECIPE, values).policy
    generation = replace(ours.generation, val_temperature=theirs.generation.val_temperature)
    scheduler = replace(ours.megatron_cfg.scheduler, per_rollout=False)  # NeMo RL's loop itself advances it so
    megatron_cfg = replace(ours.megatron_cfg, scheduler=scheduler)
    assert ours.megatron_cfg.scheduler.per_rollout
    assert replace(ours, generation=generation, tokenizer=theirs.tokenizer, megatron_cfg=megatron_cfg) == theirs


FORMS = {
    "absent": [],
    "null": ["++policy.tokenizer.chat_template=null"],
    "default": ["++policy.tokenizer.chat_template=default"],
    "text": ["++policy.tokenizer.chat_template=\"{% for m in messages %}>{{ m['content'] }};{% endfor %}{{ mark }}\""],
    "file": ["++policy.tokenizer.chat_template=TEMPLATE.jinja"],
    "variables": ["++policy.tokenizer.chat_template_kwargs={mark: '7'}"],
}


@marked
@pytest.mark.parametrize("form", FORMS)
def test_both_loops_show_the_model_the_same_tokens(form, nemo_rl, keys, tiny, tmp_path):
    from nemo_rl.algorithms.utils import get_tokenizer
    from nemo_rl.data.interfaces import TaskDataSpec
    from nemo_rl.data.processors import PROCESSOR_REGISTRY
    from transformers import AutoTokenizer

    folder = tmp_path / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}+{{ m['content'] }}{% endfor %}{{ mark }}="
    tokenizer.save_pretrained(folder)
    (tmp_path / "TEMPLATE.jinja").write_text("{% for m in messages %}={{ m['content'] }}{% endfor %}")
    keys = [*keys, f"policy.tokenizer.name={folder}", *FORMS[form]]
    keys = [key.replace("TEMPLATE.jinja", str(tmp_path / "TEMPLATE.jinja")) for key in keys]
    prompts = load_prompts(load_for_train(runs.RECIPE, keys), 64)
    theirs = get_tokenizer(load_recipe(runs.RECIPE, keys).values["policy"]["tokenizer"])
    for processor in recipe_for_train.PROCESSORS:
        for prompt in prompts.train[:20]:
            messages = [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": prompt.answer}]
            datum = {"messages": messages, "task_name": "add"}
            log = PROCESSOR_REGISTRY[processor](datum, TaskDataSpec(), theirs, 64, 0)["message_log"]
            assert tuple(log[0]["token_ids"].tolist()) == prompt.token_ids
            assert log[0]["content"] == prompt.rendered
            assert len(log) == 1


ADDITIONS = [(f"{a}+{b}=", a + b) for a in range(10, 40) for b in range(10, 14)]


@marked
@pytest.mark.parametrize("form", ["text", "numbers", "other names", "messages", "defaults"])
def test_both_loops_read_the_same_questions_and_answers(form, nemo_rl, keys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    from nemo_rl.data.datasets import load_response_dataset

    question, answer = {"other names": ("question", "solution"), "defaults": ("input", "output")}.get(
        form, ("prompt", "answer")
    )
    rows = [{question: q, answer: s if form == "numbers" else str(s)} for q, s in ADDITIONS]
    if form == "messages":
        rows = [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": str(s)}]}
            for q, s in ADDITIONS
        ]
    file = tmp_path / f"{form.replace(' ', '_')}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {} if form == "defaults" else {"input_key": question, "output_key": answer}
    block = {"dataset_name": "ResponseDataset", "data_path": str(file), "env_name": "exact_match", **names}
    theirs = load_response_dataset(dict(block)).dataset
    block["split_validation_size"] = 0.05
    text = ",".join(f"{key}:{value}" for key, value in block.items())
    loaded = load_prompts(
        load_for_train(runs.RECIPE, [*keys, "~data.default", f"++data.train={{{text}}}"]), 64
    )  # fmt: skip
    ours = {(prompt.text, prompt.answer) for prompt in (*loaded.train, *loaded.validation)}
    assert ours == {(row["messages"][0]["content"], str(row["messages"][1]["content"])) for row in theirs}


@marked
def test_the_share_held_out_is_nemo_rls(keys, tiny):
    cfg = load_for_train(runs.RECIPE, keys)
    assert (cfg.data.train.split_validation_size, cfg.data.train.seed) == (0.05, 42)
    for train, message in (
        (f"data_path:{tiny}/data.jsonl", "NeMo RL has nothing to validate on"),
        (f"data_path:{tiny}/data.jsonl,split_validation_size:64", "is a number of samples in NeMo RL"),
    ):
        assert message in refusal_of(load_for_train, runs.RECIPE, [*keys, "~data.train", f"++data.train={{{train}}}"])


COMPLETIONS = [
    r"\boxed{72}",
    r"<think>\boxed{3}</think> \boxed{72}",
    "72",
    "The answer is 72.",
    "",
    r"\boxed{7",
    "Paris",
]


@marked
@pytest.mark.parametrize("answer", ["72", "Paris", r"\frac{1}{2}"])
def test_both_loops_give_the_same_rewards(answer, nemo_rl, keys):
    from nemo_rl.environments.math_environment import HFVerifyWorker

    from nemo_fp8rl.nemo_rl.adapters.environment import RewardEnvironment

    worker = HFVerifyWorker.__ray_metadata__.modified_class()
    theirs = worker.verify(COMPLETIONS, [answer] * len(COMPLETIONS), math_verify_impl="hf_math_verify")
    ours = VERIFIERS[recipe_for_train.REWARDS["math"]]
    assert [ours(completion, answer) for completion in COMPLETIONS] == theirs
    environment = RewardEnvironment({"name": "exact_match"})
    logs = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in COMPLETIONS]
    stepped = environment.step(logs, [{"ground_truth": answer}] * len(logs)).rewards.tolist()
    assert stepped == [VERIFIERS["exact_match"](completion, answer) for completion in COMPLETIONS]
    cfg = load_for_train(runs.RECIPE, [*keys, "++data.train.env_name=math", "++env.math={num_workers: 1}"])
    assert cfg.data.default.env_name == recipe_for_train.REWARDS["math"]


REWARDS_OF_STEP = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 1.0])
GROUPS = torch.arange(3).repeat_interleave(4)


@marked
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("flag", [True, False])
def test_both_loops_compute_the_same_advantages(normalize, flag, nemo_rl):
    from nemo_rl.algorithms.advantage_estimator import GRPOAdvantageEstimator, ReinforcePlusPlusAdvantageEstimator

    choice = SimpleNamespace(normalize_rewards=normalize, use_leave_one_out_baseline=flag, minus_baseline=flag)
    loss = SimpleNamespace(use_kl_in_reward=False, reference_policy_kl_penalty=0.0, reference_policy_kl_type="k3")
    mask = torch.ones(12, 3)
    if find_checkout().version.startswith("0.7"):
        choice, loss = vars(choice), vars(loss)
    theirs = GRPOAdvantageEstimator(choice, loss).compute_advantage(GROUPS[:, None], REWARDS_OF_STEP, mask)
    ours = group_advantages(REWARDS_OF_STEP, GROUPS, normalize_rewards=normalize, use_leave_one_out_baseline=flag)
    torch.testing.assert_close(ours[:, None].expand(12, 3), theirs, rtol=1e-4, atol=1e-5)
    theirs = ReinforcePlusPlusAdvantageEstimator(choice, loss).compute_advantage(GROUPS[:, None], REWARDS_OF_STEP, mask)
    ours = reinforce_plus_plus_advantages(REWARDS_OF_STEP, GROUPS, mask, minus_baseline=flag)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@marked
@pytest.mark.parametrize("coefficient", [None, 0.25])
def test_both_loops_shape_rewards_alike(coefficient, nemo_rl, keys):
    from nemo_rl.algorithms.reward_functions import RewardShapingConfig as TheirConfig
    from nemo_rl.algorithms.reward_functions import apply_reward_shaping
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    values = {"enabled": True, "overlong_buffer_length": 4, "overlong_buffer_penalty": 0.5, "max_response_length": 8}
    values["stop_properly_penalty_coef"] = coefficient
    lengths = range(1, 9)
    completions = [Completion((2,) * n, (0.0,) * n, "length" if n == 8 else "stop", 0) for n in lengths]
    logs = [[{"role": "assistant", "token_ids": torch.ones(n)}] for n in lengths]
    batch = {"total_reward": torch.ones(8), "message_log": logs, "truncated": torch.tensor([n == 8 for n in lengths])}
    config = values if find_checkout().version.startswith("0.7") else TheirConfig(**values)
    theirs = apply_reward_shaping(BatchedDataDict(batch), config)["total_reward"]
    torch.testing.assert_close(shape_rewards(torch.ones(8), completions, RewardShapingConfig(**values)), theirs)
    shaping = (
        "++grpo.reward_shaping={enabled:true,overlong_buffer_length:2,overlong_buffer_penalty:1,max_response_length:5}"
    )
    cfg = load_for_train(runs.RECIPE, [*keys, shaping, "grpo.overlong_filtering=true"])
    assert (cfg.grpo.reward_shaping.overlong_buffer_length, cfg.grpo.overlong_filtering) == (2, True)
    shorter = shaping.replace("max_response_length:5", "max_response_length:3")
    assert "NeMo RL's penalty grows beyond it" in refusal_of(load_for_train, runs.RECIPE, [*keys, shorter])
    assert "grpo.reward_shaping.overlong_buffer_length must be a finite" in refusal_of(
        load_for_train, runs.RECIPE, [*keys, "~grpo.reward_shaping", "++grpo.reward_shaping={enabled:true}"]
    )


@marked
def test_a_run_has_as_many_steps_in_both_loops(keys):
    """NeMo RL: steps of an epoch are the whole batches of its dataloader (drop_last)."""
    steps = load_for_train(runs.RECIPE, [*keys, "grpo.max_num_steps=1000000", "grpo.max_num_epochs=2"]).grpo
    prompts = len(load_prompts(load_for_train(runs.RECIPE, keys), 64).train)
    assert steps.max_num_steps == 2 * (prompts // 16) == count_steps(10**6, 2, prompts, 16)
    assert load_for_train(runs.RECIPE, [*keys, "grpo.max_num_steps=7", "grpo.max_num_epochs=2"]).grpo.max_num_steps == 7


@marked
def test_validation_takes_whole_batches_as_nemo_rl_does(keys):
    """NeMo RL: max_val_samples // val_batch_size batches."""
    given = [*keys, "grpo.max_val_samples=100", "grpo.val_batch_size=32"]
    assert load_for_train(runs.RECIPE, given).grpo.max_val_samples == 96
    few = [*keys, "grpo.max_val_samples=16", "grpo.val_batch_size=32"]
    assert "NeMo RL would validate on no prompt" in refusal_of(load_for_train, runs.RECIPE, few)


@marked
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.use_dynamic_sampling=true", "grpo.use_leave_one_out_baseline=true"], "NeMo RL drops single samples"),
        (["++data.train.processor=sft_processor"], "data.train.processor=sft_processor"),
        (["++data.default.env_name=code"], "env_name=code"),
        (["~data.default.env_name"], "data.train.env_name is missing"),
        (["++data.train.subset=main"], "the folder of the subset"),
        (["++data.train.num_frames=3"], "data.train.num_frames=3"),
        (
            ["++env.math={num_workers:1,verifier_type:english_multichoice}"],
            "env.math.verifier_type=english_multichoice",
        ),
        (["++policy.tokenizer.chat_template=chatml"], "is no template"),
        (["++grpo.seq_logprob_error_threshold=0.0"], "grpo.seq_logprob_error_threshold=0.0"),
    ],
)
def test_what_means_something_else_is_refused(overrides, message, keys):
    assert message in refusal_of(load_for_train, runs.RECIPE, [*keys, *overrides])


@marked
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("grpo.seed", 7),
        ("grpo.dynamic_sampling_max_gen_batches", 3),
        ("grpo.val_period", 5),
        ("grpo.val_at_start", True),
        ("grpo.val_at_end", True),
        ("checkpointing.enabled", True),
        ("checkpointing.checkpoint_dir", "elsewhere"),
        ("checkpointing.save_period", 3),
        ("checkpointing.keep_top_k", 4),
        ("logger.log_dir", "logs/elsewhere"),
        ("logger.tensorboard_enabled", False),
        ("policy.generation.top_k", 20),
    ],
)
def test_a_value_arrives_where_our_loop_reads_it(key, value, keys):
    text = str(value).lower() if isinstance(value, bool) else value
    found: Any = load_for_train(runs.RECIPE, [*keys, f"++{key}={text}"])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


@marked
def test_minus_one_and_null_are_no_top_k(keys):
    for value in ("-1", "null"):
        assert load_for_train(runs.RECIPE, [*keys, f"policy.generation.top_k={value}"]).policy.generation.top_k is None
    assert "null or -1 takes all tokens" in refusal_of(
        load_for_train, runs.RECIPE, [*keys, "policy.generation.top_k=0"]
    )


@marked
def test_keys_that_are_left_out_have_nemo_rls_values(nemo_rl, keys):
    if find_checkout().version.startswith("0.7"):
        pytest.skip("v0.7.0 has no defaults: a recipe that leaves a key out does not run")
    theirs = nemo_rl.GRPOConfig()
    for block, values in DEFAULTS.items():
        part = theirs
        for name in block.split(".")[1:]:
            part = getattr(part, name)
        assert {name: getattr(part, name) for name in values} == values
    removed = [
        f"~grpo.{name}" for name in ("adv_estimator", "val_at_start", "val_at_end", "use_leave_one_out_baseline")
    ]
    cfg = load_for_train(runs.RECIPE, [*keys, *removed]).grpo
    assert (cfg.val_at_start, cfg.val_at_end) == (theirs.val_at_start, theirs.val_at_end)
    assert cfg.adv_estimator.use_leave_one_out_baseline == theirs.adv_estimator.use_leave_one_out_baseline
    loss = nemo_rl.ClippedPGLossConfig()
    ours = {f"loss_fn.{name}": value for name, value in vars(LossConfig()).items()}
    assert {name: value for name, value in ours.items() if name not in OURS_ALONE} == {
        f"loss_fn.{name}": value for name, value in loss.model_dump().items()
    }
