"""The global scales of quantized weights: chosen once for a fused matrix, and alike on all ranks that share it.

Values do not depend on a power-of-two global scale, as long as no block scale saturates. So it is chosen with headroom
when weights are loaded, and stays: bytes of blocks that do not change then stay as well, and ranks need not agree on
the largest value in every step. It is raised, which is logged and counted, when a weight has outgrown it. Float32
global scales follow the largest value at every step, as Transformer Engine's do.

The scales are part of a checkpoint, because blocks of tiny values are flushed relative to them.
"""

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import Format, Fp8Layers, ScaleFormat, encode_scale, largest_magnitude
from nemo_fp8rl.policy.weights.hf_names import parameters_by_hf_name
from nemo_fp8rl.policy.weights.layout import Layout

HEADROOM = 4
"""Binades by which a weight may grow before its global scale is raised. E4M3 block scales leave 10 binades below."""
FOLDER = "global_scales"
"""The folder in a checkpoint, with a file of each rank."""
logger = logging.getLogger(__name__)


def headroom(scale_format: ScaleFormat) -> int:
    """Return the binades between the largest value of a weight and what its global scale has room for."""
    return HEADROOM if scale_format == "pow2" else 0


def read_scales(checkpoint: Path) -> dict[str, float]:
    """Return the factors of all ranks that saved, by HF name; empty if none did. Raises UserError."""
    scales: dict[str, float] = {}
    path = checkpoint / FOLDER
    try:
        for file in path.glob("rank_*.json"):
            scales |= {str(name): float(encode) for name, encode in json.loads(file.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}); the checkpoint is not complete") from None
    return scales


@dataclass(frozen=True)
class _Matrix:
    """A weight of Megatron's, which may be several of HF's.

    layer:   Megatron's linear layer
    encode:  float32 [], the factor; a buffer of the layer where the layer multiplies quantized weights
    """

    layer: Any
    encode: Tensor


class GlobalScales:
    """The factors `encode` (1 / global scale) of a rank's weights that engines quantize.

    matrices:  by HF name; fused ones share one. Empty where the format has no global scale.
    """

    def __init__(
        self, layout: Layout, model: nn.Module, layers: Fp8Layers, format: Format, scale_format: ScaleFormat
    ) -> None:
        self.scale_format = scale_format
        self.matrices: dict[str, _Matrix] = {}
        if not (format.has_global and layers):
            return
        modules, by_parameter = dict(model.named_modules()), dict[str, _Matrix]()
        for hf_name, name in parameters_by_hf_name(layout, model).items():
            if layers.quantizes(hf_name) and hf_name.endswith(".weight"):
                layer = modules[name.removesuffix(".weight")]
                encode = getattr(layer, "weight_encode", None)
                encode = torch.ones((), dtype=torch.float32, device=layer.weight.device) if encode is None else encode
                self.matrices[hf_name] = by_parameter.setdefault(name, _Matrix(layer, encode))

    @torch.no_grad()
    def choose(self) -> None:
        """Choose all scales for the present weights, together with the ranks that share them."""
        room = headroom(self.scale_format)
        for matrices, amax in self._largest():
            for matrix, encode in zip(matrices, encode_scale(amax, self.scale_format, room), strict=True):
                matrix.encode.copy_(encode)

    @torch.no_grad()
    def update(self) -> int:
        """Follow the weights after a step, together with the ranks that share them; return how many scales rose."""
        if self.scale_format == "fp32":
            self.choose()
            return 0
        count = 0
        for matrices, amax in self._largest():
            encodes = torch.stack([matrix.encode for matrix in matrices])
            is_too_large = encode_scale(amax, "pow2") < encodes
            if not is_too_large.any():  # the only wait for a GPU
                continue
            for i in is_too_large.nonzero()[:, 0].tolist():
                matrices[i].encode.copy_(encode_scale(amax[i], "pow2", HEADROOM))
                name = next(name for name, matrix in self.matrices.items() if matrix is matrices[i])
                logger.warning("the global scale of %s was raised to %g", name, 1 / float(matrices[i].encode))
                count += 1
        return count

    def encodes(self) -> dict[str, Tensor]:
        """Return the factors, float32 [], of this rank's weights by HF name."""
        return {name: matrix.encode for name, matrix in self.matrices.items()}

    def _largest(self) -> Iterator[tuple[list[_Matrix], Tensor]]:
        """Yield (matrices that the same ranks share, their largest magnitudes, float32 [matrices])."""
        by_group: dict[Any, list[_Matrix]] = {}
        for matrix in {id(matrix): matrix for matrix in self.matrices.values()}.values():
            by_group.setdefault(matrix.layer.tp_group, []).append(matrix)
        for group, matrices in by_group.items():
            amax = torch.stack([largest_magnitude(matrix.layer.weight).float() for matrix in matrices])
            if group.size() > 1:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
            yield matrices, amax

    def save(self, folder: Path, rank: int) -> None:
        """Write this rank's scales to the folder of a checkpoint. Raises OSError."""
        if self.matrices:
            (folder / FOLDER).mkdir(exist_ok=True)
            scales = {name: float(encode) for name, encode in self.encodes().items()}
            (folder / FOLDER / f"rank_{rank}.json").write_text(json.dumps(scales) + "\n")

    def load(self, folder: Path) -> None:
        """Read the scales of all ranks that saved. Raises UserError, as a resumed run needs those of its last step."""
        if not self.matrices:
            return
        scales, path = read_scales(folder), folder / FOLDER
        for name, encode in self.encodes().items():
            if not 0 < scales.get(name, 0.0) < math.inf:
                raise UserError(
                    f"{path} lacks the global scale of {name}: the checkpoint is of another nemo_fp8rl.flow, or not "
                    f"complete; start a new run with policy.model_name={folder}/weights"
                )
            encode.fill_(scales[name])
