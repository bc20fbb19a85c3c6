"""Which keys NeMo RL's GRPO knows: those of its example configs and of its config classes, both read as text.

NeMo RL's own top block keeps keys that it does not know, so a misspelled one changes nothing and nobody is told, and
there is no schema to ask without importing it. A key counts as known where one of its examples for GRPO has it at the
same place (those for other algorithms have keys that GRPO passes over), or where the annotations of its config classes
lead there from GRPO's MasterConfig; subclasses count, as GenerationConfig stands for VllmConfig. Mappings with free
keys show themselves: an example leaves them empty, or their annotation is a dict.

Some keys of its own recipes are read by no code of it. What a recipe has of them stays, as nobody meant anything by it
but NeMo RL; one that an override adds is meant, and refused.
"""

import ast
import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.recipe.checkout import Checkout
from nemo_fp8rl.nemo_rl.recipe.precision import READ_WITHOUT_DECLARATION

ALGORITHM = "grpo"
"""The block that every example for it has, itself or from a parent."""
ALIKE = 0.7
"""Likeness, 0 to 1, from which on one name may be meant by another."""
ROOT_CLASS, ROOT_MODULE = "MasterConfig", "algorithms/grpo.py"
"""Other algorithms have classes of that name, too."""
READ_BY_NAME = ("grpo", "loss_fn", "policy.megatron_cfg")
"""Blocks of which NeMo RL reads single keys; others it hands on, whole, to who knows their keys."""
MAPPINGS = {"dict", "Dict", "Mapping", "Any"}


@dataclass
class Known:
    """A key: what may stand below it, or that anything may.

    declared: a class has it. unread: no code has its name; looked for in the blocks READ_BY_NAME alone.
    """

    free: bool = False
    declared: bool = False
    unread: bool = False
    keys: dict[str, "Known"] = field(default_factory=dict)

    def at(self, key: str) -> "Known":
        return self.keys.setdefault(key, Known())

    def below(self, path: str) -> "dict[str, Known]":
        """The keys of a block, none where it is not known."""
        here = self
        for part in path.split("."):
            here = here.keys.get(part, Known())
        return here.keys

    def paths(self, prefix: str = "") -> Iterator[str]:
        for key, known in self.keys.items():
            yield prefix + key
            yield from known.paths(f"{prefix}{key}.")


@functools.cache
def read_known_keys(checkout: Checkout) -> Known:
    known = Known()
    for values in _examples(checkout.examples):
        _add_values(known, values)
    named = _add_classes(known, checkout.package)
    for block in READ_BY_NAME:
        for name, one in known.below(block).items():
            one.unread = not one.declared and name not in named
    for key in READ_WITHOUT_DECLARATION:
        place = known
        for part in key.split("."):
            place = place.at(part)
    return known


def check_known(values: Mapping[Any, Any], known: Known, version: str) -> None:
    """Raise UserError for the first key of `values` that is not known, with the nearest one that is."""
    for place, key, here in _unknown(values, known, ""):
        near = difflib.get_close_matches(key, here.keys, 1)
        elsewhere = [path for path in known.paths() if path.rpartition(".")[2] == key]
        meant = [f"{place}{near[0]}"] if near else elsewhere[:1]
        hint = f"did you mean {meant[0]}?" if meant else f"NeMo RL {version} has no such key for GRPO"
        raise UserError(f"unknown config key {place}{key}; {hint}")


def check_read(key: str, known: Known) -> None:
    """Raise UserError where no code of NeMo RL reads this key, which an example of its has."""
    block, _, name = key.rpartition(".")
    beside = known.below(block) if block else {}
    if name in beside and beside[name].unread:
        read = [other for other, one in beside.items() if not one.unread]
        likeness, near = max(((_likeness(name, other), other) for other in read), default=(0.0, ""))
        hint = f"; did you mean {block}.{near}?" if likeness >= ALIKE else ": remove it"
        raise UserError(f"NeMo RL's code reads no key {key}, which an example of its has{hint}")


