"""The report in a real browser, opened as a file: no console message, no network request, readable on a phone."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_fp8rl.commands.report.page import report
from tests.commands.report.browser import Browser, find_browser
from tests.commands.report.conftest import make_sample, write_run
from tests.commands.report.test_page import HOSTILE

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium on PATH, nor in BROWSER_PATH"),
]
DRAWN = (
    "[...document.querySelectorAll('.chart svg')]"
    ".filter(svg => svg.querySelector('path:not(.grid)').getBBox().width > 1)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(find_browser()) as browser:
        yield browser


@pytest.fixture(scope="module")
def page_of_two_runs(tmp_path_factory) -> Path:
    """The report of a run of 60 steps and of a run of 20 steps."""
    folder = tmp_path_factory.mktemp("two")
    return report([write_run(folder / "one", 60), write_run(folder / "two", 20)], folder / "out.html")


def assert_quiet(browser: Browser, page: Path) -> None:
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith("data:")] == [page.resolve().as_uri()]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_renders(browser, page_of_two_runs, width, dark):
    browser.open(page_of_two_runs, width, dark=dark)
    assert_quiet(browser, page_of_two_runs)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    charts = browser.evaluate("document.querySelectorAll('.chart').length")
    assert charts > 25
    assert browser.evaluate(f"{DRAWN}.length") == charts
    assert browser.evaluate("[...document.querySelectorAll('.chart')].every(c => c.scrollWidth <= c.clientWidth)")


def test_letters_are_large_enough_on_a_phone(browser, page_of_two_runs):
    browser.open(page_of_two_runs, 390)
    sizes = (
        "[...document.querySelectorAll('.chart svg')].map(svg => parseFloat(getComputedStyle("
        "svg.querySelector('text')).fontSize) * svg.clientWidth / svg.viewBox.baseVal.width)"
    )
    assert browser.evaluate(f"Math.min(...{sizes})") >= 9


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_coloured_tokens_can_be_read(browser, page_of_two_runs, dark):
    """The contrast is at least 4.5 (WCAG 2, AA) at the deepest colour."""
    browser.open(page_of_two_runs, dark=dark)
    style = "getComputedStyle(document.querySelector('.answer .token.{}')).{}"
    body = "getComputedStyle(document.body).{}"
    (paper, ink) = (colour(browser.evaluate(body.format(key))) for key in ("backgroundColor", "color"))
    browser.evaluate("document.querySelectorAll('.token').forEach(token => token.style.setProperty('--depth', 1))")
    for side in ("up", "down"):
        *rgb, alpha = colour(browser.evaluate(style.format(side, "backgroundColor")))
        blended = [alpha * over + (1 - alpha) * under for over, under in zip(rgb, paper, strict=True)]
        high, low = sorted((luminance(blended), luminance(ink)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5
        assert alpha >= 0.5


def colour(css: str) -> list[float]:
    """Parse rgb(1, 2, 3) or rgba(1, 2, 3, 0.5)."""
    return [float(part) for part in css.partition("(")[2].rstrip(")").split(",")]


def luminance(rgb: list[float]) -> float:
    parts = [value / 255 for value in rgb]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_light_and_dark(browser, page_of_two_runs):
    colours = []
    for dark in (False, True):
        browser.open(page_of_two_runs, dark=dark)
        colours.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(255, 255, 255)", "rgb(20, 23, 27)"]


def test_the_pointer_shows_values(browser, page_of_two_runs):
    browser.open(page_of_two_runs)
    box = browser.evaluate(
        "(() => { const box = document.querySelector('.chart svg').getBoundingClientRect();"
        " return [box.left, box.top, box.width, box.height] })()"
    )
    x = 62 + (10 - 1) / (60 - 1) * (440 - 62 - 10)  # of step 10 in a drawing of 440
    browser.move(box[0] + x / 440 * box[2], box[1] + box[3] / 2)
    lines = browser.evaluate("[...document.querySelector('.chart output').childNodes].map(n => n.textContent)")
    assert lines[0] == "step 10"
    for text, run in zip(lines[1:], ("one", "two"), strict=True):
        rows = [json.loads(line) for line in (page_of_two_runs.parent / run / "metrics.jsonl").read_text().splitlines()]
        name, value = text.split()
        assert name == run
        assert float(value) == pytest.approx(rows[10]["train/reward"], rel=1e-6)


def test_a_tap_shows_values_until_the_next_one_elsewhere(browser, page_of_two_runs):
    browser.open(page_of_two_runs, 390)
    for chart in ("", ":not(:has(script))"):  # lines; a heat map
        svg = f"document.querySelector('.chart{chart} svg')"
        output = f"document.querySelector('.chart{chart} output.visible')"
        browser.evaluate(f"{svg}.scrollIntoView({{block: 'center'}})")
        x, y = browser.evaluate(
            f"(() => {{ const box = {svg}.getBoundingClientRect();"
            " return [box.left + box.width / 2, box.top + box.height / 2] })()"
        )
        browser.tap(x, y)
        assert "step" in browser.evaluate(f"{output}.textContent")
        browser.tap(195, 3)
        assert browser.evaluate(f"{output} === null")


def test_a_run_can_be_hidden(browser, page_of_two_runs):
    browser.open(page_of_two_runs)
    parts = "[...document.querySelectorAll('[data-run=\"1\"]')]"
    visible_parts = f"{parts}.filter(part => getComputedStyle(part).display != 'none').length"
    assert browser.evaluate(visible_parts) > 25
    browser.evaluate("document.querySelector('[data-toggle=\"1\"]').click()")
    assert browser.evaluate(visible_parts) == 0
    browser.evaluate("document.querySelector('[data-toggle=\"1\"]').click()")
    assert browser.evaluate(visible_parts) > 25


def test_a_token_shows_the_figures_of_both_sides(browser, page_of_two_runs):
    browser.open(page_of_two_runs, 390)
    browser.evaluate("document.querySelector('details[open] .answer .token').click()")
    text = browser.evaluate("document.querySelector('details[open] .answer output').textContent")
    assert text.startswith('" 7": trainer 0.')


def test_a_hostile_answer_stays_text(browser, tmp_path):
    run = write_run(tmp_path / "run", 3)
    answer = make_sample(random.Random(0), 2, HOSTILE) | {"prompt": HOSTILE}
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "samples": [answer]}) + "\n")
    page = report([run])
    browser.open(page)
    assert_quiet(browser, page)
    assert browser.evaluate("document.title") == "run - nemo-fp8rl report"
    assert browser.evaluate("document.querySelector('.answer .token').textContent") == HOSTILE
    assert browser.evaluate("document.images.length") == 0


def test_an_injected_script_does_not_run(browser, page_of_two_runs, tmp_path):
    """The Content-Security-Policy of the page stops a script that escaping missed."""
    page = tmp_path / "page.html"
    page.write_text(page_of_two_runs.read_text().replace("</body>", "<script>document.title = 'owned'</script></body>"))
    browser.open(page)
    assert browser.evaluate("document.title") != "owned"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


def test_a_thousand_steps_open_in_under_2_seconds(browser, long_run, tmp_path):
    page = report([long_run], tmp_path / "out.html")
    seconds = browser.open(page)
    assert_quiet(browser, page)
    assert seconds < 2


def test_a_page_without_a_step_opens(browser, tmp_path):
    run = write_run(tmp_path / "run", 2)
    for name in ("metrics", "histograms", "samples"):
        (run / f"{name}.jsonl").write_text("")
    page = report([run])
    browser.open(page)
    assert_quiet(browser, page)
