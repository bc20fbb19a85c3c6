"""The global scales of an exported checkpoint: those that its run saved, or those that a trainer would choose now."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nemo_fp8rl.commands.export.adapters import MergedReader
from nemo_fp8rl.commands.export.choices import Choices
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import encode_scale
from nemo_fp8rl.fp8.layers import FUSED
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.policy.weights.global_scales import FOLDER, headroom, read_scales


class ExportedScales:
    """The factors (1 / global scale) of the weights of a checkpoint, in a format that has them.

    Power-of-two scales were chosen in the past, and blocks of tiny values were flushed relative to them, so the run's
    are used where the run saved them. A run with adapters does not: its base has those that it chose at the start.
    Float32 scales follow from the weights.
    """

    def __init__(self, reader: CheckpointReader | MergedReader, choices: Choices, folder: Path | None) -> None:
        """folder: where the run may have saved its scales; None for a base, whose scales no run saved"""
        self.reader, self.choices, self.folder = reader, choices, folder
        self._saved: Mapping[str, float] | None = None
        self._chosen: dict[str, Tensor] = {}
        if choices.format.has_global and choices.scale_format == "pow2" and folder and (folder / FOLDER).is_dir():
            self._saved = read_scales(folder)

    def encode(self, name: str) -> Tensor | None:
        """Return the factor of a weight, float32 []; None in a format without it. Raises UserError."""
        if not self.choices.format.has_global:
            return None
        if self._saved is None or self.folder is None:
            return self._choose(name)
        encode = self._saved.get(name, 0.0)
        if not 0 < encode < math.inf:
            raise UserError(
                f"{self.folder / FOLDER} lacks the global scale of {name}: the run left this layer in bfloat16, or the "
                "checkpoint is not complete; leave out the options about layers, or copy the weights elsewhere"
            )
        if math.frexp(encode)[0] != 0.5:
            raise UserError(
                f"{self.folder / FOLDER} has the global scale {encode} for {name}, which is no power of two: the run's "
                "nemo_fp8rl.scale_format was fp32; give --scale-format fp32"
            )
        return torch.tensor(encode, dtype=torch.float32)

    def _choose(self, name: str) -> Tensor:
        """Return the factor for the largest value of all weights that vLLM and the trainer fuse with this one."""
        path, _, leaf = name.removesuffix(".weight").rpartition(".")
        parts = next((parts for parts in FUSED.values() if leaf in parts), (leaf,))
        fused = [f"{path}.{part}.weight" for part in parts]
        if fused[0] not in self._chosen:
            amax = torch.stack([self.reader.get(part).abs().amax().float() for part in fused]).amax()
            scale_format = self.choices.scale_format
            self._chosen = dict.fromkeys(fused, encode_scale(amax, scale_format, headroom(scale_format)))
        return self._chosen[name]
