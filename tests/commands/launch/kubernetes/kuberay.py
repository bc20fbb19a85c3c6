"""KubeRay's schema for the tests, and what Kubernetes and KubeRay make of a manifest, from their sources."""

import os
import re
from pathlib import Path

import pytest

CRDS = Path(
    os.environ.get("KUBERAY_CRDS") or Path(__file__).parents[5] / "shared/data/kuberay-crds",
)
needs_crds = pytest.mark.skipif(
    not (CRDS / "ray.io_rayjobs.yaml").exists(),
    reason="KUBERAY_CRDS names no folder with ray.io_rayjobs.yaml: copy ray-operator/config/crd/bases of KubeRay",
)
EXPANDED = re.compile(r"\$\$|\$\(([^)]*)\)")


def expand(text: str, variables: dict[str, str]) -> str:
    """What a container sees of `env: value`, `command` and `args` (third_party/forked/golang/expansion)."""
    return EXPANDED.sub(lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), text)
