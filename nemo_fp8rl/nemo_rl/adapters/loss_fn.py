"""Our GRPO loss behind NeMo RL's LossFunction, in place of its ClippedPGLossFn."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType

from nemo_fp8rl.algorithms.correction_config import CorrectionConfig
from nemo_fp8rl.algorithms.loss import GrpoLoss
from nemo_fp8rl.algorithms.loss_config import LossConfig
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.compat import metric_normalizers


class LossConfigError(UserError, AssertionError):
    """Keys of `loss_fn` that contradict each other: NeMo RL's callers expect an AssertionError, ours a UserError."""


class GrpoLossFn(GrpoLoss):
    """`GrpoLoss` with the attributes that NeMo RL's trainers read: loss_type, input_type, metric_normalizations, and
    reference_policy_kl_penalty, without which they give no unfiltered log-probs to a KL beside top-k or top-p.
    """

    def __init__(
        self,
        cfg: Any,
        use_fused_linear_logprobs: bool = False,
        correction: CorrectionConfig | Mapping[str, Any] | None = None,
    ) -> None:
        """cfg: NeMo RL's ClippedPGLossConfig, or `checks.loss_keys`. Raises LossConfigError."""
        keys = cfg if isinstance(cfg, Mapping) else cfg.model_dump()
        known = {field.name for field in fields(LossConfig)}
        try:
            super().__init__({name: value for name, value in keys.items() if name in known}, correction)
        except UserError as error:
            raise LossConfigError(str(error)) from None
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.reference_policy_kl_penalty = self.cfg.reference_policy_kl_penalty if self.cfg.kl_in_loss else 0
        self.loss_type = LossType.TOKEN_LEVEL if self.cfg.token_level_loss else LossType.SEQUENCE_LEVEL
        self.input_type = LossInputType.LOGPROB

    def _normalizations(self) -> dict[str, Any]:
        return metric_normalizers(super()._normalizations())
