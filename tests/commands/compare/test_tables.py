"""The table from a record made by hand: what stands in it, and what its sentences claim."""

import io
from typing import Any

import pytest
from rich.console import Console

from nemo_fp8rl.commands.compare.results import by_position, measure
from nemo_fp8rl.commands.compare.tables import as_markdown, as_rich, sections

FLOWS = ("bf16", "same", "worse", "better", "absent")
ACCURACY = {
    "bf16": (0.50, 0.52, 0.54, 0.56, 0.58),
    "same": (0.51, 0.51, 0.55, 0.55, 0.58),
    "worse": (0.40, 0.42, 0.44, 0.46, 0.47),
    "better": (0.60, 0.62, 0.64, 0.66, 0.69),
}
ERROR = {"short": 1.0, "long": 2.0}


def run(flow: str, seed: int, accuracy: float | None, length: str | None, error: float) -> dict[str, Any]:
    numbers = {
        "token_mult_prob_error": error,
        "k3_kl": 2e-4,
        "reward": 0.5,
        "tokens_per_answer": 12.0 if length == "short" else 30.0,
        "generate_seconds": 0.25 + seed / 100,
        "train_seconds": 0.5,
        "step_seconds": 1.0,
        "refit_bytes": 821_696.0,
    }
    return {
        "flow": flow,
        "seed": seed,
        "length": length,
        "numbers": numbers if accuracy is None else numbers | {"accuracy_end": accuracy},
        "k3_by_position": {"0": 1e-4, "1": 2e-4, "2_3": 3e-4} if length else {},
    }


@pytest.fixture
def results() -> dict[str, Any]:
    runs = [run(f, seed, a, None, 1.01) for f, row in ACCURACY.items() for seed, a in enumerate(row, 1)]
    runs += [run("bf16", s, None, name, e * (1 + s * 1e-6)) for name, e in ERROR.items() for s in range(1, 6)]
    return {
        "comparison": {
            "reference": "bf16",
            "flows": {flow: {} for flow in FLOWS},
            "lengths": {"terms": {"short": 3, "long": 6}, "flows": ["bf16", "same"]},
        },
        "planned": 45,
        "left_out": ["bf16 is left out: no room"],
        "machines": ["x86_64, 2 CPUs"],
        "runs": runs,
    }


def cells(results: dict[str, Any], section: int) -> dict[str, dict[str, str]]:
    """First cells of a row -> header -> cell."""
    made = sections(results)[section]
    return {" ".join(row[: 1 + (section == 1)]): dict(zip(made.headers, row, strict=True)) for row in made.rows}


def test_means_intervals_and_differences_of_the_same_seed(results):
    rows = cells(results, 0)
    assert rows["bf16"] == {
        "flow": "bf16",
        "seeds": "5",
        "accuracy": "0.540 ± 0.039",  # 2.776 x 0.03162 / sqrt(5)
        "less bf16": "-",
        "token_mult_prob_error": "1.010000 ± 0.000000",
        "k3 KL": "2.0e-04 ± 0.0e+00",
        "rollout s": "0.280 ± 0.020",  # 0.26 to 0.30: 2.776 x 0.01581 / sqrt(5)
        "training s": "0.500 ± 0.000",
        "step s": "1.000 ± 0.000",
        "refit MB": "0.822 ± 0.000",
    }
    assert rows["worse"]["less bf16"] == "-0.102 ± 0.006"  # of -0.10 four times and -0.11: the pairs, not the spreads
    assert rows["better"]["less bf16"] == "+0.102 ± 0.006"


def test_a_flow_without_a_finished_run_is_left_out(results):
    assert "absent" not in cells(results, 0)
    assert "absent" not in as_markdown(results, "x")


def test_sentences_claim_what_the_interval_says(results):
    said = {sentence.partition(":")[0]: sentence for sentence in sections(results)[0].sentences}
    assert said["same"].startswith("same: accuracy less that of bf16: the interval (")
    assert "contains 0, so no difference is shown" in said["same"]
    assert said["worse"].endswith("lies below 0.")
    assert said["better"].endswith("lies above 0.")
    assert "bf16" not in said


def test_one_seed_claims_nothing(results):
    results["runs"] = [r for r in results["runs"] if r["seed"] == 1]
    worse = cells(results, 0)["worse"]
    assert (worse["accuracy"], worse["rollout s"], worse["refit MB"]) == ("0.400", "0.260", "0.822")
    said = [sentence for section in sections(results) for sentence in section.sentences]
    assert "worse: accuracy less that of bf16: too few seeds for an interval." in said
    assert not any("lies" in sentence or "contains" in sentence for sentence in said)


def test_a_seed_that_the_reference_lacks_is_not_in_the_difference(results):
    results["runs"] = [r for r in results["runs"] if (r["flow"], r["seed"], r["length"]) != ("bf16", 5, None)]
    rows = cells(results, 0)
    assert (rows["bf16"]["seeds"], rows["worse"]["seeds"]) == ("4", "5")
    assert rows["worse"]["less bf16"] == "-0.100 ± 0.000"


