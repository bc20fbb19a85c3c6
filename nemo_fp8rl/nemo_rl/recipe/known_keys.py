"""The keys that NeMo RL's GRPO knows, read as text from its example configs and its config classes.

NeMo RL's top block keeps unknown keys, so a misspelled key silently changes nothing, and its schema is not available
without importing it. A key counts as known in two cases: an example for GRPO has it at the same place (examples for
other algorithms have keys that GRPO ignores), or the annotations of the config classes lead to it from GRPO's
MasterConfig. Subclasses count, because GenerationConfig stands for VllmConfig. A mapping accepts any key if an example
leaves it empty or its annotation is a dict.

Some keys of NeMo RL's own recipes are read by none of its code. In a recipe these keys are passed through unchecked:
only NeMo RL reads them. An override that adds such a key is refused, because its author expects an effect.
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
from nemo_fp8rl.nemo_rl.recipe.keys import KV_WINDOW
from nemo_fp8rl.nemo_rl.recipe.precision import UNDECLARED_KEYS
from nemo_fp8rl.nemo_rl.refit_transport.settings import ENGINE

ALGORITHM = "grpo"
"""The block that every example for GRPO has, in its own file or a parent's."""
MIN_SIMILARITY = 0.7
"""Similarity of two names, 0 to 1, from which on one is suggested for the other."""
ROOT_CLASS, ROOT_MODULE = "MasterConfig", "algorithms/grpo.py"
"""The class of GRPO; other algorithms have classes of the same name."""
READ_BY_NAME = ("grpo", "loss_fn", "policy.megatron_cfg")
"""Blocks whose keys NeMo RL reads one by one; it passes other blocks whole to other libraries."""
REFIT_CFG = "refit_cfg"
"""The block with the settings of a refit, each transport's under the transport's name."""
MEGATRON_KEYS = (
    *(f"policy.megatron_cfg.optimizer.{name}" for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")),
    "policy.megatron_cfg.optimizer.store_param_remainders",
    "policy.megatron_cfg.distributed_data_parallel_config.reduce_scatter_with_fp32_accumulation",
    *(f"policy.megatron_cfg.scheduler.{name}" for name in ("lr_wsd_decay_iters", "lr_wsd_decay_style")),
)
"""Keys of Megatron that no example of NeMo RL has. The package's trainer reads them; what NeMo RL's own trainer does
not take, `stock/stock_limits.py` refuses."""
OUR_LOOP_KEYS = {
    "grpo.trajectory_sampling": "NeMo RL's loop computes the log-probs of all answers, and its trainer does not learn "
    "which of them are a group",
}
"""Keys of our own loop beside NeMo RL's, and why they have no place in its loop."""
MAPPINGS = {"dict", "Dict", "Mapping", "Any"}


@dataclass
class KnownKey:
    """A node in the tree of known keys.

    accepts_any:  any key may stand below this one
    is_declared:  a config class has the key
    is_unread:    no code has the key's name; set only in the blocks READ_BY_NAME
    keys:         the keys below this one
    """

    accepts_any: bool = False
    is_declared: bool = False
    is_unread: bool = False
    keys: dict[str, "KnownKey"] = field(default_factory=dict)

    def add(self, key: str) -> "KnownKey":
        return self.keys.setdefault(key, KnownKey())

    def keys_of(self, path: str) -> "dict[str, KnownKey]":
        """Return the keys of a block, empty if the block is unknown."""
        node = self
        for part in path.split("."):
            node = node.keys.get(part, KnownKey())
        return node.keys

    def paths(self, prefix: str = "") -> Iterator[str]:
        for key, known in self.keys.items():
            yield prefix + key
            yield from known.paths(f"{prefix}{key}.")


@functools.cache
def read_known_keys(checkout: Checkout) -> KnownKey:
    known = KnownKey()
    for values in _examples(checkout.examples):
        _add_values(known, values)
    words = _add_classes(known, checkout.package)
    for block in READ_BY_NAME:
        for name, key in known.keys_of(block).items():
            key.is_unread = not key.is_declared and name not in words
    for path in (*UNDECLARED_KEYS, *MEGATRON_KEYS, KV_WINDOW):
        node = known
        for part in path.split("."):
            node = node.add(part)
    if REFIT_CFG in known.keys_of("policy.generation"):
        known.keys_of("policy.generation")[REFIT_CFG].add(ENGINE).accepts_any = True  # `read_settings` checks its keys
    return known


def check_known(values: Mapping[Any, Any], known: KnownKey, version: str) -> None:
    """Raise UserError for the first unknown key of `values`, with the most similar known key."""
    for key_prefix, key, parent in _find_unknown(values, known, ""):
        if reason := OUR_LOOP_KEYS.get(f"{key_prefix}{key}"):
            raise UserError(
                f"{key_prefix}{key} is for recipes of `nemo-fp8rl train`, and a recipe for NeMo RL has no such key: "
                f"{reason}; remove it"
            )
        similar = difflib.get_close_matches(key, parent.keys, 1)
        other_paths = [path for path in known.paths() if path.rpartition(".")[2] == key]
        suggestions = [f"{key_prefix}{similar[0]}"] if similar else other_paths[:1]
        hint = f"did you mean {suggestions[0]}?" if suggestions else f"NeMo RL {version} has no such key for GRPO"
        raise UserError(f"unknown config key {key_prefix}{key}; {hint}")


def check_key_is_read(key: str, known: KnownKey) -> None:
    """Raise UserError for a key that an example of NeMo RL has, but none of its code reads."""
    block, _, name = key.rpartition(".")
    siblings = known.keys_of(block) if block else {}
    if name in siblings and siblings[name].is_unread:
        names = [other for other, sibling in siblings.items() if not sibling.is_unread]
        similarity, nearest = max(((_similarity(name, other), other) for other in names), default=(0.0, ""))
        hint = f"; did you mean {block}.{nearest}?" if similarity >= MIN_SIMILARITY else ": remove it"
        raise UserError(f"NeMo RL's code never reads the key {key}, though an example of NeMo RL has it{hint}")


def _similarity(a: str, b: str) -> float:
    """Return the similarity of two names, 0 to 1, whatever the order of their words."""
    first, second = ("_".join(sorted(name.split("_"))) for name in (a, b))
    return difflib.SequenceMatcher(None, first, second).ratio()


def _find_unknown(values: Mapping[Any, Any], known: KnownKey, key_prefix: str) -> Iterator[tuple[str, str, KnownKey]]:
    """Yield (prefix, key, parent) of each unknown key."""
    for key, value in values.items():
        key = str(key)
        if key not in known.keys:
            yield key_prefix, key, known
        elif isinstance(value, Mapping) and not known.keys[key].accepts_any:
            yield from _find_unknown(value, known.keys[key], f"{key_prefix}{key}.")


def _examples(folder: Path) -> Iterator[dict[Any, Any]]:
    """Yield the files of the examples for GRPO and of their parents, each without its list of parents.

    Each file is read once and none is merged: `yaml_tree.read_with_parents` would take half a minute for all of them.
    """
    read = functools.cache(_read_yaml)

    def with_parents(path: Path, children: tuple[Path, ...] = ()) -> list[Path]:
        if path in children or not isinstance(values := read(path), dict):
            return []
        defaults = values.get("defaults") or []
        parents = [defaults] if isinstance(defaults, str) else defaults if isinstance(defaults, list) else []
        files = ((path.parent / parent).resolve() for parent in parents if isinstance(parent, str))
        return [path, *(ancestor for file in files for ancestor in with_parents(file, (*children, path)))]

    paths: set[Path] = set()
    for path in folder.rglob("*.yaml"):
        tree = with_parents(path.resolve())
        if any(ALGORITHM in read(file) for file in tree):
            paths.update(tree)
    for path in paths:
        yield {key: value for key, value in read(path).items() if key != "defaults"}


def _read_yaml(path: Path) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster; it needs libyaml
    try:
        return yaml.load(path.read_text(), loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None  # the file is no config, such as a template, or it is being edited


def _add_values(known: KnownKey, values: Any) -> None:
    if isinstance(values, dict):
        known.accepts_any |= not values
        for key, value in values.items():
            _add_values(known.add(str(key)), value)


Classes = dict[str, tuple[set[str], dict[str, list[ast.expr]]]]
"""Config classes: name -> (base classes, annotations of each field). Classes of one name are merged, except the
root class.
"""


def _add_classes(known: KnownKey, package: Path) -> set[str]:
    """Add the fields of the package's config classes to `known`, and return every word of its code."""
    classes: Classes = {}
    words = set[str]()
    for path in package.rglob("*.py"):
        try:
            text = path.read_text()
            words.update(re.findall(r"\w+", text))
            if "TypedDict" in text or "BaseModel" in text or "dataclass" in text:
                _collect(classes, ast.parse(text), path == package / ROOT_MODULE)
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue  # the file is no module, or it is being edited
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


def _add_fields(known: KnownKey, name: str, classes: Classes, ancestors: tuple[str, ...]) -> None:
    if name in ancestors or name not in classes:
        return
    bases, fields = classes[name]
    subclasses = [other for other, (other_bases, _) in classes.items() if name in other_bases] if ancestors else []
    for relative in {*bases, *subclasses} - {"TypedDict", "BaseModel"}:
        _add_fields(known, relative, classes, (*ancestors, name))
    for key, annotations in fields.items():
        known.add(key).is_declared = True
        for type_name in {word for annotation in annotations for word in _names_in(annotation)}:
            known.add(key).accepts_any |= type_name in MAPPINGS
            _add_fields(known.add(key), type_name, classes, (*ancestors, name))


def _names_in(annotation: ast.expr) -> Iterator[str]:
    """Yield every name in a type hint, also in a hint that is written as a string."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
