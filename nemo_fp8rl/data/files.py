"""Rows of a dataset's file, by its first bytes: JSONL, a JSON array, either of them compressed, parquet, arrow.

A place says where a row stands, for messages: "data.jsonl, line 3". Whatever else a file may be is refused by name.
Left out: CSV and text, which have no types, and everything that would be unpickled.
"""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError, single_line

Rows = Iterator[tuple[str, Any]]
"""Pairs of a place and a row."""
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
REFUSED = {
    b"PK\x03\x04": "a ZIP archive; unpack it",
    b"SQLite format 3": "a SQLite database; export its table as JSONL or parquet",
    b"\x89HDF": "an HDF5 file; export it as JSONL or parquet",
    b"\x80\x04\x95": "a Python pickle, which is never loaded; export it as JSONL or parquet",
    b"version https://git-lfs": "a Git LFS pointer; run `git lfs pull` in its repository",
    b"<!DOCTYPE": "a web page; download the file itself",
    b"<html": "a web page; download the file itself",
}
REFUSED_SUFFIXES = {".csv": "CSV", ".tsv": "TSV", ".txt": "plain text", ".xlsx": "a spreadsheet", ".tar": "an archive"}
PYARROW = "pip install pyarrow==25.0.1"


def decompress_zstandard(data: bytes) -> bytes:
    import zstandard

    parts = []
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()  # a reader of streams would not notice a file cut short
        try:
            parts.append(frame.decompress(data))
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
        if not frame.eof:
            raise ValueError("it ends within a frame")
        data = frame.unused_data
    return b"".join(parts)


COMPRESSED: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ\x00": lzma.decompress,
    b"(\xb5/\xfd": decompress_zstandard,
}


def read_rows(path: Path, key: str) -> Rows:
    """Yield the rows of a file.

    key:     the config key of the path, for messages
    Raises:  UserError for a file that cannot be read, and for a line that is no JSON
    """
    data = _read_bytes(path, key)
    for start, decompress in COMPRESSED.items():
        if data.startswith(start):
            try:
                data = decompress(data)
            except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
                raise UserError(f"{key}: {path} cannot be decompressed ({single_line(error)}); get it anew") from None
            break
    for start, what in REFUSED.items():
        if data.startswith(start):
            raise UserError(f"{key}: {path} is {what}")
    if data.startswith(PARQUET) or path.suffix == ".parquet":
        yield from _table_rows(path, key, data, _read_parquet)
    elif data.startswith((ARROW_FILE, ARROW_STREAM)) or path.suffix == ".arrow":
        yield from _table_rows(path, key, data, _read_arrow)
    else:
        if kind := REFUSED_SUFFIXES.get(path.suffix):
            raise UserError(f"{key}: {path} is {kind} by its name; export it as JSONL or parquet")
        yield from _text_rows(path, key, data)


def _read_bytes(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        if path.name != path.as_posix() and path.as_posix().count("/") == 1 and not path.suffix:
            raise UserError(
                f"{key}: there is no file {path}; a dataset on the hub is downloaded first: hf download {path} "
                "--repo-type dataset --local-dir DIR"
            ) from None
        raise UserError(f"{key}: there is no file {path}; give the path of a JSONL dataset") from None
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read ({error.strerror}); give a JSONL dataset") from None


def _text_rows(path: Path, key: str, data: bytes) -> Rows:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{key}: {path} cannot be read as UTF-8 text ({error}); give a JSONL dataset") from None
    lines = text.split("\n")
    if text.lstrip()[:1] == "[" and (array := _parse_array(path, text, lines)) is not None:
        yield from array
        return
    for number, line in enumerate(lines, 1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                row = _parse_json(line, place)
            except UserError:
                if number == 1 and "\n" in text.strip() and _is_one_object(text):
                    raise UserError(
                        f"{key}: {path} is one JSON object over several lines; write one object a line, or an array"
                    ) from None
                raise
            yield place, row


def _parse_array(path: Path, text: str, lines: list[str]) -> "list[tuple[str, Any]] | None":
    """Return the elements of a file that is one JSON array; None for lines that are arrays."""
    if len([line for line in lines if line.strip()]) > 1 and _is_json(next(line for line in lines if line.strip())):
        return None
    elements = _parse_json(text, str(path), "an array of objects")
    if not all(isinstance(element, dict) for element in elements):
        return None
    return [(f"{path}, element {number}", element) for number, element in enumerate(elements, 1)]


def _parse_json(text: str, place: str, form: str = "one object a line") -> Any:
    """Return the JSON value. Raises UserError for anything else, for NaN and for an object with a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant)
    except _Refusal as error:
        raise UserError(f"{place}: {error}") from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"{place}: not JSON ({reason}); write {form}") from None


class _Refusal(ValueError):
    """A value that json would take."""


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refusal(f'the key "{twice}" occurs twice in one object; remove one of the two')
    return row


def _refuse_constant(name: str) -> Any:
    raise _Refusal(f"{name} is no JSON value; write a number, text or null")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_one_object(text: str) -> bool:
    return text.lstrip()[:1] == "{" and _is_json(text)


def _table_rows(path: Path, key: str, data: bytes, read: Callable[[bytes], list[Any]]) -> Rows:
    try:
        rows = read(data)
    except ModuleNotFoundError:
        raise UserError(f"{key}: {path} is a table of parquet or arrow, which needs pyarrow: {PYARROW}") from None
    except Exception as error:  # pyarrow's errors share no class with the standard library's
        raise UserError(f"{key}: {path} cannot be read as a table ({single_line(error)[:200]}); get it anew") from None
    yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


def _read_parquet(data: bytes) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    return pyarrow.parquet.read_table(pyarrow.BufferReader(data)).to_pylist()


def _read_arrow(data: bytes) -> list[Any]:
    import pyarrow

    source = pyarrow.BufferReader(data)
    opened = pyarrow.ipc.open_file if data.startswith(ARROW_FILE) else pyarrow.ipc.open_stream
    return opened(source).read_all().to_pylist()
