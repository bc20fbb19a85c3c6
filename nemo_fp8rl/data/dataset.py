"""A dataset of a recipe: one file, or a folder as the Hugging Face hub and `datasets` have them.

data.jsonl                                       a file, whatever `files` reads
FOLDER/train-00000-of-00002.parquet, ...         files that name their split, also in data/ (a downloaded dataset)
FOLDER/state.json, data-00000-of-00001.arrow     what `Dataset.save_to_disk` writes
FOLDER/dataset_dict.json, train/, test/          what `DatasetDict.save_to_disk` writes
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.files import Rows, read_rows
from nemo_fp8rl.data.records import FieldNames, Record, parse_records

DATA_FILES = re.compile(r"\.(parquet|arrow|jsonl?|ndjson)(\.(gz|zst|xz|bz2))?$")
NO_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
SPLIT_WORDS = {
    **{"train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation"},
    **{"dev": "validation", "test": "test", "testing": "test", "eval": "test"},
}


def read_dataset(path: str | Path, names: FieldNames | None = None, split: str | None = None) -> list[Record]:
    """Return all records of a file or folder, in order.

    names:   where prompt and answer are
    split:   the part of a folder that has several; None is train, or the only one
    Raises:  UserError for a dataset that is missing, empty or cannot be read, with the line of a bad record
    """
    names = names or FieldNames()
    records = parse_records(_read(Path(path), split, names.block), names)
    if not records:
        raise UserError(
            f'{names.block}.data_path: {path} holds no record; write one {{"prompt": ..., "answer": ...}} object a line'
        )
    return records


def read_first_row(path: str | Path, names: FieldNames, split: str | None = None) -> Mapping[str, Any]:
    """Return the first row as it is; empty where there is none, or no object. Raises UserError as `read_dataset`."""
    _, row = next(_read(Path(path), split, names.block), ("", {}))
    return row if isinstance(row, Mapping) else {}


def _read(path: Path, split: str | None, block: str) -> Rows:
    key = f"{block}.data_path"
    if path.is_dir():
        yield from _folder_rows(path, key, split, block)
        return
    if split not in (None, "train"):
        raise UserError(f"{block}.split={split}: {path} is one file, whose only split is train; remove it")
    yield from read_rows(path, key)


def _folder_rows(folder: Path, key: str, split: str | None, block: str) -> Rows:
    saved = folder
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json", key).get("splits") or []
        saved = folder / _choose([str(name) for name in splits], split, folder, block)
        split = None
    if (saved / "state.json").is_file():
        if split not in (None, "train"):
            raise UserError(f"{block}.split={split}: {folder} holds one saved dataset without splits; remove it")
        for file in _saved_files(saved, key):
            yield from read_rows(file, key)
        return
    by_split = _files_by_split(folder)
    if not by_split:
        raise UserError(
            f"{key}: the folder {folder} holds no file of a dataset (parquet, arrow, jsonl, json); give a file, or a "
            "folder that `datasets` saved or that was downloaded from the hub"
        )
    files = by_split[_choose(sorted(by_split), split, folder, block)]
    if len(parents := sorted({str(file.parent.relative_to(folder)) for file in files})) > 1:
        raise UserError(f"{key}: {folder} has this split in {' and '.join(parents)}; give one of these folders")
    if len(kinds := sorted({match[0] for file in files if (match := DATA_FILES.search(file.name))})) > 1:
        raise UserError(f"{key}: {folder} has this split as {' and as '.join(kinds)}; give one of the files")
    for file in files:
        yield from read_rows(file, key)


def _choose(splits: list[str], split: str | None, folder: Path, block: str) -> str:
    """Return the split to read. Raises UserError where it is not there or not clear."""
    chosen = split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
    if chosen not in splits:
        listed = ", ".join(splits) or "none"
        raise UserError(f"{block}.split={split or 'null'}: {folder} has the splits {listed}; set it to one of them")
    return chosen


def _saved_files(folder: Path, key: str) -> list[Path]:
    """Return the arrow files of a saved dataset, in order."""
    state = _read_json(folder / "state.json", key)
    if state.get("_indices_files"):
        raise UserError(
            f"{key}: {folder} was saved with a selection of rows that is kept apart; call flatten_indices() before "
            "save_to_disk"
        )
    named = [entry.get("filename") for entry in state.get("_data_files") or [] if isinstance(entry, dict)]
    if not named or not all(isinstance(name, str) and Path(name).name == name for name in named):
        raise UserError(f"{key}: {folder / 'state.json'} names no data files; save the dataset anew")
    return [folder / str(name) for name in named]


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    """Return the data files below a folder by split; files whose names say none are train."""
    by_split: defaultdict[str, list[Path]] = defaultdict(list)
    for file in sorted(folder.rglob("*")):
        inner = file.relative_to(folder)
        hidden = any(part.startswith((".", "_")) for part in inner.parts)
        if file.is_file() and not hidden and DATA_FILES.search(file.name) and file.name not in NO_DATA:
            words = re.split(r"[^a-z]+", "/".join(reversed(inner.parts)).lower())
            by_split[next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), "train")].append(file)
    return dict(by_split)


def _read_json(path: Path, key: str) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{key}: {path} cannot be read ({error}); save the dataset anew") from None
    if not isinstance(tree, dict):
        raise UserError(f"{key}: {path} is no object; save the dataset anew")
    return tree
