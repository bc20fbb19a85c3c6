"""`nemo-fp8rl engines` writes what a run reads between two steps, or refuses it in a sentence."""

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.common.atomic_files import lock_folder
from nemo_fp8rl.config.recipe import to_yaml
from nemo_fp8rl.generation.elastic_engines import FILE

KEYS = ("cluster.backend=ray", "cluster.generation_engines=2", "cluster.max_generation_engines=4")


@pytest.fixture
def run(recipe, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(recipe(*KEYS)))
    return tmp_path


def test_the_number_is_written_for_the_run(run, capsys):
    assert main(["engines", str(run), "3"]) == 0
    assert (run / FILE).read_text() == "3\n"
    assert capsys.readouterr().out.endswith("to have 3 engines when it is continued: no process works in it now\n")
    with lock_folder(run, "locked"):
        assert main(["engines", str(run), "4"]) == 0
    assert capsys.readouterr().out == f"{run} is to have 4 engines from its next step on\n"
    assert sorted(path.name for path in run.iterdir() if not path.name.startswith(".")) == ["config.yaml", FILE]


@pytest.mark.parametrize("number", ["1", "5"])
def test_a_number_that_the_run_cannot_have_is_refused(run, capsys, number):
    assert main(["engines", str(run), number]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"nemo-fp8rl: {number} engines: this run has 2 to 4 (cluster.min_generation_engines, ")
    assert said.count("\n") == 1
    assert not (run / FILE).exists()


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["engines", str(tmp_path), "2"]) == 2
    assert capsys.readouterr().err == (
        f"nemo-fp8rl: {tmp_path} has no config.yaml, so it is no run: give the logger.log_dir of one\n"
    )


@pytest.mark.parametrize("number", ["0", "two", "1.5"])
def test_what_is_no_number_is_refused(run, capsys, number):
    with pytest.raises(SystemExit) as ended:
        main(["engines", str(run), number])
    assert ended.value.code == 2
    assert f"COUNT: invalid count value: '{number}'" in capsys.readouterr().err
