"""Runs whose trainer and engine agree exactly, and runs that do not: a page that shows which is which."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands.report.test_page import Page, chart_titles, make_page

EXACT = {
    "train/token_mult_prob_error": 1.0,
    "train/gen_kl_error": 0.0,
    "train/exact_logprob_fraction": 1.0,
    "train/max_logprob_error": 0.0,
    "train/ess": 1.0,
    "train/ess_seq": 1.0,
    "train/correction/rejected_token_ratio": 0.0,
}


def change(run: Path, **metrics: Any) -> Path:
    """Give metrics other values in every step that has them; a prefix changes all metrics that begin with it."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {key: value for name, value in metrics.items() for key in row if key.startswith(name)}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def make_exact(run: Path) -> Path:
    (run / "histograms.jsonl").write_text('{"step": 1, "log_weights": [[-0.0001, 0.0001, 900]]}\n')
    positions = dict.fromkeys(("train/gen_kl_error/position_", "train/mean_logprob_error/position_"), 0.0)
    return change(run, **positions, **EXACT)


def headline(page: Page) -> str:
    return page.source.split('class="headline"')[1].split("</section>")[0].replace("<wbr>", "").replace("\u00a0", " ")


def test_what_never_changes_is_one_sentence_a_section(make_run):
    page = make_page(make_exact(make_run(steps=12)))
    assert not {*EXACT} & {*chart_titles(page)}
    constants = re.findall(r'<p class="constant">([^\n]*)</p>', page.source.replace("<wbr>", ""))
    assert constants == [
        "The same in every step, so without a chart: train/token_mult_prob_error 1; train/gen_kl_error 0 nats; "
        "train/exact_logprob_fraction 1; train/max_logprob_error 0 nats; train/gen_kl_error/position_* 0; "
        "train/mean_logprob_error/position_* 0.",
        "The same in every step, so without a chart: train/ess 1; train/ess_seq 1; "
        "train/correction/rejected_token_ratio 0; importance weights: all 900 tokens have a weight within 0.0001 of 1.",
    ]
    assert "to the bit, in all 12 steps: train/token_mult_prob_error is exactly 1" in headline(page)


def test_exact_runs_have_a_place_of_their_own_beside_others(make_run):
    """Three exact runs lie side by side in the band below the decades; the fourth is where its value is."""
    exact = [make_exact(make_run(f"exact{i}", steps=12)) for i in range(3)]
    other = change(make_run("other", steps=12), **{"train/token_mult_prob_error": 1.01})
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "train/token_mult_prob_error": 1.05}\n')
    page = make_page(*exact, other)
    chart = page.source.split('aria-label="train/token_mult_prob_error"')[1].split("</svg>")[0]
    assert "3 lines with equal values lie side by side" in page.text
    labels = {label: float(y) for y, label in re.findall(r'<text class="y"[^>]* y="([\d.]*)">([^<]*)', chart)}
    assert [*labels] == ["exactly 1", "1.01", "1.02", "1.05", "1.1"]
    band = float(re.search(r'class="band" d="M[\d.]* ([\d.]*)H', chart)[1])
    starts = [float(y) for y in re.findall(r'class="line c\d"[^>]* d="M[\d.]* ([\d.]*)L', chart)]
    assert len({*starts}) == 4
    assert all(band < y for y in starts[:3])
    assert starts[3] == pytest.approx(labels["1.01"] - 3.5, abs=0.2)
    assert starts[3] <= band
    assert not re.search(rf'class="grid" d="M[\d.]* {labels["exactly 1"] - 3.5:.1f}', chart)


@pytest.mark.parametrize(("value", "shown"), [(0.99999999, "99.999999 %"), (0.5, "50 %"), (1e-9, "0.0000001 %")])
def test_a_share_near_1_is_not_called_100_percent(make_run, value, shown):
    page = make_page(change(make_exact(make_run(steps=5)), **{"train/exact_logprob_fraction": value}))
    assert f"{shown} of the tokens have the same log-prob" in headline(page)
    assert "exactly 1" not in headline(page)


def test_a_mismatch_near_1_is_not_called_1(make_run):
    error = {"train/token_mult_prob_error": 1.000000001, "train/exact_logprob_fraction": 0.9}
    page = make_page(change(make_run(steps=5), **error))
    assert "train/token_mult_prob_error: 1.000000001 on average" in headline(page)
    assert "<td>1.000000001</td>" in page.source


def test_a_run_that_ended_with_an_error_says_so_at_the_top(make_run):
    run = make_run("gate", steps=4, last=50)
    (run / "ended.json").write_text('{"reason": "step 5: gate <max_mismatch>"}')
    page = make_page(run)
    assert "Stopped after step 4 of 50." in headline(page)
    assert '<p class="warning">It ended with: step 5: gate &lt;max_mismatch&gt;</p>' in headline(page)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"reason": 3}', "\xff"])
def test_a_record_of_the_end_that_cannot_be_read_is_none(make_run, text):
    run = make_run(steps=4, last=50)
    (run / "ended.json").write_bytes(text.encode("latin-1"))
    assert 'class="warning"' not in headline(make_page(run))


def test_a_run_without_a_step_is_not_named_in_every_section(make_run):
    run, stopped = make_run("one", steps=5), make_run("gate", steps=5)
    (stopped / "metrics.jsonl").write_text('{"step": 0, "refit/bytes": 3}\n')
    page = make_page(run, stopped)
    assert "gate: Stopped before its first step of 5." in headline(page).replace("</b>", "")
    assert "Not in" not in page.text


def test_runs_of_one_axis_share_it(make_run):
    """Charts of one kind, one for each run, can be compared."""
    fast, slow = make_run("fast", steps=5), make_run("slow", steps=5)
    change(slow, **{"timing/total_step_time": 20.0})
    page = make_page(fast, slow)
    axes = {
        tuple(re.findall(r'<text class="y"[^>]*>([^<]*)', chart))
        for chart in re.findall(r'aria-label="timing/\*, (?:fast|slow)".*?</svg>', page.source, re.DOTALL)
    }
    assert len(axes) == 1


def test_a_row_of_figures_has_one_unit(make_run):
    small, large = (change(make_run(name, steps=5), **{"refit/bytes": size}) for name, size in (("a", 9e5), ("b", 2e6)))
    assert "<td>0.9 MB</td><td>2 MB</td>" in make_page(small, large).source


def test_axes_name_what_they_count(make_run):
    page = make_page(make_run(steps=12))
    titles = {
        label: re.findall(r'class="(?:x )?title"[^>]*>([^<]*)', chart)
        for label, chart in re.findall(r'aria-label="([^"]*)">(.*?)</svg>', page.source, re.DOTALL)
    }
    assert all(shown[0] in ("step", "position", "weight") for shown in titles.values())
    assert titles["refit/bytes"] == ["step", "kB"]
    assert titles["timing/total_step_time"] == ["step", "seconds"]
    assert titles["train/mean_logprob_error/position_*"] == ["position", "nats"]


def test_a_heat_map_outlines_exact_zeros(make_run):
    run = change(make_run(steps=12), **{"train/gen_kl_error/position_1": 0.0})
    chart = make_page(run).source.split('aria-label="train/gen_kl_error/position_*"')[2].split("</figure>")[0]
    assert chart.count('class="cell exact') == 12
    assert "outlined: 0 exactly" in make_page(run).text
