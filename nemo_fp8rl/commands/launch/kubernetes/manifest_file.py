"""YAML of others, read: whatever is in the file, what cannot be used is said in a sentence.

PyYAML's readers raise whatever Python does for a value that is none of its type (`2020-13-45`, `!!bool x`), and the one
that is made of C ends the process where lists are nested too deep.
"""

from pathlib import Path
from typing import Any

import yaml

from nemo_fp8rl.common.errors import UserError, one_line
from nemo_fp8rl.config.yaml_tree import unreadable

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DEEPEST = 100
"""Levels of a manifest, at most; KubeRay's schema goes 36 deep."""
LARGEST = 2**63 - 1
"""The largest of Kubernetes' integers."""


class Strict(yaml.SafeLoader):
    """Refuses a key that is there twice, as kubectl does (YAML's own reader takes the last), what no key can be, and
    integers that Kubernetes has not; says in which line a value is that cannot be read.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be one word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except unreadable() as error:
            if not isinstance(node, yaml.ScalarNode) or isinstance(error, yaml.YAMLError):
                raise
            problem = f"{node.value[:40]!r} cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_yaml_int(self, node: Any) -> int:
        number = super().construct_yaml_int(node)
        if abs(number) > LARGEST:
            raise yaml.constructor.ConstructorError(None, None, "an integer has more than 64 bits", node.start_mark)
        return number


Strict.add_constructor("tag:yaml.org,2002:int", Strict.construct_yaml_int)


def documents(path: Path, loader: Any = Strict) -> list[Any]:
    """The YAML documents of a file. Raises UserError, and FileNotFoundError."""
    try:
        text = path.read_text(encoding="utf-8")
        _check_depth(text)
        return list(yaml.load_all(text, loader))
    except FileNotFoundError:
        raise
    except unreadable() as error:
        raise UserError(f"{path} cannot be read as YAML: {one_line(error)[:300]}") from None


def _check_depth(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise yaml.YAMLError(f"it is nested more than {DEEPEST} deep")
