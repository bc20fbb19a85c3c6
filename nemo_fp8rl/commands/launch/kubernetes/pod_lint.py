"""What is wrong with a pod's template: the API server says so only when KubeRay creates the pods."""

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from nemo_fp8rl.commands.launch.kubernetes.manifest_parts import (
    Finding,
    key_path,
    mapping,
    mappings,
    plain,
    quantity,
    repeated,
    tags,
)
from nemo_fp8rl.common.secret_variables import looks_secret

OF_KUBERAY = {"ray-token", "ray-logs", "shared-mem"}
"""Volumes that KubeRay adds to a pod."""
GPU = re.compile(r"(nvidia|amd|intel)\.com/.*gpu.*|nvidia\.com/mig-.*")
ONE_OF = {
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "operator": ("Exists", "Equal", "Lt", "Gt"),
    "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
}


def pod_findings(template: Mapping[str, Any], path: str, start: Mapping[str, Any]) -> Iterator[Finding]:
    yield from tags(mapping(template.get("metadata")), f"{path}.metadata")
    spec, path = mapping(template.get("spec")), f"{path}.spec"
    containers = mappings(spec.get("containers"))
    if not containers:
        yield Finding(f"{path}.containers", "there is none", "describe the container that runs Ray")
    if spec.get("hostNetwork") and spec.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield Finding(
            f"{path}.dnsPolicy",
            "a pod on its node's network does not find the services of the cluster, so neither Ray's head",
            "write dnsPolicy: ClusterFirstWithHostNet",
        )
    yield from _one_of(spec, path, ("restartPolicy", "dnsPolicy"))
    for i, toleration in mappings(spec.get("tolerations")):
        where = f"{path}.tolerations[{i}]"
        yield from _one_of(toleration, where, ("operator", "effect"))
        if toleration.get("operator") == "Exists" and toleration.get("value"):
            yield Finding(f"{where}.value", "operator Exists takes none", "remove it, or write operator: Equal")
    volumes = mappings(spec.get("volumes"))
    for name, where in repeated([volume.get("name") for _, volume in volumes], f"{path}.volumes", "name"):
        yield Finding(where, f"{name!r} is the name of another volume, too", "give each volume a name of its own")
    for i, volume in volumes:
        if len(set(volume) - {"name"}) != 1:
            fix = "give it exactly one source, such as persistentVolumeClaim"
            yield Finding(f"{path}.volumes[{i}]", f"has {len(volume) - 1} sources", fix)
    every = [(f"{path}.containers[{i}]", container) for i, container in containers]
    every += [(f"{path}.initContainers[{i}]", one) for i, one in mappings(spec.get("initContainers"))]
    names = [container.get("name") for _, container in every]
    for name, _ in repeated(names, path, "name"):
        where = [place for (place, _), other in zip(every, names, strict=True) if str(other) == name][-1]
        yield Finding(f"{where}.name", f"{name!r} is the name of another container, too", "give each container its own")
    by_name = {str(volume.get("name")): (i, volume) for i, volume in volumes}
    for where, container in every:
        yield from _container(container, where, by_name)
    if every:
        yield from _gpus_of_ray(every[0][1], every[0][0], start)
        yield from _shared_memory(every[0][1], every[0][0], path, by_name, start)


def _container(container: Mapping[str, Any], path: str, volumes: Mapping[Any, Any]) -> Iterator[Finding]:
    if not container.get("image"):
        yield Finding(f"{path}.image", "is missing", "name the image")
    yield from _one_of(container, path, ("imagePullPolicy",))
    mounts = mappings(container.get("volumeMounts"))
    for i, mount in mounts:
        if str(mount.get("name")) not in {*volumes, *OF_KUBERAY}:
            where = f"{path}.volumeMounts[{i}].name"
            yield Finding(where, f"there is no volume {mount.get('name')!r}", "add it to the pod's volumes")
        if not str(mount.get("mountPath")).startswith("/"):
            where = f"{path}.volumeMounts[{i}].mountPath"
            yield Finding(where, f"{mount.get('mountPath')!r} is not absolute", "begin it with a slash")
    paths = [mount.get("mountPath") for _, mount in mounts]
    for name, where in repeated(paths, f"{path}.volumeMounts", "mountPath"):
        yield Finding(where, f"{name!r} is another mount's path, too", "mount one of the two elsewhere")
    variables = mappings(container.get("env"))
    for name, where in repeated([variable.get("name") for _, variable in variables], f"{path}.env", "name"):
        yield Finding(where, f"{name} is set twice", "remove one of the two")
    for i, variable in variables:
        yield from _variable(variable, f"{path}.env[{i}]")
    yield from _resources(mapping(container.get("resources")), f"{path}.resources")


