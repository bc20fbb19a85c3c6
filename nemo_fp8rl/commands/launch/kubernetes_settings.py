"""The settings of a Kubernetes cluster: the block `kubernetes:` of a site file."""

from dataclasses import dataclass, field
from typing import Annotated

from nemo_fp8rl.commands.launch.limits import COUNT, COUNT_OR_0, GPUS, ID, SECONDS, SECONDS_OR_0


@dataclass(frozen=True)
class Toleration:
    key: str
    operator: str = "Exists"
    value: str | None = None
    """The taint's value, with operator Equal."""
    effect: str | None = "NoSchedule"
    """The taint's effect; null: any."""


@dataclass(frozen=True)
class HeadConfig:
    """The head's pod. It has no GPU: the driver runs there, Ray's actors do not."""

    cpus: int = 4
    memory: str = "32Gi"
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that a node must have for the pods of the head and the submitter. The tolerations are for both as well."""
    tolerations: tuple[Toleration, ...] = ()


@dataclass(frozen=True)
class SecurityContext:
    """The security context of all pods. null: the image's or the cluster's choice."""

    run_as_user: Annotated[int | None, ID] = None
    """A user other than 0 also makes containers keep the Pod Security Standard `restricted`: no capabilities but
    the one that `rdma` needs, no privilege escalation, the runtime's profile of system calls."""
    run_as_group: Annotated[int | None, ID] = None
    fs_group: Annotated[int | None, ID] = None
    """The group that owns the volumes, if the kind of the volume allows it."""


@dataclass(frozen=True)
class GenerationGroup:
    """The engines' pods if they are of another kind than the trainer's. null: as for the trainer's pods."""

    gpus_per_node: Annotated[int | None, GPUS] = None
    cpus: Annotated[int | None, COUNT] = None
    memory: str | None = None
    node_selector: dict[str, str] | None = None


@dataclass(frozen=True)
class SecretVariable:
    """A variable from one key of a Kubernetes secret."""

    name: str
    secret: str
    key: str


@dataclass(frozen=True)
class Volume:
    """A persistent volume claim, mounted in every pod; of a class that many nodes may mount, such as ReadWriteMany."""

    claim: str
    path: str
    sub_path: str | None = None
    read_only: bool = False


@dataclass(frozen=True)
class KueueConfig:
    queue: str
    """A LocalQueue of the namespace."""
    required_topology: str | None = None
    """A node label; the pods of a group must be on nodes that share its value."""
    preferred_topology: str | None = None
    """A node label; the pods of a group are on nodes that share its value if the cluster has such nodes."""


@dataclass(frozen=True)
class KaiConfig:
    queue: str


@dataclass(frozen=True)
class KubernetesConfig:
    image: str | None = None
    """An image with nemo-fp8rl, its requirements and Ray, the same in all pods; required."""
    image_pull_policy: str | None = None
    """Always, IfNotPresent or Never; null: the cluster's default."""
    image_pull_secrets: tuple[str, ...] = ()
    namespace: str | None = None
    """The namespace of the job; null: that of kubectl's context."""
    service_account: str | None = None
    ray_version: str = "2.60.0"
    """The version of the Ray in the image."""
    token: bool = True
    """Protect Ray by a token, which KubeRay (1.5.1 or newer) makes and keeps in a secret."""
    cpus: Annotated[int | None, COUNT] = None
    """CPUs of a GPU node's pod. null: no request; Ray then counts all CPUs of the node."""
    memory: str | None = None
    """Memory of a GPU node's pod, such as 512Gi. null: no request."""
    shared_memory: str = "64Gi"
    """/dev/shm of a GPU node's pod, for NCCL, vLLM and Ray's objects. Its used part counts as memory of the pod."""
    head: HeadConfig = field(default_factory=HeadConfig)
    generation: GenerationGroup | None = None
    gpu_resource: str = "nvidia.com/gpu"
    rdma: dict[str, int] = field(default_factory=dict)
    """Resources of RDMA devices for a GPU node's pod, such as rdma/ib: 1; pods that have them may lock memory."""
    host_network: bool = False
    """Pods on GPU nodes use the network of the node. A node can then have one such pod, because Ray takes its ports."""
    secrets: tuple[str, ...] = ()
    """Kubernetes secrets, each key of which becomes an environment variable."""
    secret_env: tuple[SecretVariable, ...] = ()
    """Single variables from secrets."""
    volumes: tuple[Volume, ...] = ()
    workdir: str | None = None
    """The folder of a recipe's relative paths; null: the path of the first writable volume."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that a node must have for GPU nodes' pods."""
    tolerations: tuple[Toleration, ...] = (Toleration("nvidia.com/gpu"),)
    """Tolerations of GPU nodes' pods."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the job and all pods."""
    annotations: dict[str, str] = field(default_factory=dict)
    """Annotations of GPU nodes' pods, such as k8s.v1.cni.cncf.io/networks."""
    priority_class: str | None = None
    security_context: SecurityContext = field(default_factory=SecurityContext)
    termination_grace_seconds: Annotated[int | None, SECONDS_OR_0] = None
    """Seconds from the request to end a pod until it is killed. null: 600 if the pod waits for the run to finish a step
    and save, else the cluster's 30."""
    backoff_limit: Annotated[int, COUNT_OR_0] = 3
    """Attempts after the first, each with a new cluster; a run continues from its latest checkpoint."""
    start_seconds: Annotated[int | None, SECONDS] = None
    """Seconds for all pods to be ready; null: the job waits. KubeRay must know preRunningDeadlineSeconds."""
    deadline_seconds: Annotated[int | None, SECONDS] = None
    """Seconds within which the job must be done."""
    ttl_seconds: Annotated[int, SECONDS_OR_0] = 300
    """Seconds that the pods of a finished job stay for inspection."""
    kueue: KueueConfig | None = None
    kai: KaiConfig | None = None
