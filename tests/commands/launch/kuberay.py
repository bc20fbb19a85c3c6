"""KubeRay's schema, applied strictly, and how Kubernetes expands variables, from their sources.

The rules in CEL of the schema (`x-kubernetes-validations`) are not evaluated.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

CRDS = Path(
    os.environ.get("KUBERAY_CRDS") or Path(__file__).parents[4] / "shared/data/kuberay-crds",
)
needs_crds = pytest.mark.skipif(
    not (CRDS / "ray.io_rayjobs.yaml").exists(),
    reason="KUBERAY_CRDS names no folder with ray.io_rayjobs.yaml: copy ray-operator/config/crd/bases of KubeRay",
)
EXPANDED = re.compile(r"\$\$|\$\(([^)]*)\)")


def expand(text: str, variables: dict[str, str]) -> str:
    """What a container sees of `env: value`, `command` and `args` (third_party/forked/golang/expansion)."""
    return EXPANDED.sub(lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), text)


def schema_errors(manifest: dict[str, Any]) -> list[str]:
    """Return what KubeRay's schema refuses in a RayJob or RayCluster, a path and a message each."""
    kind, version = manifest["kind"], manifest["apiVersion"].rpartition("/")[2]
    errors = _validator(f"ray.io_{kind.lower()}s.yaml", version).iter_errors(manifest)
    return [f"{error.json_path}: {error.message}" for error in errors]


@cache
def _validator(file: str, version: str) -> Draft202012Validator:
    definition = yaml.load((CRDS / file).read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (schema,) = (v["schema"]["openAPIV3Schema"] for v in definition["spec"]["versions"] if v["name"] == version)
    schema = _strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(schema)


def _strict(schema: Any) -> Any:
    """Turn a part of a CRD's schema into JSON schema that refuses keys which it does not name."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: value if key in ("default", "enum") else _strict(value) for key, value in schema.items()}
    if strict.get("x-kubernetes-int-or-string") is True:
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    properties = strict.get("properties")
    if isinstance(properties, dict) and strict.get("type") == "object":
        if not strict.get("x-kubernetes-preserve-unknown-fields"):
            strict.setdefault("additionalProperties", False)
        if isinstance(strict.get("required"), list):  # the API server fills in defaults first
            strict["required"] = [key for key in strict["required"] if "default" not in properties.get(key, {})]
    return strict
