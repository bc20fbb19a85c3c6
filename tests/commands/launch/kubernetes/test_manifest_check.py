"""Seeded mistakes in a manifest that is sound: each is found, with where it is and what to do."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.launch.kubernetes.manifest_check import check_file, lint, schema_errors
from nemo_fp8rl.commands.launch.kubernetes.manifest_parts import quantity
from nemo_fp8rl.common.errors import UserError
from tests.commands.launch.kubernetes.kuberay import CRDS, needs_crds
from tests.commands.launch.kubernetes.test_manifest import manifests, tiny_job

SOUND = (
    "nodes=3",
    "generation_nodes=1",
    "kubernetes.cpus=32",
    "kubernetes.memory=512Gi",
    "kubernetes.host_network=true",
    "kubernetes.kueue={queue: rl, required_topology: example.com/block}",
    "kubernetes.deadline_seconds=3600",
)
CLUSTER = "spec.rayClusterSpec"
TRAIN = f"{CLUSTER}.workerGroupSpecs[0]"
POD = f"{TRAIN}.template.spec"
BOX = f"{POD}.containers[0]"
VARIABLES = 5
"""Of a pod, that the launcher sets."""
Tree = Any
Mistake = tuple[Callable[[Tree], object], str, str]


@pytest.fixture(scope="module")
def sound() -> Tree:
    return manifests(*tiny_job(changes=SOUND))[1]


def cluster(job: Tree) -> Tree:
    return job["spec"]["rayClusterSpec"]


def train(job: Tree) -> Tree:
    return cluster(job)["workerGroupSpecs"][0]


def pod(job: Tree) -> Tree:
    return train(job)["template"]["spec"]


def box(job: Tree) -> Tree:
    return pod(job)["containers"][0]


def rename(tree: Tree, old: str, new: str) -> None:
    tree[new] = tree.pop(old)


def spec(**values: Any) -> Callable[[Tree], None]:
    return lambda job: job["spec"].update(values)


def limits(**values: Any) -> Callable[[Tree], None]:
    named = {key.replace("__", "/").replace("_", "."): value for key, value in values.items()}
    return lambda job: box(job)["resources"]["limits"].update(named)


def env(*variables: dict[str, Any]) -> Callable[[Tree], None]:
    return lambda job: box(job)["env"].extend(variables)


def volume(**values: Any) -> Callable[[Tree], None]:
    return lambda job: pod(job)["volumes"].append(values)


def without_volumes(job: Tree) -> None:
    for group in (cluster(job)["headGroupSpec"], *cluster(job)["workerGroupSpecs"]):
        inner = group["template"]["spec"]
        inner["volumes"] = [one for one in inner["volumes"] if "persistentVolumeClaim" not in one]
        names = {one["name"] for one in inner["volumes"]}
        mounts = inner["containers"][0]["volumeMounts"]
        inner["containers"][0]["volumeMounts"] = [mount for mount in mounts if mount["name"] in names]


def ray_image(job: Tree) -> None:
    box(job)["image"] = "rayproject/ray:2.52.0-py311"


OF_SCHEMA: dict[str, Mistake] = {  # what is done to the manifest, where it is found, the fix
    "replica for replicas": (
        lambda j: rename(train(j), "replicas", "replica"),
        f"{TRAIN}.replica",
        "did you mean replicas?",
    ),
    "emptydir": (
        lambda j: rename(pod(j)["volumes"][0], "emptyDir", "emptydir"),
        f"{POD}.volumes[0].emptydir",
        "emptyDir?",
    ),
    "image of the pod": (lambda j: pod(j).update(image="x"), f"{POD}.image", "remove it, known here are"),
    "tolerance": (
        lambda j: rename(pod(j), "tolerations", "tolerance"),
        f"{POD}.tolerance",
        "did you mean tolerations?",
    ),
    "backofflimit": (lambda j: rename(j["spec"], "backoffLimit", "backofflimit"), "spec.backofflimit", "backoffLimit?"),
    "replicas in quotes": (lambda j: train(j).update(replicas="2"), f"{TRAIN}.replicas", "without quotes, as integer"),
    "number for a parameter of ray start": (
        lambda j: train(j)["rayStartParams"].update({"num-gpus": 8}),
        f"{TRAIN}.rayStartParams.num-gpus",
        'quote it: "8"',
    ),
    "number for a variable": (env({"name": "X", "value": 1}), f"{BOX}.env[{VARIABLES}].value", 'quote it: "1"'),
    "no group name": (lambda j: train(j).pop("groupName"), f"{TRAIN}.groupName", "add groupName"),
    "no head": (lambda j: cluster(j).pop("headGroupSpec"), f"{CLUSTER}.headGroupSpec", "add headGroupSpec"),
    "no container name": (lambda j: box(j).pop("name"), f"{BOX}.name", "add name"),
    "no claim name": (
        volume(name="v", persistentVolumeClaim={}),
        f"{POD}.volumes[2].persistentVolumeClaim.claimName",
        "add claimName",
    ),
    "memory in GB": (limits(memory="512GB"), f"{BOX}.resources.limits.memory", "512Gi or 512G"),
    "size of shared memory in gb": (
        lambda j: pod(j)["volumes"][0]["emptyDir"].update(sizeLimit="64gb"),
        f"{POD}.volumes[0].emptyDir.sizeLimit",
        "512Gi or 512G",
    ),
    "containers as a mapping": (lambda j: pod(j).update(containers={}), f"{POD}.containers", "write one of type array"),
    "yes for a switch": (spec(shutdownAfterJobFinishes="yes"), "spec.shutdownAfterJobFinishes", "as boolean"),
    "unknown way to ask for tokens": (
        lambda j: cluster(j)["authOptions"].update(mode="tokens"),
        f"{CLUSTER}.authOptions.mode",
        "write one of disabled, token",
    ),
    "deadline of the start below one": (
        spec(preRunningDeadlineSeconds=0),
        "spec.preRunningDeadlineSeconds",
        "keep to minimum: 1",
    ),
}
OF_LINT: dict[str, Mistake] = {
    "no name": (lambda j: j["metadata"].pop("name"), "metadata.name", "give the object a name"),
    "name too long": (lambda j: j["metadata"].update(name="a" * 48), "metadata.name", "shorten it to 47"),
    "name with a capital": (lambda j: j["metadata"].update(name="Run"), "metadata.name", "lower-case letters"),
    "label with a space": (
        lambda j: j["metadata"]["labels"].update(team="a b"),
        "metadata.labels.team",
        "at most 63 letters",
    ),
    "number for a label": (lambda j: j["metadata"]["labels"].update(team=7), "metadata.labels.team", 'quote it: "7"'),
    "label's key with a space": (
        lambda j: train(j)["labels"].update({"a b": "c"}),
        f'{TRAIN}.labels["a b"]',
        "prefix.example/name",
    ),
    "switch for an annotation": (
        lambda j: j["metadata"].update(annotations={"x": True}),
        "metadata.annotations.x",
        'quote it: "true"',
    ),
    "submission mode": (spec(submissionMode="HttpMode"), "spec.submissionMode", "one of K8sJobMode, HTTPMode"),
    "no entry point": (lambda j: j["spec"].pop("entrypoint"), "spec.entrypoint", "the driver's command"),
    "no cluster": (lambda j: j["spec"].pop("rayClusterSpec"), "spec.rayClusterSpec", "describe the cluster"),
    "suspended and kept": (
        spec(shutdownAfterJobFinishes=False, ttlSecondsAfterFinished=0),
        "spec.suspend",
        "set spec.shutdownAfterJobFinishes: true",
    ),
    "queued and kept": (
        spec(shutdownAfterJobFinishes=False, ttlSecondsAfterFinished=0, suspend=False),
        "spec.shutdownAfterJobFinishes",
        "set spec.shutdownAfterJobFinishes: true",
    ),
    "time to live of what is kept": (
        spec(shutdownAfterJobFinishes=False),
        "spec.ttlSecondsAfterFinished",
        "set spec.shutdownAfterJobFinishes: true",
    ),
    "deadline of zero": (spec(activeDeadlineSeconds=0), "spec.activeDeadlineSeconds", "above 0"),
    "queued for another's cluster": (
        lambda j: (j["spec"].pop("rayClusterSpec"), j["spec"].update(backoffLimit=0, clusterSelector={"a": "b"})),
        "spec.clusterSelector",
        "write a rayClusterSpec",
    ),
    "fewer than no retries": (spec(backoffLimit=-1), "spec.backoffLimit", "write 0 or more"),
    "retries and no volume": (without_volumes, "spec.backoffLimit", "mount a persistentVolumeClaim"),
    "retries by hand": (spec(submissionMode="InteractiveMode"), "spec.backoffLimit", "set it to 0"),
    "submitter that always restarts": (
        lambda j: j["spec"]["submitterPodTemplate"]["spec"].update(restartPolicy="Always"),
        "spec.submitterPodTemplate.spec.restartPolicy",
        "write restartPolicy: Never",
    ),
    "submitter's pod beside a sidecar": (
        spec(submissionMode="SidecarMode"),
        "spec.submitterPodTemplate",
        "remove it",
    ),
    "KAI and a submitter that comes later": (
        lambda j: j["metadata"]["labels"].update({"kai.scheduler/queue": "rl"}),
        "spec.submissionMode",
        "write SidecarMode or HTTPMode",
    ),
    "token of an old Ray": (
        lambda j: cluster(j).update(rayVersion="2.40.0"),
        f"{CLUSTER}.rayVersion",
        "use Ray 2.52 or newer",
    ),
    "token of no version": (
        lambda j: cluster(j).pop("rayVersion"),
        f"{CLUSTER}.rayVersion",
        "write the version of the image's Ray",
    ),
    "another Ray in the image": (ray_image, f"{BOX}.image", "make the two the same"),
    "queued and scaled": (
        lambda j: cluster(j).update(enableInTreeAutoscaling=True),
        f"{CLUSTER}.enableInTreeAutoscaling",
        "set it to false",
    ),
    "two groups of a name": (
        lambda j: cluster(j)["workerGroupSpecs"][1].update(groupName="train"),
        f"{CLUSTER}.workerGroupSpecs[1].groupName",
        "a name of its own",
    ),
    "more replicas than the most": (lambda j: train(j).update(replicas=4), f"{TRAIN}.replicas", "to the same number"),
    "least above most": (lambda j: train(j).update(minReplicas=5), f"{TRAIN}.minReplicas", "or raise the other"),
    "labels for ray start": (
        lambda j: train(j)["rayStartParams"].update(labels="a=b"),
        f"{TRAIN}.rayStartParams.labels",
        f"move it to {TRAIN}.labels",
    ),
    "resources said twice": (
        lambda j: train(j).update(resources={"GPU": "8"}),
        f"{TRAIN}.resources",
        "remove num-gpus from rayStartParams",
    ),
    "topology without a queue": (
        lambda j: j["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name"),
        f'{TRAIN}.template.metadata.annotations["kueue.x-k8s.io/podset-required-topology"]',
        "add the label kueue.x-k8s.io/queue-name",
    ),
    "two topologies": (
        lambda j: train(j)["template"]["metadata"]["annotations"].update(
            {"kueue.x-k8s.io/podset-preferred-topology": "example.com/rack"}
        ),
        f"{TRAIN}.template.metadata.annotations",
        "remove kueue.x-k8s.io/podset-preferred-topology",
    ),
    "no container": (lambda j: pod(j).update(containers=[]), f"{POD}.containers", "the container that runs Ray"),
    "network of the node, DNS of the pods": (
        lambda j: pod(j).pop("dnsPolicy"),
        f"{POD}.dnsPolicy",
        "write dnsPolicy: ClusterFirstWithHostNet",
    ),
    "unknown restart policy": (
        lambda j: pod(j).update(restartPolicy="never"),
        f"{POD}.restartPolicy",
        "OnFailure, Never",
    ),
    "unknown effect": (
        lambda j: pod(j)["tolerations"][0].update(effect="NoStart"),
        f"{POD}.tolerations[0].effect",
        "NoSchedule",
    ),
    "value that exists": (
        lambda j: pod(j)["tolerations"][0].update(value="true"),
        f"{POD}.tolerations[0].value",
        "write operator: Equal",
    ),
    "two volumes of a name": (volume(name="dshm", emptyDir={}), f"{POD}.volumes[2].name", "a name of its own"),
    "volume of nothing": (volume(name="v"), f"{POD}.volumes[2]", "exactly one source"),
    "two containers of a name": (
        lambda j: pod(j)["containers"].append(copy.deepcopy(box(j))),
        f"{POD}.containers[1].name",
        "give each container its own",
    ),
    "no image": (lambda j: box(j).pop("image"), f"{BOX}.image", "name the image"),
    "mount of no volume": (
        lambda j: box(j)["volumeMounts"].append({"name": "data", "mountPath": "/data"}),
        f"{BOX}.volumeMounts[2].name",
        "add it to the pod's volumes",
    ),
    "mount at a relative path": (
        lambda j: box(j)["volumeMounts"][1].update(mountPath="runs"),
        f"{BOX}.volumeMounts[1].mountPath",
        "begin it with a slash",
    ),
    "two mounts at a path": (
        lambda j: box(j)["volumeMounts"].append({"name": "dshm", "mountPath": "/runs"}),
        f"{BOX}.volumeMounts[2].mountPath",
        "elsewhere",
    ),
    "variable set twice": (
        env({"name": "WANDB_RUN_ID", "value": "x"}),
        f"{BOX}.env[{VARIABLES}].name",
        "remove one of the two",
    ),
    "variable from two places": (
        env({"name": "X", "value": "x", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}),
        f"{BOX}.env[{VARIABLES}].valueFrom",
        "remove one of the two",
    ),
    "secret for all to read": (
        env({"name": "HF_TOKEN", "value": "hf_abc"}),
        f"{BOX}.env[{VARIABLES}].value",
        "valueFrom.secretKeyRef",
    ),
    "limit without a request's number": (
        limits(nvidia_com__gpu="4"),
        f'{BOX}.resources.limits["nvidia.com/gpu"]',
        "write the same number twice",
    ),
    "device without a limit": (
        lambda j: box(j)["resources"]["requests"].update({"rdma/ib": "1"}),
        f'{BOX}.resources.limits["rdma/ib"]',
        "write the same number twice",
    ),
    "half a GPU": (limits(nvidia_com__gpu="500m"), f'{BOX}.resources.limits["nvidia.com/gpu"]', "a whole number"),
    "request above its limit": (limits(cpu="8"), f"{BOX}.resources.requests.cpu", "lower it, or raise the limit"),
    "GPUs that Ray is not told of": (
        lambda j: train(j)["rayStartParams"].update({"num-gpus": "4"}),
        f'{BOX}.resources.limits["nvidia.com/gpu"]',
        "make the two the same",
    ),
    "GPUs that there are not": (
        lambda j: [box(j)["resources"][part].pop("nvidia.com/gpu") for part in ("requests", "limits")],
        f'{BOX}.resources.limits["nvidia.com/gpu"]',
        "make the two the same",
    ),
    "shared memory on a disk": (
        lambda j: pod(j)["volumes"][0]["emptyDir"].pop("medium"),
        f"{POD}.volumes[0].emptyDir.medium",
        "write medium: Memory",
    ),
    "more shared memory than memory": (
        lambda j: pod(j)["volumes"][0]["emptyDir"].update(sizeLimit="1Ti"),
        f"{POD}.volumes[0].emptyDir.sizeLimit",
        "lower it below the memory limit",
    ),
    "no shared memory beside a plasma directory": (
        lambda j: (box(j)["volumeMounts"].pop(0), train(j)["rayStartParams"].update({"plasma-directory": "/tmp"})),
        f"{BOX}.volumeMounts",
        "mount an emptyDir of medium Memory there",
    ),
}
OF_BOTH = (
    "number for a parameter of ray start",
    "number for a variable",
    "memory in GB",
    "size of shared memory in gb",
)
"""Of the schema's, those that are found without its file, too."""


