"""`GrpoLoss` with the interface of NeMo RL's LossFunction, in place of ClippedPGLossFn."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType
from torch import Tensor

from nemo_fp8rl.algorithms.correction_config import CorrectionConfig
from nemo_fp8rl.algorithms.loss import GrpoLoss
from nemo_fp8rl.algorithms.loss_config import LossConfig
from nemo_fp8rl.batch import LossTotals
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.typed_tree import to_block
from nemo_fp8rl.nemo_rl.adapters.batched_data import UNFILTERED, build_batch
from nemo_fp8rl.nemo_rl.compat import metric_normalizers


class LossConfigError(UserError, AssertionError):
    """Contradicting keys of `loss_fn`: NeMo RL's callers expect an AssertionError, this package's a UserError."""


class GrpoLossFn:
    """`GrpoLoss` as NeMo RL's trainers call it: with a mapping for the batch, and with the attributes that they read.

    These are loss_type, input_type, metric_normalizations, use_fused_linear_logprobs and reference_policy_kl_penalty.
    Without the last one the trainers pass no unfiltered log-probs, which a KL beside top-k or top-p needs.
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
            self.loss = GrpoLoss(to_block(values, LossConfig, "loss_fn."), correction)
        except UserError as error:
            raise LossConfigError(str(error)) from None
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        loss_cfg = self.loss.cfg
        self.reference_policy_kl_penalty = loss_cfg.reference_policy_kl_penalty if loss_cfg.kl_in_loss else 0
        self.loss_type = LossType.TOKEN_LEVEL if loss_cfg.token_level_loss else LossType.SEQUENCE_LEVEL
        self.input_type = LossInputType.LOGPROB
        self.metric_normalizations = metric_normalizers(self.loss.metric_normalizations)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return what `GrpoLoss` does; positive examples are counted in each microbatch, as NeMo RL's loss counts."""
        optional = {"rewards", "prev_logprobs"} if self.loss.cfg.force_on_policy_ratio else {"rewards"}
        batch = build_batch(data, optional)
        totals = LossTotals(global_valid_seqs, global_valid_toks)
        return self.loss(next_token_logprobs, batch, totals, data.get(UNFILTERED))
