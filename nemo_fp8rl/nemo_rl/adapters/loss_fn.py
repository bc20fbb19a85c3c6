"""`GrpoLoss` with the interface of NeMo RL's LossFunction, in place of ClippedPGLossFn."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType

from nemo_fp8rl.algorithms.correction_config import CorrectionConfig
from nemo_fp8rl.algorithms.loss import GrpoLoss
from nemo_fp8rl.algorithms.loss_config import LossConfig
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.typed_tree import to_block
from nemo_fp8rl.nemo_rl.compat import metric_normalizers


class LossConfigError(UserError, AssertionError):
    """Contradicting keys of `loss_fn`: NeMo RL's callers expect an AssertionError, this package's a UserError."""


class GrpoLossFn(GrpoLoss):
    """`GrpoLoss` with the attributes that NeMo RL's trainers read.

    These are loss_type, input_type, metric_normalizations and reference_policy_kl_penalty. Without the last one the
    trainers pass no unfiltered log-probs, which a KL beside top-k or top-p needs.
    """

    def __init__(
        self,
        cfg: Any,
        use_fused_linear_logprobs: bool = False,
        correction: CorrectionConfig | None = None,
    ) -> None:
        """Build the loss.

        cfg:                        NeMo RL's ClippedPGLossConfig, or the mapping of `recipe_checks.loss_keys`
        use_fused_linear_logprobs:  value of that key of policy.megatron_cfg, which NeMo RL's trainer reads here
        correction:                 nemo_fp8rl.correction
        Raises: LossConfigError for keys that contradict each other
        """
        keys = cfg if isinstance(cfg, Mapping) else cfg.model_dump()
        known = {field.name for field in fields(LossConfig)}
        values = {name: value for name, value in keys.items() if name in known}
        try:
            super().__init__(to_block(values, LossConfig, "loss_fn."), correction)
        except UserError as error:
            raise LossConfigError(str(error)) from None
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.reference_policy_kl_penalty = self.cfg.reference_policy_kl_penalty if self.cfg.kl_in_loss else 0
        self.loss_type = LossType.TOKEN_LEVEL if self.cfg.token_level_loss else LossType.SEQUENCE_LEVEL
        self.input_type = LossInputType.LOGPROB

    def _normalizations(self) -> dict[str, Any]:
        return metric_normalizers(super()._normalizations())
