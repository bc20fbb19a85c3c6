"""The pages docs/config*.md, made from the blocks of a recipe: all keys with type, default, range and meaning, and
whether a run may change them when it resumes.

    python -m nemo_fp8rl.config.reference docs

The meaning of a key is the first sentence of the text below its field.
"""

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from nemo_fp8rl.common.field_rules import Field, MayChange, Range, fields_of
from nemo_fp8rl.config.schema import Config

COMMAND = "python -m nemo_fp8rl.config.reference docs"
RULES = f"""`*`: a run may change the key when it resumes. `{COMMAND}`
makes this page from the classes in `nemo_fp8rl/config/*schema.py` and `nemo_fp8rl/algorithms/*config.py`, which say
more.
"""
POLICY = f"""# Keys of the block policy

Model, trainer and engines; the other blocks are in [config.md](config.md).

{RULES}"""
FP8RL = f"""# Keys of the block nemo_fp8rl

Precision on both sides, the refit, rollout correction and gates: keys that NeMo RL does not have. The other blocks are
in [config.md](config.md).

{RULES}"""
OTHERS = f"""# Keys of a recipe

Keys of `nemo-fp8rl train`, a table a block; the block `policy` is in [config_policy.md](config_policy.md), the block
`nemo_fp8rl` in [config_fp8rl.md](config_fp8rl.md). Most are NeMo RL's, with its meanings; for recipes of NeMo RL itself
see [nemo_rl.md](nemo_rl.md).

{RULES}"""
SENTENCE = re.compile(r"(.+?)[.:](?=\s|$)")


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    tables = list(_tables(Config, "", may_change=False))
    policy = [table for table in tables if table.startswith("## `policy")]
    fp8rl = [table for table in tables if table.startswith("## `nemo_fp8rl")]
    others = [table for table in tables if table not in (*policy, *fp8rl)]
    texts = {"config.md": [OTHERS, *others], "config_policy.md": [POLICY, *policy], "config_fp8rl.md": [FP8RL, *fp8rl]}
    return {name: "\n".join(parts) for name, parts in texts.items()}


def meanings(block: type) -> dict[str, str]:
    """Return the text below each field of a block, by name; empty where there is none."""
    names = {field.name for field in fields_of(block)}
    body = ast.parse(textwrap.dedent(inspect.getsource(block))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            constant = following.value if isinstance(following, ast.Expr) else None
            text = constant.value if isinstance(constant, ast.Constant) else ""
            texts[statement.target.id] = " ".join(str(text).split())
    return {name: text for name, text in texts.items() if name in names}


def first_sentence(text: str) -> str:
    """Return the first sentence without its full stop."""
    found = SENTENCE.match(text)
    return found[1] if found else text


def _tables(block: type, prefix: str, *, may_change: bool) -> Iterator[str]:
    """Yield the tables of a block and of the blocks in it."""
    texts, fields = meanings(block), fields_of(block, prefix)
    rows = [_row(field, texts[field.name], may_change) for field in fields if not field.block]
    if rows:
        yield "\n".join(
            [f"## `{prefix.rstrip('.')}`\n", "| key | type, default | meaning |", "|---|---|---|", *rows, ""]
        )
    for field in fields:
        inner = field.block or field.element
        if inner:
            key = f"{field.key}[]." if field.element else f"{field.key}."
            yield from _tables(inner, key, may_change=may_change or field.marker(MayChange) is not None)


def _row(field: Field, text: str, may_change: bool) -> str:
    star = " *" if may_change or field.marker(MayChange) else ""
    rules = [str(marker) for marker in field.markers if isinstance(marker, Range) and str(marker)]
    default = "" if field.default is dataclasses.MISSING else f" = {_yaml(field.default)}"
    kind = " ".join([_type(field), *rules])
    return f"| `{field.name}`{star} | {kind}{default} | {first_sentence(text)} |"


def _type(field: Field) -> str:
    if field.choices:
        return " / ".join(_yaml(choice) for choice in field.choices)
    if field.element:
        return "list of blocks"
    return _type_name(field.hint)


def _type_name(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"list of {_type_name(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "mapping"
    if get_origin(hint) in (UnionType, Literal) or type(None) in get_args(hint):
        return " or ".join(_type_name(option) for option in get_args(hint))
    return "null" if hint is type(None) else {"str": "text"}.get(hint.__name__, hint.__name__)


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return json.dumps(value)
    return json.dumps(value) if isinstance(value, str) and "\n" in value else str(value)


if __name__ == "__main__":
    for name, text in pages().items():
        Path(sys.argv[1], name).write_text(text, encoding="utf-8")
