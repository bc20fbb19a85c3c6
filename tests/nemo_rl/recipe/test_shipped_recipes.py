"""The recipes in conf/nemo_rl: comments, parents, precision, and NeMo RL's own config classes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_fp8rl.config.yaml_tree import flatten, read_with_parents
from nemo_fp8rl.nemo_rl.recipe.precision import Precision
from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe
from tests.nemo_rl.runs import environment, needs_checkout

ALL = sorted((Path(__file__).parents[3] / "conf/nemo_rl").rglob("*.yaml"))
SHIPPED = [path for path in ALL if path.stem != "tiny_cpu"]
"""The recipes for GPUs."""

KEYS = "fp8|precision|deep_gemm|pow2|kv_cache_dtype|FP32_SCALES|is_mx|fp4_param|nvfp4|quant"
OF_FORMATS = re.compile(rf"\s*\w*({KEYS})\w*: *[^#\s]", re.IGNORECASE)
FLOW = re.compile(r"-((?:mxfp8|nvfp4-a16|nvfp4|fp8)-e2e)")
"""The flow in the name of a recipe; without one it is in bfloat16."""


def flow_of(path: Path) -> str:
    found = FLOW.search(path.stem)
    return found[1].replace("-", "_") if found else "bf16"


def test_every_key_of_a_format_in_our_recipes_has_a_comment():
    lines = [(path.name, line) for path in ALL for line in path.read_text().splitlines() if OF_FORMATS.match(line)]
    assert len(lines) > 20
    assert [line for line in lines if " # " not in line[1]] == []


@pytest.mark.nemo_rl
@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_recipe_has_only_keys_that_differ_from_its_parent(real_checkout, path):
    own = yaml.safe_load(path.read_text())
    parent = path.parent / own.pop("defaults").replace("${oc.env:NEMO_RL_SRC}", str(real_checkout))
    inherited = flatten(OmegaConf.to_container(read_with_parents(parent)))
    assert [key for key, value in flatten(own).items() if inherited.get(key, ...) == value] == []


@pytest.mark.nemo_rl
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_our_recipes_load(real_checkout, path):
    recipe = load_recipe(path)
    loss_fn = recipe.values["loss_fn"]
    block = "square" if "nvfp4-e2e" in path.stem else None
    expected = Precision(flow_of(path), "pow2", "kv" in path.stem, weight_block=block)
    assert recipe.precision == expected
    assert recipe.fp8rl.format.weight_block == {"mxfp8": (32, 32), "fp8": (128, 128)}.get(
        recipe.fp8rl.format.name, (16, 16)
    )
    assert loss_fn["use_importance_sampling_correction"]
    assert (loss_fn["truncated_importance_sampling_type"], loss_fn["truncated_importance_sampling_ratio"]) == ("tis", 2)
    assert recipe.values["checkpointing"]["checkpoint_dir"] == f"results/{path.stem}"
    assert recipe.values["checkpointing"]["save_period"] <= 100


@pytest.mark.nemo_rl
@needs_checkout
def test_nemo_rls_own_config_classes_take_our_recipes(tmp_path):
    """By its own loader, all in one process, as the import takes a while; and they do refuse something.

    From a folder without the prompt files, which the recipes name as from the root of its checkout.
    """
    command = [sys.executable, "-c", VALIDATE, *map(str, SHIPPED)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(tmp_path) | {"HF_HOME": "/nowhere"},
        check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *taken, refused, missing = (line for line in done.stdout.splitlines() if line.startswith("RECIPE "))
    assert taken == [f"RECIPE {path.stem} True True" for path in SHIPPED]
    assert "data.default.prompt_file=none.txt: no such file" in missing
    assert "policy.train_global_batch_size: input should be a valid integer" in refused


VALIDATE = """
import sys
from pathlib import Path
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.compat import prepare
from nemo_fp8rl.nemo_rl.run.master_config import load_master_config

grpo = prepare()
for path in map(Path, sys.argv[1:]):
    config = load_master_config(grpo, path, [])
    files = [name for key, name in config.data["default"].items() if key.endswith("prompt_file") and name]
    print("RECIPE", path.stem, isinstance(config, grpo.MasterConfig), all(Path(name).is_file() for name in files))
for wrong in ("policy.train_global_batch_size=many", "data.default.prompt_file=none.txt"):
    try:
        load_master_config(grpo, path, [wrong])
    except UserError as error:
        print("RECIPE", error)
"""


@pytest.mark.nemo_rl
def test_a_twin_differs_in_precision_alone(real_checkout):
    names = ("precision", "kv_cache_dtype", "enabled", "checkpoint_dir", "log_dir", "name")
    for path in SHIPPED:
        if "-bf16" not in path.name:
            continue
        stem = path.stem.replace("-bf16", "-fp8-e2e")
        fp8 = next(other for other in SHIPPED if other.stem in (stem, f"{stem}-kv"))
        changed = {key.rpartition(".")[2] for key in differences(load_recipe(path).values, load_recipe(fp8).values)}
        assert {"precision", "enabled"} <= changed <= set(names)


def differences(left: dict, right: dict, prefix: str = "") -> list[str]:
    """Dotted keys at which two trees differ."""
    found = []
    for key in left.keys() | right.keys():
        one, other = left.get(key), right.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            found += differences(one, other, f"{prefix}{key}.")
        elif one != other:
            found.append(prefix + key)
    return found
