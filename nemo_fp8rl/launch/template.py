"""The templates, filled in. Nothing goes into them unquoted."""

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from nemo_fp8rl.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"


def fill(template: str, **values: Any) -> str:
    """template: its path in templates/. In it `| sh` quotes for a POSIX shell, `| shs` a list, `| yaml` for YAML."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "sh": _sh,
        "shs": lambda values: " ".join(_sh(value) for value in values),
        "yaml": quoted,
    }
    return environment


def _sh(value: Any) -> str:
    quoted = shlex.quote(str(value))
    return f"'{quoted}'" if "," in quoted and "'" not in quoted else quoted  # shellcheck takes a comma for a mistake


def quoted(value: Any) -> str:
    """JSON in the part of it that YAML reads alike: ASCII, other characters as \\u or \\U and not in two halves."""
    text = json.dumps(value, ensure_ascii=False)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{value!r} holds bytes that are not text")
    return "".join(c if " " <= c <= "~" else f"\\u{ord(c):04x}" if c <= "\uffff" else f"\\U{ord(c):08x}" for c in text)
