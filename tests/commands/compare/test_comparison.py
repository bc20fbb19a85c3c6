"""A comparison that is wrong ends in one sentence and exit code 2, before anything runs."""

import json
from contextlib import nullcontext

import pytest
import yaml

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.compare.comparison import load_comparison
from nemo_fp8rl.commands.compare.run_list import plan
from nemo_fp8rl.commands.compare.start_models import make_models
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.yaml_tree import flatten
from nemo_fp8rl.run.stop_flag import StopFlag
from tests.commands.compare.conftest import FLOWS
from tests.conftest import RECIPES

LENGTHS = {"terms": {"short": 3, "long": 6}, "flows": ["bf16"], "warm_up": str(RECIPES / "tiny_sft.yaml")}


@pytest.fixture
def refused(capsys, tmp_path):
    """refused(*arguments) -> the one line on stderr."""

    def run(*arguments: object) -> str:
        assert main(["compare", *map(str, arguments), "--output", str(tmp_path / "out")]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("nemo-fp8rl: ")
        assert len(err.splitlines()) == 1
        assert not (tmp_path / "out").exists()
        return err

    return run


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The comparison of conf/ and its runs."""
    comparison = load_comparison(RECIPES / "compare" / "tiny.yaml")
    return comparison, plan(comparison, [], tmp_path_factory.mktemp("shipped"))


def test_the_shipped_comparison_has_the_six_flows_and_five_seeds(shipped):
    comparison, runs = shipped
    assert len(comparison.seeds) >= 5
    of_flows = [run for run in runs if run.length is None]
    assert len(of_flows) == 6 * len(comparison.seeds)
    made = {run.flow: run.config for run in of_flows}
    kv = "policy.generation.vllm_cfg.kv_cache_dtype"
    kinds = {
        name: (c["nemo_fp8rl.flow"], c.get("nemo_fp8rl.correction.weight"), c[kv] == "fp8") for name, c in made.items()
    }
    assert kinds == {
        "bf16": ("bf16", None, False),
        "fp8_rollout": ("fp8_rollout", None, False),
        "fp8_rollout+correction": ("fp8_rollout", "token", False),
        "fp8_e2e": ("fp8_e2e", None, False),
        "fp8_e2e+correction": ("fp8_e2e", "token", False),
        "fp8_e2e+KV+correction": ("fp8_e2e", "token", True),
    }
    assert all(not c["loss_fn.use_importance_sampling_correction"] for c in made.values())


def test_the_runs_of_a_seed_differ_in_their_flow_alone(shipped):
    """And those of a flow in their seed: the data's split stays."""
    _, runs = shipped
    places = {"logger.log_dir", "checkpointing.checkpoint_dir"}

    def differing(one, other):
        keys = one.config.keys() | other.config.keys()
        return {key for key in keys if one.config.get(key) != other.config.get(key)} - places

    by_name = {(run.length, run.flow, run.seed): run for run in runs}
    for (length, flow, seed), run in by_name.items():
        assert differing(run, by_name[length, flow, 1]) == ({"grpo.seed"} if seed != 1 else set())
        changed = differing(run, by_name[length, "bf16", seed])
        assert all(key.startswith(("nemo_fp8rl.", "policy.generation.vllm_cfg.kv_cache_dtype")) for key in changed)
        assert bool(changed) == (flow != "bf16")
    lengths = {run.config["data.train.data_path"] for run in runs if run.length}
    assert len(lengths) == 3


def test_runs_go_seed_by_seed(write, tmp_path):
    runs = plan(load_comparison(write(lengths=LENGTHS)), [], tmp_path / "out")
    assert [run.name for run in runs] == [
        f"{part} seed {seed}"
        for seed in (1, 2)
        for part in ("bf16", "fp8_rollout+correction", "short bf16", "long bf16")
    ]
    assert runs[3].folder == tmp_path / "out/lengths/long/bf16/seed_1"


def test_later_overrides_win(write, tmp_path):
    """recipe < overrides < those of lengths < the command line."""
    path = write(
        overrides={"grpo.max_num_steps": 7, "grpo.val_period": 3},
        lengths=LENGTHS | {"overrides": {"grpo.max_num_steps": 4, "grpo.max_val_samples": 9}},
    )
    steps = {run.length: run.steps for run in plan(load_comparison(path), [], tmp_path / "out")}
    assert steps == {None: 7, "short": 4, "long": 4}
    runs = plan(load_comparison(path), ["grpo.max_num_steps=2"], tmp_path / "out")
    assert {run.steps for run in runs} == {2}
    assert {run.config["grpo.val_period"] for run in runs} == {3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sedes": [1]}, "unknown config key sedes; did you mean seeds?"),
        ({"model": {"tsak": "add"}}, "unknown config key model.tsak; did you mean model.task?"),
        ({"lengths": LENGTHS | {"term": 1}}, "unknown config key lengths.term; did you mean lengths.terms?"),
        ({"log_dir": "x"}, "unknown config key log_dir; known here: "),
        ({"flows": None}, "flows is required"),
        ({"recipe": None}, "recipe is required"),
        ({"seeds": ["one"]}, "seeds[0]='one': input should be a whole number"),
        ({"seeds": [1, True]}, "seeds[1]=True: input should be a whole number"),
        ({"seeds": []}, "seeds=[]: give at least one, each once"),
        ({"seeds": [1, 1]}, "seeds=[1, 1]: give at least one, each once"),
        ({"reference": "fp16"}, "reference=fp16 is none of the flows bf16, fp8_rollout+correction"),
        ({"flows": FLOWS | {"a/b": {}}}, "'a/b' cannot be a folder of runs"),
        ({"flows": FLOWS | {"models": {}}}, "'models' cannot be a folder of runs"),
        ({"lengths": LENGTHS | {"flows": ["fp16"]}}, "lengths.flows: fp16 is none of the flows"),
        ({"lengths": LENGTHS | {"terms": {"data": 4}}}, "lengths.terms: data is the mix of all lengths"),
        ({"lengths": LENGTHS | {"terms": {"short": 1}}}, "lengths of at least 2 terms"),
        ({"overrides": {"grpo.seed": 3}}, "overrides: grpo.seed is set for each run by the comparison"),
        ({"flows": {"bf16": {"logger.log_dir": "x"}}}, "flows.bf16: logger.log_dir is set for each run"),
        ({"flows": {"bf16": {"nemo_fp8rl.flwo": "bf16"}}}, "flow bf16: unknown config key nemo_fp8rl.flwo; did you"),
        ({"flows": {"bf16": {"nemo_fp8rl.flow": "fp4"}}}, "flow bf16: nemo_fp8rl.flow='fp4': input should be"),
        ({"recipe": "none.yaml"}, "none.yaml; give the path of a YAML file"),
    ],
)
def test_a_wrong_file(refused, write, changes, message):
    assert message in refused(write(**changes))


