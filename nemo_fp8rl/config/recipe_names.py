"""The recipes that the package ships, addressed by name wherever a recipe's path is expected.

A name is the file below `recipes/` without .yaml, as `nemo_rl/qwen3-8b-bf16`; the last part suffices where it is clear.
What exists as a file is always that file.
"""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from nemo_fp8rl.common.errors import UserError

RECIPES = Path(__file__).resolve().parent / "recipes"
LOOPS = {"nemo_rl": "nemo", "compare": "compare"}
"""Folder of recipes -> the command that runs them; those of no folder are for `train`."""

SUPERVISED = ("sft", "cpt")
"""Words in names of recipes for `sft`."""


def list_recipes() -> dict[str, str]:
    """Return each name with the first comment of its file."""
    paths = sorted(RECIPES.rglob("*.yaml"), key=lambda path: (len(path.relative_to(RECIPES).parts), str(path)))
    return {_name(path): _first_comment(path) for path in paths}


def command_of(name: str) -> str:
    """Return the command that runs the recipe of this name."""
    if any(word in Path(name).name for word in SUPERVISED):
        return "sft"
    return LOOPS.get(name.partition("/")[0] if "/" in name else "", "train")


def check_command(path: Path, keys: Iterable[str], command: str) -> None:
    """Raise UserError, with the right command, if a file with these keys at its top is for another command."""
    names = set(keys)
    if names.isdisjoint({"recipe", "flows"} if command != "compare" else {"policy", "grpo"}):
        return
    right, kind = ("train", "recipe of training") if command == "compare" else ("compare", "comparison of flows")
    word = _name(path) if path.is_relative_to(RECIPES) else path
    right = command_of(_name(path)) if path.is_relative_to(RECIPES) else right
    raise UserError(f"{word} is a {kind}, which `nemo-fp8rl {command}` does not take: nemo-fp8rl {right} {word}")


def find_recipe(word: str | Path, folder: str = "") -> Path:
    """Return the path of a recipe that is given by its path or its name.

    folder:  the folder of recipes that a name means first, if several have it
    Raises:  UserError if it is neither; the message has the nearest name
    """
    path = Path(word)
    if path.is_file():
        return path
    if by_name := shipped_recipe(str(word), folder):
        return by_name
    if path.exists():
        return path  # a folder or a device: its reader says what is wrong
    names = list(list_recipes())
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"there is no file {word}, and no recipe of that name{_nearest(str(word), names)} "
            "(`nemo-fp8rl recipes` lists the names)"
        )
    hint = _nearest(str(word), names) or "; give the path of a YAML file, or a name that `nemo-fp8rl recipes` lists"
    raise UserError(f"there is no file {word}{hint}")


def shipped_recipe(word: str, folder: str = "") -> Path | None:
    """Return the path of the recipe of this name, None if no recipe has it."""
    parts = word.split("/")
    if ".." in parts or not all(parts):
        return None
    for name in ([f"{folder}/{word}"] if folder else []) + [word]:
        if (path := RECIPES / f"{name}.yaml").is_file():
            return path
    found = [path for path in RECIPES.rglob("*.yaml") if path.stem == word]
    return found[0] if len(found) == 1 else None


def _nearest(word: str, names: list[str]) -> str:
    """Return "; did you mean NAME?", or "" if no name is near."""
    stem = Path(word).stem if word.endswith((".yaml", ".yml")) else word.rpartition("/")[2]
    last_parts = {name.rpartition("/")[2]: name for name in reversed(names)}  # the first of two names stays
    near = difflib.get_close_matches(stem, last_parts, n=1, cutoff=0.7)
    return f"; did you mean {last_parts[near[0]]}?" if near else ""


def _name(path: Path) -> str:
    return path.relative_to(RECIPES).with_suffix("").as_posix()


def _first_comment(path: Path) -> str:
    """Return the comment at the top of a file up to its first full stop or colon."""
    text = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = f"{text} {line.removeprefix('#').strip()}".strip()
    return re.split(r"[.:] ", text)[0].rstrip(".")
