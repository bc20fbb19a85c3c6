"""The dtype that config.json says; vLLM and transformers load a checkpoint in it, whatever its tensors have."""

import json
from pathlib import Path
from typing import Any

KEYS = ("dtype", "torch_dtype")
"""transformers' name of the key, and the one of its versions before 4.56."""


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config that says `dtype` under the keys that it has of KEYS, or under the older one, which all read."""
    keys = [key for key in KEYS if key in config] or [KEYS[1]]
    return config | dict.fromkeys(keys, dtype)


def write_dtype(path: Path, dtype: str) -> None:
    """Change the dtype in a config.json; a file that says it already stays as it is, byte by byte."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if (changed := with_dtype(config, dtype)) != config:
        path.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
