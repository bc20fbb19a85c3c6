"""The models from which runs start, made once in OUTPUT/models: weights, data, warm-up. A folder appears whole."""

import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_fp8rl.commands.compare.comparison import Comparison, Lengths, TinyModel, as_words
from nemo_fp8rl.commands.compare.subprocess_run import run
from nemo_fp8rl.common.atomic_files import write_atomically
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.config.yaml_tree import file_errors, flatten
from nemo_fp8rl.run.resume import add_later_keys
from nemo_fp8rl.run.stop_flag import StopFlag

CHAINS_OF_A_LENGTH = 6_000
"""Number of prompts of each length, or fewer if there are fewer different ones."""
OF_FILES = ("logger.", "checkpointing.")
"""Keys of a warm-up that decide no weight."""
MODEL_OF_FLOWS, MODEL_OF_LENGTHS = "flows", "lengths"


def model_words(folder: Path, data: str = "data.jsonl") -> list[str]:
    return as_words({"policy.model_name": f"{folder}/warm", "data.train.data_path": f"{folder}/{data}"})


def check_models(comparison: Comparison, output: Path) -> None:
    """Raise UserError for a wrong recipe, and if the folder holds models of another comparison."""
    for chosen, folder in _parts(comparison, output):
        made = folder / "made.json"
        if made.exists() and not _is_record(made, json.loads(_record(chosen))):
            raise UserError(f"{folder} was made by another comparison; give another --output")


def make_models(
    comparison: Comparison, output: Path, stop: StopFlag, say: Callable[[str], None], keep: Sequence[int]
) -> bool:
    """Make the missing models. Return False if it was interrupted. keep: see `subprocess_run.run`."""
    return all(
        _make(chosen, folder, stop, say, keep)
        for chosen, folder in _parts(comparison, output)
        if not (folder / "made.json").exists()
    )


def _parts(comparison: Comparison, output: Path) -> list[tuple[TinyModel | Lengths, Path]]:
    """Return each block with its folder."""
    parts = ((comparison.model, MODEL_OF_FLOWS), (comparison.lengths, MODEL_OF_LENGTHS))
    return [(chosen, output / "models" / name) for chosen, name in parts if chosen]


def _make(
    chosen: TinyModel | Lengths, folder: Path, stop: StopFlag, say: Callable[[str], None], keep: Sequence[int]
) -> bool:
    say(f"making the model in {folder}")
    record = _record(chosen)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    from nemo_fp8rl.commands.tiny_model import make_tiny  # loads torch

    task = chosen.task if isinstance(chosen, TinyModel) else "chain"
    make_tiny(partial, task, chosen.seed, chosen.family)
    if isinstance(chosen, Lengths):
        _write_chains(chosen, partial)
    words = ["--config", chosen.warm_up, *_warm_up_words(chosen, partial)]
    words += [f"logger.log_dir={partial}/sft", "--output", f"{partial}/warm"]
    if not run(["sft", *words], folder.with_name(f"{folder.name}.log"), stop, lambda: None, keep):
        return False
    write_atomically(partial / "made.json", record)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)
    return True


def _warm_up_words(chosen: TinyModel | Lengths, folder: Path) -> list[str]:
    overrides = chosen.overrides if isinstance(chosen, TinyModel) else chosen.warm_up_overrides
    made = {"policy.model_name": f"{folder}/model", "data.train.data_path": f"{folder}/data.jsonl"}
    return [*as_words(overrides), *as_words(made)]


def _record(chosen: TinyModel | Lengths) -> str:
    """Return the content of made.json: everything that weights and data depend on."""
    of_the_make = ("task", "family", "seed", "terms")
    tree = {
        "make": {key: value for key, value in asdict(chosen).items() if key in of_the_make},
        "warm_up": asdict(load(chosen.warm_up, _warm_up_words(chosen, Path("model")))),
    }
    return json.dumps(tree, indent=1) + "\n"


def _is_record(made: Path, record: dict[str, Any]) -> bool:
    """Return whether made.json has this record; keys that the recipe got later may be missing."""
    try:
        was = json.loads(made.read_text(encoding="utf-8"))
        old, new = (
            {key: value for key, value in flatten(tree["warm_up"]).items() if not key.startswith(OF_FILES)}
            for tree in (was, record)
        )
    except file_errors():
        return False
    return bool(was["make"] == record["make"] and add_later_keys(old, new) == new)


def _write_chains(chosen: Lengths, folder: Path) -> None:
    """Write NAME.jsonl for each length, and all lengths mixed as data.jsonl."""
    from nemo_fp8rl.commands.tiny_model import make_chains

    rng = random.Random(chosen.seed)
    mixed: list[str] = []
    for name, terms in chosen.terms.items():
        count = min(CHAINS_OF_A_LENGTH, 10**terms)
        rows = [json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in make_chains(rng, terms, count)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
        mixed += rows
    rng.shuffle(mixed)
    (folder / "data.jsonl").write_text("".join(mixed))
