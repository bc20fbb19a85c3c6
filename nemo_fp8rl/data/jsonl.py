"""Read files of `{"prompt": ..., "answer": ...}` lines; an error names the line."""

import json
from dataclasses import dataclass
from pathlib import Path

from nemo_fp8rl.common.errors import UserError


@dataclass(frozen=True)
class Record:
    """One line of a dataset. Other fields of the line are ignored."""

    prompt: str
    answer: str


def read_jsonl(path: str | Path, key: str = "data.train.data_path") -> list[Record]:
    """Return all records of the file, in order.

    key:     the config key of the path, for messages
    Raises:  UserError for a missing or empty file, a line that is not a JSON object, or a field that is not text
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise UserError(f"{key}: there is no file {path}; give the path of a JSONL dataset") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: {path} cannot be read as UTF-8 text ({error}); give a JSONL dataset") from None
    records = [_parse_record(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise UserError(f'{key}: {path} holds no record; write one {{"prompt": ..., "answer": ...}} object a line')
    return records


def _parse_record(line: str, path: Path, number: int) -> Record:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"{path}, line {number}: not JSON ({reason}); write one object a line") from None
    if not isinstance(row, dict):
        raise UserError(f'{path}, line {number}: not an object; write {{"prompt": ..., "answer": ...}}')
    for field in ("prompt", "answer"):
        if not isinstance(row.get(field), str):
            raise UserError(f'{path}, line {number}: "{field}" is missing or not text; give it as a string')
        if any("\ud800" <= character <= "\udfff" for character in row[field]):
            raise UserError(f'{path}, line {number}: "{field}" holds half a surrogate pair; write the whole character')
    return Record(row["prompt"], row["answer"])
