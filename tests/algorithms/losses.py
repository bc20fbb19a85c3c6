"""Losses made from the keys of a recipe."""

from collections.abc import Mapping
from typing import Any

from nemo_fp8rl.algorithms.correction_config import CorrectionConfig
from nemo_fp8rl.algorithms.loss import GrpoLoss
from nemo_fp8rl.algorithms.loss_config import LossConfig
from nemo_fp8rl.config.typed_tree import read_block


def read_correction(keys: Mapping[str, Any]) -> CorrectionConfig:
    """Return the resolved correction of keys of `nemo_fp8rl.correction`."""
    return read_block(keys, CorrectionConfig, "nemo_fp8rl.correction.").resolve()


def make_loss(
    keys: LossConfig | Mapping[str, Any], correction: CorrectionConfig | Mapping[str, Any] | None = None
) -> GrpoLoss:
    """Return the loss of keys of `loss_fn` and of `nemo_fp8rl.correction`."""
    cfg = keys if isinstance(keys, LossConfig) else LossConfig(**keys)
    if isinstance(correction, Mapping):
        correction = read_correction(correction) if "preset" in correction else CorrectionConfig(**correction)
    return GrpoLoss(cfg, correction)
