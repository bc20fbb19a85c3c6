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
    ".filter(svg => svg.querySelector('path:not(.grid):not(.band)').getBBox().width > 1)"
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


@pytest.fixture(scope="module")
def page_of_odd_runs(tmp_path_factory) -> Path:
    """The report of five runs of 1,000 and more steps with long labels: exact values, tiny ones, large ones."""
    folder = tmp_path_factory.mktemp("odd")
    runs = [write_run(folder / f"run_with_a_long_name_{i}", 12, layers=40, positions=9) for i in range(5)]
    for i, run in enumerate(runs):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            row["step"] *= 10**i
            row["refit/bytes"] *= 10**i
            row["train/token_mult_prob_error"] = 1 if i < 3 else 1 + 10.0**-i / row["step"] if row["step"] else 1
            row["train/gen_kl_error"] = 0 if i < 3 else 1e-15
            row["train/exact_logprob_fraction"] = 1 - 1e-8 * i
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return report(runs, folder / "out.html")


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


@pytest.mark.parametrize("width", [1400, 390])
def test_no_label_is_cut(browser, page_of_odd_runs, width):
    browser.open(page_of_odd_runs, width)
    cut = (
        "[...document.querySelectorAll('.chart svg text')].filter(text => { const box = text.getBBox(),"
        " view = text.ownerSVGElement.viewBox.baseVal; return box.x < 0 || box.y < 0 ||"
        " box.x + box.width > view.width || box.y + box.height > view.height }).map(text => text.textContent)"
    )
    assert browser.evaluate(cut) == []
    assert browser.evaluate("document.querySelectorAll('.chart svg text').length") > 100


def test_keys_break_between_words_and_wide_tables_say_that_they_scroll(browser, page_of_odd_runs):
    browser.open(page_of_odd_runs, 390)
    browser.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    broken = (
        "[...document.querySelectorAll('td:first-child, tbody th')].flatMap(cell => [...cell.childNodes])"
        ".filter(node => node.nodeType === 3 && node.data.trim()).filter(node => { const range ="
        " document.createRange(); range.selectNodeContents(node); return range.getClientRects().length > 1 &&"
        " !node.data.includes(' ') }).map(node => node.data)"
    )
    assert browser.evaluate(broken) == []
    browser.evaluate("new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    wide = "[...document.querySelectorAll('.wide')].filter(part => part.scrollWidth > part.clientWidth + 1)"
    hint = "getComputedStyle(part, '::before').content.includes('scroll')"
    assert browser.evaluate(f"{wide}.length") > 0
    assert browser.evaluate(f"{wide}.every(part => {hint})")
    assert browser.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.parametrize("width", [1400, 1000])
def test_charts_leave_no_hole_in_the_grid(browser, page_of_two_runs, width):
    """In every section the cards of each row reach the right edge."""
    browser.open(page_of_two_runs, width)
    holes = (
        "[...document.querySelectorAll('.charts')].filter(grid => { const rows = {};"
        " for (const card of grid.children) { const box = card.getBoundingClientRect();"
        " rows[box.top] = Math.max(rows[box.top] || 0, box.right); }"
        " return Object.values(rows).some(right => right < grid.getBoundingClientRect().right - 1) }).length"
    )
    assert browser.evaluate(holes) == 0


def test_the_contents_lead_to_the_sections(browser, page_of_two_runs):
    browser.open(page_of_two_runs)
    links = browser.evaluate("[...document.querySelectorAll('nav a')].map(link => link.getAttribute('href'))")
    assert len(links) == 9
    assert browser.evaluate("[...document.querySelectorAll('nav a')].every(link => document.querySelector(link.hash))")


def test_runs_parts_and_tokens_have_colours_of_their_own(browser, page_of_two_runs):
    for dark in (False, True):
        browser.open(page_of_two_runs, dark=dark)
        style = "getComputedStyle(document.documentElement).getPropertyValue('--{}')"
        runs, parts = ({browser.evaluate(style.format(f"{kind}{i}")) for i in range(8)} for kind in "cp")
        assert len(runs | parts) == 16


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
    data = json.loads(browser.evaluate("document.querySelector('.chart script').textContent"))
    x = data["left"] + (10 - 1) / (60 - 1) * (data["right"] - data["left"])  # of step 10
    width = browser.evaluate("document.querySelector('.chart svg').viewBox.baseVal.width")
    browser.move(box[0] + x / width * box[2], box[1] + box[3] / 2)
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
