"""What is wrong with a RayJob or RayCluster although its schema is kept.

Three kinds of rules: what KubeRay's own checks refuse once the object exists (its validation.go), what the API server
refuses only when KubeRay creates the pods (CRDs do not say it of pod templates), and what starts but cannot do its
work, such as a retried job without a volume. Left out: what depends on the cluster, such as taints, quotas and names of
secrets, and what KubeRay adds by itself: probes, /dev/shm, ports.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_fp8rl.commands.launch.kubernetes.manifest_parts import (
    Finding,
    key_path,
    labels_at,
    mapping,
    mappings,
    plain,
    repeated,
    tags,
)
from nemo_fp8rl.commands.launch.kubernetes.pod_lint import pod_findings

MAX_NAME = {"RayJob": 47, "RayCluster": 53}
"""Characters of an object's name, at most: KubeRay adds to it (validation.go)."""
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
QUEUE, KAI_QUEUE = "kueue.x-k8s.io/queue-name", "kai.scheduler/queue"
TOPOLOGY = ("kueue.x-k8s.io/podset-required-topology", "kueue.x-k8s.io/podset-preferred-topology")
GONE_WITH_THE_POD = {"emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral", "image"}
OF_RAY_START = ("num-cpus", "num-gpus", "memory", "resources")
SUBMISSION_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
SHUT_DOWN = "set spec.shutdownAfterJobFinishes: true"


def lint(manifest: Any) -> list[Finding]:
    """Findings on one object; values of a wrong type are the schema's business and passed over."""
    kind = mapping(manifest).get("kind")
    if not isinstance(kind, str) or kind not in MAX_NAME:
        return [Finding("kind", f"{kind!r} is not checked here", "give a RayJob or a RayCluster")]
    if manifest.get("apiVersion") != "ray.io/v1":
        return [Finding("apiVersion", f"is {manifest.get('apiVersion')!r}", "write ray.io/v1")]
    spec = mapping(manifest.get("spec"))
    findings = [*_metadata(manifest, kind)]
    if kind == "RayCluster":
        return [*findings, *_cluster(spec, "spec", manifest)]
    findings += _job(manifest, spec)
    if "rayClusterSpec" in spec:
        findings += _cluster(mapping(spec["rayClusterSpec"]), "spec.rayClusterSpec", manifest)
    return findings


def _metadata(manifest: Mapping[str, Any], kind: str) -> Iterator[Finding]:
    metadata = mapping(manifest.get("metadata"))
    name, longest = metadata.get("name"), MAX_NAME[kind]
    if name is None and "generateName" not in metadata:
        yield Finding("metadata.name", "is missing", "give the object a name")
    elif name is not None and (not isinstance(name, str) or not DNS_1035.fullmatch(name)):
        yield Finding(
            "metadata.name",
            f"{name!r} is not a DNS-1035 label",
            "use lower-case letters, digits and dashes, begin with a letter and end with a letter or digit",
        )
    elif name is not None and len(name) > longest:
        yield Finding("metadata.name", f"has {len(name)} characters", f"shorten it to {longest}, KubeRay adds to it")
    yield from tags(metadata, "metadata")


