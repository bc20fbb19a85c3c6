"""The light rooms need the standard library and torch; imports between rooms go one way."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nemo_fp8rl

PACKAGE = Path(nemo_fp8rl.__file__).parent

LIGHT = (
    "errors",
    "batch",
    "config",
    "config_check",
    "fp8",
    "fp8.quantize",
    "fp8.linear",
    "fp8.delta",
    "fp8.kv_scales",
    "fp8.layers",
    "fp8.kernels",
    "fp8.kernels.reference",
    "fp8.kernels.emulate",
    "algorithms.advantages",
    "algorithms.correction",
    "algorithms.correction_config",
    "algorithms.gates",
    "algorithms.loss",
    "algorithms.loss_config",
    "algorithms.quantization_error",
    "algorithms.metric_names",
    "algorithms.mismatch",
    "algorithms.weight_bins",
    "algorithms.weight_histogram",
    "step_log",
    "compare.statistics",
    "data",
    "data.jsonl",
    "data.order",
    "data.split",
    "rewards",
    "rewards.verifiers",
    "refit.manifest",
    "refit.quantize",
    "refit.bridge",
    "refit.mode",
    "refit.plan",
    "refit.report",
    "refit.transport.in_process",
    "refit.transport.post",
    "hf.config",
    "hf.tensors",
    "parity",
    "parity.formulas",
    "parity.libraries",
    "parity.table",
)
WITHOUT_TORCH = (
    "errors",
    "disk",
    "config",
    "yaml_tree",
    "typed_tree",
    "stop_request",
    "fp8.gpus",
    "fp8.names",
    "fp8.layers",
    "algorithms.gates",
    "algorithms.metric_names",
    "hf.tensors",
    "nemo_rl.precision",
    "nemo_rl.stock.refusal",
)
"""What reads a recipe; these answer before torch would be loaded."""
HEAVY = "nemo_fp8rl.policy.worker"

RECORD = """
import json, sys
asked = set()
class Recorder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        asked.add(name.partition(".")[0])
sys.meta_path.insert(0, Recorder)
import torch
print(json.dumps(sorted(asked | {name.partition(".")[0] for name in sys.modules})))
"""

IMPORT = """
import importlib, json, sys
allowed, names = json.loads(sys.stdin.read())
class Refuser:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"refused {name}", name=name)
sys.meta_path.insert(0, Refuser)
failures = {}
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failures[name] = str(error)
print(json.dumps(failures))
"""


def run(code: str, stdin: str = "") -> list[str] | dict[str, str]:
    process = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        input=stdin,
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def failures() -> list[str] | dict[str, str]:
    """What failed to import where only the standard library, torch and what a bare `import torch` asks for exist."""
    allowed = {*run(RECORD), *sys.stdlib_module_names, "nemo_fp8rl"}
    names = [*(f"nemo_fp8rl.{module}" for module in LIGHT), HEAVY]
    return run(IMPORT, json.dumps([sorted(allowed), names]))


def test_light_rooms_import_with_torch_alone(failures):
    assert {name: why for name, why in failures.items() if name != HEAVY} == {}


def test_a_heavy_room_does_not_import_with_torch_alone(failures):
    assert failures.get(HEAVY, "").startswith("refused "), (
        "the finder refuses nothing, so the test above proves nothing"
    )


def test_recipes_are_read_without_torch():
    names = [f"nemo_fp8rl.{module}" for module in WITHOUT_TORCH]
    allowed = sorted({*sys.stdlib_module_names, "nemo_fp8rl"})
    assert run(IMPORT, json.dumps([allowed, names])) == {}
    assert "nemo_fp8rl.fp8.quantize" in run(IMPORT, json.dumps([allowed, ["nemo_fp8rl.fp8.quantize"]]))


def test_a_recipe_is_loaded_without_torch():
    recipe = str(PACKAGE.parent / "conf/tiny_cpu.yaml")
    code = "import json, sys; sys.modules['torch'] = None; from nemo_fp8rl.recipe import load"
    assert run(f"{code}; print(json.dumps(load({recipe!r}).nemo_fp8rl.flow))") == "fp8_e2e"


def test_a_report_is_made_without_torch():
    names = ["nemo_fp8rl.report.page", "nemo_fp8rl.cli"]
    others = ("jinja2", "markupsafe", "yaml", "_yaml")
    assert run(IMPORT, json.dumps([sorted({*sys.stdlib_module_names, "nemo_fp8rl", *others}), names])) == {}
    assert names[0] in run(IMPORT, json.dumps([sorted({*sys.stdlib_module_names, "nemo_fp8rl"}), names]))


DRIVERS = {"cli", "demo", "export", "rollout", "samples", "sft", "train", "__init__"}
BOTH_SIDES = {"batch", "config", "errors", "fp8", "hf", "machine", "refit", "region", "workers"}
ALONE = {"batch", "display", "errors", "fp8", "machine", "region", "secret_variables", "shown_gpus", "timing"}
MAY_IMPORT: dict[str, set[str]] = {  # room -> the rooms it may import besides itself
    **{room: set() for room in ALONE},
    **{room: {"errors"} for room in ("disk", "rewards", "typed_tree", "stop_request", "which_vllm")},
    "algorithms": {"batch", "errors", "fp8"},
    "config": {"algorithms", "fp8"},
    "config_check": {"algorithms", "config", "errors", "secret_variables"},
    "yaml_tree": {"errors", "typed_tree"},
    "recipe": {"config", "config_check", "typed_tree", "yaml_tree"},
    "hf": {"config", "errors", "fp8", "region", "typed_tree"},
    "data": {"batch", "config", "errors", "hf", "rewards"},
    "parity": {"display", "errors", "fp8"},
    "refit": {"errors", "fp8", "region"},
    "workers": {"config", "errors", "secret_variables", "shown_gpus"},
    "policy": {*BOTH_SIDES, "algorithms", "which_vllm"},
    "generation": {*BOTH_SIDES, "which_vllm"},
    "weights": {"config", "errors", "generation", "policy", "refit", "workers"},
    "interrupt": {"stop_request"},
    "step_log": {"disk", "errors"},
    "loggers": {"config", "disk", "errors"},
    "tiny": {"disk", "errors", "hf"},
    "resume": {"config", "errors", "recipe", "yaml_tree"},
    "rundir": {
        *("algorithms", "config", "disk", "errors", "loggers", "machine", "policy", "recipe", "resume", "step_log"),
        "yaml_tree",
    },
    "report": {"algorithms", "disk", "errors", "step_log", "yaml_tree"},
    "compare": {
        *("algorithms", "disk", "display", "errors", "generation", "hf", "interrupt", "recipe", "resume", "step_log"),
        *("tiny", "typed_tree", "yaml_tree"),
    },
    "doctor": {"config", "display", "errors", "fp8", "hf", "nemo_rl", "typed_tree"},
    "launch": {
        *("disk", "errors", "nemo_rl", "recipe", "secret_variables", "shown_gpus", "stop_request", "typed_tree"),
        *("workers", "yaml_tree"),
    },
    "nemo_rl": {
        *("algorithms", "batch", "config", "config_check", "data", "errors", "fp8", "generation", "hf", "interrupt"),
        *("policy", "recipe", "refit", "rewards", "shown_gpus", "typed_tree", "weights", "workers", "yaml_tree"),
    },
}


def imports_of(path: Path) -> Iterator[str]:
    """Full names that a file of the package imports from the package, also inside functions."""
    package = ["nemo_fp8rl", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def room_of(name: str) -> str | None:
    """The room of an imported name; None for what is not a module or package directly in nemo_fp8rl."""
    first, _, rest = name.partition(".")
    room = rest.partition(".")[0]
    here = first == "nemo_fp8rl" and ((PACKAGE / room / "__init__.py").exists() or (PACKAGE / f"{room}.py").exists())
    return room if here and room else None


def edges() -> set[tuple[str, str]]:
    """(room, room that it imports) over the whole package."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        found |= {(room, target) for name in imports_of(path) if (target := room_of(name))}
    return {(room, target) for room, target in found if room != target}


def test_rooms_import_one_way():
    found = edges()
    assert {("train", "policy"), ("refit", "fp8"), ("algorithms", "batch")} <= found, "the imports are not being read"
    assert {(room, target) for room, target in found if room not in DRIVERS and target not in MAY_IMPORT[room]} == set()


def test_every_permission_to_import_is_used():
    assert {(room, target) for room, may in MAY_IMPORT.items() for target in may} - edges() == set()


def test_every_room_has_its_place():
    rooms = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py")}
    assert rooms == DRIVERS | MAY_IMPORT.keys()
