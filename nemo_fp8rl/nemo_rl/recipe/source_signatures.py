"""Functions and classes of a checkout of NeMo RL, read from its source: nothing of it is imported.

So a difference between versions is decided by what a checkout has, before anything is loaded.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function, without `self` and `cls`.

    positional:  names in order, of those that may be given by position
    keyword:     names of those that may be given by keyword alone
    required:    names of those without a default
    any_positional, any_keyword: it has *args, **kwargs
    """

    positional: tuple[str, ...]
    keyword: tuple[str, ...]
    required: frozenset[str]
    any_positional: bool
    any_keyword: bool

    @property
    def names(self) -> tuple[str, ...]:
        return self.positional + self.keyword

    @classmethod
    def of(cls, function: ast.FunctionDef | ast.AsyncFunctionDef) -> "Parameters":
        arguments = function.args
        every = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        required = set(every[: len(every) - len(arguments.defaults)])
        keyword = tuple(argument.arg for argument in arguments.kwonlyargs)
        required |= {name for name, default in zip(keyword, arguments.kw_defaults, strict=True) if default is None}
        positional = tuple(name for i, name in enumerate(every) if i or name not in ("self", "cls"))
        without_self = frozenset(required & {*positional, *keyword})
        return cls(positional, keyword, without_self, arguments.vararg is not None, arguments.kwarg is not None)


@cache
def parse(path: Path) -> ast.Module | None:
    """Return the module, None where it cannot be read."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


def find(path: Path, name: str) -> Definition | None:
    """Return the function, class or method (`Class.method`) of this name; None where the file does not define it."""
    scope: ast.Module | Definition | None = parse(path)
    for part in name.split("."):
        nodes = [] if scope is None else _statements(scope)
        scope = next((node for node in nodes if isinstance(node, Definition) and node.name == part), None)
    return scope if isinstance(scope, Definition) else None


def imports(path: Path, name: str) -> bool:
    """Return whether the file imports the name, so that its definition is elsewhere."""
    module = parse(path)
    nodes = [] if module is None else ast.walk(module)
    aliases = (alias for node in nodes if isinstance(node, ast.ImportFrom | ast.Import) for alias in node.names)
    return any((alias.asname or alias.name) == name.partition(".")[0] for alias in aliases)


def methods(definition: Definition | None) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the methods that a class itself defines, by name."""
    nodes = [] if definition is None else _statements(definition)
    return {node.name: node for node in nodes if isinstance(node, FUNCTIONS)}


def is_abstract(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("abstractmethod" in ast.unparse(decorator) for decorator in function.decorator_list)


def annotated(definition: Definition | None) -> dict[str, ast.expr | None]:
    """Return the annotated fields of a class, by name, with their defaults; None is no default."""
    nodes = [] if definition is None else _statements(definition)
    return {ast.unparse(node.target): node.value for node in nodes if isinstance(node, ast.AnnAssign)}


def lacks_default(definition: Definition | None, field: str) -> bool:
    """Return whether a config class has this field, and gives it no default."""
    fields = annotated(definition)
    return field in fields and fields[field] is None


def _statements(scope: ast.Module | Definition) -> Iterator[ast.stmt]:
    """Yield the statements of a body, also those in its `if` and `try` blocks."""
    for node in scope.body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, Definition))
