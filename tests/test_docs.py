"""The documentation: links lead somewhere, paths and messages exist, pages stay short."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

import nemo_fp8rl

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MOST_BYTES = 12 << 10
TOO_LONG: set[str] = set()
"""Pages that are still to be shortened."""
FROM_NEMO_RL = ("nemo_rl/algorithms/", "examples/")
"""Paths in NeMo RL's checkout, not in ours."""
PATH = re.compile(r"(?<![\w/.-])((?:[\w*-]+/)+(?:[\w.*-]+\.(?:py|yaml|json|md|sh|txt|svg|png))?)(?![\w/])")
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
MESSAGE = re.compile(r"^\| (`.*?) \| ", re.MULTILINE)
names = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@names
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@names
def test_mentioned_paths_exist(page):
    """Paths from the root, and those within the package that begin with one of its rooms."""
    roots = [ROOT, ROOT / "nemo_fp8rl", page.parent]
    first = {path.name for root in roots[:2] for path in root.iterdir() if path.is_dir()} - {"runs"}  # what runs leave
    text, _, _ = page.read_text().partition("### Removed or renamed")  # of the changelog, which names what is gone
    code = re.findall(r"`([^`\n]+)`", text)
    found = [path for words in code for path in PATH.findall(words)]
    for path in found:
        if path.split("/")[0] in first and not path.startswith(FROM_NEMO_RL):
            assert any(any(root.glob(path)) for root in roots), path


@names
def test_mentioned_targets_and_commands_exist(page):
    text, _, _ = page.read_text().partition("### Removed or renamed")
    targets = re.findall(r"^([\w.%/-]+(?: [\w.%/-]+)*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    patterns = [re.escape(target).replace("%", ".+") for line in targets for target in line.split()]
    for target in re.findall(r"`make (?:\w+=\S+ )*([a-z][\w.-]*)", text):
        assert any(re.fullmatch(pattern, target) for pattern in patterns), target
    commands = re.findall(r'_add\(\s*commands,\s*"([\w-]+)"', (ROOT / "nemo_fp8rl/commands/arguments.py").read_text())
    for command in re.findall(r"(?:nemo-fp8rl|nemo_fp8rl\.cli) ([a-z][\w-]*)", text):
        assert command in commands, command


@names
def test_pages_are_short(page):
    size = len(page.read_bytes())
    assert (size > MOST_BYTES) == (page.name in TOO_LONG), size
    if page.name == "README.md":
        assert len(page.read_text().splitlines()) <= 90


@cache
def sentences() -> str:
    """The texts of the package and of the set-up, with what is computed in them left out."""
    texts = []
    for path in [*(ROOT / "nemo_fp8rl").rglob("*.py"), ROOT / "tools/setup_env.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                texts.append("".join(map(str, parts)))
    return "\n".join(texts)


def test_messages_are_those_of_the_package():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    cells = MESSAGE.findall(page)
    assert len(cells) > 40
    parts = [part.strip() for cell in cells for text in re.findall("`([^`]+)`", cell) for part in text.split("...")]
    assert [part for part in parts if part and part not in sentences()] == []


def test_the_version_is_the_same_everywhere():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert nemo_fp8rl.__version__ == pyproject
    assert f"\nversion: {pyproject}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {pyproject}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_makefile_names_tests_that_are_there():
    """With a path that is not there, pytest-xdist collects nothing and says no more than that."""
    named = set(re.findall(r"tests/[\w/]+(?:\.py)?", (ROOT / "Makefile").read_text()))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
