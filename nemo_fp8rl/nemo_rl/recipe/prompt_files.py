"""Prompt files of NeMo RL's recipes, which name them from its checkout's root, as its own scripts run there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError

KEYS = ("prompt_file", "system_prompt_file")


def find_prompt_files(data: dict[str, Any], root: Path) -> None:
    """Replace, in the block `data`, the relative path of a file that is not in the working folder by the checkout's.

    root: of the checkout. Raises UserError, naming the key, for a file that is in neither.
    """
    for place, block in _blocks(data):
        for key in KEYS:
            if not (named := block.get(key)) or Path(named).is_file():
                continue
            if not (root / named).is_file():
                raise UserError(f"data.{place}.{key}={named}: no such file, neither here nor in {root}")
            block[key] = str(root / named)
            print(f"nemo-fp8rl: data.{place}.{key}={named} is the one of the checkout in NEMO_RL_SRC", flush=True)


def _blocks(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, block) of each set of prompts, in a list or alone, and of what they have in common."""
    for place in ("default", "train", "validation"):
        given = data.get(place)
        for index, block in enumerate(given if isinstance(given, list) else [given]):
            if isinstance(block, dict):
                yield (f"{place}[{index}]" if isinstance(given, list) else place), block
