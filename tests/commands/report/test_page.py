"""The report as a file: its contents, its sentences about missing data, and the escaping of all text of a run."""

import base64
import hashlib
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from nemo_fp8rl.commands.report.page import report
from nemo_fp8rl.commands.report.run_data import FILES
from nemo_fp8rl.common.errors import UserError
from tests.commands.report.conftest import STAGES, make_sample

HOSTILE = (
    "</script x></script></pre></style><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&<!--"
)


class Page(HTMLParser):
    """A parsed page.

    scripts:  (type, text) of each script
    tags:     the number of elements by tag
    text:     all text outside styles and scripts
    """

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[tuple[str, str]] = []
        self.tags: dict[str, int] = {}
        self.attributes: list[str] = []
        self.text = ""
        self.open_tag = ""
        self.source = path.read_text()
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open_tag = tag
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [name for name, _ in attrs]
        if tag == "script":
            self.scripts.append((dict(attrs).get("type", ""), ""))

    def handle_endtag(self, tag):
        self.open_tag = ""

    def handle_data(self, data):
        if self.open_tag == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self.open_tag != "style":
            self.text += data

    @property
    def charts(self) -> list[dict]:
        return [json.loads(text) for kind, text in self.scripts if kind == "application/json"]


def make_page(*runs: Path) -> Page:
    return Page(report(runs, runs[0].parent / "out.html"))


def chart_titles(page: Page) -> list[str]:
    return re.findall(r'<svg [^>]*aria-label="([^"]*)"', page.source)


def test_every_chart_of_one_run(make_run):
    page = make_page(make_run(steps=20))
    assert chart_titles(page) == [
        *("train/reward", "validation/accuracy", "train/loss", "train/grad_norm", "train/approx_entropy"),
        *("train/mean_gen_tokens_per_sample", "train/frac_reward_zero_std", "train/truncation_rate"),
        *("train/token_mult_prob_error", "train/gen_kl_error", "train/exact_logprob_fraction"),
        *("train/max_logprob_error", "train/gen_kl_error/position_*", "train/mean_logprob_error/position_*"),
        *("train/gen_kl_error/position_*", "train/ess", "train/ess_seq", "train/correction/rejected_token_ratio"),
        *("importance weights", "refit/bytes", "timing/refit", "timing/refit_*", "timing/total_step_time"),
        *("performance/generation_tokens_per_sec", "timing/*", "weight_error/fp8", "weight_error/layer_*"),
    ]
    assert "Not in" not in page.text
    assert "without a chart" not in page.text
    assert "finished, 20 steps" in page.text


def test_a_chart_holds_what_was_logged(make_run):
    run = make_run(steps=5)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (line,) = make_page(run).charts[0]["series"]
    assert line["x"] == [1, 2, 3, 4, 5]
    assert line["y"] == pytest.approx([row["train/reward"] for row in rows[1:]], rel=1e-6)


def test_the_histogram_adds_up_the_steps(make_run):
    run = make_run(steps=2)
    (run / "histograms.jsonl").write_text(
        '{"step": 1, "log_weights": [[null, -10, 1], [-0.0001, 0.0001, 5]]}\n'
        '{"step": 2, "log_weights": [[-0.0001, 0.0001, 3], [0.001, 0.00177828, 1]]}\n'
    )
    chart = next(chart for chart in make_page(run).charts if "weight about 1" in chart["labels"].values())
    (line,) = chart["series"]
    assert line["y"] == [0.1, 0.8, 0.1]
    assert list(chart["labels"].values())[1:] == ["weight about 1", "weight about 1.0013"]
    assert line["x"] == sorted(line["x"])


def test_runs_share_charts_and_differing_keys_are_listed(make_run):
    first, second = make_run("one", steps=5), make_run("two", steps=7)
    config = yaml.safe_load((second / "config.yaml").read_text())
    config["nemo_fp8rl"]["flow"] = "fp8_rollout"
    (second / "config.yaml").write_text(yaml.safe_dump(config))
    page = make_page(first, second)
    assert [line["name"] for line in page.charts[0]["series"]] == ["one", "two"]
    assert [len(line["x"]) for line in page.charts[0]["series"]] == [5, 7]
    table = page.source.split("Keys of the recipe that differ")[1].split("</table>")[0]
    assert re.findall(r"<td>([^<]*)</td>", table.replace("<wbr>", "")) == [
        *("grpo.max_num_steps", "5", "7"),
        *("nemo_fp8rl.flow", "fp8_e2e", "fp8_rollout"),
    ]
    assert "Environment that differs</h3>\n<p>None.</p>" in page.source
    assert "timing/*, one" in chart_titles(page)


def test_runs_of_one_name_are_told_apart(make_run):
    page = make_page(make_run("a/grpo", steps=2), make_run("b/grpo", steps=2))
    assert [line["name"] for line in page.charts[0]["series"]] == ["a/grpo", "b/grpo"]


def test_a_killed_run_shows_its_last_step(make_run):
    run = make_run(steps=7, last=50)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "train/rew')
    assert "stopped after step 7 of 50" in make_page(run).text


def test_a_run_at_work_is_not_called_stopped(recipe, tmp_path):
    from nemo_fp8rl.run.directory import RunDirectory

    with RunDirectory(recipe(), resume=False) as run:
        run.log(3, {"train/reward": 0.5})
        assert "running, after step 3 of 100" in make_page(run.path).text
    assert "stopped after step 3 of 100" in make_page(run.path).text


