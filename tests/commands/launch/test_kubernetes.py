"""RayJobs and RayClusters from recipes and settings. There is no API server: the tests use KubeRay's schema."""

import copy
import dataclasses
import os
import shlex
import stat
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.launch import kubernetes
from nemo_fp8rl.commands.launch.job import LONGEST_NAME, NAME, Job, plan
from nemo_fp8rl.commands.launch.merged_recipe import merge
from nemo_fp8rl.commands.launch.settings import LaunchConfig, read_settings
from nemo_fp8rl.commands.launch.template import quote
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.workers import ROLE, Role
from tests.commands.launch.conftest import ON_JSONL
from tests.commands.launch.kuberay import expand, needs_crds, schema_errors
from tests.conftest import RECIPES
from tests.nemo_rl.runs import needs_checkout

TINY = RECIPES / "tiny_cpu.yaml"
BASE = ("kubernetes.image=registry.example/rl:1", "kubernetes.volumes=[{claim: runs, path: /runs}]")
MATRIX = {
    "nothing else": (),
    "generation nodes of another kind": (
        "nodes=4",
        "generation_nodes=2",
        "kubernetes.generation={gpus_per_node: 4, memory: 256Gi, node_selector: {gpu: small}}",
    ),
    "Kueue": ("kubernetes.kueue={queue: rl, required_topology: example.com/block}", "nodes=2"),
    "Kueue, preferring": ("kubernetes.kueue={queue: rl, preferred_topology: example.com/rack}",),
    "KAI": ("kubernetes.kai={queue: rl}",),
    "network of the node and RDMA": ("kubernetes.host_network=true", "kubernetes.rdma={rdma/ib: 1}"),
    "secrets": (
        "kubernetes.secrets=[wandb, hf]",
        "kubernetes.secret_env=[{name: HF_TOKEN, secret: hf, key: token}]",
        "kubernetes.image_pull_secrets=[pull]",
    ),
    "volumes": (
        "kubernetes.volumes=[{claim: a, path: /runs, sub_path: me}, {claim: b, path: /data, read_only: true}]",
    ),
    "no GPUs": ("gpus_per_node=0", "kubernetes.cpus=16", "kubernetes.memory=128Gi"),
    "limits": (
        "kubernetes.start_seconds=900",
        "kubernetes.deadline_seconds=86400",
        "kubernetes.termination_grace_seconds=120",
        "kubernetes.priority_class=high",
        "kubernetes.service_account=runner",
        "kubernetes.namespace=rl",
        "kubernetes.image_pull_policy=Always",
        "kubernetes.token=false",
    ),
    "tags": (
        "kubernetes.labels={team: rl}",
        "kubernetes.annotations={k8s.v1.cni.cncf.io/networks: ib0}",
        "kubernetes.tolerations=[{key: spot, operator: Equal, value: 'true', effect: null}]",
    ),
    "a user without rights": (
        "kubernetes.security_context={run_as_user: 1000, run_as_group: 100, fs_group: 2000}",
        "kubernetes.head.tolerations=[{key: cpu}]",
        "kubernetes.rdma={rdma/ib: 1}",
    ),
    "no retries and no volume": ("kubernetes.backoff_limit=0", "kubernetes.volumes=[]"),
}


@cache
def site(*changes: str) -> LaunchConfig:
    return read_settings(None, ["gpus_per_node=8", *BASE, *changes])


def tiny_job(*overrides: str, changes: tuple[str, ...] = (), idle: bool = False) -> tuple[Job, LaunchConfig]:
    chosen = site(*changes)
    return plan(TINY, overrides, chosen, idle=idle), chosen


def manifests(job: Job, chosen: LaunchConfig) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(kubernetes.render(job, chosen)))


