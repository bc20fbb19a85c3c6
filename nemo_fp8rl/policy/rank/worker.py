"""One Megatron rank: forward, backward, optimizer and export, in this process or in a Ray actor.

Calls into Megatron that name CUDA run inside `megatron_on_cpu`, so that an engine in the same process sees an unchanged
torch.
"""

import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from nemo_fp8rl.algorithms.loss import combine_metrics
from nemo_fp8rl.algorithms.quantization_error import SquaresByGroup
from nemo_fp8rl.batch import LossTotals, RolloutBatch, SequenceBatch
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.fp8 import FP8, FP8_TOKENS, KvScales
from nemo_fp8rl.fp8.fp4_training.random_bits import GradientBits
from nemo_fp8rl.fp8.kv_scales import CalibrationError
from nemo_fp8rl.hf.adapters import adapter_tensors, is_adapter, read_adapters
from nemo_fp8rl.hf.fp8_layers import engine_fp8_layers
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.ops.alignment import choose_alignment
from nemo_fp8rl.policy.interface import Loss, PolicyDescription
from nemo_fp8rl.policy.layers.kv_cache import make_kv_cache
from nemo_fp8rl.policy.layers.linears import freeze_base, give_gradient_bits
from nemo_fp8rl.policy.layers.routing_replay import RoutingReplay
from nemo_fp8rl.policy.model import DTYPES, build_model, check_gpu_policy, transformer_config
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.optimizer.builders import build_ddp, build_optimizer, build_scheduler
from nemo_fp8rl.policy.optimizer.finite_check import overflows
from nemo_fp8rl.policy.optimizer.grad_reduce import largest_of_ranks
from nemo_fp8rl.policy.optimizer.loss_scale import LossScale
from nemo_fp8rl.policy.rank.description import describe_rank
from nemo_fp8rl.policy.rank.offload import Offload
from nemo_fp8rl.policy.rank.pipeline import Pipeline, TokenValues
from nemo_fp8rl.policy.rank.process_groups import destroy_process_groups, make_layout, start_process_groups
from nemo_fp8rl.policy.rank.reference_policy import ReferencePolicy
from nemo_fp8rl.policy.weights.global_scales import GlobalScales
from nemo_fp8rl.policy.weights.norm_noise import NormNoise
from nemo_fp8rl.policy.weights.optimizer_state import count_adam_steps
from nemo_fp8rl.policy.weights.rank_checkpoint import RankCheckpoint
from nemo_fp8rl.policy.weights.rank_weights import RankWeights
from nemo_fp8rl.refit.expert_stacks import stack_parts, stack_weights
from nemo_fp8rl.refit.interface import Transport
from nemo_fp8rl.refit.manifest import RefitError, Route, TensorPart
from nemo_fp8rl.refit.reports import SendReport
from nemo_fp8rl.refit.sender.sending_rank import SendingRank
from nemo_fp8rl.refit.transport.link import SENDER_SHARE
from nemo_fp8rl.refit.transport.shared_memory import domain
from nemo_fp8rl.workers.network import node_address


@dataclass(frozen=True)
class RankInfo:
    """The facts about a rank that the driver needs.

    shard:        the number of the batch shard that this rank gets
    is_reporter:  True on the one rank per shard that returns the shard's log-probs and metrics
    """

    shard: int
    is_reporter: bool


