"""What a complete refit is: every HF name with shape and dtype, and the version it belongs to."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import BLOCK, Fp8Layers, scale_name, scale_shape
from nemo_fp8rl.fp8.format import E4M3


class RefitError(RuntimeError):
    """A refit that must not be applied: the message names the tensors."""


@dataclass(frozen=True)
class TensorSpec:
    """dtype is torch's name without the prefix, such as float8_e4m3fn."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The tensors of one version. Versions grow by one a refit."""

    version: int
    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, version: int, tensors: Mapping[str, Tensor]) -> "Manifest":
        specs = (TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items())
        return cls(version, tuple(specs))

    @property
    def names(self) -> set[str]:
        return {spec.name for spec in self.tensors}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        raw = json.loads(text)
        specs = (TensorSpec(t["name"], t["dtype"], tuple(t["shape"])) for t in raw["tensors"])
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
            found = TensorSpec(spec.name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
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


def _same_names(side: str, wanted: set[str], got: set[str]) -> None:
    missing, unknown = sorted(wanted - got), sorted(got - wanted)
    if missing:
        raise RefitError(f"the refit lacks {len(missing)} tensors that the {side} needs, among them {missing[0]}")
    if unknown:
        raise RefitError(f"the refit holds {len(unknown)} tensors unknown to the {side}, among them {unknown[0]}")