def _variable(variable: Mapping[str, Any], path: str) -> Iterator[Finding]:
    name, value = variable.get("name"), variable.get("value")
    if value is not None and not isinstance(value, str):
        yield Finding(f"{path}.value", f"{value!r} is not a string", f'quote it: "{plain(value)}"')
    if value and "valueFrom" in variable:
        yield Finding(f"{path}.valueFrom", "there is a value, too", "remove one of the two")
    if isinstance(value, str) and looks_secret(str(name), value):
        yield Finding(
            f"{path}.value",
            f"{name} looks like a secret, and everybody who may read the object would see it",
            "put it into a Kubernetes secret and name that in valueFrom.secretKeyRef, or in envFrom",
        )


def _resources(resources: Mapping[str, Any], path: str) -> Iterator[Finding]:
    requests, limits = mapping(resources.get("requests")), mapping(resources.get("limits"))
    for part, amounts in (("requests", requests), ("limits", limits)):
        for name, amount in amounts.items():
            where = key_path(f"{path}.{part}", name)
            number = quantity(amount)
            if number is None:
                yield Finding(where, f"{amount!r} is not a quantity", "write a number, 500m, 512Gi or 512G")
            elif "/" in name and number != int(number):
                yield Finding(where, f"{amount} is not whole, devices are not divided", "write a whole number")
    for name, asked in requests.items():
        least, most = quantity(asked), quantity(limits.get(name))
        if "/" in name and (least is not None) and least != most:
            where = key_path(f"{path}.limits", name)
            problem = f"is {limits.get(name, 'missing')}, requests has {asked}, and devices are not lent"
            yield Finding(where, problem, "write the same number twice")
        elif least is not None and most is not None and least > most:
            where = key_path(f"{path}.requests", name)
            yield Finding(where, f"{asked} is above the limit of {limits[name]}", "lower it, or raise the limit")


def _gpus_of_ray(container: Mapping[str, Any], path: str, start: Mapping[str, Any]) -> Iterator[Finding]:
    """Ray schedules as many GPUs as it is told; more than there are ends in a CUDA error, fewer leaves some idle."""
    limits = mapping(mapping(container.get("resources")).get("limits"))
    held = [(name, quantity(amount)) for name, amount in limits.items() if GPU.fullmatch(name)]
    told = quantity(start.get("num-gpus"))
    total = sum((number or Decimal(0) for _, number in held), Decimal(0))
    if not held and told in [quantity(amount) for name, amount in limits.items() if "/" in name]:
        return  # a device by a name of the cluster's own
    if told is not None and told != total:
        where = key_path(f"{path}.resources.limits", held[0][0] if held else "nvidia.com/gpu")
        yield Finding(where, f"is {total:f}, but rayStartParams has num-gpus {told:f}", "make the two the same")


def _shared_memory(
    container: Mapping[str, Any], path: str, pod: str, volumes: Mapping[Any, Any], start: Mapping[str, Any]
) -> Iterator[Finding]:
    """Findings on /dev/shm. Where it is not mounted KubeRay adds it, but not beside a plasma-directory."""
    resources = mapping(container.get("resources"))
    limits = mapping(resources.get("limits"))
    mount = next((m for _, m in mappings(container.get("volumeMounts")) if m.get("mountPath") == "/dev/shm"), None)
    if mount is None:
        if "plasma-directory" in start and any(GPU.fullmatch(name) for name in limits):
            yield Finding(
                f"{path}.volumeMounts",
                "nothing is mounted at /dev/shm, which NCCL and vLLM fill, and KubeRay adds none beside a "
                "plasma-directory",
                "mount an emptyDir of medium Memory there",
            )
        return
    i, volume = volumes.get(str(mount.get("name")), (0, {}))
    directory = volume.get("emptyDir")
    where = f"{pod}.volumes[{i}].emptyDir"
    if directory is not None and mapping(directory).get("medium") != "Memory":
        yield Finding(f"{where}.medium", "/dev/shm is on a disk", "write medium: Memory")
    if directory is None:
        return
    size, memory = mapping(directory).get("sizeLimit"), limits.get("memory")
    if size is not None and quantity(size) is None:
        yield Finding(f"{where}.sizeLimit", f"{size!r} is not a quantity", "write a number, 512Gi or 512G")
    elif (most := quantity(memory)) is not None and (quantity(size) or Decimal(0)) > most:
        fix = "lower it below the memory limit, against which it counts"
        yield Finding(f"{where}.sizeLimit", f"{size} is above the container's memory limit of {memory}", fix)


def _one_of(values: Mapping[str, Any], path: str, keys: Sequence[str]) -> Iterator[Finding]:
    for key in keys:
        if (value := values.get(key)) and value not in ONE_OF[key]:
            yield Finding(f"{path}.{key}", f"{value!r} is unknown", f"write one of {', '.join(ONE_OF[key])}")
