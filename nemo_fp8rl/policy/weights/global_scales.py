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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import Format, Fp8Layers, ScaleFormat, encode_scale, largest_magnitude
from nemo_fp8rl.policy.weights.hf_names import hf_views
from nemo_fp8rl.policy.weights.layout import Layout

HEADROOM = 4
"""Binades by which a weight may grow before its global scale is raised. E4M3 block scales leave 10 binades below."""
FOLDER = "global_scales"
"""The folder in a checkpoint, with a file of each rank."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Matrix:
    """A weight of Megatron's, which may be several of HF's.

    layer:   Megatron's linear layer
    encode:  float32 [], the factor; a buffer of the layer where the layer multiplies quantized weights
    """

    layer: Any
    encode: Tensor

    def set(self, scale_format: ScaleFormat) -> None:
        headroom = HEADROOM if scale_format == "pow2" else 0
        self.encode.copy_(encode_scale(self.amax(), scale_format, headroom))

    def amax(self) -> Tensor:
        """Return the largest magnitude, float32 [], of the weight of which ranks have parts; NaN if there is one."""
        amax = largest_magnitude(self.layer.weight).float()
        if self.layer.tp_group.size() > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.layer.tp_group)
        return amax


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
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        names, made = list(parameters), dict[str, _Matrix]()

        def number(name: str) -> Tensor:
            """Return the parameter's number in its shape, so that the number takes the weight's way to HF names."""
            return torch.tensor(names.index(name)).expand(parameters[name].shape)

        for hf_name, numbers in hf_views(layout, number):
            if layers.quantizes(hf_name) and hf_name.endswith(".weight"):
                name = names[int(numbers.flatten()[0])]
                layer = modules[name.removesuffix(".weight")]
                encode = getattr(layer, "weight_encode", None)
                encode = torch.ones((), dtype=torch.float32, device=layer.weight.device) if encode is None else encode
                self.matrices[hf_name] = made.setdefault(name, _Matrix(layer, encode))

    @torch.no_grad()
    def choose(self) -> None:
        """Choose all scales for the present weights, together with the ranks that share them."""
        for matrix in self._distinct():
            matrix.set(self.scale_format)

    @torch.no_grad()
    def update(self) -> int:
        """Follow the weights after a step, together with the ranks that share them; return how many scales rose."""
        if self.scale_format == "fp32":
            self.choose()
            return 0
        outgrown = [m for m in self._distinct() if encode_scale(m.amax(), "pow2") < m.encode]
        for matrix in outgrown:
            matrix.set(self.scale_format)
            name = next(name for name, other in self.matrices.items() if other is matrix)
            logger.warning("the global scale of %s was raised to %g", name, 1 / float(matrix.encode))
        return len(outgrown)

    def encodes(self) -> dict[str, Tensor]:
        """Return the factors, float32 [], of this rank's weights by HF name."""
        return {name: matrix.encode for name, matrix in self.matrices.items()}

    def _distinct(self) -> list[_Matrix]:
        return list({id(matrix): matrix for matrix in self.matrices.values()}.values())

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
        saved: dict[str, float] = {}
        path = folder / FOLDER
        try:
            for file in path.glob("rank_*.json"):
                saved |= {str(name): float(encode) for name, encode in json.loads(file.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({error}); the checkpoint is not complete") from None
        for name, encode in self.encodes().items():
            if not 0 < saved.get(name, 0.0) < math.inf:
                raise UserError(
                    f"{path} lacks the global scale of {name}: the checkpoint is of another nemo_fp8rl.flow, or not "
                    f"complete; start a new run with policy.model_name={folder}/weights"
                )
            encode.fill_(saved[name])
