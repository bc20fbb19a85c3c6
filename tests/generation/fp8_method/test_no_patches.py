"""Nothing of vLLM's is replaced: no name of a module or class of its own is assigned to, deleted, or `setattr`ed.

What it offers to outsiders is called (`register_backend`, `register_quantization_config`, ...). Objects that it made
for an engine of ours may be written to.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import nemo_fp8rl

PACKAGE = Path(nemo_fp8rl.__file__).parent
SOURCES = [path for folder in ("generation", "nemo_rl") for path in (PACKAGE / folder).rglob("*.py")]


def root(node: ast.expr) -> str | None:
    """`a` of `a.b.c` and of `a.b[c]`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def written(tree: ast.AST) -> Iterator[ast.expr]:
    """What is written into."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            yield node.args[0]


def patches(source: str) -> list[str]:
    """Names that came from vLLM and are written into."""
    tree, names = ast.parse(source), set[str]()
    for node in ast.walk(tree):
        module = node.module if isinstance(node, ast.ImportFrom) else None
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if (module or alias.name).split(".")[0] == "vllm":
                names.add((alias.asname or alias.name).split(".")[0])
    return [name for node in written(tree) if (name := root(node)) in names]


def test_nothing_of_vllms_is_replaced():
    assert len(SOURCES) > 40
    assert {path.name: found for path in SOURCES if (found := patches(path.read_text()))} == {}


@pytest.mark.parametrize(
    "patch",
    [
        "from vllm import envs\nenvs.VLLM_USE_V2 = True",
        "from vllm.v1.worker.gpu_worker import Worker\n\ndef ours():\n    Worker.load_model = None",
        "import vllm.envs\nsetattr(vllm.envs, 'A', 1)",
        "from vllm.model_executor.models.registry import _MODELS as models\nmodels['a'] = 1",
        "from vllm import envs\ndel envs.A",
        "from vllm import envs\nbefore, envs.A = envs.A, 1",
    ],
)
def test_a_patch_is_found(patch):
    assert len(patches(patch)) == 1
