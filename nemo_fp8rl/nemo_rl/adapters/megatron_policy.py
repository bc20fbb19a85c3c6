"""Our Megatron policy behind NeMo RL's ColocatablePolicyInterface."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nemo_rl.algorithms.loss.interfaces import LossInputType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.models.policy.interfaces import ColocatablePolicyInterface
from torch import Tensor

from nemo_fp8rl.algorithms.correction import corrected_batch
from nemo_fp8rl.algorithms.gates import enforce
from nemo_fp8rl.algorithms.loss import EXTREMA
from nemo_fp8rl.algorithms.mismatch import DISAGREEMENT, MismatchSums
from nemo_fp8rl.batch import TrainBatch, has_tokens, num_rows, rows
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.fp8.kv_scales import MARGIN
from nemo_fp8rl.nemo_rl.adapters.batched_data import to_train_batch
from nemo_fp8rl.nemo_rl.adapters.loss_fn import GrpoLossFn
from nemo_fp8rl.policy.interface import Loss
from nemo_fp8rl.policy.rank_group import MegatronPolicy

NO_ANSWERS = (
    "no sample of this batch has an answer: NeMo RL printed above why (Error generating response ...) and went on, or "
    "every prompt fills policy.generation.vllm_cfg.max_model_len; mend that, then start the run again"
)


class MegatronFp8Policy(ColocatablePolicyInterface):
    """refit: called where NeMo RL streams weights to an engine; it raises when that fails.

    sharding_annotations: among how many replicas of the model a batch is divided. asynchronous: NeMo RL's loop, which
    never asks for scales of an FP8 KV cache; they are then taken from what was trained on, after each step.
    """

    refit: Callable[[], Any]

    def __init__(
        self, policy: MegatronPolicy, cfg: Config, tokenizer: Any, loaded: bool, asynchronous: bool = False
    ) -> None:
        """policy: as `weights.backends` gives it. loaded: from a checkpoint."""
        self.policy, self.cfg, self.tokenizer = policy, cfg, tokenizer
        self.offloads = cfg.policy.megatron_cfg.offload_between_phases
        self.scales_loaded = loaded and cfg.fp8_kv_cache and not asynchronous
        self.calibrates = asynchronous and cfg.fp8_kv_cache
        self.sharding_annotations = NamedSharding(np.arange(cfg.data_parallel_size), ["data_parallel"])

    def get_logprobs(self, data: Mapping[str, Any], timer: Any = None) -> Any:
        """{"logprobs": float32 [B, S]}, position 0 is 0."""
        return BatchedDataDict({"logprobs": self.policy.logprobs(to_train_batch(data))})

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None, timer: Any = None
    ) -> Any:
        """{"reference_logprobs": float32 [B, S]}; zeros, which nothing reads, where the KL has no weight."""
        if self.cfg.loss_fn.reference_policy_kl_penalty:
            return BatchedDataDict({"reference_logprobs": self.policy.reference_logprobs(to_train_batch(data))})
        return BatchedDataDict({"reference_logprobs": torch.zeros(data["input_ids"].shape)})

    def train(
        self,
        data: Mapping[str, Any],
        loss_fn: Any,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Any = None,
    ) -> dict[str, Any]:
        """One optimizer step for each global batch, then one of the learning rate's schedule.

        loss: float32 [steps], grad_norm: float32 [1], the last. all_mb_metrics: lists of one value a step. NeMo RL adds
        lists and losses up, but for extrema, lr and the like; so they are divided by the number of steps, and their sum
        is the mean. A global batch with no token left to train on is skipped, and counted; so are all of a batch on
        which a gate says so. Samples without a token of an answer are counted: NeMo RL's asynchronous rollouts pass
        over an error of one and keep it, with reward 0. Raises StepRefused, and UserError where no sample has any.
        """
        if eval_mode or mbs not in (None, self.cfg.policy.train_micro_batch_size):
            raise UserError("this policy trains, in microbatches of policy.train_micro_batch_size; nothing else")
        batch, seen, skip = to_train_batch(data), dict[str, float](), False
        unanswered = int((~batch["token_mask"].any(1)).sum())  # whatever is filtered from the loss, all with tokens
        if unanswered == num_rows(batch):
            raise UserError(NO_ANSWERS)
        if not self.cfg.loss_fn.force_on_policy_ratio:  # else NeMo RL does without prev_logprobs, and has zeros there
            mask = batch["token_mask"] * batch["sample_mask"][:, None]
            if mask.any():
                mismatch = MismatchSums()
                mismatch.observe(batch["prev_logprobs"], batch["generation_logprobs"], mask)
                seen = mismatch.metrics()
                skip, tripped = enforce(self.cfg.nemo_fp8rl.gates, seen)
                for sentence in tripped:
                    print(f"nemo-fp8rl: {sentence}", flush=True)
            if isinstance(loss_fn, GrpoLossFn):
                batch, corrected = corrected_batch(batch, loss_fn.correction)
                seen |= corrected
        size = gbs or self.cfg.policy.train_global_batch_size
        parts = [rows(batch, slice(start, start + size)) for start in range(0, num_rows(batch), size)]
        trained = [part for part in parts if not skip and has_tokens(part)]
        loss = _as_loss(loss_fn)
        steps = [self.policy.train_step(part, loss, schedules=False) | self._counts(part) for part in trained]
        self.policy.step_schedule()
        if self.calibrates:
            self.policy.calibrate_kv(batch)
        steps = steps or [{"loss": 0.0, "grad_norm": 0.0} | self._counts(batch)]
        # of all tokens, where the loss's are those left by the correction, or, with `bypass`, no disagreement at all
        known = {name: [value] for name, value in seen.items() if name in DISAGREEMENT or math.isfinite(value)}
        unknown = {name: [math.nan] for name in DISAGREEMENT}
        return {
            "loss": torch.tensor([step["loss"] / len(steps) for step in steps]),
            "grad_norm": torch.tensor([steps[-1]["grad_norm"]]),
            "all_mb_metrics": unknown
            | _lists(steps)
            | known
            | {"optimizer_steps_skipped": [len(parts) - len(trained)], "samples_without_answer": [unanswered]},
        }

    def _counts(self, part: TrainBatch) -> dict[str, float]:
        mask = part["token_mask"][:, 1:] * part["sample_mask"][:, None]
        return {
            "global_valid_seqs": float(part["sample_mask"].sum()),
            "global_valid_toks": float(mask.sum()),
            "wd": self.cfg.policy.megatron_cfg.optimizer.weight_decay,
        }

    def calibrate_qkv_fp8_scales(
        self,
        data: Mapping[str, Any],
        micro_batch_size: int | None = None,
        percentile: float = 99.9,
        margin: float = 1.05,
        include_q: bool = False,
    ) -> dict[str, Any]:
        """Take the KV cache's scales from these sequences by our contract (`fp8.kv_scales`): amax, no percentile.

        "layers" is empty: the scales stay with the ranks that found them and travel as part of the next refit. The
        first call after a checkpoint was loaded keeps the scales that came with it, as the uninterrupted run does.
        """
        if not self.scales_loaded:
            self.policy.calibrate_kv(to_train_batch(data))
        self.scales_loaded = False
        return {"format": "fp8", "percentile": 100.0, "margin": MARGIN, "layers": {}}

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        if self.offloads:
            self.policy.prepare_for_training()

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: a refit or `offload_after_refit` gives memory back."""

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Nothing: log-probs need the parameters alone, which come by themselves."""

    def offload_before_refit(self) -> None:
        if self.offloads:
            self.policy.offload_before_refit()

    def offload_after_refit(self) -> None:
        if self.offloads:
            self.policy.offload_after_refit()

    def prepare_refit_info(self) -> None:
        """Nothing: trainer and engine agree on a manifest when they are linked (`refit.bridge`)."""

    def stream_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The whole refit, over our links, before the engine's half: where NeMo RL refits through these methods."""
        self.refit()
        return []

    def broadcast_weights_for_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self.stream_weights_via_ipc_zmq()

    def init_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def get_free_memory_bytes(self) -> int:
        """Asked for the size of NeMo RL's buffers, which are not used; ours is nemo_fp8rl.refit.bucket_bytes."""
        return self.cfg.nemo_fp8rl.refit.bucket_bytes

    def get_topk_logits(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError("this policy has no top-k logits, which distillation asks for: use NeMo RL's own policy there")

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        **kwargs: Any,
    ) -> None:
        """weights/ (an HF checkpoint), optimizer/ and tokenizer/ side by side: where NeMo RL looks for them."""
        folder = Path(weights_path).parent
        folder.mkdir(parents=True, exist_ok=True)
        self.policy.save(folder)
        if tokenizer_path is not None:
            self.tokenizer.save_pretrained(tokenizer_path)

    def finalize_async_save(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: a checkpoint is whole when `save_checkpoint` returns."""

    def print_node_ip_and_gpu_id(self) -> None:
        """Nothing: Ray's own log says where its actors are."""

    def shutdown(self) -> bool:
        self.policy.shutdown()
        return True


class _KeywordLoss:
    """A loss of NeMo RL's, called as it expects to be."""

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = loss_fn

    def __call__(
        self, logprobs: Tensor, batch: TrainBatch, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        return self.loss_fn(
            next_token_logprobs=logprobs,
            data=BatchedDataDict(batch),
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
        )


def _as_loss(loss_fn: Any) -> Loss:
    if isinstance(loss_fn, GrpoLossFn):
        return loss_fn
    if loss_fn.input_type is not LossInputType.LOGPROB:
        raise UserError(f"{type(loss_fn).__name__} asks for {loss_fn.input_type.value}; this policy gives log-probs")
    return _KeywordLoss(loss_fn)


MEANS = ("lr", "wd", "global_valid_seqs", "global_valid_toks")
"""What NeMo RL averages over a list."""


def _lists(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    def share(name: str, value: float) -> float:
        return value if name in MEANS or name.endswith(tuple(EXTREMA)) else value / len(steps)

    return {name: [share(name, step[name]) for step in steps] for name in steps[0] if name != "grad_norm"}
