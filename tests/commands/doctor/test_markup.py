"""Names of files and models in the doctor's output are text, whatever brackets they hold."""

from nemo_fp8rl.commands.doctor.examine import Report, show
from nemo_fp8rl.commands.doctor.finding import Finding
from nemo_fp8rl.commands.doctor.hardware import gpu_by_name
from nemo_fp8rl.commands.doctor.memory.phases import Memory


def test_brackets_in_names_are_shown(capsys):
    findings = [Finding("error", "kv", "mm[/b] and [red]mm")]
    show(Report("r[/x].yaml", "[bold]m[/c]", 1, "v1", gpu_by_name("h100"), Memory([]), findings))
    out = capsys.readouterr().out
    assert out.startswith("r[/x].yaml: [bold]m[/c], ")
    assert "mm[/b] and [red]mm" in out