def test_the_manifest_that_the_mistakes_are_made_in_is_sound(sound):
    assert lint(sound) == []


@needs_crds
def test_its_schema_is_kept(sound):
    assert schema_errors(sound, CRDS) == []


@needs_crds
@pytest.mark.parametrize(("make", "path", "fix"), OF_SCHEMA.values(), ids=OF_SCHEMA)
def test_a_mistake_against_the_schema_is_found(make, path, fix, sound):
    wrong = copy.deepcopy(sound)
    make(wrong)
    found = {finding.path: finding.fix for finding in schema_errors(wrong, CRDS)}
    assert fix in found.get(path, f"not found, only {found}")
    lint(wrong)  # which meets such values, too, and passes over them


@pytest.mark.parametrize(("make", "path", "fix"), OF_LINT.values(), ids=OF_LINT)
def test_a_mistake_that_the_schema_allows_is_found(make, path, fix, sound):
    wrong = copy.deepcopy(sound)
    make(wrong)
    findings = lint(wrong)
    assert any(finding.path == path and fix in finding.fix for finding in findings), [str(one) for one in findings]
    assert len(findings) <= 3, "one mistake, many findings"


@pytest.mark.parametrize("name", OF_BOTH)
def test_common_mistakes_are_found_without_the_schema(name, sound):
    make, path, fix = OF_SCHEMA[name]
    wrong = copy.deepcopy(sound)
    make(wrong)
    assert any(finding.path == path and fix in finding.fix for finding in lint(wrong))


