"""SLURM's script as text: what bash and sbatch read in it is what was meant. The lab runs it (tests/slurm/)."""

import os
import re
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from nemo_fp8rl.commands.launch.job import Job, plan
from nemo_fp8rl.commands.launch.slurm import job_script
from nemo_fp8rl.commands.launch.slurm.attempt import secrets
from nemo_fp8rl.commands.launch.template import TEMPLATES
from nemo_fp8rl.common.errors import UserError
from tests.commands.launch.conftest import WRITES, settings, shellcheck
from tests.conftest import RECIPES

HOSTILE = [
    "a b",
    "it's",
    '"',
    "$(touch /tmp/x)",
    "`id`",
    "a\nb",
    "\\",
    "*",
    "~",
    "!x",
    "-n",
    "",
    "a'\"$b",
    "é漢",
    "#SBATCH",
]
words = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20), max_size=8)


def read_by_bash(script: str, expression: str) -> str:
    """What bash makes of the header's settings."""
    header = script.split("# A Ray cluster over the nodes", 1)[0]
    done = subprocess.run(["bash", "-c", f"{header}\n{expression}"], capture_output=True, check=True)
    return done.stdout.decode()


@examples(max_examples=60, deadline=None)
@given(words)
def test_any_words_of_a_command_arrive_in_bash_as_they_are(tmp_path_factory, given_words):
    job = Job("tiny", "tiny-1", ("train", "--config", "r.yaml", *given_words), 1, 0, 0, writes=WRITES)
    script = job_script.render(job, settings(tmp_path_factory.getbasetemp()))
    driver = read_by_bash(script, r'printf "%s\0" "${DRIVER[@]}"').split("\0")[:-1]
    assert driver[3:] == ["train", "--config", str(Path("r.yaml").absolute()), "cluster.backend=ray", *given_words]


def test_hostile_values_arrive_as_they_are(job, tmp_path):
    command = (*job.command, *HOSTILE)
    environment = {f"V{i}": value for i, value in enumerate(HOSTILE)}
    config = replace(settings(tmp_path), env=environment)
    script = job_script.render(replace(job, command=command), config)
    assert tuple(read_by_bash(script, r'printf "%s\0" "${DRIVER[@]}"').split("\0")[-1 - len(HOSTILE) : -1]) == tuple(
        HOSTILE
    )
    names = " ".join(f'"$V{i}"' for i in range(len(HOSTILE)))
    assert read_by_bash(script, rf'printf "%s\0" {names}').split("\0")[:-1] == HOSTILE


def test_every_value_of_the_header_is_quoted(job, tmp_path):
    """Numbers are numbers by then (test_job.py, test_settings.py); the script does not rely on it."""
    evil, config = "8|touch evil", settings(tmp_path)
    wrong = replace(config, slurm=replace(config.slurm, max_restarts=evil, min_free_gib=evil))  # type: ignore[arg-type]
    script = job_script.render(job, wrong)
    assert read_by_bash(script, 'printf %s "$MAX_RESTARTS$MIN_FREE_GIB"') == evil * 2
    template = (TEMPLATES / "slurm" / "header.sh.jinja").read_text()
    values = re.findall(r"^[A-Z_]+=.*\{\{(.*)\}\}", template, re.MULTILINE)
    assert len(values) > 15 and all(re.search(r"\| shs? $", value) for value in values)


def test_attempts_after_the_first_need_checkpoints(tmp_path):
    """A cluster that waits for people has one attempt."""
    job = plan(RECIPES / "tiny_cpu.yaml", ["checkpointing.enabled=false"], settings(tmp_path))
    with pytest.raises(UserError, match=r"set checkpointing.enabled=true, or slurm.max_restarts=0"):
        job_script.render(job, settings(tmp_path))
    assert job_script.render(job, settings(tmp_path, "slurm.max_restarts=0"))
    assert job_script.render(replace(job, command=()), settings(tmp_path))


def test_features_of_nodes_may_be_joined(job, tmp_path):
    script = job_script.render(job, settings(tmp_path, "slurm.constraint='[(a&b)|c*2]'"))
    assert "--constraint=[(a&b)|c*2]" in directives(script)


