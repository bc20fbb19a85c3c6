"""Site files: typed, every key known, and no secret in them."""

import pytest

from nemo_fp8rl.commands.launch.settings import read_settings
from nemo_fp8rl.common.errors import UserError

SITE = """
env: {NCCL_DEBUG: WARN}
slurm:
  partition: gpu
  time: 1-02:00:00
  container: {image: "nvcr.io#nvidia/nemo:25.11", mounts: ["/lustre:/lustre"]}
"""


def test_a_site_file_and_changes_to_it(tmp_path):
    (tmp_path / "site.yaml").write_text(SITE)
    settings = read_settings(tmp_path / "site.yaml", ["slurm.partition=high", "slurm.generation.gpus_per_node=4"])
    assert (settings.slurm.partition, settings.slurm.time) == ("high", "1-02:00:00")
    assert settings.slurm.container.mounts == ("/lustre:/lustre",)
    assert settings.slurm.generation.gpus_per_node == 4
    assert settings.env == {"NCCL_DEBUG": "WARN"}


def test_a_switch_and_a_path_are_no_secrets():
    env = read_settings(
        None, ["env.TOKENIZERS_PARALLELISM='false'", "env.MAX_TOKENS='12'", "env.TOKEN_FILE=/run/token"]
    ).env
    assert env == {"TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "12", "TOKEN_FILE": "/run/token"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("slurm.partion=x", "did you mean slurm.partition"),
        ("slurm.max_restarts=often", "slurm.max_restarts"),
        ("nodes=0", "nodes=0 must lie in 1.."),
        ("generation_nodes=-1", "must lie in 0.."),
        ("env.WANDB_API_KEY=abc", "looks like a secret"),
        ("env.HF_TOKEN=abc", "looks like a secret"),
        ("env.A-B=abc", "env.A-B is not the name"),
        ("slurm.ready_seconds=0", "slurm.ready_seconds=0"),
        ("slurm.preflight_seconds=89", "slurm.preflight_seconds=89 must lie in 90.."),
        ("slurm.ports=20000", "slurm.ports"),
        ("slurm.ports=90000-90010", "slurm.ports"),
        ("slurm.ports='٢٠٠٠٠-٢٩٩٩٩'", "slurm.ports"),
        ("slurm.min_free_gib=nan", "slurm.min_free_gib=nan must lie in 0.."),
        ("slurm.min_free_gib=inf", "slurm.min_free_gib=inf must lie in 0.."),
        ("slurm.min_free_gib=-1", "slurm.min_free_gib=-1.0 must lie in 0.."),
        ("slurm.max_restarts=-1", "slurm.max_restarts=-1 must lie in 0.."),
        ("slurm.preflight_seconds=999999999999999999999", "slurm.preflight_seconds"),
        ("slurm.preflight_seconds=31622401", "slurm.preflight_seconds=31622401 must lie in 90..31622400"),
        ("slurm.stop_seconds=31622401", "slurm.stop_seconds"),
        ("slurm.cpus_per_node=0", "slurm.cpus_per_node=0 must lie in 1.."),
        ("slurm.generation.gpus_per_node=-1", "slurm.generation.gpus_per_node=-1 must lie in 0.."),
        (f"nodes=0x{'f' * 5000}", "^nodes"),
        ("kubernetes.backoff_limit=-1", "kubernetes.backoff_limit=-1 must lie in 0.."),
        ("kubernetes.termination_grace_seconds=-1", "kubernetes.termination_grace_seconds=-1"),
        ("kubernetes.generation.cpus=0", "kubernetes.generation.cpus=0 must lie in 1.."),
        ("slurm.exclude=[n1/w]", "slurm.exclude: 'n1/w' is not the name of a node"),
        ("kubernetes=[1]", "--set cannot be read|kubernetes must be a block"),
        ("slurm.node_tmp=/local/scratch/of/some/job", "at most 23 characters"),
        ("slurm.node_tmp=tmp", "absolute path"),
        ("name", "form key=value"),
    ],
)
def test_what_cannot_be_is_named(change, message):
    with pytest.raises(UserError, match=message) as caught:
        read_settings(None, [change])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["kubernetes=[1]", "slurm=[]", "env=[a]", "slurm.exclude={a: b}"])
def test_a_change_of_another_kind_than_the_site_file_has_is_refused(change, tmp_path):
    (tmp_path / "site.yaml").write_text("env: {A: b}\nslurm: {exclude: [n1]}\nkubernetes: {image: i}\n")
    with pytest.raises(UserError, match=r"does not fit what the file says|must be a") as caught:
        read_settings(tmp_path / "site.yaml", [change])
    assert "\n" not in str(caught.value)


def test_a_time_that_yaml_takes_for_a_number_is_to_be_quoted(tmp_path):
    for change in ("slurm.time=12:00:00", "slurm.time=240"):
        with pytest.raises(UserError, match=r"quote it, in the site file as '12:00:00'"):
            read_settings(None, [change])
    assert read_settings(None, ["slurm.time='12:00:00'"]).slurm.time == "12:00:00"


def test_a_site_file_that_is_none(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        read_settings(tmp_path / "nowhere.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(UserError, match="mapping"):
        read_settings(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    with pytest.raises(UserError, match="cannot be read"):
        read_settings(tmp_path / "broken.yaml")