def test_no_file_and_no_yaml(refused, tmp_path):
    assert "there is no file" in refused(tmp_path / "none.yaml")
    (tmp_path / "x.yaml").write_text("a: [")
    assert "x.yaml cannot be read as YAML" in refused(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nemo_fp8rl.flow=fp8_e2e", "nemo_fp8rl.flow is what makes the flow bf16"),
        ("nemo_fp8rl.correction.weight_max=3", "nemo_fp8rl.correction.weight_max is what makes the flow bf16"),
        ("nemo_fp8rl={}", "nemo_fp8rl is what makes the flow bf16"),
        ("+grpo.seed=3", "grpo.seed is set for each run"),
        ("grpo.max_num_stpes=3", "unknown config key grpo.max_num_stpes; did you mean grpo.max_num_steps?"),
    ],
)
def test_a_wrong_override(refused, write, override, message):
    assert message in refused(write(), override)


def test_another_recipe_in_the_folder_is_not_taken_for_this_one(write, tmp_path):
    """Numbers of other steps or rates would stand in the table under the wrong name."""
    path, out = write(), tmp_path / "out"
    folder = out / "bf16" / "seed_2"
    folder.mkdir(parents=True)
    before = next(
        r for r in plan(load_comparison(path), ["policy.megatron_cfg.optimizer.lr=0.5"], out) if r.folder == folder
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(before.config))
    assert plan(load_comparison(path), ["policy.megatron_cfg.optimizer.lr=0.5"], out)
    with pytest.raises(
        UserError, match=r"seed_2 holds a run with another recipe: policy.megatron_cfg.optimizer.lr was 0.5"
    ):
        plan(load_comparison(path), [], out)


def older(recipe: dict) -> dict:
    """A flat recipe of before there were some keys, one of which changes numbers."""
    later = ("policy.megatron_cfg.freeze_moe_router", "nemo_fp8rl.workers")
    assert set(later) < recipe.keys()
    return {key: value for key, value in recipe.items() if key not in later}


def test_runs_and_models_of_before_there_was_a_key_stay(write, tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_fp8rl.commands.compare.start_models.run", lambda *_: True)
    comparison, out = load_comparison(write(model={"warm_up": str(RECIPES / "tiny_sft.yaml")})), tmp_path / "out"
    assert make_models(comparison, out, StopFlag(), print, [])
    made = out / "models/flows/made.json"
    record = json.loads(made.read_text())
    made.write_text(json.dumps(record | {"warm_up": older(flatten(record["warm_up"]))}))
    first = plan(comparison, [], out)[0]
    first.folder.mkdir(parents=True)
    (first.folder / "config.yaml").write_text(yaml.safe_dump(older(first.config)))
    assert plan(comparison, [], out)
    with pytest.raises(UserError, match="freeze_moe_router was False and is now True"):
        plan(comparison, ["policy.megatron_cfg.freeze_moe_router=true"], out)


def test_a_run_on_a_model_of_the_hub_has_the_commit_that_it_began_with(write, tmp_path):
    words, out = ["policy.model_name=some-org/some-model@main"], tmp_path / "out"
    comparison = load_comparison(write(model=None))
    first = plan(comparison, words, out)[0]
    first.folder.mkdir(parents=True)
    for repository, fails in (("some-org/some-model", False), ("some-org/another", True)):
        pinned = dict.fromkeys(("policy.model_name", "policy.tokenizer.name"), f"{repository}@{'9' * 40}")
        (first.folder / "config.yaml").write_text(yaml.safe_dump(first.config | pinned))
        with pytest.raises(UserError, match=r"policy\.model_name was some-org/another@9") if fails else nullcontext():
            plan(comparison, words, out)


@pytest.mark.parametrize("change", [{"seed": 1}, {"task": "chain"}, {"overrides": {"sft.max_num_steps": 4}}])
def test_models_of_another_comparison_are_refused_at_every_call(write, tmp_path, monkeypatch, capsys, change):
    """Also where nothing is left to run: numbers would stand below a model that they are not of."""
    model, out = {"warm_up": str(RECIPES / "tiny_sft.yaml")}, tmp_path / "out"
    monkeypatch.setattr("nemo_fp8rl.commands.compare.start_models.run", lambda *_: True)
    assert make_models(load_comparison(write(model=model)), out, StopFlag(), print, [])
    assert plan(load_comparison(write(model=model)), [], out)
    assert main(["compare", str(write(model=model | change)), "--output", str(out), "--table-only"]) == 2
    assert "models/flows was made by another comparison; give another --output" in capsys.readouterr().err
    assert not (out / "results.json").exists()