@needs_crds
def test_the_schema_allows_them_indeed(sound):
    """Else the rule would be the schema's already."""
    stricter = {"number for a label", "no container", "deadline of zero"}
    refused = set()
    for name, (make, _, _) in OF_LINT.items():
        wrong = copy.deepcopy(sound)
        make(wrong)
        if schema_errors(wrong, CRDS):
            refused.add(name)
    assert refused <= stricter


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("HF_TOKEN", "hf_abc", True),
        ("WANDB_API_KEY", "0af3", True),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("RAY_AUTH_TOKEN_PATH", "/run/token", False),
        ("MAX_TOKENS", "4096", False),
    ],
)
def test_what_looks_like_a_secret(name, value, is_secret, sound):
    wrong = copy.deepcopy(sound)
    env({"name": name, "value": value})(wrong)
    assert bool(lint(wrong)) is is_secret


@pytest.mark.parametrize(
    "manifest", [None, [], "x", {}, {"kind": "Pod"}, {"kind": "RayJob"}, {"kind": "RayCluster", "spec": 3}]
)
def test_what_is_no_manifest_is_said_and_not_raised(manifest):
    assert lint(manifest)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500m", 0.5),
        ("1Ki", 1024),
        ("2", 2),
        (3, 3),
        ("1e3", 1000),
        ("1.5G", 1.5e9),
        ("512GB", None),
        ("", None),
        (True, None),
    ],
)
def test_quantities_are_read_as_kubernetes_does(text, number):
    assert quantity(text) == number


