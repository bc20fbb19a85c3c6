"""What a Kubernetes cluster asks for: `kubernetes:` in a site file."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Toleration:
    key: str
    operator: str = "Exists"
    value: str | None = None
    """With operator Equal."""
    effect: str | None = "NoSchedule"
    """null: any."""


@dataclass(frozen=True)
class HeadConfig:
    """The head's pod, for which no GPU is asked: the driver runs there, Ray's actors do not."""

    cpus: int = 4
    memory: str = "32Gi"
    node_selector: dict[str, str] = field(default_factory=dict)
    """The submitter's, too, as are the tolerations."""
    tolerations: tuple[Toleration, ...] = ()


@dataclass(frozen=True)
class SecurityContext:
    """Of all pods. What is null is the image's, or the cluster's."""

    run_as_user: int | None = None
    """One other than 0 also makes containers those of the Pod Security Standard `restricted`: without capabilities (but
    for that of `rdma`), a way to more of them, and system calls outside of the runtime's profile."""
    run_as_group: int | None = None
    fs_group: int | None = None
    """Which volumes are made to belong to, where their kind allows it."""


@dataclass(frozen=True)
class GenerationGroup:
    """The pods of the engines, where they are of another kind than the trainer's. What is null is as for those."""

    gpus_per_node: int | None = None
    cpus: int | None = None
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
    """Of the namespace: a LocalQueue."""
    required_topology: str | None = None
    """A node label; the pods of a group must be on nodes that share its value."""
    preferred_topology: str | None = None
    """The same, where it can be had."""


@dataclass(frozen=True)
class KaiConfig:
    queue: str


@dataclass(frozen=True)
class KubernetesConfig:
    image: str | None = None
    """With nemo-fp8rl, its requirements and Ray; required. The same in all pods."""
    image_pull_policy: str | None = None
    """Always, IfNotPresent or Never; null: the cluster's default."""
    image_pull_secrets: tuple[str, ...] = ()
    namespace: str | None = None
    """null: that of kubectl's context."""
    service_account: str | None = None
    ray_version: str = "2.60.0"
    """Of the Ray in the image."""
    token: bool = True
    """Whether Ray asks for a token, which KubeRay (1.5.1 or newer) makes and keeps in a secret."""
    cpus: int | None = None
    """Of a GPU node's pod. null asks for none; Ray then counts all of the node's."""
    memory: str | None = None
    """Of a GPU node's pod, such as 512Gi. null asks for none."""
    shared_memory: str = "64Gi"
    """/dev/shm of a GPU node's pod, for NCCL, vLLM and Ray's objects. What is used of it counts as memory."""
    head: HeadConfig = field(default_factory=HeadConfig)
    generation: GenerationGroup | None = None
    gpu_resource: str = "nvidia.com/gpu"
    rdma: dict[str, int] = field(default_factory=dict)
    """Resources of RDMA devices for a GPU node's pod, such as rdma/ib: 1; pods that have them may lock memory."""
    host_network: bool = False
    """GPU nodes' pods use the network of the node. One such pod a node, since Ray's ports are then the node's."""
    secrets: tuple[str, ...] = ()
    """Kubernetes secrets, each key of which becomes an environment variable."""
    secret_env: tuple[SecretVariable, ...] = ()
    """Single variables from secrets."""
    volumes: tuple[Volume, ...] = ()
    workdir: str | None = None
    """What relative paths of a recipe are relative to; null: the path of the first volume that can be written."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """For GPU nodes' pods."""
    tolerations: tuple[Toleration, ...] = (Toleration("nvidia.com/gpu"),)
    """Of GPU nodes' pods."""
    labels: dict[str, str] = field(default_factory=dict)
    """Of the job and all pods."""
    annotations: dict[str, str] = field(default_factory=dict)
    """Of GPU nodes' pods, such as k8s.v1.cni.cncf.io/networks."""
    priority_class: str | None = None
    security_context: SecurityContext = field(default_factory=SecurityContext)
    termination_grace_seconds: int | None = None
    """In which a pod that is told to end must have ended. null: 600 where it waits for the run to save, a step and a
    checkpoint; else the cluster's 30."""
    backoff_limit: int = 3
    """Attempts after the first, each with a new cluster; a run continues from its latest checkpoint."""
    start_seconds: int | None = None
    """Within which all pods must be ready; null: the job waits. For a KubeRay that knows preRunningDeadlineSeconds."""
    deadline_seconds: int | None = None
    """Within which the job must be done."""
    ttl_seconds: int = 300
    """How long the pods of a finished job are kept, to look at."""
    kueue: KueueConfig | None = None
    kai: KaiConfig | None = None
    crds: str | None = None
    """A folder with ray.io_rayjobs.yaml and ray.io_rayclusters.yaml of the cluster's KubeRay to check against."""
