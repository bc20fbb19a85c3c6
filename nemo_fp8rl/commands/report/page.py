"""The page: one HTML file with its own style and script, which asks the network for nothing."""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nemo_fp8rl import __version__
from nemo_fp8rl.commands.report.answer_tokens import answers
from nemo_fp8rl.commands.report.charts import COLOURS, WIDTH
from nemo_fp8rl.commands.report.run_data import Run, read_runs
from nemo_fp8rl.commands.report.sections import differing, sections, summary
from nemo_fp8rl.common.atomic_files import write_atomically
from nemo_fp8rl.common.errors import UserError

GENERATOR = '<meta name="generator" content="nemo-fp8rl report">'
BEGINNING = 2000
"""Characters of a report in which GENERATOR stands."""


def report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of these run directories; returns where it is: by default report.html, of one run in its
    directory, of several in the present one. An earlier report is replaced, another file is not: UserError.
    """
    runs = read_runs(folders)
    path = output or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    if path.is_dir():
        raise UserError(f"--output {path} is a folder; give a file, such as {path}/report.html")
    try:
        if path.exists() and not _is_report(path):
            raise UserError(f"--output {path} exists and is no report; give another name, nothing else is overwritten")
        text = page(runs).encode(errors="backslashreplace").decode()  # half a surrogate pair cannot be written
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"--output {path} cannot be written ({error}); give another file") from None
    return path


def _is_report(path: Path) -> bool:
    """Whether the file is a report, by its beginning; a device or a pipe is none, and could be without end."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return GENERATOR in file.read(BEGINNING)


def page(runs: Sequence[Run]) -> str:
    """Everything that comes from a run is escaped: by Jinja in text and attributes, by `_data` in a script's data."""
    environment = Environment(
        loader=PackageLoader("nemo_fp8rl", "commands/report/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data"] = _data
    script = environment.get_template("script.js.jinja").render()
    return environment.get_template("page.html.jinja").render(
        generator=Markup(GENERATOR),
        style=Markup(environment.get_template("style.css.jinja").render()),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
        width=WIDTH,
        colours=COLOURS,
        runs=runs,
        summary=summary(runs),
        sections=sections(runs),
        answers=[answers(run) for run in runs],
        config=differing(runs, lambda run: run.config),
        environment=differing(runs, lambda run: run.environment),
    )


def _data(value: Any) -> Markup:
    """JSON that ends no <script>, whatever strings it holds."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
