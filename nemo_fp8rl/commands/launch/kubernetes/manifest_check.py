"""Manifests of KubeRay, checked without a cluster: against its schema, made strict, and by `lint`.

An API server drops or refuses what the schema of a custom resource does not name; here it is refused. The schema's
rules in CEL (`x-kubernetes-validations`) are not evaluated.
"""

import difflib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from nemo_fp8rl.commands.launch.kubernetes.manifest_file import LOADER, documents
from nemo_fp8rl.commands.launch.kubernetes.manifest_lint import lint
from nemo_fp8rl.commands.launch.kubernetes.manifest_parts import QUANTITY, Finding, key_path
from nemo_fp8rl.common.errors import UserError, one_line
from nemo_fp8rl.config.yaml_tree import unreadable

PLURAL = {"RayJob": "rayjobs", "RayCluster": "rayclusters", "RayService": "rayservices"}
__all__ = ["Finding", "check_file", "lint", "schema_errors"]


def check_file(path: Path, crds: Path | None = None) -> dict[str, list[Finding]]:
    """Findings for every RayJob and RayCluster of a file, by "kind name". Raises UserError when it has none."""
    try:
        manifests = documents(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    found = {}
    for i, manifest in enumerate(manifests):
        if not isinstance(manifest, dict) or manifest.get("kind") not in ("RayJob", "RayCluster"):
            continue
        metadata = manifest.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        of_schema = schema_errors(manifest, crds) if crds else []
        seen = {finding.path for finding in of_schema}
        key = f"{manifest['kind']} {name or f'number {i + 1}'}"
        found[key] = of_schema + [finding for finding in lint(manifest) if finding.path not in seen]
    if not found:
        raise UserError(f"{path} holds no RayJob and no RayCluster")
    return found


def schema_errors(manifest: dict[str, Any], crds: Path) -> list[Finding]:
    """crds: a folder with ray.io_rayjobs.yaml and ray.io_rayclusters.yaml, of config/crd/bases in KubeRay's repository.

    Raises UserError when it has no schema for the manifest's kind and version, or one that cannot be used.
    """
    kind, version = manifest.get("kind"), str(manifest.get("apiVersion")).rpartition("/")[2]
    if kind not in PLURAL:
        raise UserError(f"kind {kind!r}: there is a schema for {', '.join(PLURAL)}")
    validator = _validator(crds, PLURAL[kind], version)
    try:
        errors = list(validator.iter_errors(manifest))
    except Exception as error:  # whatever becomes of words that mean nothing; what raises them has no base in common
        path, why = _file(crds, PLURAL[kind]), one_line(error)[:200]
        raise UserError(f"{path} has a schema that cannot be used ({why}); copy it from KubeRay again") from None
    return [finding for error in errors for finding in _findings(error)]


def _file(crds: Path, plural: str) -> Path:
    return crds / f"ray.io_{plural}.yaml"


@cache
def _validator(crds: Path, plural: str, version: str) -> Any:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    path = _file(crds, plural)
    try:
        (definition,) = documents(path, LOADER)
        schemas = {str(one["name"]): one["schema"]["openAPIV3Schema"] for one in definition["spec"]["versions"]}
        if version not in schemas:
            raise UserError(f"{path} has no version {version!r}; it has {', '.join(schemas)}")
        schema = _strict(schemas[version])
        schema["properties"]["metadata"] = {"type": "object"}
    except FileNotFoundError:
        raise UserError(f"there is no {path}; copy it from ray-operator/config/crd/bases of KubeRay") from None
    except UserError:
        raise
    except unreadable():
        raise UserError(f"{path} is no custom resource definition of KubeRay; copy it from there again") from None
    return Draft202012Validator(schema, registry=Registry())  # which fetches nothing that a schema names


def _strict(schema: Any) -> Any:
    """A part of a CRD's schema as JSON schema, with keys that it does not name refused."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value if key in ("default", "enum") else _strict(value) for key, value in schema.items()}
    if kept.get("x-kubernetes-int-or-string") is True:
        of_quantity = {"pattern": QUANTITY.pattern.join(("^(", ")$"))} if "pattern" in kept else {}
        return {"anyOf": [{"type": "integer"}, {"type": "string", **of_quantity}]}
    if kept.pop("nullable", False) is True and isinstance(kept.get("type"), str):
        kept["type"] = [kept["type"], "null"]
    properties = kept.get("properties")
    if isinstance(properties, dict) and kept.get("type") == "object":
        if not kept.get("x-kubernetes-preserve-unknown-fields"):
            kept.setdefault("additionalProperties", False)
        if isinstance(kept.get("required"), list):  # the API server fills in defaults before it looks
            kept["required"] = [key for key in kept["required"] if "default" not in properties.get(key, {})]
    return kept


def _findings(error: Any) -> Iterator[Finding]:
    path = ""
    for key in error.absolute_path:
        path = key_path(path, key)
    value, given = error.instance, _shown(error.instance)
    if error.validator == "additionalProperties" and error.validator_value is False:
        known = error.schema.get("properties", {})
        for key in (key for key in value if key not in known):
            near = difflib.get_close_matches(str(key), known, 1)
            fix = f"did you mean {near[0]}?" if near else f"remove it, known here are {', '.join(sorted(known))}"
            yield Finding(key_path(path, key), "is unknown to KubeRay's schema", fix)
    elif error.validator == "required":
        key = next(key for key in error.validator_value if key not in value)
        yield Finding(key_path(path, key), "is missing", f"add {key}")
    elif error.validator == "type":
        wanted = error.validator_value
        text = str(value).lower() if isinstance(value, bool) else str(value)
        is_scalar = isinstance(value, str | int | float)
        fix = f'quote it: "{text}"' if wanted == "string" and is_scalar else f"write one of type {wanted}"
        if wanted in ("integer", "number", "boolean") and isinstance(value, str):
            fix = f"write it without quotes, as {wanted}"
        yield Finding(path, f"{given} is not of type {wanted}", fix)
    elif error.validator == "enum":
        allowed = ", ".join(str(one) for one in error.validator_value)
        yield Finding(path, f"{given} is unknown", f"write one of {allowed}")
    elif error.validator in ("anyOf", "pattern"):
        yield Finding(path, f"{given} is not a quantity", "write a number, 500m, 512Gi or 512G")
    else:
        yield Finding(path, error.message[:120], f"keep to {error.validator}: {error.validator_value}")


def _shown(value: Any) -> str:
    try:
        return json.dumps(value, default=str)[:60]
    except (TypeError, ValueError, RecursionError):  # a key that JSON has not, or an alias of what it stands in
        return repr(value)[:60]
