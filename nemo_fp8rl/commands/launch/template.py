"""Fills in the templates. Every value is quoted for the language of its template."""

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from nemo_fp8rl.config.yaml_tree import quote

TEMPLATES = Path(__file__).parent / "templates"


def fill(template: str, **values: Any) -> str:
    """Fill in a template, a path in templates/. `| sh` quotes for a POSIX shell, `| shs` a list, `| yaml` for YAML."""
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
        "yaml": quote,
    }
    return environment


def _sh(value: Any) -> str:
    quoted = shlex.quote(str(value))
    return f"'{quoted}'" if "," in quoted and "'" not in quoted else quoted  # shellcheck takes a comma for a mistake
