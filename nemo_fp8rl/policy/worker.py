"""One Megatron rank: forward, backward, optimizer, export. Runs in this process or inside a Ray actor.

Calls into Megatron that name CUDA go through `megatron_on_cpu`, so an engine in the same process sees an unchanged
torch.
"""

import shutil
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from nemo_fp8rl.algorithms.loss import combined
from nemo_fp8rl.algorithms.quantization_error import SquaresByGroup
from nemo_fp8rl.batch import TrainBatch
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.machine import instructions
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.fp8 import FP8_TOKENS, KvScales, kernels
from nemo_fp8rl.fp8.format import E4M3
from nemo_fp8rl.fp8.kv_scales import CalibrationError
from nemo_fp8rl.hf.fp8_layers import engine_fp8_layers
from nemo_fp8rl.hf.hub import checkpoint_folder
from nemo_fp8rl.hf.model_config import HfConfig, read_hf_config
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.policy.interface import SHARED, Loss, PolicyDescription
from nemo_fp8rl.policy.layer_specs import transformer_engine_linears
from nemo_fp8rl.policy.layers.kv_cache import TrainerKvCache
from nemo_fp8rl.policy.layers.linears import MultipliesInFp8
from nemo_fp8rl.policy.layers.routing_replay import RoutingReplay
from nemo_fp8rl.policy.model import DTYPES, build_model, moe_dispatcher, transformer_config
from nemo_fp8rl.policy.offload import Offload
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.on_cpu.vllm_cpu_rounding import cache_rounding, is_aligned, loses_denormals
from nemo_fp8rl.policy.optimizer import build_ddp, build_optimizer, build_scheduler, check_finite
from nemo_fp8rl.policy.pipeline import Pipeline
from nemo_fp8rl.policy.process_groups import join, leave, split_model
from nemo_fp8rl.policy.weights.checkpoint import load_hf, save_hf
from nemo_fp8rl.policy.weights.optimizer_state import load_optimizer, save_optimizer
from nemo_fp8rl.policy.weights.rank_weights import HeldWeights
from nemo_fp8rl.refit.bridge import Transport
from nemo_fp8rl.refit.manifest import RefitError, TensorPart, from_json, to_json
from nemo_fp8rl.refit.reports import SendReport
from nemo_fp8rl.refit.sender.sending_rank import SendingRank
from nemo_fp8rl.refit.transport.link import SENDER_SHARE
from nemo_fp8rl.refit.transport.shared_memory import domain


@dataclass(frozen=True)
class Place:
    """What the driver must know of a rank.

    shard: which part of a batch it gets. answers: whether it is the one, of those with this part, that has its
    log-probs and metrics.
    """

    shard: int
    answers: bool


