"""The light rooms need the standard library and torch; imports between rooms go one way."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import nemo_fp8rl

PACKAGE = Path(nemo_fp8rl.__file__).parent

LIGHT = (
    "common.errors",
    "batch",
    "config.schema",
    "config.validate.recipe",
    "fp8",
    "fp8.quantize",
    "fp8.linear",
    "fp8.delta",
    "fp8.kv_scales",
    "fp8.layers",
    "fp8.kernels",
    "fp8.kernels.reference",
    "fp8.kernels.emulate",
    "fp8.kernels.tile_delta",
    "algorithms.advantages",
    "algorithms.correction",
    "algorithms.correction_config",
    "algorithms.gates",
    "algorithms.loss",
    "algorithms.loss_config",
    "algorithms.quantization_error",
    "algorithms.metric_names",
    "algorithms.mismatch",
    "algorithms.importance_bins",
    "algorithms.trajectories",
    "run.spikes",
    "run.step_log",
    "commands.compare.statistics",
    "data",
    "data.dataset",
    "data.files",
    "data.order",
    "data.records",
    "data.split",
    "data.rewards",
    "data.rewards.reward_function",
    "data.rewards.verifiers",
    "refit.manifest",
    "refit.sender.checkpoint_form",
    "refit.bridge",
    "refit.interface",
    "refit.driver.full_or_delta",
    "refit.route_plan",
    "refit.reports",
    "refit.transport.in_process",
    "refit.transport.handshake",
    "hf.model_config",
    "hf.model_tensors",
    "commands.parity",
    "commands.parity.formulas",
    "commands.parity.libraries",
    "commands.parity.comparison_table",
)
WITHOUT_TORCH = (
    "common.errors",
    "common.atomic_files",
    "config.schema",
    "config.yaml_tree",
    "config.typed_tree",
    "run.pod_stop",
    "run.spikes",
    "fp8.gpu_support",
    "fp8.names",
    "fp8.layers",
    "algorithms.gates",
    "algorithms.metric_names",
    "hf.model_tensors",
    "nemo_rl.recipe.precision",
    "nemo_rl.stock.stock_limits",
    "data.rewards",
)
"""What reads a recipe; these answer before torch would be loaded."""
HEAVY = "nemo_fp8rl.policy.rank.worker"

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
    code = "import json, sys; sys.modules['torch'] = None; from nemo_fp8rl.config.recipe import load"
    assert run(f"{code}; print(json.dumps(load({recipe!r}).nemo_fp8rl.flow))") == "fp8_e2e"


def test_a_report_is_made_without_torch():
    names = ["nemo_fp8rl.commands.report.page", "nemo_fp8rl.cli"]
    others = ("jinja2", "markupsafe", "yaml", "_yaml")
    assert run(IMPORT, json.dumps([sorted({*sys.stdlib_module_names, "nemo_fp8rl", *others}), names])) == {}
    assert names[0] in run(IMPORT, json.dumps([sorted({*sys.stdlib_module_names, "nemo_fp8rl"}), names]))


MAY_IMPORT: dict[str, set[str]] = {  # room -> the rooms it may import besides itself
    "common": set(),
    "batch": set(),
    "fp8": set(),
    "algorithms": {"batch", "common", "fp8"},
    "config": {"algorithms", "common", "fp8"},
    "hf": {"common", "config", "fp8"},
    "ops": {"common", "config", "fp8", "hf"},
    "data": {"batch", "common", "config", "hf"},
    "refit": {"common", "fp8"},
    "workers": {"common", "config"},
    "policy": {"algorithms", "batch", "common", "config", "fp8", "hf", "ops", "refit", "workers"},
    "generation": {"batch", "common", "config", "fp8", "hf", "ops", "refit", "workers"},
    "assemble": {"algorithms", "common", "config", "generation", "hf", "ops", "policy", "refit", "workers"},
    "rollout": {"algorithms", "batch", "common", "config", "data", "generation"},
    "run": {"algorithms", "batch", "common", "config", "data", "policy", "rollout"},
    "train": {
        *("algorithms", "assemble", "batch", "common", "config", "data", "generation", "hf", "policy", "refit"),
        *("rollout", "run"),
    },
    "nemo_rl": {
        *("algorithms", "assemble", "batch", "common", "config", "data", "fp8", "generation", "hf", "policy", "refit"),
        *("run", "workers"),
    },
    "commands": {
        *("algorithms", "batch", "common", "config", "data", "fp8", "generation", "hf", "nemo_rl", "ops", "policy"),
        *("refit", "run", "train", "workers"),
    },
    "cli": {"commands", "common", "config", "nemo_rl", "run", "train", "workers"},
    "__main__": {"cli"},
}


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Full names that a file of the package imports from the package, also inside functions."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
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
    assert {(room, target) for room, target in found if room in MAY_IMPORT and target not in MAY_IMPORT[room]} == set()
    assert circle({room: may for room, may in MAY_IMPORT.items()}) == []


def test_every_permission_to_import_is_used():
    assert {(room, target) for room, may in MAY_IMPORT.items() for target in may} - edges() == set()


def test_every_room_has_its_line():
    rooms = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py")}
    assert rooms == {"__init__", *MAY_IMPORT}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes that lie on a circle of a graph, or behind one; [] where there is none."""
    left = {node: set(targets) for node, targets in graph.items()}
    while free := {node for node, targets in left.items() if not targets & left.keys()}:
        left = {node: targets for node, targets in left.items() if node not in free}
    return sorted(left)


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda p: p.name)
def test_files_and_folders_of_a_folder_import_without_a_circle(folder):
    """Each file of a folder, and each folder in it as a whole, is a node."""
    prefix = ".".join(["nemo_fp8rl", *folder.relative_to(PACKAGE).parts]) + "."
    graph: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        node = path.relative_to(folder).with_suffix("").parts[0]
        names = {name.removeprefix(prefix).partition(".")[0] for name in imports_of(path) if name.startswith(prefix)}
        targets = {name for name in names if (folder / f"{name}.py").exists() or (folder / name).is_dir()}
        graph.setdefault(node, set()).update(targets - {node})
    assert circle(graph) == []


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda p: p.name)
def test_a_folder_is_seen_at_a_glance(folder):
    names_of_python = ("__init__.py", "__main__.py", "py.typed", "__pycache__")
    entries = [path for path in folder.iterdir() if path.name not in names_of_python]
    assert len(entries) <= (19 if folder == PACKAGE else 13)