def _job(manifest: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[Finding]:
    mode, retries = spec.get("submissionMode", "K8sJobMode"), spec.get("backoffLimit") or 0
    labels = mapping(mapping(manifest.get("metadata")).get("labels"))
    shuts_down = bool(spec.get("shutdownAfterJobFinishes"))
    if mode not in SUBMISSION_MODES:
        yield Finding("spec.submissionMode", f"{mode!r} is unknown", f"write one of {', '.join(SUBMISSION_MODES)}")
    submitter = mapping(mapping(spec.get("submitterPodTemplate")).get("spec"))
    submits = any("command" in container for _, container in mappings(submitter.get("containers")))
    if not spec.get("entrypoint") and mode != "InteractiveMode" and not submits:
        yield Finding("spec.entrypoint", "is missing", "write the driver's command")
    if "rayClusterSpec" not in spec and not spec.get("clusterSelector"):
        yield Finding("spec.rayClusterSpec", "is missing", "describe the cluster, or name one in spec.clusterSelector")
    if not shuts_down:
        if spec.get("suspend"):
            yield Finding("spec.suspend", "a job that keeps its cluster cannot be suspended", SHUT_DOWN)
        if spec.get("ttlSecondsAfterFinished"):
            yield Finding("spec.ttlSecondsAfterFinished", "has no effect on a cluster that is kept", SHUT_DOWN)
        if QUEUE in labels:
            yield Finding("spec.shutdownAfterJobFinishes", "Kueue takes no job that keeps its cluster", SHUT_DOWN)
    if spec.get("clusterSelector") and (QUEUE in labels or spec.get("suspend")):
        yield Finding("spec.clusterSelector", "a job on another's cluster cannot be queued", "write a rayClusterSpec")
    if KAI_QUEUE in labels and mode == "K8sJobMode":
        yield Finding(
            "spec.submissionMode",
            "KAI takes no job whose submitter's pod comes after the cluster's",
            "write SidecarMode or HTTPMode",
        )
    if mode == "SidecarMode" and "submitterPodTemplate" in spec:
        yield Finding("spec.submitterPodTemplate", "SidecarMode has no submitter's pod", "remove it")
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if isinstance(spec.get(key), int) and spec[key] <= 0:
            yield Finding(f"spec.{key}", f"is {spec[key]}", "write a number of seconds above 0, or remove it")
    for key in ("backoffLimit", "ttlSecondsAfterFinished"):
        if isinstance(spec.get(key), int) and spec[key] < 0:
            yield Finding(f"spec.{key}", f"is {spec[key]}", "write 0 or more")
    yield from _retries(spec, mode, retries)
    if "submitterPodTemplate" in spec:
        template = mapping(spec["submitterPodTemplate"])
        path = "spec.submitterPodTemplate"
        if mapping(template.get("spec")).get("restartPolicy") not in ("Never", "OnFailure"):
            yield Finding(
                f"{path}.spec.restartPolicy", "a Kubernetes Job takes Never or OnFailure", "write restartPolicy: Never"
            )
        yield from pod_findings(template, path, {})


def _retries(spec: Mapping[str, Any], mode: Any, retries: Any) -> Iterator[Finding]:
    if not isinstance(retries, int) or retries <= 0:
        return
    path = "spec.backoffLimit"
    if mode == "InteractiveMode" or spec.get("clusterSelector"):
        yield Finding(path, "only a job with an entry point and a cluster of its own is tried again", "set it to 0")
        return
    head = mapping(mapping(mapping(spec.get("rayClusterSpec")).get("headGroupSpec")).get("template"))
    volumes = mappings(mapping(head.get("spec")).get("volumes"))
    if not any(set(volume) - {"name"} - GONE_WITH_THE_POD for _, volume in volumes):
        yield Finding(
            path,
            f"{retries} more attempts, and no volume that outlives the pods to continue from",
            "mount a persistentVolumeClaim for the checkpoints in head and workers, or set it to 0",
        )


def _cluster(spec: Mapping[str, Any], path: str, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    yield from _version(spec, path)
    labels = mapping(mapping(manifest.get("metadata")).get("labels"))
    if spec.get("enableInTreeAutoscaling") and QUEUE in labels:
        yield Finding(
            f"{path}.enableInTreeAutoscaling",
            "Kueue admits a cluster of a fixed size",
            "set it to false and replicas, minReplicas and maxReplicas to the same number",
        )
    head = mapping(spec.get("headGroupSpec"))
    groups = [(f"{path}.headGroupSpec", head)]
    workers = mappings(spec.get("workerGroupSpecs"))
    groups += [(f"{path}.workerGroupSpecs[{i}]", group) for i, group in workers]
    names = [group.get("groupName") for _, group in workers]
    for name, where in repeated(names, f"{path}.workerGroupSpecs", "groupName"):
        yield Finding(where, f"{name!r} is the name of another group, too", "give each group a name of its own")
    for i, group in workers:
        yield from _replicas(group, f"{path}.workerGroupSpecs[{i}]")
    for where, group in groups:
        yield from _group(group, where, spec.get("rayVersion"), QUEUE in labels)


def _version(spec: Mapping[str, Any], path: str) -> Iterator[Finding]:
    version = spec.get("rayVersion")
    if mapping(spec.get("authOptions")).get("mode") != "token":
        return
    parts = re.match(r"(\d{1,9})\.(\d{1,9})", str(version))
    if version is None:
        yield Finding(f"{path}.rayVersion", "is missing, tokens need it", "write the version of the image's Ray")
    elif not parts or (int(parts[1]), int(parts[2])) < (2, 52):
        fix = "use Ray 2.52 or newer, or authOptions.mode: disabled"
        yield Finding(f"{path}.rayVersion", f"{version!r} has no tokens", fix)


def _replicas(group: Mapping[str, Any], path: str) -> Iterator[Finding]:
    replicas, least, most = (group.get(key) for key in ("replicas", "minReplicas", "maxReplicas"))
    if not all(isinstance(number, int) for number in (replicas, least, most) if number is not None):
        return
    if least is not None and most is not None and least > most:
        yield Finding(f"{path}.minReplicas", f"{least} is above maxReplicas={most}", "lower it, or raise the other")
    elif replicas is not None and not (least or 0) <= replicas <= (replicas if most is None else most):
        fix = "set replicas, minReplicas and maxReplicas to the same number"
        yield Finding(f"{path}.replicas", f"{replicas} is not within {least} to {most}", fix)


def _group(group: Mapping[str, Any], path: str, version: Any, queued: bool) -> Iterator[Finding]:
    start = mapping(group.get("rayStartParams"))
    for key, value in start.items():
        if not isinstance(value, str):
            where = key_path(f"{path}.rayStartParams", key)
            yield Finding(where, f"{value!r} is not a string", f'quote it: "{plain(value)}"')
    if "labels" in start:
        yield Finding(f"{path}.rayStartParams.labels", "KubeRay refuses it", f"move it to {path}.labels")
    yield from labels_at(group.get("labels"), f"{path}.labels")
    if group.get("resources") and (both := [key for key in OF_RAY_START if start.get(key)]):
        fix = f"remove {' and '.join(both)} from rayStartParams"
        yield Finding(f"{path}.resources", "Ray's resources are in rayStartParams, too", fix)
    template = mapping(group.get("template"))
    where = f"{path}.template"
    annotations = mapping(mapping(template.get("metadata")).get("annotations"))
    placed = [key for key in TOPOLOGY if key in annotations]
    if len(placed) > 1:
        fix = f"remove {placed[1]}"
        yield Finding(f"{where}.metadata.annotations", "Kueue takes one kind of topology, not both", fix)
    elif placed and not queued:
        fix = f"add the label {QUEUE} to the object's metadata, or remove it"
        yield Finding(key_path(f"{where}.metadata.annotations", placed[0]), "only Kueue reads it", fix)
    yield from pod_findings(template, where, start)
    yield from _image_version(template, where, version)


def _image_version(template: Mapping[str, Any], path: str, version: Any) -> Iterator[Finding]:
    """Ray's own images say their version; of others it is not known."""
    for i, container in mappings(mapping(template.get("spec")).get("containers"))[:1]:
        tag = re.fullmatch(r"(?:.*/)?rayproject/ray(?:-ml|-llm)?:(\d+\.\d+\.\d+)(?:-.*)?", str(container.get("image")))
        if tag and version is not None and tag[1] != version:
            where = f"{path}.spec.containers[{i}].image"
            yield Finding(where, f"has Ray {tag[1]}, rayVersion says {version}", "make the two the same")