class MegatronWorker:
    """One rank, with its part of the model. Construct, then `setup`."""

    listener: socket.socket | None = None
    """The socket on which the ranks meet; held by rank 0 from `rendezvous` until `setup`."""
    borrows = False
    """Whether a push has taken parameters that were away, and gives them back."""

    def rendezvous(self) -> tuple[str, int]:
        """(host, port) for the ranks to meet at: a socket that this rank holds, on the cluster's interface only."""
        import ray

        self.listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        return self.listener.getsockname()[:2]

    def setup(self, cfg: Config, rank: int, world_size: int, rendezvous: tuple[str, int] | None) -> Place:
        """Join the ranks, build the model and its optimizer. `rendezvous` is (host, port) of rank 0's store."""
        self.cfg, self.rank, on_gpu = cfg, rank, self.on_gpu()
        self._quantizer()  # raises UserError for a quantizer that this machine does not have
        device = torch.device("cuda" if on_gpu else "cpu")
        self.hf = read_hf_config(cfg.policy.model_name)
        if on_gpu:
            _check_for_gpu(cfg, self.hf)
        tokenizer = checkpoint_folder(cfg.policy.tokenizer.name, "policy.tokenizer.name")
        self.sources = checkpoint_folder(cfg.policy.model_name), tokenizer
        self.engine_fp8_layers = engine_fp8_layers(self.hf, cfg)
        join(rank, world_size, rendezvous, self.listener if rank == 0 else None)
        self.layout = split_model(self.hf, cfg.policy.megatron_cfg)
        if on_gpu:
            model_parallel_cuda_manual_seed(cfg.grpo.seed)  # Megatron asks for it, though nothing here drops out
        self.kv_cache = self._build_kv_cache()
        with megatron_on_cpu():
            config = transformer_config(self.hf, cfg.policy, cfg.nemo_fp8rl)
            self.model = build_model(config, self.layout, cfg, self.kv_cache).to(device)
            recomputed = cfg.policy.megatron_cfg.activation_checkpointing
            replay = RoutingReplay(self.model, self.layout, recomputed) if self.hf.family.experts else None
            fp8_param = on_gpu and cfg.nemo_fp8rl.fp8_param
            self.ddp = build_ddp(config, self.model, cfg.policy.precision, fp8_param)
            self.optimizer = build_optimizer(cfg.policy, self.ddp, DTYPES[cfg.policy.precision], fp8_param)
        self.scheduler = build_scheduler(cfg.policy, self.optimizer)
        self.offload = Offload(self.ddp, self.optimizer, on_gpu)
        self.held = HeldWeights(self.layout, self.model, self.optimizer, DTYPES[cfg.policy.precision])
        layout = self.layout
        split = layout.tensor.size if cfg.policy.megatron_cfg.sequence_parallel else 1  # of a rank's tokens
        multiple = split * FP8_TOKENS if on_gpu and split > 1 else split
        multiple *= layout.context.size
        aligned = is_aligned(cfg.nemo_fp8rl)
        self.pipeline = Pipeline(cfg.policy, self.ddp, self.model, self.kv_cache, replay, device, multiple, aligned)
        if cfg.loss_fn.reference_policy_kl_penalty:  # on the host: it is read once a step
            self.reference = [_on_host(tensor) for tensor in self.held.storage()]
        first = layout.tensor.rank == layout.context.rank == 0
        return Place(shard=layout.data.rank, answers=layout.last_stage and first)

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """`logprobs` under the weights of policy.model_name, which take the trainer's place meanwhile.

        Nothing of the engine's enters them, neither its choice of experts nor its cache: both follow the policy.
        """
        self.offload.take_parameters()
        present = self.held.storage()
        # beside gradients and the optimizer, where these stay, there may be no room for a second copy
        aside = None if self.cfg.policy.megatron_cfg.offload_between_phases else "cpu"
        own = [tensor.to(aside, copy=True) for tensor in present]
        alone = TrainBatch(input_ids=batch["input_ids"], input_lengths=batch["input_lengths"])
        with self.kv_cache.unread() if self.kv_cache is not None else nullcontext():
            try:
                torch._foreach_copy_(present, self.reference)  # in place: they are views of Megatron's buffers
                return self.logprobs(alone, restricted=False)
            finally:
                torch._foreach_copy_(present, own)

    def logprobs(self, batch: TrainBatch, restricted: bool = True) -> Tensor:
        """float32 [B, T], position 0 is 0, padding is whatever the model says of it; zeros before the last stage.

        restricted: over the tokens that policy.generation's top_k and top_p leave.
        """
        out = torch.zeros(batch["input_ids"].shape)
        self.offload.take_parameters()

        def keep(logprobs: Tensor, which: Tensor, part: TrainBatch) -> tuple[Tensor, None]:
            out[which, 1 : part["input_ids"].size(1)] = logprobs.cpu()
            return logprobs, None

        with torch.no_grad(), megatron_on_cpu():
            self.pipeline.run(batch, keep, training=False, restricted=restricted)
        return out

    def train_step(
        self, shard: TrainBatch, loss: Loss, valid_seqs: float, valid_toks: float, schedules: bool = True
    ) -> dict[str, float]:
        """One optimizer step; `shard` is this rank's part, the counts are those of the whole batch.

        Gradients and metrics are sums over microbatches and ranks, because the loss divides by the global counts. Only
        ranks of the last stage have the loss's metrics. schedules, raises: see `policy.base`.
        """

        def lossy(logprobs: Tensor, which: Tensor, part: TrainBatch) -> tuple[Tensor, dict[str, float]]:
            return loss(logprobs, part, torch.tensor(valid_seqs), torch.tensor(valid_toks))

        with megatron_on_cpu():
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            metrics = combined(self.pipeline.run(shard, lossy, training=True))
            finalize_model_grads([self.ddp])
            check_finite(metrics, self.ddp)
            if schedules:  # before the update: the first step of a warm-up already moves
                self.scheduler.step(increment=1)
            _, grad_norm, _ = self.optimizer.step()
            if self.kv_cache is not None:
                self.kv_cache.of_present_weights = False
        return {**metrics, "grad_norm": float(grad_norm), "lr": float(self.optimizer.param_groups[0]["lr"])}

    def weights(self) -> HeldWeights:
        """What this rank has of the model, brought back from where it was offloaded to; FP8 weights without columns."""
        self.offload.take_parameters(columns=False)
        return self.held

    def describe(self) -> PolicyDescription:
        """Return what this rank chose for its machine."""
        layers = (module for module in self.model.modules() if isinstance(module, MultipliesInFp8))
        rounding = None if self.kv_cache is None else self.kv_cache.rounding
        return PolicyDescription(
            kernels=frozenset(layer.kernel_name for layer in layers),
            quantizers=frozenset(filter(None, [self._quantizer()])),
            alignments=frozenset(["vllm" if is_aligned(self.cfg.nemo_fp8rl) else "none"]),
            cache_roundings=frozenset(filter(None, [rounding])),
            instruction_sets=frozenset([instructions()]),
        )

    def _quantizer(self) -> str:
        """Name what quantizes the weights of this rank for a refit; "" without FP8 engines."""
        name = self.cfg.nemo_fp8rl.kernel
        if not self.cfg.nemo_fp8rl.engine_fp8:
            return ""
        if self.on_gpu() and self.cfg.nemo_fp8rl.fp8_param:
            return "none: weights are sent as they are held"
        try:
            return kernels.describe(kernels.resolve(name, "cuda" if self.on_gpu() else "cpu"))
        except kernels.KernelError as error:
            raise UserError(f"nemo_fp8rl.kernel={name}: {error}") from None

    def on_gpu(self) -> bool:
        return torch.cuda.is_available()

    def step_schedule(self) -> None:
        self.scheduler.step(increment=1)

    def prepare_for_training(self) -> None:
        self.offload.take_parameters()
        self.offload.take_training()

    def offload_before_refit(self) -> None:
        self.offload.give_training()
        self.offload.give_columns()

    def offload_after_refit(self) -> int:
        """Bytes that are away now. Training needs `prepare_for_training` first; all else takes what it reads itself."""
        self.offload.give_training()
        self.offload.give_parameters()
        return self.offload.nbytes

    def calibrate_kv(self, batch: TrainBatch) -> None:
        """Take the scales of the KV cache from what the present weights make of these sequences, on all ranks."""
        assert self.kv_cache is not None
        self.kv_cache.begin_calibration()
        try:
            self.logprobs(batch)
            self.kv_cache.end_calibration()
        except CalibrationError as error:
            raise UserError(f"the FP8 KV cache cannot be calibrated: {error}; look into the model's weights") from None

    def open_refit(self, transport: Transport, token: str) -> tuple[str, str]:
        """Be ready for engines to link with this rank; what it holds, `refit.manifest.to_json`, and its domain."""
        choice, layers, shapes = self.cfg.nemo_fp8rl, self.engine_fp8_layers, expected_tensors(self.hf)
        parts = [
            TensorPart.of(
                name,
                E4M3 if layers.quantizes(name) else part.dtype,
                shapes[name],
                self.layout.region(name, shapes[name]),
            )
            for name, part in self.weights().for_refit()
        ]
        if self.kv_cache is not None:
            names = KvScales.tensor_names(self.hf.num_hidden_layers)
            parts += [TensorPart.of(name, torch.float32, ()) for name in names]
        self.refit = SendingRank(
            parts,
            choice.scale_format,
            choice.kernel,
            transport=transport,
            host=_own_host(self.cfg),
            token=token,
            timeout=SENDER_SHARE * self.cfg.cluster.engine_timeout_seconds,
            device=next(self.model.parameters()).device,  # with its number
        )
        return to_json(parts), domain()

    def offer(self, engine: int, routes: Sequence[str], capacities: Sequence[int]) -> list[Any]:
        return self.refit.offer(engine, [from_json(route) for route in routes], capacities)

    def withdraw(self, engine: int) -> None:
        self.refit.withdraw(engine)

    def base_version(self) -> int:
        return self.refit.base_version

    def start_push(self, version: int, engines: Collection[int], whole: frozenset[str], how: dict[str, bool]) -> None:
        """Send what these engines take of this rank, in a thread; quantized here, but for what is held in FP8."""
        kv_scales: Iterator[tuple[str, Tensor]] = iter(())
        if self.kv_cache is not None:
            if self.kv_cache.scales is None:
                raise RefitError(f"refit {version}: the KV cache is FP8 and has no scales yet: calibrate first")
            if not self.kv_cache.of_present_weights:
                raise RefitError(f"refit {version}: the KV cache's scales are of earlier weights: calibrate first")
            kv_scales = self.kv_cache.scales.named_tensors()
        self.borrows = "parameters" in self.offload.away  # to catch up an engine, while others generate
        self.refit.start(chain(self.weights().for_refit(), kv_scales), version, engines, whole=whole, **how)

    def finish_push(self) -> SendReport:
        try:
            return self.refit.finish()
        finally:
            if self.borrows:
                self.offload.give_parameters()

    def weight_squares(self) -> SquaresByGroup:
        """This rank's part of `weight_error`."""
        choice = self.cfg.nemo_fp8rl
        return self.weights().squares(self.engine_fp8_layers, choice.scale_format, choice.kernel)

    def save(self, folder: str, optimizer: bool = True) -> None:
        """Write an HF checkpoint and the optimizer's state, all ranks together. Raises UserError on a full disk, and
        where the folder is another on some rank's node.

        What the folder had of either is removed: a save that was killed may have been of more ranks.
        """
        path = Path(folder)
        errors: list[Exception | None] = []  # raised at the end: till then the other ranks wait for this one's part
        try:
            if self.rank == 0:
                path.mkdir(parents=True, exist_ok=True)
                for part in (path / "weights", path / "optimizer"):
                    if part.exists():
                        shutil.rmtree(part)
                if self.kv_cache is not None:
                    self.kv_cache.save(path)
        except OSError as error:
            errors.append(error)
        dist.barrier()
        if self.rank and not path.is_dir():
            errors.append(UserError(f"rank {self.rank} does not see it: {SHARED}"))
        errors.append(save_hf(path / "weights", self.weights().for_checkpoint(), self.layout, self.rank, *self.sources))
        if optimizer:
            parts = self.layout, self.model, self.optimizer, self.scheduler
            errors.append(save_optimizer(path / "optimizer", self.rank, *parts))
        dist.barrier()  # nobody writes any more, so that a caller may remove what there is
        if any(errors):
            raise UserError(f"{folder}: {next(filter(None, errors))}") from None

    def load(self, folder: str) -> None:
        self.offload.take_parameters()
        with megatron_on_cpu():
            load_hf(Path(folder) / "weights", self.model, self.layout)
            if self.kv_cache is not None:
                self.kv_cache.load(Path(folder))
            load_optimizer(Path(folder) / "optimizer", self.layout, self.model, self.optimizer, self.scheduler)

    def shutdown(self) -> None:
        """Leave the process as `setup` found it, so that another policy can be built in it."""
        if "refit" in self.__dict__:
            self.refit.close()
        leave()

    def _build_kv_cache(self) -> TrainerKvCache | None:
        if not self.cfg.fp8_kv_cache:
            return None
        rounding = cache_rounding() if self.cfg.nemo_fp8rl.kv == "unified" else None
        return TrainerKvCache(self.hf.num_hidden_layers, rounding, loses_denormals(DTYPES[self.cfg.policy.precision]))