class MegatronWorker:
    """One rank with its part of the model; call `setup` after the constructor."""

    listener: socket.socket | None = None
    """The socket at which the ranks meet; rank 0 has it between `rendezvous` and `setup`."""
    has_borrowed_parameters = False
    """True while a push uses parameters that were offloaded before it and are offloaded again after it."""

    def rendezvous(self) -> tuple[str, int]:
        """Open the socket at which the ranks meet, on the cluster's interface only; return its (host, port)."""
        import ray

        self.listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        return self.listener.getsockname()[:2]

    def setup(self, cfg: Config, rank: int, world_size: int, rendezvous: tuple[str, int] | None) -> RankInfo:
        """Join the other ranks and build the model and its optimizer.

        rendezvous:  (host, port) of rank 0's store; None for a single rank
        """
        self.cfg, self.rank, on_gpu = cfg, rank, self.on_gpu()
        self.description: PolicyDescription | None = None
        device = torch.device("cuda" if on_gpu else "cpu")
        self.hf = read_hf_config(cfg.policy.model_name)
        if on_gpu:
            check_gpu_policy(cfg, self.hf)
        self.engine_fp8_layers = engine_fp8_layers(self.hf, cfg)
        adapters = read_adapters(self.hf, cfg.policy.megatron_cfg.peft)
        start_process_groups(rank, world_size, rendezvous, self.listener if rank == 0 else None)
        # Transformer Engine's layer of many experts knows blockwise FP8 and bfloat16
        grouped_experts = on_gpu and cfg.nemo_fp8rl.format is FP8
        self.layout = make_layout(self.hf, cfg.policy.megatron_cfg, adapters, grouped_experts)
        if on_gpu:
            # Megatron requires a seed, although this model has no dropout
            model_parallel_cuda_manual_seed(cfg.grpo.seed)
        self.kv_cache = make_kv_cache(self.hf.num_hidden_layers, cfg)
        alignment = choose_alignment(cfg.nemo_fp8rl)
        with megatron_on_cpu():
            config = transformer_config(self.hf, cfg.policy, cfg.nemo_fp8rl)
            self.model = build_model(config, self.layout, cfg, self.kv_cache).to(device)
            recomputes = cfg.policy.megatron_cfg.activation_checkpointing
            replay = RoutingReplay(self.model, self.layout, recomputes) if self.hf.family.experts else None
            fp8_param = on_gpu and cfg.nemo_fp8rl.fp8_param and not adapters  # adapters are bfloat16
            self.ddp = build_ddp(config, self.model, cfg, fp8_param)
            self.optimizer = build_optimizer(cfg.policy, self.ddp, DTYPES[cfg.policy.precision], fp8_param)
            if (loss_scale := LossScale.of(self.optimizer)) is not None:
                config.grad_scale_func = self.optimizer.scale_loss
        self.loss_scale = loss_scale
        self.optimizer_steps, self.gradient_bits = 0, GradientBits(cfg.grpo.seed)
        give_gradient_bits(self.model, self.layout, self.gradient_bits)
        quantization = self.engine_fp8_layers, cfg.nemo_fp8rl.format, cfg.nemo_fp8rl.scale_format
        self.global_scales = GlobalScales(self.layout, self.model, *quantization)
        self.global_scales.choose()
        if adapters:
            freeze_base(self.model)
        self.scheduler = build_scheduler(cfg.policy, self.optimizer)
        self.offload = Offload(self.ddp, self.optimizer, on_gpu)
        self.rank_weights = RankWeights(self.layout, self.model, self.optimizer, DTYPES[cfg.policy.precision])
        of_rank = self.rank_weights, self.scheduler, self.global_scales, self.kv_cache
        self.checkpoint, self.noise = RankCheckpoint(cfg, rank, *of_rank), NormNoise.of(cfg)
        layout = self.layout
        token_parts = layout.tensor.size if cfg.policy.megatron_cfg.sequence_parallel else 1
        token_multiple = token_parts * FP8_TOKENS if on_gpu and token_parts > 1 else token_parts
        token_multiple *= layout.context.size
        self.pipeline = Pipeline(
            cfg.policy,
            self.ddp,
            self.model,
            self.kv_cache,
            replay,
            cfg.trainer_kv_window,
            device,
            token_multiple,
            alignment,
        )
        self.reference = ReferencePolicy(cfg, self.rank_weights, self.offload, self.model.adapters, self.kv_cache)
        is_first = layout.tensor.rank == layout.context.rank == 0
        return RankInfo(shard=layout.data.rank, is_reporter=layout.is_last_stage and is_first)

    def reference_logprobs(self, batch: SequenceBatch) -> Tensor:
        """Return `logprobs` under the weights of policy.model_name."""
        return self.reference.logprobs(batch, partial(self._clean_logprobs, filter_tokens=False))

    def logprobs(self, batch: SequenceBatch, filter_tokens: bool = True) -> Tensor:
        """Return the log-probs of the tokens, float32 [B, T]: 0 at position 0, arbitrary at padding.

        A stage before the last one returns zeros.
        filter_tokens:  True takes the softmax only over the tokens that policy.generation's top_k and top_p select
        """
        self.offload.restore_parameters()
        with self.noise.applied(self.rank_weights.norms):
            return self._clean_logprobs(batch, filter_tokens)

    def logprobs_and_sharpness(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return `logprobs` and, in the same layout, the sharpness of the tokens (`policy.sharpness`)."""
        self.offload.restore_parameters()
        with self.noise.applied(self.rank_weights.norms):
            return self._run_forward(batch, epsilon=self.cfg.nemo_fp8rl.sharpness.epsilon)

    def _clean_logprobs(self, batch: SequenceBatch, filter_tokens: bool = True) -> Tensor:
        """Return `logprobs` of the parameters as they are, without noise."""
        return self._run_forward(batch, filter_tokens)[0]

    def _run_forward(
        self, batch: SequenceBatch, filter_tokens: bool = True, epsilon: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and sharpness, float32 [B, T] each; without epsilon the sharpness is zeros."""
        logprobs, sharpness = torch.zeros(batch.input_ids.shape), torch.zeros(batch.input_ids.shape)
        self.offload.restore_parameters()

        def copy_out(values: TokenValues, row_numbers: Tensor, part: SequenceBatch) -> tuple[Tensor, None]:
            columns = slice(1, part.input_ids.size(1))
            logprobs[row_numbers, columns] = values.logprobs.cpu()
            if values.sharpness is not None:
                sharpness[row_numbers, columns] = values.sharpness.cpu()
            return values.logprobs, None

        with torch.no_grad(), megatron_on_cpu():
            self.pipeline.run(batch, copy_out, training=False, filter_tokens=filter_tokens, epsilon=epsilon)
        return logprobs, sharpness

    def train_step(
        self, shard: RolloutBatch, loss: Loss, totals: LossTotals, schedules: bool = True
    ) -> dict[str, float]:
        """Take one optimizer step and return its metrics; see `policy.interface.Policy.train_step`.

        Gradients and metrics are sums over microbatches and ranks, because the loss divides by the global counts. Only
        ranks of the last stage return the loss's metrics.
        shard:   the rows of this rank
        totals:  counts of the whole batch
        """

        def compute_loss(
            values: TokenValues, _row_numbers: Tensor, part: RolloutBatch
        ) -> tuple[Tensor, dict[str, float]]:
            return loss(values.logprobs, part, totals, values.unfiltered)

        with megatron_on_cpu():
            self.gradient_bits.start_step(self.optimizer_steps)
            self.ddp.restore_grad_buffers()
            self.ddp.zero_grad_buffer()
            # the gradients are those of the weights without noise
            with self._dropout(), self.noise.applied(self.rank_weights.norms):
                metrics = combine_metrics(self.pipeline.run(shard, compute_loss, training=True))
            finalize_model_grads([self.ddp])
            of_scale: dict[str, float] = {}
            skipped = overflows(metrics, self.ddp, self.loss_scale)
            if self.loss_scale is not None:
                of_scale = {"loss_scale": self.loss_scale.value, "overflow_ratio": float(skipped)}
            if self.loss_scale is not None and skipped:
                grad_norm, raises = 0.0, 0
                self.loss_scale.record_overflow()
            else:
                grad_norm, raises = self._update_weights(schedules)
            if self.layout.adapters:  # between steps an adapter's parameter then has 14 bytes
                self.ddp.offload_grad_buffers(empty_cache=False)
        metrics = {**metrics, "grad_norm": grad_norm, "lr": float(self.optimizer.param_groups[0]["lr"])}
        metrics |= {"grad_bytes": largest_of_ranks(self.ddp.sent_bytes)} | of_scale
        return {**metrics, "global_scale_raises": float(raises)} if self.global_scales.matrices else metrics

    def _update_weights(self, schedules: bool) -> tuple[float, int]:
        """Move the weights by finite gradients; return their norm and the global scales that were raised."""
        if schedules:  # before the update, so that the first step of a warm-up already moves weights
            self.scheduler.step(increment=1)
        moved, grad_norm, _ = self.optimizer.step()
        if not moved:
            raise RuntimeError("Megatron skipped a step whose gradients are finite")
        self.optimizer.zero_grad()  # else float32 copies of 16-bit gradients stay until the next step
        self.optimizer_steps += 1
        if self.kv_cache is not None:
            self.kv_cache.is_current = False
        # a frozen base keeps its scales
        return float(grad_norm), 0 if self.layout.adapters else self.global_scales.update()

    def _dropout(self) -> AbstractContextManager[None]:
        """Return a block in which adapters drop the values of this optimizer step and this rank."""
        if self.model.adapters is None:
            return nullcontext()
        rank = self.layout.dropout_seed(self.cfg.policy.megatron_cfg.sequence_parallel)
        return self.model.adapters.training(self.pipeline.device, self.cfg.grpo.seed, self.optimizer_steps, *rank)

    def weights(self) -> RankWeights:
        """Return the weights of this rank, on its device again after an offload; FP8 weights come without columns."""
        self.offload.restore_parameters(columns=False)
        return self.rank_weights

    def describe(self) -> PolicyDescription:
        """Return what this rank chose for its machine."""
        if self.description is None:
            self.description = describe_rank(self.cfg, self.hf, self.model, self.kv_cache)
        return self.description

    def on_gpu(self) -> bool:
        return torch.cuda.is_available()

    def step_schedule(self) -> None:
        self.scheduler.step(increment=1)

    def prepare_for_training(self) -> None:
        self.offload.restore_parameters()
        self.offload.restore_training_state()

    def offload_before_refit(self) -> None:
        self.offload.offload_training_state()
        self.offload.drop_fp8_columns()

    def offload_after_refit(self) -> int:
        """Free what training needs and the parameters; return the bytes that are away now.

        Training must call `prepare_for_training` first; every other method brings back what it reads.
        """
        self.offload.offload_training_state()
        self.offload.offload_parameters()
        return self.offload.nbytes

    def calibrate_kv(self, batch: SequenceBatch) -> None:
        """Compute the KV cache's scales from the present weights on these sequences, together with all ranks."""
        assert self.kv_cache is not None
        self.kv_cache.begin_calibration()
        try:
            self._clean_logprobs(batch)
            self.kv_cache.end_calibration()
        except CalibrationError as error:
            raise UserError(f"the FP8 KV cache cannot be calibrated: {error}; look into the model's weights") from None

    def open_refit(self, transport: Transport, token: str) -> tuple[tuple[TensorPart, ...], str]:
        """Prepare for links from engines; return this rank's parts and its domain
        (`refit.transport.shared_memory.domain`).
        """
        choice, layers, adapters = self.cfg.nemo_fp8rl, self.engine_fp8_layers, self.layout.adapters
        shapes = expected_tensors(self.hf) | adapter_tensors(self.hf, adapters)
        parts = [
            TensorPart.of(
                name,
                choice.format if layers.quantizes(name) else part.dtype,
                shapes[name],
                self.layout.region(name, shapes[name]),
                is_frozen=bool(adapters) and not is_adapter(name) and not self.noise.concerns(name),
            )
            for name, part in self.weights().for_refit()
        ]
        parts = stack_parts(parts, self.hf.num_experts)
        if self.kv_cache is not None:
            names = KvScales.tensor_names(self.hf.num_hidden_layers)
            parts += [TensorPart.of(name, torch.float32, ()) for name in names]
        self.refit = SendingRank(
            parts,
            choice.scale_format,
            transport=transport,
            host=node_address(self.cfg.cluster),
            token=token,
            timeout=SENDER_SHARE * self.cfg.cluster.engine_timeout_seconds,
            device=next(self.model.parameters()).device,  # a device with an index
        )
        return tuple(parts), domain()

    def offer(self, engine: int, routes: Sequence[Route], capacities: Sequence[int]) -> list[Any]:
        return self.refit.offer(engine, routes, capacities)

    def withdraw(self, engine: int) -> None:
        self.refit.withdraw(engine)

    def base_version(self) -> int:
        return self.refit.base_version

    def take_noise(self, version: int) -> None:
        """Compute with the noise of this version from now on."""
        self.noise.version = version

    def start_push(
        self, version: int, engines: Collection[int], full_only: frozenset[str], how: dict[str, bool]
    ) -> None:
        """Start a thread that sends these engines their parts of this rank's weights.

        The thread quantizes the weights, except those that exist only in FP8.
        """
        kv_scales: Iterator[tuple[str, Tensor]] = iter(())
        if self.kv_cache is not None:
            if self.kv_cache.scales is None:
                raise RefitError(f"refit {version}: the KV cache is FP8 and has no scales yet: calibrate first")
            if not self.kv_cache.is_current:
                raise RefitError(f"refit {version}: the KV cache's scales are of earlier weights: calibrate first")
            kv_scales = self.kv_cache.scales.named_tensors()
        # parameters may be offloaded when an engine is brought up to date while other engines generate
        self.has_borrowed_parameters = "parameters" in self.offload.offloaded_bytes
        stacked = stack_weights(self.weights().for_refit(), self.refit.sender.stack_sizes)
        weights, encodes = chain(self.noise.add_to_parts(stacked, version), kv_scales), self.global_scales.encodes()
        self.refit.start(weights, version, engines, full_only=full_only, encodes=encodes, **how)

    def finish_push(self) -> SendReport:
        try:
            return self.refit.finish()
        finally:
            if self.has_borrowed_parameters:
                self.offload.offload_parameters()

    def weight_squares(self) -> SquaresByGroup:
        """Return this rank's part of `weight_error`."""
        choice = self.cfg.nemo_fp8rl
        rule = self.engine_fp8_layers, choice.scale_format, choice.format, self.global_scales.encodes()
        return self.weights().squares(*rule)

    def save(self, folder: str, optimizer: bool = True) -> None:
        """Write weights or adapters and the optimizer's state; all ranks call it together (`RankCheckpoint.save`)."""
        self.offload.restore_parameters(columns=False)
        self.checkpoint.save(Path(folder), optimizer)

    def load(self, folder: str) -> None:
        self.offload.restore_parameters()
        with megatron_on_cpu():
            self.checkpoint.load(Path(folder))
            self.optimizer_steps = int(count_adam_steps(self.optimizer))

    def shutdown(self) -> None:
        """Release what `setup` made, so that another policy can be built in this process."""
        if "refit" in self.__dict__:
            self.refit.close()
        destroy_process_groups()