def test_before_the_first_step_there_is_a_page(make_run):
    run = make_run(steps=2)
    for name in ("metrics", "histograms", "samples"):
        (run / f"{name}.jsonl").write_text("")
    page = make_page(run)
    assert "stopped before its first step of 2" in page.text
    assert "Not in" not in page.text
    assert chart_titles(page) == []


@pytest.mark.parametrize("missing", FILES)
def test_a_file_that_is_missing_is_named(make_run, missing):
    run = make_run(steps=3)
    (run / missing).unlink()
    assert f"run has no {missing}" in make_page(run).text


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("train/ess_seq", "train/ess_seq"),
        ("train/gen_kl_error/position_", "train/gen_kl_error/position_*"),
        ("timing/refit_", "timing/refit_*"),
        ("timing/total_step_time", "timing/total_step_time, timing/*"),
        ("weight_error/layer_", "weight_error/layer_*"),
    ],
)
def test_a_metric_that_one_run_lacks_is_named(make_run, metric, title):
    first, second = make_run("one", steps=3), make_run("two", steps=3)
    rows = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    lines = (json.dumps({key: v for key, v in row.items() if not key.startswith(metric)}) for row in rows)
    (second / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert f"Not in two: {title}." in make_page(first, second).text


def test_a_run_without_histograms_is_named(make_run):
    first, second = make_run("one", steps=3), make_run("two", steps=3)
    (second / "histograms.jsonl").unlink()
    assert "Not in two: importance weights." in make_page(first, second).text


def test_the_stages_of_a_refit_are_lines(make_run):
    """The stages overlap, so the chart does not stack them."""
    run = make_run(steps=3)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    page = make_page(run)
    assert 'class="area' not in page.source.split('aria-label="timing/refit_*"')[1].split("</figure>")[0]
    (chart,) = [chart for chart in page.charts if [line["name"] for line in chart["series"]] == [*STAGES]]
    load = next(line for line in chart["series"] if line["name"] == "load")
    assert load["y"] == pytest.approx([row["timing/refit_load"] for row in rows[1:]], rel=1e-6)
    assert len({line["colour"] for line in chart["series"]}) == len(STAGES)


def test_a_run_of_one_step_has_no_second(make_run):
    steps = {
        x
        for chart in make_page(make_run(steps=1)).charts
        if not chart["labels"]
        for s in chart["series"]
        for x in s["x"]
    }
    assert steps == {0, 1}


def test_nothing_in_a_run_breaks_out_of_the_page(make_run, tmp_path):
    run = make_run(f"{HOSTILE.replace('/', '')}", steps=3)
    plain = make_page(make_run("plain", steps=3))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row[f"timing/refit_{HOSTILE}"] = 0.1
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.yaml").write_text(yaml.safe_dump({HOSTILE: HOSTILE, "nemo_fp8rl": {"flow": HOSTILE}}))
    (run / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    answer = {"prompt": HOSTILE, "chosen": HOSTILE, "reward": 0.0, "policy_version": 0, "num_tokens": 2}
    logprobs = {"prev_logprobs": [-1.0, None], "generation_logprobs": [-1.1, -1.0]}
    samples = [{**answer, "tokens": [HOSTILE, "ok"], **logprobs}]
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "samples": samples}) + "\n")
    page = make_page(run)
    assert len(page.scripts) == len(plain.scripts)
    assert "img" not in page.tags
    assert not {name for name in page.attributes if name.startswith("on")}
    assert page.text.count(HOSTILE) >= 8  # prompt, token, reason, keys and values, unchanged
    assert any(line["name"] == HOSTILE for chart in page.charts for line in chart["series"])


def test_the_page_runs_no_script_but_its_own(make_run):
    page = make_page(make_run(steps=3))
    (script,) = [text for kind, text in page.scripts if not kind]
    allowed = re.search(r"script-src 'sha256-([^']*)'", page.source)[1]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() == allowed
    for directive in ("default-src", "base-uri", "form-action"):
        assert f"{directive} 'none'" in page.source
    assert not re.search(r"https?://", page.source)


def test_tokens_are_coloured_by_how_their_probability_differs(make_run):
    run = make_run(steps=3)
    answer = make_sample(random.Random(0), 4)
    answer |= {"tokens": ["a", "b", "c", "d"], "prev_logprobs": [-1.0, -0.5, -2.0, None]}
    answer |= {"generation_logprobs": [-1.0, -0.6, -1.0, -1.0]}
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "samples": [answer]}) + "\n")
    token = r'<span class="token (\w*)" style="--depth:([\d.]*)" title="([^"]*)">([a-d])</span>'
    spans = re.findall(token, make_page(run).source)
    assert [(side, text) for side, _, _, text in spans] == [("", "a"), ("up", "b"), ("down", "c"), ("unknown", "d")]
    assert 0 < float(spans[1][1]) < float(spans[2][1]) < 1
    assert spans[1][2] == "trainer 0.60653, engine 0.54881, difference +0.058"


def test_a_thousand_steps_fit_in_5_mb(long_run, tmp_path):
    assert report([long_run], tmp_path / "out.html").stat().st_size < 5e6


def test_a_report_replaces_its_predecessor_and_nothing_else(make_run):
    run = make_run(steps=2)
    assert report([run]) == report([run]) == run / "report.html"
    before = (run / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"config\.yaml exists and is no report"):
        report([run], run / "config.yaml")
    assert (run / "config.yaml").read_text() == before