def _check_for_gpu(cfg: Config, hf: HfConfig) -> None:
    """Raise UserError for what a policy on a GPU cannot do as it is said, before anything is built."""
    if cfg.nemo_fp8rl.align == "vllm":
        raise UserError(
            "nemo_fp8rl.align=vllm rounds as vLLM's CPU kernels do: set nemo_fp8rl.align=auto to train on a GPU"
        )
    if hf.family.experts or cfg.nemo_fp8rl.trainer_fp8:
        te = transformer_engine_linears(cfg.nemo_fp8rl.scale_format if cfg.nemo_fp8rl.trainer_fp8 else None)
        allgather = hf.family.experts and moe_dispatcher(cfg.policy.megatron_cfg) == "allgather"
        if allgather and (why_not := te.why_no_allgather()):
            raise UserError(
                f"{why_not} where experts are on one rank: install 2.15 or later, or set "
                "policy.megatron_cfg.expert_model_parallel_size=2 or more"
            )
    if hf.family.experts and cfg.policy.precision == "float32":
        raise UserError(
            "policy.precision=float32: on a GPU experts are Transformer Engine's, which multiplies float32 in TF32; "
            "set policy.precision=bfloat16"
        )


def _on_host(tensor: Tensor) -> Tensor:
    """A copy, pinned where it is to go back to a GPU: one that is not is copied once more on the way."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)


def _own_host(cfg: Config) -> str:
    """Address of this node on the cluster's interface; loopback without a cluster."""
    if cfg.cluster.backend == "in_process":
        return "127.0.0.1"
    import ray

    return ray.util.get_node_ip_address()