def _likeness(a: str, b: str) -> float:
    """How alike two names are, 0 to 1, whatever the order of their words."""
    first, second = ("_".join(sorted(name.split("_"))) for name in (a, b))
    return difflib.SequenceMatcher(None, first, second).ratio()


def _unknown(values: Mapping[Any, Any], known: Known, place: str) -> Iterator[tuple[str, str, Known]]:
    for key, value in values.items():
        key = str(key)
        if key not in known.keys:
            yield place, key, known
        elif isinstance(value, Mapping) and not known.keys[key].free:
            yield from _unknown(value, known.keys[key], f"{place}{key}.")


def _examples(folder: Path) -> Iterator[dict[Any, Any]]:
    """The files that one for GRPO is made of, parents included, each without its list of parents.

    Each is read once and none merged (`yaml_tree.read_with_parents` takes half a minute for all of them).
    """
    read = functools.cache(_read_yaml)

    def with_parents(path: Path, children: tuple[Path, ...] = ()) -> list[Path]:
        if path in children or not isinstance(values := read(path), dict):
            return []
        named = values.get("defaults") or []
        parents = [named] if isinstance(named, str) else named if isinstance(named, list) else []
        files = ((path.parent / parent).resolve() for parent in parents if isinstance(parent, str))
        return [path, *(one for file in files for one in with_parents(file, (*children, path)))]

    paths: set[Path] = set()
    for path in folder.rglob("*.yaml"):
        tree = with_parents(path.resolve())
        if any(ALGORITHM in read(one) for one in tree):
            paths.update(tree)
    for path in paths:
        yield {key: value for key, value in read(path).items() if key != "defaults"}


def _read_yaml(path: Path) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where libyaml is there
    try:
        return yaml.load(path.read_text(), loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None  # an example that is no config, such as a template, or that is being edited


def _add_values(known: Known, values: Any) -> None:
    if isinstance(values, dict):
        known.free |= not values
        for key, value in values.items():
            _add_values(known.at(str(key)), value)


# Config classes: name -> base classes, and the annotation of every field. Classes of one name count as one, but for the
# root.

Classes = dict[str, tuple[set[str], dict[str, list[ast.expr]]]]


def _add_classes(known: Known, package: Path) -> set[str]:
    """Add to `known` the fields of the package's classes; returns every name and word in its code."""
    classes: Classes = {}
    words = set[str]()
    for path in package.rglob("*.py"):
        try:
            text = path.read_text()
            words.update(re.findall(r"\w+", text))
            if "TypedDict" in text or "BaseModel" in text or "dataclass" in text:
                _collect(classes, ast.parse(text), path == package / ROOT_MODULE)
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue  # no module, or one that is being edited
    _add_fields(known, ROOT_CLASS, classes, ())
    return words


def _collect(classes: Classes, module: ast.Module, has_root: bool) -> None:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and (has_root or node.name != ROOT_CLASS):
            bases, fields = classes.setdefault(node.name, (set(), {}))
            bases |= {name for base in node.bases for name in _names_in(base)}
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    fields.setdefault(statement.target.id, []).append(statement.annotation)


def _add_fields(known: Known, name: str, classes: Classes, above: tuple[str, ...]) -> None:
    if name in above or name not in classes:
        return
    bases, fields = classes[name]
    subclasses = [other for other, (its_bases, _) in classes.items() if name in its_bases] if above else []
    for relative in {*bases, *subclasses} - {"TypedDict", "BaseModel"}:
        _add_fields(known, relative, classes, (*above, name))
    for key, annotations in fields.items():
        known.at(key).declared = True
        for named in {named for annotation in annotations for named in _names_in(annotation)}:
            known.at(key).free |= named in MAPPINGS
            _add_fields(known.at(key), named, classes, (*above, name))


def _names_in(annotation: ast.expr) -> Iterator[str]:
    """Every name in a type hint, also in one that is written as a string."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