@pytest.mark.parametrize("changes", [(), ("env.A=b c",), ("slurm.container.image=i", "slurm.generation.partition=p")])
def test_shellcheck_finds_nothing(job, tmp_path, changes):
    config = settings(tmp_path, *changes)
    assert shellcheck(job_script.render(replace(job, command=(*job.command, *HOSTILE)), config)) == ""


def test_shellcheck_finds_nothing_in_the_script_of_an_idle_cluster(job, tmp_path):
    assert shellcheck(job_script.render(replace(job, command=()), settings(tmp_path))) == ""


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_what_sbatch_is_asked_for(job, tmp_path):
    changes = (
        "slurm.partition=gpu",
        "slurm.account=rl",
        "slurm.time=08:00:00",
        "gpus_per_node=8",
        "slurm.exclude=[n1,n2]",
    )
    asked = directives(job_script.render(replace(job, gpus_per_node=8), settings(tmp_path, *changes)))
    folder = tmp_path / "runs" / job.run_id
    for option in (
        *("--job-name=tiny", "--requeue", "--signal=B:USR1@300", "--open-mode=append", "--exclusive"),
        *(f"--output={folder}/slurm-%j.out", "--partition=gpu", "--account=rl", "--time=08:00:00"),
        *("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--exclude=n1,n2"),
    ):
        assert option in asked
    assert "hetjob" not in asked


def test_a_cluster_without_gres_is_not_asked_for_gpus(job, tmp_path):
    job, others = replace(job, gpus_per_node=8), ("slurm.generation.gpus_per_node=4",)
    assert "--gpus-per-node" in "".join(directives(job_script.render(job, settings(tmp_path, *others))))
    script = job_script.render(job, settings(tmp_path, *others, "slurm.gres=false"))
    assert "--gpus-per-node" not in "".join(directives(script))
    assert read_by_bash(script, 'echo "$GPUS_PER_NODE $GENERATION_GPUS_PER_NODE"') == "8 4\n"


def test_nodes_whose_gpus_slurm_does_not_divide_are_not_shared(job, tmp_path):
    changes = ("slurm.gres=false", "slurm.exclusive=false", "slurm.cpus_per_node=4")
    assert job_script.render(job, settings(tmp_path, *changes))
    with pytest.raises(UserError, match=r"slurm\.gres=false needs slurm\.exclusive=true"):
        job_script.render(replace(job, gpus_per_node=8), settings(tmp_path, *changes))


def test_engines_of_another_kind_make_the_job_heterogeneous(job, tmp_path):
    changes = ("slurm.partition=train", "slurm.generation.partition=small", "slurm.generation.gpus_per_node=4")
    script = job_script.render(replace(job, nodes=5, generation_nodes=2, gpus_per_node=8), settings(tmp_path, *changes))
    first, second = "\n".join(directives(script)).split("hetjob")
    assert {"--partition=train", "--nodes=3", "--gpus-per-node=8"} <= set(first.split())
    assert {"--partition=small", "--nodes=2", "--gpus-per-node=4"} <= set(second.split())
    assert read_by_bash(script, 'echo "$GPUS_PER_NODE $GENERATION_GPUS_PER_NODE"') == "8 4\n"