# The command


@pytest.fixture
def file(tmp_path, sound):
    """file(change, ...) -> a file with a ConfigMap and the changed job."""

    def make(*changes: Callable[[Tree], object]) -> Path:
        wrong = copy.deepcopy(sound)
        for change in changes:
            change(wrong)
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump_all([{"apiVersion": "v1", "kind": "ConfigMap"}, wrong]))
        return path

    return make


def test_a_sound_file_ends_in_0_and_says_nothing(file, capsys):
    assert main(["check-manifest", str(file())]) == 0
    assert capsys.readouterr().out == ""


@needs_crds
def test_a_line_a_finding_and_2(file, capsys):
    path = file(lambda j: box(j).pop("image"), lambda j: rename(train(j), "replicas", "replica"), spec(backoffLimit=-1))
    assert main(["check-manifest", str(path), "--crds", str(CRDS)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("RayJob tiny-cpu-") for line in lines)
    assert any(f": {TRAIN}.replica: is unknown to KubeRay's schema; did you mean replicas?" in line for line in lines)


@needs_crds
def test_what_both_find_is_said_once(file):
    (findings,) = check_file(file(env({"name": "X", "value": 1})), CRDS).values()
    assert [finding.path for finding in findings] == [f"{BOX}.env[{VARIABLES}].value"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: RayJob\nkind: RayJob\n", "kind is there twice"),
        ("kind: RayJob\n? [a]\n: b\n", "a key must be one word .* line 2"),
        ("kind: RayJob\n? {a: b}\n: b\n", "a key must be one word"),
        ("kind: RayJob\nx: !!map foo\n", "expected a mapping node"),
        ("kind: RayJob\nx: 2020-13-45\n", "'2020-13-45' cannot be read as timestamp .* line 2"),
        ("kind: RayJob\nx: !!bool maybe\n", "'maybe' cannot be read as bool"),
        ("kind: RayJob\nx: !!timestamp noon\n", "'noon' cannot be read as timestamp"),
        ("kind: RayJob\nx: !!int ''\n", "'' cannot be read as int"),
        (f"kind: RayJob\nx: {'1' * 5000}\n", "'1{40}' cannot be read as int"),
        (f"kind: RayJob\nx: 0x{'f' * 5000}\n", "an integer has more than 64 bits"),
        (f"kind: RayJob\nx: {'[' * 100_000}{']' * 100_000}\n", "nested more than 100 deep"),
        (f"kind: RayJob\nx: {'[' * 500}\n", "nested more than 100 deep"),
        ("a: [", "cannot be read as YAML"),
        ("kind: Pod\n", "holds no RayJob"),
        ("", "holds no RayJob"),
    ],
)
def test_a_file_that_cannot_be_checked_is_refused(text, says, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        check_file(path)
    assert "\n" not in str(caught.value) and (str(path) in str(caught.value))


ODD = (["a"], {"a": "b"}, 3, None, True)


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_names_of_any_type_are_passed_over(odd, sound):
    def change(job: Tree) -> None:
        for inner in (pod(job), cluster(job)["headGroupSpec"]["template"]["spec"]):
            inner["volumes"] += [{"name": odd, "emptyDir": {}}, {"name": odd, "emptyDir": {}}]
            inner["containers"][0]["volumeMounts"] += [{"name": odd, "mountPath": odd}, {"name": odd, "mountPath": odd}]
            inner["containers"][0]["env"] += [{"name": odd, "value": odd}]
            inner["containers"] += [{"name": odd, "image": odd}, {"name": odd, "image": odd}]
        train(job)["groupName"] = cluster(job)["workerGroupSpecs"][1]["groupName"] = odd

    wrong = copy.deepcopy(sound)
    change(wrong)
    assert lint(wrong)
    wrong["kind"] = odd
    assert lint(wrong)[0].path == "kind"


def test_a_mount_finds_a_volume_whatever_its_name(sound):
    wrong = copy.deepcopy(sound)
    volume(name=3, emptyDir={})(wrong)
    box(wrong)["volumeMounts"].append({"name": 3, "mountPath": "/three"})
    assert lint(wrong) == []


@pytest.mark.parametrize("amount", ["1e99999999999", f"1e{'9' * 5000}", "9" * 5000, "1" * 101])
def test_numbers_beyond_all_measure_are_no_quantities(amount, sound):
    assert quantity(amount) is None
    wrong = copy.deepcopy(sound)
    train(wrong)["rayStartParams"]["num-gpus"] = amount
    limits(memory=amount)(wrong)
    cluster(wrong)["rayVersion"] = f"{'9' * 5000}.1"
    assert any(finding.path == f"{BOX}.resources.limits.memory" for finding in lint(wrong))


def test_a_folder_without_crds_is_refused(file, tmp_path):
    with pytest.raises(UserError, match="copy it from"):
        check_file(file(), tmp_path)


def crd(folder: Path, schema: str) -> Path:
    """A folder with a definition of RayJobs that has this schema."""
    version = f"{{name: v1, schema: {{openAPIV3Schema: {schema}}}}}"
    (folder / "ray.io_rayjobs.yaml").write_text(f"spec: {{versions: [{version}]}}\n")
    return folder


@pytest.mark.parametrize(
    "schema",
    [
        "{type: object}",
        "text",
        "[a]",
        "{type: object, properties: text}",
        "{type: object, properties: {a: 2020-13-45}}",
        "{type: object, properties: {spec: {type: strnig}}}",
        "{type: object, properties: {kind: {type: string, pattern: '['}}}",
        "{type: object, properties: {kind: {$ref: 'http://127.0.0.1:9/x'}}}",
        "{type: object, properties: {kind: {enum: 3}}}",
        "{type: object, properties: {kind: text}}",
        f"{{properties: {'[' * 100_000}{']' * 100_000}}}",
    ],
    ids=lambda schema: schema[:60],
)
def test_a_definition_that_cannot_be_used_is_named(schema, file, tmp_path, capsys):
    crds = crd(tmp_path, schema)
    assert main(["check-manifest", str(file()), "--crds", str(crds)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(crds / "ray.io_rayjobs.yaml") in line


@needs_crds
def test_what_json_has_not_is_found_in_a_manifest_and_not_raised(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "kind: RayJob\napiVersion: ray.io/v1\n2020-01-01: x\n1.5: x\ntrue: x\nnull: x\n"
        "spec: &a {rayClusterSpec: *a, entrypoint: &b [*b], suspend: {2020-01-01: 1}}\n"
    )
    (findings,) = check_file(path, CRDS).values()
    assert {"2020-01-01", "spec.entrypoint", "spec.suspend"} <= {finding.path for finding in findings}