@cache
def rayjob(*changes: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    return manifests(*tiny_job(*overrides, changes=changes))[1]


def workers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return (manifest["spec"].get("rayClusterSpec") or manifest["spec"])["workerGroupSpecs"]


def container(group: dict[str, Any]) -> dict[str, Any]:
    return group["template"]["spec"]["containers"][0]


def refusal(*changes: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(UserError) as caught:
        kubernetes.render(*tiny_job(*overrides, changes=changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Soundness


over_the_matrix = pytest.mark.parametrize(
    ("changes", "idle"),
    [(changes, idle) for changes in MATRIX.values() for idle in (False, True)],
    ids=[f"{name}, {what}" for name in MATRIX for what in ("job", "idle cluster")],
)


@cache
def of_the_matrix(changes: tuple[str, ...], idle: bool) -> list[dict[str, Any]]:
    return manifests(*tiny_job(changes=changes, idle=idle))


@over_the_matrix
def test_a_job_has_a_config_map_and_a_ray_job(changes, idle):
    kinds = [document["kind"] for document in of_the_matrix(changes, idle)]
    assert kinds == (["RayCluster"] if idle else ["ConfigMap", "RayJob"])


@needs_crds
@over_the_matrix
def test_what_is_rendered_keeps_the_schema(changes, idle):
    assert schema_errors(of_the_matrix(changes, idle)[-1]) == []


@needs_checkout
@needs_crds
@pytest.mark.nemo_rl
@pytest.mark.parametrize("recipe", sorted((RECIPES / "nemo_rl").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_for_nemo_rl_makes_a_sound_job_that_reads_the_same(recipe, tmp_path):
    from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe

    overrides = ("checkpointing.enabled=true", "grpo.max_num_steps=7")
    chosen = read_settings(None, BASE)
    job = plan(recipe, overrides, chosen)
    config_map, ray = manifests(job, chosen)
    assert schema_errors(ray) == []
    assert len(kubernetes.object_name(job)) <= 47
    carried = tmp_path / "recipe.yaml"
    carried.write_text(config_map["data"]["recipe.yaml"])
    assert load_recipe(carried).values == load_recipe(recipe, overrides).values
    assert sum(group["replicas"] for group in workers(ray)) == job.nodes
    assert {container(group)["resources"]["limits"]["nvidia.com/gpu"] for group in workers(ray)} == {"8"}


@needs_checkout
@pytest.mark.nemo_rl
def test_our_own_loop_takes_a_recipe_for_nemo_rl(tmp_path):
    chosen = read_settings(None, [*BASE, "kubernetes.backoff_limit=0"])
    overrides = (*ON_JSONL, "++grpo.max_num_steps=70")
    job = plan(RECIPES / "nemo_rl/qwen3-8b-fp8-e2e-kv.yaml", overrides, chosen, loop="train")
    config_map, ray = manifests(job, chosen)
    assert ray["spec"]["entrypoint"].startswith("nemo-fp8rl train --restartable --config ")
    assert yaml.safe_load(config_map["data"]["recipe.yaml"])["grpo"]["max_num_steps"] == 70


@needs_crds
def test_the_schema_finds_a_key_that_kuberay_does_not_know():
    job = copy.deepcopy(of_the_matrix((), False)[-1])
    workers(job)[0]["replica"] = workers(job)[0].pop("replicas")
    assert any("replica" in error for error in schema_errors(job))


# What is in it


def test_a_group_has_a_pod_a_node_and_the_same_requests_and_limits():
    (train,) = workers(rayjob("nodes=3", "kubernetes.cpus=64", "kubernetes.memory=512Gi"))
    assert (train["groupName"], train["replicas"], train["minReplicas"], train["maxReplicas"]) == ("train", 3, 3, 3)
    resources = container(train)["resources"]
    assert resources["limits"] == {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"} == resources["requests"]
    assert train["rayStartParams"] == {"num-gpus": "8"} and train["labels"] == {"nemo-fp8rl/role": "train"}


def test_gpus_may_have_a_name_of_the_clusters_own():
    (train,) = workers(rayjob("nodes=3", "kubernetes.gpu_resource=volcano.sh/vgpu-number"))
    assert container(train)["resources"]["limits"]["volcano.sh/vgpu-number"] == "8"


def test_the_engines_nodes_may_be_of_another_kind():
    train, generation = workers(rayjob(*MATRIX["generation nodes of another kind"], "kubernetes.cpus=64"))
    assert (train["replicas"], generation["replicas"]) == (2, 2)
    assert container(generation)["resources"]["limits"] == {"cpu": "64", "memory": "256Gi", "nvidia.com/gpu": "4"}
    assert generation["template"]["spec"]["nodeSelector"] == {"gpu": "small"}
    assert generation["labels"] == {"nemo-fp8rl/role": "generation"}


def test_workers_find_their_nodes_by_the_label():
    groups = workers(rayjob(*MATRIX["generation nodes of another kind"]))
    assert [group["labels"] for group in groups] == [{ROLE: role} for role in get_args(Role)]


def test_our_own_loop_runs_on_the_cluster_unless_it_is_told_otherwise():
    def backend(*overrides: str) -> str:
        config_map, _ = manifests(*tiny_job(*overrides))
        return yaml.safe_load(config_map["data"]["recipe.yaml"])["cluster"]["backend"]

    assert (backend(), backend("cluster.backend=in_process")) == ("ray", "in_process")


def test_without_gpus_none_are_asked_for_and_nothing_is_tolerated():
    (train,) = workers(rayjob(*MATRIX["no GPUs"]))
    assert container(train)["resources"]["limits"] == {"cpu": "16", "memory": "128Gi"}
    assert "tolerations" not in train["template"]["spec"] and train["rayStartParams"] == {"num-gpus": "0"}


def test_the_head_offers_nothing_to_ray():
    head = rayjob()["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0", "no-monitor": "true"}
    assert container(head)["resources"]["limits"] == {"cpu": "4", "memory": "32Gi"}


def test_kueue_gets_a_suspended_job_and_the_topology_of_its_groups():
    job = rayjob(*MATRIX["Kueue"])
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "rl" and job["spec"]["suspend"] is True
    annotations = workers(job)[0]["template"]["metadata"]["annotations"]
    assert annotations == {"kueue.x-k8s.io/podset-required-topology": "example.com/block"}


def test_kai_places_all_pods_and_none_comes_later():
    job = rayjob(*MATRIX["KAI"])
    assert job["spec"]["submissionMode"] == "SidecarMode" and "submitterPodTemplate" not in job["spec"]
    for group in (job["spec"]["rayClusterSpec"]["headGroupSpec"], *workers(job)):
        assert group["template"]["spec"]["schedulerName"] == "kai-scheduler"
        assert group["template"]["metadata"]["labels"]["kai.scheduler/queue"] == "rl"


def test_rdma_pods_may_lock_memory():
    (train,) = workers(rayjob(*MATRIX["network of the node and RDMA"]))
    assert container(train)["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert container(train)["resources"]["limits"]["rdma/ib"] == "1"


def test_pods_on_gpu_nodes_may_have_the_nodes_network():
    made = rayjob(*MATRIX["network of the node and RDMA"], "nodes=2", "generation_nodes=1")
    pods = [group["template"]["spec"] for group in workers(made)]
    assert [(pod["hostNetwork"], pod["dnsPolicy"]) for pod in pods] == [(True, "ClusterFirstWithHostNet")] * 2
    head = made["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    others = [head, *(group["template"]["spec"] for group in workers(rayjob()))]
    assert not any("hostNetwork" in pod or "dnsPolicy" in pod for pod in others)


def test_shared_memory_is_as_large_as_the_settings_say():
    for pod in workers(rayjob("kubernetes.shared_memory=48Gi", "nodes=2", "generation_nodes=1")):
        spec = pod["template"]["spec"]
        (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "dshm"]
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "48Gi"}
        assert {"name": "dshm", "mountPath": "/dev/shm"} in container(pod)["volumeMounts"]


def test_times_are_those_of_the_settings():
    limited, usual = rayjob(*MATRIX["limits"])["spec"], rayjob()["spec"]
    assert (limited["activeDeadlineSeconds"], limited["preRunningDeadlineSeconds"]) == (86400, 900)
    assert not {"activeDeadlineSeconds", "preRunningDeadlineSeconds"} & usual.keys()


def pods(*changes: str) -> list[dict[str, Any]]:
    """Of the submitter, the head and the first group."""
    job = rayjob(*changes)
    head, train = job["spec"]["rayClusterSpec"]["headGroupSpec"], workers(job)[0]
    return [template["spec"] for template in (job["spec"]["submitterPodTemplate"], head["template"], train["template"])]


def test_a_private_image_is_pulled_in_every_pod():
    assert [pod["imagePullSecrets"] for pod in pods(*MATRIX["secrets"])] == [[{"name": "pull"}]] * 3


def test_every_pod_is_of_the_user_and_has_no_rights():
    submitter, head, train = pods(*MATRIX["a user without rights"])
    user = {"runAsUser": 1000, "runAsGroup": 100, "fsGroup": 2000, "runAsNonRoot": True}
    for pod in (submitter, head, train):
        assert pod["securityContext"] == {**user, "seccompProfile": {"type": "RuntimeDefault"}}
    own = [pod["containers"][0]["securityContext"] for pod in (submitter, head, train)]
    assert own[:2] == [{"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}] * 2
    assert own[2] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}


def test_root_keeps_its_rights_and_a_group_may_stand_alone():
    for pod in pods("kubernetes.security_context={run_as_user: 0}"):
        assert pod["securityContext"] == {"runAsUser": 0} and "securityContext" not in pod["containers"][0]
    for pod in pods("kubernetes.security_context.fs_group=2000"):
        assert pod["securityContext"] == {"fsGroup": 2000} and "securityContext" not in pod["containers"][0]
    assert not any("securityContext" in str(pod) for pod in pods())


def test_the_head_and_the_submitter_tolerate_what_they_are_told():
    submitter, head, train = (pod.get("tolerations") for pod in pods("kubernetes.head.tolerations=[{key: cpu}]"))
    assert submitter == head == [{"key": "cpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert train == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_secrets_are_named_and_not_shown():
    train = container(workers(rayjob(*MATRIX["secrets"]))[0])
    assert train["envFrom"] == [{"secretRef": {"name": "wandb"}}, {"secretRef": {"name": "hf"}}]
    reference = {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert {"name": "HF_TOKEN", "valueFrom": reference} in train["env"]


def test_relative_paths_are_on_the_first_volume_that_can_be_written():
    changes = ("kubernetes.volumes=[{claim: d, path: /data, read_only: true}, {claim: r, path: /runs}]",)
    assert container(workers(rayjob(*changes))[0])["workingDir"] == "/runs"
    assert container(workers(rayjob(*changes, "kubernetes.workdir=/runs/me"))[0])["workingDir"] == "/runs/me"


# The run


def test_a_run_keeps_its_id_over_all_attempts():
    job, chosen = tiny_job()
    ray = manifests(job, chosen)[1]
    variables = {one["name"]: one.get("value") for one in container(workers(ray)[0])["env"]}
    assert variables["NEMO_FP8RL_RUN_ID"] == variables["WANDB_RUN_ID"] == job.run_id
    assert variables["WANDB_RESUME"] == "allow"
    assert ray["metadata"]["labels"]["nemo-fp8rl/run-id"] == job.run_id


def test_a_users_variable_stands_once_and_wins():
    variables = container(workers(rayjob("env={WANDB_RUN_ID: mine}"))[0])["env"]
    assert [one["value"] for one in variables if one["name"] == "WANDB_RUN_ID"] == ["mine"]


@given(st.from_regex(NAME, fullmatch=True))
@example("a" * LONGEST_NAME)
@settings(max_examples=8, deadline=None)
def test_every_name_of_a_job_makes_one_of_an_object(name):
    chosen = dataclasses.replace(site(), name=name)
    job = plan(TINY, (), chosen)
    ray = manifests(job, chosen)[1]
    assert ray["metadata"]["labels"]["nemo-fp8rl/run-id"] == job.run_id
    assert ray["metadata"]["name"] == kubernetes.object_name(job)
    assert ray["metadata"]["name"].endswith(job.run_id.removeprefix(name))


def test_a_pod_that_is_told_to_end_asks_our_loop_to_save_where_the_checkpoints_are():
    volumes = "kubernetes.volumes=[{claim: a, path: /home/me}, {claim: b, path: /runs}]"
    made = rayjob(volumes, overrides=("checkpointing.checkpoint_dir=/runs/x",))
    head = made["spec"]["rayClusterSpec"]["headGroupSpec"]
    for pod in (head, *workers(made)):
        lingers = ["--linger", "30"] if pod is head else []
        assert container(pod)["lifecycle"] == {
            "preStop": {"exec": {"command": ["nemo-fp8rl", "request-stop", *lingers]}}
        }
        assert {"name": "NEMO_FP8RL_STOP_FOLDER", "value": "/runs/.nemo-fp8rl"} in container(pod)["env"]
        assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "570"} in container(pod)["env"]
        assert pod["template"]["spec"]["terminationGracePeriodSeconds"] == 600


def test_it_has_the_time_that_the_settings_say():
    made = rayjob("kubernetes.termination_grace_seconds=100")
    assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "70"} in container(workers(made)[0])["env"]
    assert workers(made)[0]["template"]["spec"]["terminationGracePeriodSeconds"] == 100


def test_a_job_that_kueue_suspends_goes_on_later_and_saves_though_it_is_not_retried():
    kueue = ("kubernetes.backoff_limit=0", "kubernetes.kueue={queue: rl}")
    assert "lifecycle" in kubernetes.render(*tiny_job("checkpointing.checkpoint_dir=/runs/x", changes=kueue))


@pytest.mark.parametrize("idle", [False, True], ids=["no retries", "idle"])
def test_where_nothing_would_continue_nobody_is_asked(idle):
    chosen = () if idle else ("kubernetes.backoff_limit=0",)
    text = kubernetes.render(*tiny_job(changes=chosen, idle=idle))
    assert not any(word in text for word in ("lifecycle", "STOP_FOLDER", "RAY_JOB_STOP", "terminationGrace"))


@needs_checkout
@pytest.mark.nemo_rl
@pytest.mark.parametrize("loop", ["train", "nemo"])
def test_a_recipe_for_nemo_rl_saves_then_too_whoever_runs_it(loop):
    chosen = read_settings(None, BASE)
    saves = (*ON_JSONL, "checkpointing.enabled=true", "checkpointing.checkpoint_dir=/runs/x")
    assert "lifecycle" in kubernetes.render(
        plan(RECIPES / "nemo_rl/qwen3-8b-fp8-e2e-kv.yaml", saves, chosen, loop=loop), chosen
    )


def test_the_driver_resumes_by_itself():
    assert rayjob()["spec"]["entrypoint"] == "nemo-fp8rl train --restartable --config /etc/nemo-fp8rl/recipe.yaml"


NESTED = ("kubernetes.volumes=[{claim: r, path: /runs}, {claim: d, path: /runs/data, read_only: true}]",)


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        (("kubernetes.volumes=[]",), ()),
        (("kubernetes.volumes=[{claim: d, path: /data, read_only: true}]",), ()),
        ((), ("checkpointing.checkpoint_dir=/elsewhere",)),
        ((), ("checkpointing.checkpoint_dir=/runs/../elsewhere",)),
        ((), ("checkpointing.checkpoint_dir=/runsandmore",)),
        (("kubernetes.workdir=/workspace",), ()),
        (NESTED, ("checkpointing.checkpoint_dir=/runs/data/x",)),
    ],
)
def test_a_retried_run_must_save_where_the_next_attempt_finds_it(changes, overrides):
    line = refusal(*changes, overrides=overrides)
    assert "is on no volume that can be written" in line and "kubernetes.backoff_limit=0" in line


def test_beside_a_volume_that_is_read_only_a_run_may_save():
    assert rayjob(*NESTED, overrides=("checkpointing.checkpoint_dir=/runs/database",))


def test_a_run_that_is_not_retried_may_save_where_it_wants():
    assert rayjob("kubernetes.backoff_limit=0", overrides=("checkpointing.checkpoint_dir=/elsewhere",))


def test_a_retried_run_must_save():
    assert "saves no checkpoints" in refusal(overrides=("checkpointing.enabled=false",))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("kubernetes.image=null", "kubernetes.image is required"),
        ("kubernetes.security_context.run_as_user=-1", "kubernetes.security_context.run_as_user=-1 must lie in 0.."),
        (
            "kubernetes.memory=512GB",
            "kubernetes.memory=512GB is not a quantity; write a number of bytes",
        ),
        (
            "kubernetes.memory=32Gi",
            "kubernetes.shared_memory=64Gi counts as memory of the pod",
        ),
        ("kubernetes.ray_version='2.40.0'", "kubernetes.ray_version=2.40.0 has no tokens; use Ray 2.52 or newer"),
        (
            "kubernetes.volumes=[{claim: a, path: /runs}, {claim: b, path: /runs}]",
            "/runs is the path of two volumes",
        ),
        ("kubernetes.volumes=[{claim: runs, path: runs}]", "the path 'runs' is not absolute; begin it with a slash"),
        ("kubernetes.kueue={queue: a, required_topology: b, preferred_topology: c}", "not both"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_fix(change, says):
    assert says in refusal(change, overrides=("checkpointing.checkpoint_dir=/runs/x",))


def test_two_schedulers_are_refused():
    assert "remove one of the blocks" in refusal("kubernetes.kueue={queue: a}", "kubernetes.kai={queue: b}")


# Hostile values

HOSTILE = (
    "a b",
    "it's",
    'say "x"',
    "$(rm -rf /)",
    "`id`",
    "${HOME}",
    "$$",
    "a\nb",
    "#no: [yaml",
    "é☃😀",
    "\t\x7f\u2028",
    "- x",
)


@pytest.mark.parametrize("value", HOSTILE)
def test_an_override_arrives_as_it_was_given(value, tmp_path):
    override = f"checkpointing.checkpoint_dir={quote('/runs/' + value.replace('${', '{'))}"
    config_map, ray = manifests(*tiny_job(override))
    carried = tmp_path / "recipe.yaml"
    carried.write_text(config_map["data"]["recipe.yaml"], encoding="utf-8")
    assert OmegaConf.load(carried).checkpointing.checkpoint_dir == "/runs/" + value.replace("${", "{")
    words = shlex.split(ray["spec"]["entrypoint"])
    assert words[-2:] == ["--config", "/etc/nemo-fp8rl/recipe.yaml"] and shlex.join(words) == ray["spec"]["entrypoint"]
    assert expand(ray["spec"]["entrypoint"], {"HOME": "x"}) == ray["spec"]["entrypoint"]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30))
@settings(max_examples=25, deadline=None)
def test_a_variable_arrives_as_it_was_given(value):
    chosen = dataclasses.replace(site(), env={"GIVEN": value})
    job = Job("run", "run-20260819-101112-ab12", (), 1, 0, 8)
    (cluster,) = manifests(job, chosen)
    variables = {one["name"]: one["value"] for one in container(workers(cluster)[0])["env"]}
    assert expand(variables["GIVEN"], variables) == value


def test_bytes_that_are_no_text_are_refused():
    chosen = dataclasses.replace(site(), env={"GIVEN": os.fsdecode(b"a\xff")})
    with pytest.raises(UserError, match="not text"):
        kubernetes.render(Job("run", "run-20260819-101112-ab12", (), 1, 0, 8), chosen)
    folder = os.fsdecode(b"/runs/a\xff")
    assert "cannot be read" in refusal(overrides=(f"checkpointing.checkpoint_dir={folder}",))


@given(st.text(max_size=40).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)))
def test_quoted_is_what_yaml_reads_back(text):
    assert yaml.safe_load(quote(text)) == text
    assert yaml.safe_load(quote({"a": [text]})) == {"a": [text]}


# The merged recipe


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_merged_recipe_keeps_interpolations_for_the_place_where_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERE", "/here")
    child = write(tmp_path / "child.yaml", f"defaults: {TINY}\nlogger: {{log_dir: '${{oc.env:WHERE}}/x'}}\n")
    merged = merge(child, ["grpo.max_num_steps=3"], for_nemo_rl=False)
    assert "${oc.env:WHERE}/x" in merged and "max_num_steps: 3" in merged and "defaults" not in merged


def test_numbers_like_texts_stay_texts(tmp_path):
    child = write(tmp_path / "child.yaml", f"defaults: {TINY}\nlogger: {{log_dir: '1e3'}}\n")
    merged = merge(child, ["checkpointing.checkpoint_dir='007'"], for_nemo_rl=False)
    read = OmegaConf.create(merged)
    assert (read.logger.log_dir, read.checkpointing.checkpoint_dir) == ("1e3", "007")


def test_a_recipe_that_is_too_large_for_a_config_map_is_refused():
    assert "larger than the 1 MiB" in refusal(overrides=(f"logger.log_dir=/runs/{'x' * (1 << 20)}",))


# Submission, by a fake kubectl: what it is given and what is said of its answers; not that a cluster takes it


@pytest.fixture
def fake_kubectl(tmp_path, monkeypatch):
    """fake_kubectl(script) -> a folder where it records; a fake kubectl is first on PATH."""

    def make(script: str) -> Path:
        folder = tmp_path / "fake_kubectl"
        folder.mkdir()
        program = write(folder / "kubectl", f'#!/bin/sh\n# a fake\necho "$@" >> {folder}/calls\n{script}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return folder

    return make


def test_submission_asks_the_server_first_and_creates_exactly_what_was_rendered(fake_kubectl):
    job, chosen = tiny_job(changes=("kubernetes.namespace=rl",))
    text = kubernetes.render(job, chosen)
    folder = fake_kubectl('cat > "$(dirname "$0")/input"')
    kubernetes.submit(text, chosen)
    assert (folder / "calls").read_text() == "create -n rl --dry-run=server -f -\ncreate -n rl -f -\n"
    assert (folder / "input").read_text() == text


def test_nothing_is_created_when_the_server_refuses(fake_kubectl):
    job, chosen = tiny_job()
    folder = fake_kubectl('cat > /dev/null; echo "error: no matches for kind RayJob" >&2; echo more >&2; exit 1')
    with pytest.raises(UserError) as caught:
        kubernetes.submit(kubernetes.render(job, chosen), chosen)
    assert str(caught.value) == "kubectl create: error: no matches for kind RayJob"
    assert (folder / "calls").read_text().count("\n") == 1


def test_without_kubectl_there_is_a_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="kubectl is not on PATH"):
        kubernetes.submit("", site())


def test_a_dry_run_prints_what_would_be_submitted_and_nothing_else(capsys, fake_kubectl):
    job, chosen = tiny_job()
    folder = fake_kubectl("exit 1")
    assert kubernetes.launch(job, chosen, dry_run=True)
    assert capsys.readouterr().out == kubernetes.render(job, chosen)
    assert not (folder / "calls").exists()


def test_the_command_line_prints_the_manifest(capsys):
    changes = [word for change in (*BASE, "gpus_per_node=8") for word in ("--set", change)]
    assert main(["launch", "k8s", "--config", str(TINY), "grpo.max_num_steps=3", *changes, "--dry-run"]) == 0
    kinds = [document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds == ["ConfigMap", "RayJob"]


def test_a_submission_says_the_run_and_how_to_follow_it(capsys, fake_kubectl):
    job, chosen = tiny_job()
    fake_kubectl("cat > /dev/null")
    assert kubernetes.launch(job, chosen)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"run {job.run_id}" and all(line.startswith("  kubectl ") for line in said[1:])


@pytest.mark.parametrize("changes", [(), ("kubernetes.kai={queue: rl}",)], ids=["job", "KAI"])
def test_the_next_steps_name_the_run(changes):
    job, chosen = tiny_job(changes=("kubernetes.namespace=rl", *changes))
    steps = kubernetes.next_steps(job, chosen)
    assert all(step.startswith("kubectl -n rl ") for step in steps)
    assert any(f"get rayjob {kubernetes.object_name(job)}" in step for step in steps)
    assert any("8265" in step for step in steps) and any(job.run_id in step for step in steps)