def test_lengths_are_compared_with_the_first(results):
    rows = cells(results, 1)
    assert rows.keys() == {"bf16 short", "bf16 long"}
    assert rows["bf16 short"]["error less short"] == "-"
    assert rows["bf16 long"]["error less short"] == "+1.0e+00 ± 2.0e-06"  # 1 + 1e-6 s: 2.776 x 1.581e-6 / sqrt(5)
    assert (rows["bf16 long"]["tokens"], rows["bf16 long"]["reward"]) == ("30.0 ± 0.0", "0.50 ± 0.00")
    positions = sections(results)[2]
    assert positions.headers == ("flow", "0", "1", "2 to 3")
    assert positions.rows == [("bf16", "1.0e-04 ± 0.0e+00", "2.0e-04 ± 0.0e+00", "3.0e-04 ± 0.0e+00")]


def test_markdown_and_terminal_show_the_same_cells(results):
    page = as_markdown(results, "nemo-fp8rl compare x.yaml")
    console = Console(width=250, record=True, file=io.StringIO())
    for section in sections(results):
        console.print(as_rich(section))
    shown = console.export_text()
    for section in sections(results):
        for row in section.rows:
            assert "| " + " | ".join(row) + " |" in page
            assert all(cell in shown for cell in row)
    assert "Written by `nemo-fp8rl compare x.yaml`. 30 of 45 runs have finished." in page
    assert "- x86_64, 2 CPUs" in page
    assert "the flow's own engine in its own precision" in page


def spikes_by_flow(results: dict[str, Any], counts: dict[str, list[float]]) -> None:
    """Give the flows' runs of the first part these numbers of loss spikes, one a seed, and one spike of grad_norm."""
    for run in results["runs"]:
        if run["length"] is None:
            loss = counts[run["flow"]][run["seed"] - 1]
            run["numbers"] |= {"loss_spikes": loss, "grad_norm_spikes": 1.0, "longest_spike": 2.0 + loss}


def test_spikes_are_counted_by_flow_with_their_interval(results):
    calm, noisy = [0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]
    spikes_by_flow(results, {"bf16": calm, "same": calm, "worse": noisy, "better": calm})
    rows = cells(results, 1)
    assert rows["worse 5"] == {
        "flow": "worse",
        "seeds": "5",
        "loss spikes": "3.0 ± 2.0",  # 2.776 x 1.581 / sqrt(5)
        "grad_norm spikes": "1.0 ± 0.0",
        "longest, steps": "7",
    }
    assert rows["bf16 5"]["loss spikes"] == "0.0 ± 0.0"
    said = {sentence.partition(":")[0]: sentence for sentence in sections(results)[1].sentences}
    assert said["worse"] == "worse: spikes less those of bf16: the interval (+1.04 to +4.96, 5 seeds) lies above 0."
    assert said["same"].endswith("(+0 to +0, 5 seeds) contains 0, so no difference is shown.")


def test_a_run_counts_a_spike_of_its_loss_and_of_its_gradient():
    rows = [{"step": step, "train/loss": 1.0 + step % 3, "train/grad_norm": 1.0 + step % 2} for step in range(1, 31)]
    rows[20]["train/loss"] = rows[21]["train/loss"] = 50.0
    numbers = {name: value for name, value in measure(rows).items() if "spike" in name}
    assert numbers == {"loss_spikes": 1.0, "grad_norm_spikes": 0.0, "longest_spike": 2.0}
    assert measure(rows[:10]) == {}


def test_no_finished_run_makes_no_table(results):
    results["runs"] = []
    assert sections(results) == []


ROWS = [
    {"step": 0, "validation/accuracy": 0.3, "train/token_mult_prob_error": 99.0},
    {"step": 1, "train/token_mult_prob_error": 1.1, "timing/generate": 9.0, "timing/logprob": 1.0, "timing/train": 2.0},
    {"step": 2, "train/token_mult_prob_error": 1.3, "timing/generate": 1.0, "timing/logprob": 1.0, "timing/train": 3.0},
    {
        "step": 3,
        "train/token_mult_prob_error": 1.2,
        "timing/generate": 2.0,
        "timing/logprob": 1.0,
        "timing/train": 9.0,
        "validation/accuracy": 0.4,
        "train/gen_kl_error/position_4_7": 0.2,
        "train/gen_kl_error/position_0": 0.1,
    },
]


def test_a_run_is_measured_over_its_steps():
    """Step 0 is the start. Means of the mismatch, medians of the seconds, the last validation."""
    numbers = measure(ROWS)
    assert numbers.pop("token_mult_prob_error") == pytest.approx(1.2)
    assert numbers == {"accuracy_end": 0.4, "generate_seconds": 2.0, "train_seconds": 4.0}
    assert list(by_position(ROWS).items()) == [("0", 0.1), ("4_7", 0.2)]
