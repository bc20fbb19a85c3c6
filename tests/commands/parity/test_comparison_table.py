"""The table: it finds a difference where there is one, and nothing else; its JSON; its command."""

import json
import os
import re

import pytest
import torch

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.parity import comparison_table, libraries, sample_matrices
from nemo_fp8rl.commands.parity.comparison_table import FORMULAS, SECTIONS, Difference, as_json, compare, report, show
from nemo_fp8rl.commands.parity.implementation import Implementation
from nemo_fp8rl.fp8 import BLOCK, BlockScaled, quantize_blockwise
from nemo_fp8rl.fp8.block_scaled import E4M3

NONE = Difference(0.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def no_library(monkeypatch):
    """The formulas alone, so that a report takes no time; the tests of libraries bring their own."""
    monkeypatch.setattr(libraries, "LOADERS", {})


def random(rows: int = 256, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()


def of_values(*values: float, scale: float = 1.0) -> BlockScaled:
    return BlockScaled(torch.tensor([values]).to(E4M3), torch.tensor([[scale]]), BLOCK)


# What counts as a difference


def test_zero_equals_minus_zero_and_nan_equals_nan_in_value():
    a, b = of_values(0.0, float("nan"), 1.0, 2.0), of_values(-0.0, float("nan"), 1.0, 2.0)
    b.data.view(torch.uint8)[0, 1] = 0xFF  # the other NaN of E4M3
    assert compare(a, b) == Difference(bytes=0.5, scales=0.0, values=0.0)


def test_a_nan_is_a_difference_in_value():
    assert compare(of_values(float("nan"), 1.0), of_values(448.0, 1.0)) == Difference(0.5, 0.0, 0.5)


def test_another_spelling_of_the_same_values_differs_in_bytes_and_scales_alone():
    assert compare(of_values(1.0, 2.0, scale=2.0), of_values(2.0, 4.0)) == Difference(1.0, 1.0, 0.0)


# A wrong formula is found


def rounded_up(x, block, scale_format):
    """Half of ours in every scale: what rounding the multiplier up instead of down gives."""
    ours = quantize_blockwise(x, block=block, scale_format=scale_format)
    return BlockScaled((2 * ours.data.float()).clamp(-448, 448).to(E4M3), ours.scale_inv / 2, block)


def one_byte_off(x, block, scale_format):
    ours = quantize_blockwise(x, block=block, scale_format=scale_format)
    ours.data.view(torch.uint8)[-1, -1] ^= 1
    return ours


@pytest.mark.parametrize("wrong", [rounded_up, one_byte_off])
def test_a_wrong_formula_is_found_on_every_input(monkeypatch, wrong):
    monkeypatch.setattr(comparison_table, "FORMULAS", (*FORMULAS[:1], Implementation("wrong", "nowhere", wrong)))
    for row in report(256, seed=0).rows:
        for kind, difference in row.inputs.items():
            assert (difference == NONE) == (row.implementation == "Transformer Engine"), (row, kind)


# The report


@pytest.fixture(scope="module")
def small() -> comparison_table.Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "LOADERS", {})
        return report(256, seed=0)


def test_every_formula_stands_in_its_sections_in_both_formats(small):
    listed = [(row.section, row.implementation, row.scale_format) for row in small.rows]
    assert len(listed) == len(set(listed))
    expected = {
        (section.title, made.name, scale_format)
        for section in SECTIONS
        for made in FORMULAS
        if made.format == section.format and section.block in made.blocks
        for scale_format in section.scale_formats
    }
    assert set(listed) == expected
    assert {row.format for row in small.rows} == {"fp8", "mxfp8", "nvfp4"}


def test_a_format_that_an_implementation_lacks_is_shown_as_missing(small):
    for row in small.rows:
        made = next(made for made in FORMULAS if (made.name, made.format.name) == (row.implementation, row.format))
        taken = [kind for kind, difference in row.inputs.items() if difference is not None]
        assert bool(taken) == (row.scale_format in made.formats)
        assert list(row.inputs) == list(sample_matrices.KINDS)


def test_one_seed_gives_one_report(small):
    assert report(256, seed=0).rows == small.rows
    assert report(256, seed=1).rows != small.rows


def test_the_table_tells_zero_from_nearly_zero_and_all_from_nearly_all():
    shown = [
        comparison_table._percent(Difference(fraction, 0.0, 0.0), "bytes")
        for fraction in (0, 1e-7, 0.00043, 0.41, 0.9999, 1)
    ]
    assert shown == ["0", "1e-05", "0.043", "41", ">99", "100"]
    assert comparison_table._percent(None, "bytes") == "-"


def test_the_table_prints_every_implementation_and_what_was_not_run(small, capsys):
    small.not_run["verl"] = "not installed"
    show(small)
    out = capsys.readouterr().out
    assert "verl: not installed" in out
    for made in FORMULAS:
        assert f" {made.name} " in out
    for section in SECTIONS:
        assert section.title in out
    assert "…" not in out, "a column is cut off"
    assert max(map(len, out.splitlines())) <= comparison_table.WIDTH


def test_a_sentence_for_each_implementation_comes_before_the_tables(small, capsys):
    show(small)
    lines = capsys.readouterr().out.splitlines()
    sentences = comparison_table.verdicts(small)
    assert lines[2 : 2 + len(FORMULAS)] == sentences
    assert sentences[0] == "fp8, Transformer Engine (formula): pow2 and fp32 identical in all 14 inputs"
    assert "mxfp8, Transformer Engine (formula): pow2 identical in all 14 inputs" in sentences
    assert any(re.search(r"^nvfp4, Transformer Engine .*; fp32 identical in all 14 inputs", text) for text in sentences)
    assert any(
        re.search(r"^fp8, NeMo RL .formula.: pow2 0\.\d+ % of values differ; fp32 \d+ ", text) for text in sentences
    )
    assert any("pow2 not offered; fp32 identical" in text for text in sentences)
    assert any("pow2 the same values in other bytes" in text for text in sentences)


# Libraries


def library(quantize, formula: str = "Transformer Engine") -> dict:
    made = Implementation("a library", "its source", quantize, version="1.2", formula=formula)
    return {"a library": lambda: [made]}


def test_a_library_is_compared_beside_its_formula(monkeypatch):
    def noisy(x, block, scale_format):
        print("Padding the tensor")
        return quantize_blockwise(x, block=block, scale_format=scale_format)

    monkeypatch.setattr(libraries, "LOADERS", library(noisy))
    rows = [row for row in report(256, seed=0).rows if row.section == "fp8 weights 128x128"]
    assert [row.implementation for row in rows[:5]] == ["Transformer Engine"] * 2 + ["a library"] * 2 + ["NeMo RL"]
    assert [row.installed for row in rows[:5]] == [None, None, "1.2", "1.2", None]
    assert all(difference == NONE for difference in rows[2].inputs.values())


def test_a_library_that_fails_is_reported_and_stops_nothing(monkeypatch):
    def broken(x, block, scale_format):
        raise RuntimeError("no kernel image\nfor this device")

    monkeypatch.setattr(libraries, "LOADERS", library(broken))
    result = report(256, seed=0)
    assert result.not_run["a library, pow2"] == "failed (RuntimeError: no kernel image)"
    rows = [row for row in result.rows if row.implementation == "a library"]
    assert all(set(row.inputs.values()) == {None} for row in rows)


def test_a_formula_of_ours_that_fails_is_not_hidden(monkeypatch):
    def broken(x, block, scale_format):
        raise RuntimeError("a defect")

    monkeypatch.setattr(comparison_table, "FORMULAS", (Implementation("broken", "ours", broken),))
    with pytest.raises(RuntimeError, match="a defect"):
        report(256, seed=0)


def test_a_library_that_is_not_installed_is_said_once(monkeypatch):
    monkeypatch.setattr(libraries, "LOADERS", {"verl": lambda: libraries._module("no_such_library.at_all")})
    assert libraries.load_libraries() == ([], {"verl": "not installed"})


def test_a_nemo_rl_that_is_not_there_is_said_with_its_path(monkeypatch, tmp_path):
    monkeypatch.setenv(libraries.NEMO_RL_SRC, str(tmp_path))
    with pytest.raises(libraries.UnavailableError, match=str(tmp_path / libraries.NEMO_RL_FILE)):
        libraries.nemo_rl()


def test_nemo_rls_function_is_read_without_importing_its_module(monkeypatch, tmp_path):
    path = tmp_path / libraries.NEMO_RL_FILE
    path.parent.mkdir(parents=True)
    path.write_text(
        "import no_such_library\n"
        "global_fp8_config = None\n"
        "def cast_tensor_to_fp8_blockwise(data_hp, weight_block_size):\n"
        "    scale = 2.0 if global_fp8_config.use_weight_pow2_scale else 3.0\n"
        "    return data_hp.to(torch.float8_e4m3fn), torch.full((1, 1, 1), scale)\n"
    )
    monkeypatch.setenv(libraries.NEMO_RL_SRC, str(tmp_path))
    (made,) = libraries.nemo_rl()
    assert made.quantize(random(), BLOCK, "pow2").scale_inv.tolist() == [[2.0]]
    assert made.quantize(random(), BLOCK, "fp32").scale_inv.tolist() == [[3.0]]


# The command


def test_a_reader_that_leaves_is_no_fault(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as left:
        monkeypatch.setattr("sys.stdout", left)
        assert main(["parity", "--size", "256"]) == 0


def test_the_json_has_the_documented_keys(capsys):
    assert main(["parity", "--json", "--size", "256", "--seed", "3"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert list(out) == ["size", "seed", "kernel", "torch", "rows", "not_run"]
    assert (out["size"], out["seed"], out["torch"]) == (256, 3, torch.__version__)
    for row in out["rows"]:
        assert list(row) == [
            "section",
            "format",
            "implementation",
            "source",
            "installed",
            "device",
            "scale_format",
            "inputs",
        ]
        for difference in row["inputs"].values():
            assert difference is None or list(difference) == ["bytes", "scales", "values"]
    assert json.loads(as_json(report(256, 3))) == out


@pytest.mark.parametrize(
    ("option", "value"), [("--size", "0"), ("--size", "300"), ("--size", "-256"), ("--size", "32768"), ("--seed", "-1")]
)
def test_a_size_or_seed_that_cannot_be_used_exits_with_2(capsys, option, value):
    assert main(["parity", option, value]) == 2
    assert f"{option} {value}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--size", "many"], ["--unknown"], ["extra"]])
def test_a_bad_option_exits_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(["parity", *arguments])
    assert ended.value.code == 2


def test_stdout_is_json_alone_whatever_the_libraries_print(monkeypatch, capfd):
    """With the libraries of this machine; file descriptors are watched, not only sys.stdout."""
    monkeypatch.undo()
    assert main(["parity", "--json", "--size", "256"]) == 0
    result = json.loads(capfd.readouterr().out)
    named = {row["implementation"] for row in result["rows"] if row["installed"]}
    assert named or set(result["not_run"]) >= {"Transformer Engine", "NeMo RL", "verl", "DeepGEMM", "vLLM"}
