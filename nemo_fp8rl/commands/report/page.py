"""The HTML file of a report: style, script and data are inside, so the page loads nothing from the network."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nemo_fp8rl import __version__
from nemo_fp8rl.commands.report.answer_tokens import collect_answers
from nemo_fp8rl.commands.report.charts.drawing import COLOURS, RIGHT, WIDTH
from nemo_fp8rl.commands.report.headline import find_differences, make_figures, make_headline
from nemo_fp8rl.commands.report.run_data import Run
from nemo_fp8rl.commands.report.run_folders import read_runs
from nemo_fp8rl.commands.report.sections import make_sections
from nemo_fp8rl.common.atomic_files import write_atomically
from nemo_fp8rl.common.errors import UserError

GENERATOR = '<meta name="generator" content="nemo-fp8rl report">'
BREAKS = re.compile(r"(?<=[/_=])(?=\w)|(?<=[a-zA-Z][.,:-])(?=\w)")
DIGESTS = re.compile(r"(?<=[0-9a-f]{16})(?=[0-9a-f]{16})")
HEAD_CHARACTERS = 2000
"""GENERATOR is within the first so many characters of a report."""


def report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of these run directories and return its path.

    output:  the file; by default report.html, for one run in its directory, for several in the working directory
    Raises:  UserError if `output` exists and is no report (an earlier report is replaced), or cannot be written
    """
    runs = read_runs(folders)
    path = output or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    if path.is_dir():
        raise UserError(f"--output {path} is a folder; give a file, such as {path}/report.html")
    try:
        if path.exists() and not _is_report(path):
            raise UserError(f"--output {path} exists and is no report; give another name, nothing else is overwritten")
        text = render_page(runs).encode(errors="backslashreplace").decode()  # UTF-8 has no half surrogate pairs
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"--output {path} cannot be written ({error}); give another file") from None
    return path


def _is_report(path: Path) -> bool:
    """Return True if the file begins like a report. A device or a pipe is not read: it may never end."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return GENERATOR in file.read(HEAD_CHARACTERS)


def render_page(runs: Sequence[Run]) -> str:
    """Return the HTML. All text of a run is escaped: by Jinja in text and attributes, by `_escape_json` in scripts."""
    environment = Environment(
        loader=PackageLoader("nemo_fp8rl", "commands/report/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_json"] = _escape_json
    environment.filters["breakable"] = _make_breakable
    script = environment.get_template("script.js.jinja").render()
    return environment.get_template("page.html.jinja").render(
        generator=Markup(GENERATOR),
        style=Markup(environment.get_template("style.css.jinja").render()),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
        width=WIDTH,
        right=WIDTH - RIGHT,
        colours=COLOURS,
        runs=runs,
        headlines=[make_headline(run) for run in runs],
        figures=make_figures(runs),
        sections=make_sections(runs),
        answers=[collect_answers(run) for run in runs],
        config=find_differences(runs, lambda run: run.config),
        environment=find_differences(runs, lambda run: run.environment),
    )


def _make_breakable(text: object) -> Markup:
    """Return the text, escaped, with places for line breaks in keys and paths, and in what is as long as a digest."""
    parts = BREAKS.split(str(text).replace(" %", "\u00a0%"))
    return Markup("<wbr>").join(piece for part in parts for piece in DIGESTS.split(part))


def _escape_json(value: Any) -> Markup:
    """Return JSON without "<", so that no string in it can close the <script> element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
