"""The package's Megatron policy with NeMo RL's ColocatablePolicyInterface."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nemo_rl.algorithms.loss.interfaces import LossInputType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.models.policy.interfaces import ColocatablePolicyInterface
from torch import Tensor

from nemo_fp8rl.algorithms.loss import EXTREMA
from nemo_fp8rl.algorithms.mismatch import DISAGREEMENT
from nemo_fp8rl.algorithms.policy_update import judge_and_correct, train_on_batch
from nemo_fp8rl.assemble import explained_by
from nemo_fp8rl.batch import LossTotals, RolloutBatch, ScoredBatch, SequenceBatch
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.fp8.kv_scales import MARGIN
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.nemo_rl.adapters.batched_data import UNFILTERED, count_turns, to_scored_batch, to_sequence_batch
from nemo_fp8rl.nemo_rl.adapters.loss_fn import GrpoLossFn
from nemo_fp8rl.nemo_rl.adapters.mismatch_watch import print_alarm
from nemo_fp8rl.nemo_rl.adapters.version_ledger import with_versions
from nemo_fp8rl.policy.interface import Loss
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.policy.sharpness import sharpness_metrics
from nemo_fp8rl.refit.bridge import RefitBridge
from nemo_fp8rl.run.learning_signal import PATIENCE

NO_ANSWERS = (
    "no sample of this batch has an answer: NeMo RL printed above why (Error generating response ...) and went on, or "
    "every prompt fills policy.generation.vllm_cfg.max_model_len; mend that, then start the run again"
)
NO_SIGNAL = (
    f"in the last {PATIENCE} steps all advantages were 0, as where the rewards of every group are equal: nothing is "
    "learned from them; train_data_step*.jsonl has the answers, train/baseline_reward/pct_0 and pct_1 say whether all "
    "were wrong or all right"
)


class MegatronFp8Policy(ColocatablePolicyInterface):
    """The trainer of a run of NeMo RL's loop.

    sharding_annotations:  number of model replicas among which a batch is divided
    bridge, ledger:        count the versions of the weights, and know those of answers; None without updates in flight
    completed_steps:       calls of `train`, those before the checkpoint included
    measured:              (log-probs, sharpness) of the last call of `get_logprobs`, if that measured it
    """

    _refit: Callable[[], Any]
    bridge: RefitBridge | None = None
    ledger: Any = None
    completed_steps: int = 0
    measured: tuple[Tensor, Tensor] | None = None

    def __init__(
        self, policy: MegatronPolicy, cfg: Config, tokenizer: Any, is_resumed: bool, asynchronous: bool = False
    ) -> None:
        """Wrap a policy of `assemble.backends`.

        is_resumed:    whether the policy was loaded from a checkpoint
        asynchronous:  whether NeMo RL's asynchronous loop runs. It never calibrates the scales of an FP8 KV cache, so
            they are calibrated here after each step, on the training batch.
        """
        self.policy, self.cfg, self.tokenizer = policy, cfg, tokenizer
        self.offloads = cfg.policy.megatron_cfg.offload_between_phases
        self.has_loaded_scales = is_resumed and cfg.fp8_kv_cache and not asynchronous
        self.calibrates = asynchronous and cfg.fp8_kv_cache
        self.is_asynchronous = asynchronous
        self.steps_without_signal = 0
        self.sharding_annotations = NamedSharding(np.arange(cfg.data_parallel_size), ["data_parallel"])

    def connect_refit(self, refit: Callable[[], Any]) -> None:
        """Call `refit` whenever NeMo RL streams weights to an engine; it raises if the refit fails.

        It is set after construction because the synchronizer behind it needs this policy.
        """
        self._refit = refit

    def connect_versions(self, bridge: RefitBridge, ledger: Any) -> None:
        """Judge answers by the versions that they were sampled from; ledger: of `version_ledger.start_ledger`."""
        self.bridge, self.ledger = bridge, ledger

    def get_logprobs(self, data: Mapping[str, Any], timer: Any = None) -> Any:
        """Return {"logprobs": float32 [B, S]}; position 0 is 0. `train` reports the sharpness where it is measured."""
        batch, period = self._sequences(data), self.cfg.nemo_fp8rl.sharpness.period
        self.measured = None
        if not period or (self.completed_steps + 1) % period:
            return BatchedDataDict({"logprobs": self.policy.logprobs(batch)})
        self.measured = self.policy.logprobs_and_sharpness(batch)
        return BatchedDataDict({"logprobs": self.measured[0]})

    def _sequences(self, data: Mapping[str, Any]) -> SequenceBatch:
        self._check_turns(data)
        return to_sequence_batch(data)

    def _check_turns(self, data: Mapping[str, Any]) -> None:
        """Raise UserError for conversations of several turns where the trainer has a window.

        An engine reads the answers of earlier turns as parts of its prompt, which it keeps.
        """
        window = self.cfg.trainer_kv_window
        if window is not None and "token_mask" in data and (turns := int(count_turns(data["token_mask"]).max())) > 1:
            raise UserError(
                f"policy.generation.vllm_cfg.kv_window={window}: a sample has {turns} answers, and a window begins "
                "behind one prompt: set kv_window=null, or nemo_fp8rl.kv=rollout"
            )

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None, timer: Any = None
    ) -> Any:
        """Return {"reference_logprobs": float32 [B, S]}; zeros, which nothing reads, if the KL has no weight."""
        if self.cfg.loss_fn.reference_policy_kl_penalty:
            return BatchedDataDict({"reference_logprobs": self.policy.reference_logprobs(self._sequences(data))})
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
        """Train one optimizer step per global batch, then advance the learning-rate schedule once.

        Returns: loss float32 [steps], grad_norm float32 [1] of the last step, all_mb_metrics: lists of one value per
                 step. NeMo RL sums losses and lists (except extrema, lr and the like), so each value is divided by the
                 number of steps, and the sum is the mean.
        Skips:   a global batch without a token to train on, and all global batches if a gate forbids the update; the
                 metrics count skipped steps. They also count samples without an answer token: NeMo RL's asynchronous
                 rollouts ignore an error of a sample and keep the sample with reward 0.
        Raises:  StepRefused; UserError if no sample has an answer token
        """
        if eval_mode or mbs not in (None, self.cfg.policy.train_micro_batch_size):
            raise UserError("this policy trains, in microbatches of policy.train_micro_batch_size; nothing else")
        # NeMo RL has no prev_logprobs of its own, and zeros there, where the ratio is forced
        compares = not self.cfg.loss_fn.force_on_policy_ratio
        optional = {"rewards", "advantages"} | (set() if compares else {"prev_logprobs", "generation_logprobs"})
        self._check_turns(data)
        batch, metrics, skip = to_scored_batch(data, optional), dict[str, float](), False
        unanswered = int((~batch.token_mask.any(1)).sum())  # samples without a token, whatever the loss filters
        if unanswered == batch.num_rows:
            raise UserError(NO_ANSWERS)
        if compares:
            correction = loss_fn.loss.correction if isinstance(loss_fn, GrpoLossFn) else None
            choice = self.cfg.nemo_fp8rl
            limits = self._explained(self.is_asynchronous), choice.mismatch_alarm == "stop"
            newest: dict[str, Any] = {}
            if self.bridge is not None:
                batch = with_versions(self.ledger, batch)
                newest = {"trainer_version": self.bridge.version, "explained_newest": self._explained(False)}
            sharpness = self._sharpness_of(batch)
            judgement = judge_and_correct(
                batch, batch.loss_mask, choice.gates, correction, *limits, **newest, sharpness=sharpness
            )
            for sentence in judgement.warnings:
                print(f"nemo-fp8rl: {sentence}", flush=True)
            print_alarm(judgement.alarm)
            batch, skip = judgement.batch, judgement.skip_update
            metrics = judgement.mismatch | judgement.mismatch_by_lag | judgement.correction | sharpness
        if "advantages" in data:
            self._watch_signal(bool((batch.advantages * batch.loss_mask).any()))
        loss = _as_loss(loss_fn, optional - set(data))

        def train_step(part: RolloutBatch) -> dict[str, float]:
            return self.policy.train_step(part, loss, schedules=False) | self._counts(part)

        size = gbs or self.cfg.policy.train_global_batch_size
        steps, skipped = train_on_batch(batch, train_step, size, skip)
        self.completed_steps += 1
        self.policy.step_schedule()
        if self.calibrates:
            self.policy.calibrate_kv(batch)
        steps = steps or [{"loss": 0.0, "grad_norm": 0.0} | self._counts(batch)]
        # of all tokens, where the loss's are those left by the correction, or, with `bypass`, no disagreement at all
        known = {name: [value] for name, value in metrics.items() if name in DISAGREEMENT or math.isfinite(value)}
        unknown = {name: [math.nan] for name in DISAGREEMENT}
        return {
            "loss": torch.tensor([step["loss"] / len(steps) for step in steps]),
            "grad_norm": torch.tensor([steps[-1]["grad_norm"]]),
            "all_mb_metrics": unknown
            | _metric_lists(steps)
            | known
            | {"optimizer_steps_skipped": [skipped], "samples_without_answer": [unanswered]},
        }

    def _sharpness_of(self, batch: ScoredBatch) -> dict[str, float]:
        """Return the sharpness metrics, empty unless the last call of `get_logprobs` measured these rows."""
        if self.measured is None or not torch.equal(self.measured[0], batch.prev_logprobs):
            return {}
        return sharpness_metrics(self.measured[1], batch.loss_mask)

    def _explained(self, asynchronous: bool) -> float:
        """Return the mismatch above which a step is alarming; asynchronous: answers may be of older weights."""
        return explained_by(self.cfg, *self._precision, asynchronous)

    @cached_property
    def _precision(self) -> tuple[bool, bool]:
        """(True for a mixture of experts, True if the trainer rounds as vLLM does)."""
        return read_hf_config(self.cfg.policy.model_name).family.experts, self.policy.describe().is_aligned

    def _watch_signal(self, has_signal: bool) -> None:
        """Say once in a row of steps that they teach nothing."""
        self.steps_without_signal = 0 if has_signal else self.steps_without_signal + 1
        if self.steps_without_signal == PATIENCE:
            print(f"nemo-fp8rl: {NO_SIGNAL}", flush=True)

    def _counts(self, part: RolloutBatch) -> dict[str, float]:
        totals = LossTotals.of_batch(part)
        return {
            "global_valid_seqs": float(totals.valid_seqs),
            "global_valid_toks": float(totals.valid_toks),
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
        """Calibrate the KV cache's scales on these sequences by the package's contract (`fp8.kv_scales`): by amax.

        The result's "layers" is empty: the scales stay on the ranks and travel with the next refit. The first call
        after a checkpoint was loaded keeps the checkpoint's scales, as the uninterrupted run does.
        """
        if not self.has_loaded_scales:
            batch = to_sequence_batch(data)
            if batch.prompt_lengths is None:  # the first calibration reads prompts, before there are answers
                batch = replace(batch, prompt_lengths=batch.input_lengths)
            self.policy.calibrate_kv(batch)
        self.has_loaded_scales = False
        return {"format": "fp8", "percentile": 100.0, "margin": MARGIN, "layers": {}}

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        if self.offloads:
            self.policy.prepare_for_training()

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a refit or `offload_after_refit` frees the memory."""

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Do nothing: log-probs need only the parameters, which are loaded on demand."""

    def offload_before_refit(self) -> None:
        if self.offloads:
            self.policy.offload_before_refit()

    def offload_after_refit(self) -> None:
        if self.offloads:
            self.policy.offload_after_refit()

    def prepare_refit_info(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: trainer and engine agree on a manifest when they are linked (`refit.bridge`)."""

    def stream_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Do the whole refit over the bridge's links, before NeMo RL calls the engine's half."""
        self._refit()
        return []

    def broadcast_weights_for_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self.stream_weights_via_ipc_zmq()

    def init_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def get_free_memory_bytes(self) -> int:
        """Return nemo_fp8rl.refit.bucket_bytes: NeMo RL sizes its own buffers by this, which are not used."""
        return self.cfg.nemo_fp8rl.refit.bucket_bytes

    def get_topk_logits(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError("this policy has no top-k logits, which distillation needs: use NeMo RL's own policy for it")

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Save weights/ (an HF checkpoint), optimizer/ and tokenizer/ side by side, where NeMo RL looks for them."""
        folder = Path(weights_path).parent
        folder.mkdir(parents=True, exist_ok=True)
        self.policy.save(folder)
        if tokenizer_path is not None:
            self.tokenizer.save_pretrained(tokenizer_path)

    def finalize_async_save(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a checkpoint is complete when `save_checkpoint` returns."""

    def print_node_ip_and_gpu_id(self) -> None:
        """Do nothing: Ray's own log says where its actors are."""

    def shutdown(self) -> bool:
        self.policy.shutdown()
        return True


class _MappingLoss:
    """A loss of NeMo RL's protocol, called with a mapping of the columns that NeMo RL's batch had."""

    def __init__(self, loss_fn: Any, absent: set[str]) -> None:
        self.loss_fn, self.absent = loss_fn, absent

    def __call__(
        self, logprobs: Tensor, batch: RolloutBatch, totals: LossTotals, unfiltered: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        columns = vars(batch) | {UNFILTERED: unfiltered}
        return self.loss_fn(
            next_token_logprobs=logprobs,
            data=BatchedDataDict({n: v for n, v in columns.items() if v is not None and n not in self.absent}),
            global_valid_seqs=totals.valid_seqs,
            global_valid_toks=totals.valid_toks,
        )


def _as_loss(loss_fn: Any, absent: set[str]) -> Loss:
    """absent: columns that NeMo RL's batch lacks, and ours fills with zeros."""
    if loss_fn.input_type is not LossInputType.LOGPROB:
        raise UserError(f"{type(loss_fn).__name__} needs {loss_fn.input_type.value}; this policy gives log-probs")
    return _MappingLoss(loss_fn, absent)


MEANS = ("lr", "wd", "global_valid_seqs", "global_valid_toks")
"""Metrics of which NeMo RL averages a list; it adds up other lists."""


def _metric_lists(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return lists of one value per step, scaled so that NeMo RL's aggregate of a list is the mean."""

    def share(name: str, value: float) -> float:
        return value if name in MEANS or name.endswith(tuple(EXTREMA)) else value / len(steps)

    return {name: [share(name, step[name]) for step in steps] for name in steps[0] if name != "grad_norm"}
