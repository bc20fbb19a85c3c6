"""What a complete refit is: every HF name with shape and dtype, and the version it belongs to."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import BLOCK, Fp8Layers, scale_name, scale_shape
from nemo_fp8rl.fp8.format import E4M3
from nemo_fp8rl.hf.region import Region, index, overlap, placed


class RefitError(RuntimeError):
    """A refit that must not be applied: the message names the tensors."""


@dataclass(frozen=True)
class TensorSpec:
    """dtype is torch's name without the prefix, such as float8_e4m3fn.

    start: where this begins in the whole tensor, when it is the part that one rank holds; empty for a whole one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...] = ()

    @property
    def region(self) -> Region:
        return placed(self.start or (0,) * len(self.shape), self.shape)


@dataclass(frozen=True)
class Manifest:
    """The tensors of one version. Versions grow by one a refit."""

    version: int
    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(
        cls, version: int, tensors: Mapping[str, Tensor], starts: Mapping[str, tuple[int, ...]] | None = None
    ) -> "Manifest":
        """starts: of the parts among the tensors, by name."""
        starts = starts or {}
        return cls(version, tuple(_spec(name, tensor, starts.get(name, ())) for name, tensor in tensors.items()))

    @property
    def names(self) -> set[str]:
        return {spec.name for spec in self.tensors}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        raw = json.loads(text)
        specs = (TensorSpec(t["name"], t["dtype"], tuple(t["shape"]), tuple(t["start"])) for t in raw["tensors"])
        return cls(raw["version"], tuple(specs))


@dataclass(frozen=True)
class Update:
    """One refit on its way: the manifest and the tensors it describes, by HF name."""

    manifest: Manifest
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def verify(self, expected: Mapping[str, tuple[int, ...]], fp8_layers: Fp8Layers) -> None:
        """Raise RefitError unless this is exactly what an engine that holds `expected` (name: shape) must receive.

        Scales need not be listed. Checked before a byte is applied: no tensor missing or unknown, every one shaped
        as the engine's and typed as the manifest says, FP8 exactly where the contract puts it, with finite scales.
        """
        scales = {scale_name(name) for name in expected if fp8_layers.quantizes(name)}
        _same_names("engine", {*expected, *scales}, self.manifest.names)
        _same_names("manifest", self.manifest.names, set(self.tensors))
        for spec in self.manifest.tensors:
            tensor = self.tensors[spec.name]
            found = _spec(spec.name, tensor, spec.start)
            if found != spec:
                raise RefitError(f"refit {self.manifest.version}: {found} differs from its manifest, {spec}")
            if spec.name in expected and tuple(expected[spec.name]) != spec.shape:
                raise RefitError(
                    f"refit {self.manifest.version}: {spec.name} is {list(spec.shape)}, the engine's is "
                    f"{list(expected[spec.name])}"
                )
            quantized = fp8_layers.quantizes(spec.name)
            if (tensor.dtype == E4M3) != quantized:
                wanted = "FP8" if quantized else "in high precision"
                raise RefitError(f"refit {self.manifest.version}: {spec.name} is {spec.dtype}, must be {wanted}")
            if tensor.dtype == E4M3:
                self._verify_scale(spec)

    def _verify_scale(self, weight: TensorSpec) -> None:
        scale = self.tensors.get(scale_name(weight.name))
        if scale is None:
            raise RefitError(f"refit {self.manifest.version}: {weight.name} has no {scale_name(weight.name)}")
        if len(weight.shape) != len(BLOCK):
            raise RefitError(f"refit {self.manifest.version}: {weight.name} is FP8 but not a matrix: {weight.shape}")
        shape = scale_shape(weight.shape, BLOCK)
        if tuple(scale.shape) != shape or scale.dtype != torch.float32 or not torch.isfinite(scale).all():
            raise RefitError(
                f"refit {self.manifest.version}: {scale_name(weight.name)} must be finite float32 {list(shape)}, "
                f"got {scale.dtype} {list(scale.shape)}"
            )


def _spec(name: str, tensor: Tensor, start: tuple[int, ...] = ()) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start if any(start) else ())


def joined(updates: Sequence[Update]) -> Update:
    """One update from what the trainer's ranks sent, each its parts. Raises RefitError unless they fit together.

    A tensor in one piece is taken as it is. Others are put together where their parts say; a part that is missing at
    the end makes the tensor too short, which `Update.verify` finds.
    """
    versions = {update.manifest.version for update in updates}
    if len(versions) != 1:
        raise RefitError(f"the trainer's ranks sent different versions: {sorted(versions)}")
    (version,) = versions
    parts: dict[str, list[tuple[TensorSpec, Tensor]]] = {}
    for update in updates:
        _same_names("manifest", update.manifest.names, set(update.tensors))
        for spec in update.manifest.tensors:
            parts.setdefault(spec.name, []).append((spec, update.tensors[spec.name]))
    tensors = {name: _whole(version, held) for name, held in parts.items()}
    return Update(Manifest.of(version, tensors), tensors)


def _whole(version: int, parts: list[tuple[TensorSpec, Tensor]]) -> Tensor:
    """The tensor that these parts make up, each in its place and no place twice."""
    first, tensor = parts[0]
    for spec, held in parts:
        found = _spec(spec.name, held, spec.start)
        if found != spec:
            raise RefitError(f"refit {version}: {found} differs from its manifest, {spec}")
        if spec.dtype != first.dtype or len(spec.shape) != len(first.shape):
            raise RefitError(f"refit {version}: {spec} and {first} are not parts of one tensor")
    if len(parts) == 1 and not first.start:
        return tensor
    regions = [spec.region for spec, _ in parts]
    if any(overlap(a, b) is not None for a, b in combinations(regions, 2)):
        raise RefitError(f"refit {version}: two ranks sent the same part of {first.name}")
    shape = tuple(max(region[dim][1] for region in regions) for dim in range(len(first.shape)))
    if sum(held.numel() for _, held in parts) != math.prod(shape):
        raise RefitError(f"refit {version}: parts of {first.name} are missing")
    out = tensor.new_empty(shape)
    for (_, held), region in zip(parts, regions, strict=True):
        out[index(region, (0,) * len(region))] = held
    return out


def _same_names(side: str, wanted: set[str], got: set[str]) -> None:
    missing, unknown = sorted(wanted - got), sorted(got - wanted)
    if missing:
        raise RefitError(f"the refit lacks {len(missing)} tensors that the {side} needs, among them {missing[0]}")
    if unknown:
        raise RefitError(f"the refit holds {len(unknown)} tensors unknown to the {side}, among them {unknown[0]}")