def test_a_container_sees_the_run_and_its_folder(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = ("slurm.container.image=nvcr.io#nvidia/nemo:25.11", "slurm.container.mounts=[/lustre:/data:ro]")
    script = job_script.render(job, settings(tmp_path, *changes))
    options = read_by_bash(script, r'printf "%s\n" "${STEP_OPTIONS[@]}"').splitlines()
    assert options[0] == "--container-image=nvcr.io#nvidia/nemo:25.11"
    folder = tmp_path / "runs" / job.run_id
    assert options[1] == f"--container-mounts=/lustre:/data:ro,{tmp_path}:{tmp_path},{folder}:{folder},/tmp:/tmp"
    assert read_by_bash(script, "echo $PYTHON") == "python3\n"


@pytest.mark.parametrize(
    ("changes", "folder", "message"),
    [
        (["slurm.container.mounts=[/lustre:/data]"], "/data/ckpt", ""),
        (["slurm.container.mounts=[/lustre]"], "/lustre/ckpt", ""),
        ([], "ckpt", ""),
        (["slurm.container.mounts=[data]", "slurm.container.workdir=below"], "ckpt", ""),
        ([], "/lustre/ckpt", "checkpointing.checkpoint_dir=/lustre/ckpt is /lustre/ckpt in the container"),
        (["slurm.container.workdir=/opt/rl"], "ckpt", "checkpoint_dir=ckpt is /opt/rl/ckpt in the container"),
        (["slurm.container.mounts=['/lustre:/data:ro+noexec']"], "/data/ckpt", "is /data/ckpt in the container"),
        (["slurm.node_tmp=/scratch"], "/scratch/ckpt", "is /scratch/ckpt in the container"),
        (["slurm.container.mounts=[/lustre:/data]"], "/data/../ckpt", "is /ckpt in the container"),
    ],
)
def test_what_a_run_saves_outlives_its_container(tmp_path, monkeypatch, changes, folder, message):
    recipe = RECIPES / "tiny_cpu.yaml"
    (cwd := tmp_path / "home").mkdir()
    monkeypatch.chdir(cwd)
    overrides = [f"checkpointing.checkpoint_dir={folder}", f"logger.log_dir={cwd}/run"]
    changes = settings(cwd, "slurm.container.image=i", *changes)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        job_script.render(plan(recipe, overrides, changes), changes)
    assert job_script.render(
        plan(recipe, [*overrides, "checkpointing.enabled=false"], changes),
        replace(changes, slurm=replace(changes.slurm, max_restarts=0)),
    )


def test_the_recipe_is_that_of_the_submission_wherever_the_driver_starts(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = job_script.render(job, settings(tmp_path))
    assert f"--config\n{tmp_path}/conf/tiny_cpu.yaml\n" in read_by_bash(script, r'printf "%s\n" "${DRIVER[@]}"')


def test_in_a_container_our_variables_win_against_the_images(job, tmp_path):
    script = job_script.render(
        job, settings(tmp_path, "slurm.container.image=i", "env={NCCL_DEBUG: WARN, HF_HOME: /hf}")
    )
    options = read_by_bash(script, r'printf "%s\n" "${STEP_OPTIONS[@]}"').splitlines()
    (names,) = [option.partition("=")[2].split(",") for option in options if option.startswith("--container-env=")]
    body = (TEMPLATES / "slurm" / "body.sh").read_text()
    exported = [
        word.partition("=")[0] for line in re.findall(r"^ *export (.*)", body, re.MULTILINE) for word in line.split()
    ]
    exported = [name for name in exported if re.fullmatch("[A-Z][A-Z_0-9]*", name)]
    assert len(exported) > 15 and sorted(names) == sorted({"NCCL_DEBUG", "HF_HOME", *exported})
    without = job_script.render(job, settings(tmp_path, "env.A=b"))
    assert read_by_bash(without, "echo ${#STEP_OPTIONS[@]}") == "0\n"


@pytest.mark.parametrize("command", [("train", "--config", "r.yaml"), ("nemo", "--config", "r.yaml"), ()])
def test_every_kind_of_job_needs_time_before_it_stops(job, tmp_path, command):
    job = replace(job, command=command)
    assert job_script.render(job, settings(tmp_path, "slurm.time=00:05:01"))
    with pytest.raises(UserError, match=r"slurm\.stop_seconds=300 must be less than slurm.time=00:05:00"):
        job_script.render(job, settings(tmp_path, "slurm.time=00:05:00"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["slurm.partition=a b"], "cannot stand in a #SBATCH line"),
        (["slurm.partition='a\n#SBATCH --wrap=x'"], "cannot stand in a #SBATCH line"),
        (["slurm.options=[rm]"], "cannot stand in a #SBATCH line"),
        (["slurm.partition=a|b"], "cannot stand in a #SBATCH line"),
        (["slurm.options=['--comment=a&b']"], "cannot stand in a #SBATCH line"),
        (["slurm.account=(a)"], "cannot stand in a #SBATCH line"),
        (["slurm.constraint='a;b'"], "cannot stand in a #SBATCH line"),
        (["slurm.options=['--array=0-3']"], "slurm.options: '--array=0-3' makes several jobs of one run"),
        (["slurm.options=[-a0-3]"], "makes several jobs of one run"),
        (["slurm.options=['--arr=1,2']", "slurm.generation.partition=p"], "makes several jobs of one run"),
        (["slurm.options=['--exclude=n1']"], "slurm.options: '--exclude=n1' would be forgotten .*: give slurm.exclude"),
        (["slurm.options=[-xn1]"], "give slurm.exclude"),
        (["slurm.time=400-00:00:00"], "at most a year"),
        (["slurm.time='99999:00:00'"], "HH:MM:SS"),
        (["slurm.time=२४:११:११"], "HH:MM:SS"),
        (["runs_dir=/tmp/a|b"], "runs_dir"),
        (["slurm.time=4h"], "HH:MM:SS"),
        (["slurm.exclusive=false"], "needs slurm.cpus_per_node"),
        (["slurm.container.image=i", "slurm.container.mounts=['/a,/b:/c']"], "comma"),
        (["runs_dir=/tmp/a b"], "runs_dir"),
        (["runs_dir=/tmp/%j"], "runs_dir"),
    ],
)
def test_what_sbatch_would_read_otherwise_is_refused(job, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        job_script.render(job, settings(tmp_path, *changes))


def test_options_like_that_of_an_array_are_none(job, tmp_path):
    changes = "slurm.options=['--account=a', '--acctg-freq=30', '-Aa', '--exclusive=user']"
    assert {"--account=a", "-Aa", "--exclusive=user"} <= set(
        directives(job_script.render(job, settings(tmp_path, changes)))
    )


def test_nodes_of_another_kind_need_nodes(job, tmp_path):
    with pytest.raises(UserError, match="generation_nodes"):
        job_script.render(replace(job, generation_nodes=0), settings(tmp_path, "slurm.generation.partition=x"))


def test_without_sbatch_nothing_is_written(job, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no sbatch here"):
        job_script.submit("#!/bin/bash\n", job, settings(tmp_path))
    assert not list(tmp_path.iterdir())


OF_A_JOB = {"SLURM_JOB_ID": "3", "SLURM_HET_SIZE": "2", "SLURM_NTASKS_PER_NODE": "8", "SLURM_EXPORT_ENV": "NONE"}
KEPT = {"SLURM_CONF": "/c", "SLURM_CONF_SERVER": "s:1", "SLURM_JWT": "t", "SLURM_CLUSTERS": "a", "HF_HOME": "/hf"}


def test_a_job_that_is_submitted_from_another_has_none_of_its_variables(job, tmp_path, monkeypatch):
    fake = tmp_path / "fakes" / "sbatch"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/bash\nenv >{tmp_path}/seen\necho '9;cluster'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)
    for name, value in (OF_A_JOB | KEPT).items():
        monkeypatch.setenv(name, value)
    assert job_script.submit("#!/bin/bash\n", job, settings(tmp_path)) == "9"
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    assert KEPT.items() <= seen.items() and not OF_A_JOB.keys() & seen.keys()


def test_secrets_are_read_from_a_file_of_the_owner_alone(tmp_path):
    path = tmp_path / "secrets"
    path.write_text("# tokens\nHF_TOKEN=a b=$c'\n\nWANDB_API_KEY=\n")
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        secrets(path)
    path.chmod(0o600)
    assert secrets(path) == {"HF_TOKEN": "a b=$c'", "WANDB_API_KEY": ""}
    path.write_text("export A=1\n")
    with pytest.raises(UserError, match="line 1"):
        secrets(path)
    with pytest.raises(UserError, match="cannot be read"):
        secrets(Path(tmp_path / "nowhere"))


@pytest.mark.parametrize("content", [b"\x80\x81\xff", b"A=\xff\n", b"A=b\0c\n"])
def test_a_file_of_secrets_that_is_not_text_is_named(content, tmp_path):
    path = tmp_path / "secrets"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"slurm.secrets_file={path}") as caught:
        secrets(path)
    assert "\n" not in str(caught.value) and "\0" not in str(caught.value)


def test_secrets_are_not_in_the_script(job, tmp_path):
    path = tmp_path / "secrets"
    path.write_text("HF_TOKEN=hf_abcdef\n")
    os.chmod(path, 0o600)
    script = job_script.render(job, settings(tmp_path, f"slurm.secrets_file={path}"))
    assert "hf_abcdef" not in script
    assert read_by_bash(script, "echo $SECRETS_FILE").strip() == str(path)
