"""One Megatron rank: forward, backward, optimizer, export. Runs in this process or inside a Ray actor.

Every call into Megatron goes through `megatron_on_cpu`, so an engine in the same process sees an unchanged torch.
"""

import ipaddress
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from safetensors import SafetensorError
from torch import Tensor

from nemo_fp8rl.algorithms.loss import EXTREMA, combined
from nemo_fp8rl.algorithms.quantization_error import weight_error_by_precision
from nemo_fp8rl.batch import TrainBatch, microbatches, num_rows, rows
from nemo_fp8rl.config import Config
from nemo_fp8rl.errors import UserError
from nemo_fp8rl.hf.config import engine_fp8_layers, read_hf_config
from nemo_fp8rl.policy import state
from nemo_fp8rl.policy.base import Loss
from nemo_fp8rl.policy.cpu import megatron_on_cpu
from nemo_fp8rl.policy.logprobs import token_logprobs
from nemo_fp8rl.policy.megatron_names import to_hf
from nemo_fp8rl.policy.model import DTYPES, build_model, transformer_config
from nemo_fp8rl.refit.manifest import Update
from nemo_fp8rl.refit.quantize import build_update
from nemo_fp8rl.refit.transport import serialized


class MegatronWorker:
    """One data-parallel rank with the whole model. Construct, then `setup`."""

    listener: socket.socket | None = None
    """Where the ranks meet; held by rank 0 from `rendezvous` until `setup`."""

    def rendezvous(self) -> tuple[str, int]:
        """(host, port) for the ranks to meet at: a socket that this rank holds, on the cluster's interface only."""
        import ray

        self.listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        return self.listener.getsockname()[:2]

    def setup(self, cfg: Config, rank: int, world_size: int, rendezvous: tuple[str, int] | None) -> None:
        """Join the ranks, build the model and its optimizer. `rendezvous` is (host, port) of rank 0's store."""
        if torch.cuda.is_available():
            raise UserError("this policy trains on CPU so far: set CUDA_VISIBLE_DEVICES= (empty) to run it here")
        self.cfg, self.rank = cfg, rank
        self.hf = read_hf_config(cfg.policy.model_name)
        self.engine_fp8_layers = engine_fp8_layers(self.hf, cfg)
        _join(rank, world_size, rendezvous, self.listener if rank == 0 else None)
        bf16 = cfg.policy.precision == "bfloat16"
        with megatron_on_cpu():
            config = transformer_config(self.hf, cfg.policy, cfg.nemo_fp8rl)
            self.model = build_model(config, self.hf, cfg)
            self.ddp = DistributedDataParallel(
                config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
                Float16Module(config, self.model) if bf16 else self.model,
            )
            optimizer = cfg.policy.megatron_cfg.optimizer
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer=optimizer.optimizer,
                    lr=optimizer.lr,
                    min_lr=optimizer.min_lr,
                    weight_decay=optimizer.weight_decay,
                    adam_beta1=optimizer.adam_beta1,
                    adam_beta2=optimizer.adam_beta2,
                    adam_eps=optimizer.adam_eps,
                    clip_grad=optimizer.clip_grad,
                    bf16=bf16,
                    params_dtype=DTYPES[cfg.policy.precision],
                    use_distributed_optimizer=True,
                ),
                [self.ddp],
            )
        self.scheduler = self._build_scheduler()
        if cfg.loss_fn.reference_policy_kl_penalty:
            self.reference = [parameter.detach().clone() for parameter in self.model.parameters()]

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """`logprobs` under the weights of policy.model_name, which take the trainer's place meanwhile."""
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        own = [parameter.clone() for parameter in parameters]
        try:
            torch._foreach_copy_(parameters, self.reference)  # in place: they are views of Megatron's buffers
            return self.logprobs(batch)
        finally:
            torch._foreach_copy_(parameters, own)

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """float32 [B, T], position 0 is 0, padding is whatever the model says of it."""
        out = torch.zeros(batch["input_ids"].shape)
        policy = self.cfg.policy
        with torch.no_grad(), megatron_on_cpu():
            for which, part in self._microbatches(
                batch, policy.logprob_batch_size, policy.dynamic_batching.logprob_mb_tokens
            ):
                out[which, 1 : part["input_ids"].size(1)] = self._next_token_logprobs(part["input_ids"])
        return out

    def train_step(self, shard: TrainBatch, loss: Loss, valid_seqs: float, valid_toks: float) -> dict[str, float]:
        """One optimizer step; `shard` is this rank's part, the counts are those of the whole batch.

        Gradients and metrics are sums over microbatches and ranks, because the loss divides by the global counts.
        """
        parts: list[dict[str, float]] = []
        policy = self.cfg.policy
        with megatron_on_cpu():
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            for _, part in self._microbatches(
                shard, policy.train_micro_batch_size, policy.dynamic_batching.train_mb_tokens
            ):
                logprobs = self._next_token_logprobs(part["input_ids"])
                value, part_metrics = loss(logprobs, part, torch.tensor(valid_seqs), torch.tensor(valid_toks))
                value.backward()
                parts.append(part_metrics)
            metrics = combined(parts)
            finalize_model_grads([self.ddp])
            self.scheduler.step(increment=1)  # before the update: the first step of a warm-up already moves
            _check_finite(metrics, self.ddp)
            _, grad_norm, _ = self.optimizer.step()
        return {**metrics, "grad_norm": float(grad_norm), "lr": float(self.optimizer.param_groups[0]["lr"])}

    def export_update(self, version: int, serialize: bool) -> Update | bytes:
        """This version's weights for the engines, quantized here and nowhere else."""
        choice = self.cfg.nemo_fp8rl
        update = build_update(
            self.export_weights(), version, self.engine_fp8_layers, choice.scale_format, choice.kernel
        )
        return serialized.pack(update) if serialize else update

    def weight_error(self) -> dict[str, float]:
        choice = self.cfg.nemo_fp8rl
        layers = self.engine_fp8_layers
        return weight_error_by_precision(self.export_weights(), layers, choice.scale_format, choice.kernel)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor) of every weight, in the dtype that the forward reads; views where the layout allows."""
        return to_hf(self.hf, {name: parameter.detach() for name, parameter in self.model.named_parameters()})

    def save(self, folder: str) -> None:
        """Rank 0 writes the HF checkpoint, every rank its shard of the optimizer. Raises UserError on a full disk."""
        policy = self.cfg.policy
        sources = Path(policy.model_name), Path(policy.tokenizer.name)
        try:
            if self.rank == 0:
                state.save_hf(Path(folder) / "weights", self.export_weights(), *sources)
            state.save_optimizer(Path(folder) / "optimizer", self.rank, self.model, self.optimizer, self.scheduler)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder}: {error}") from None

    def load(self, folder: str) -> None:
        with megatron_on_cpu():
            state.load_hf(Path(folder) / "weights", self.model, self.hf)
            state.load_optimizer(Path(folder) / "optimizer", self.rank, self.model, self.optimizer, self.scheduler)

    def shutdown(self) -> None:
        """Leave the process as `setup` found it, so that another policy can be built in it."""
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()

    def _microbatches(self, batch: TrainBatch, size: int, tokens: int) -> Iterator[tuple[Tensor, TrainBatch]]:
        """(row numbers, rows): `size` rows each, or with dynamic batching as many as have `tokens` with padding."""
        dynamic = self.cfg.policy.dynamic_batching
        multiple = dynamic.sequence_length_round if dynamic.enabled else 1
        if dynamic.enabled:
            parts = microbatches(batch["input_lengths"], tokens, multiple)
        else:
            parts = list(torch.arange(num_rows(batch)).split(size))
        for which in parts:
            yield which, rows(batch, which, multiple)

    def _next_token_logprobs(self, input_ids: Tensor) -> Tensor:
        """[B, T] -> float32 [B, T-1], of input_ids[:, 1:], at the temperature that the engine samples with."""
        inputs = input_ids[:, :-1]
        positions = torch.arange(inputs.size(1)).expand_as(inputs)
        policy, head = self.cfg.policy, self.model.head
        hidden = self.ddp(inputs, positions, None).to(head.dtype).flatten(0, 1)  # Megatron hands it out in float32
        targets = input_ids[:, 1:].flatten()
        logprobs = token_logprobs(hidden, head, targets, policy.generation.temperature, policy.logprob_chunk_size)
        return logprobs.view(inputs.shape)

    def _build_scheduler(self) -> OptimizerParamScheduler:
        optimizer, scheduler = self.cfg.policy.megatron_cfg.optimizer, self.cfg.policy.megatron_cfg.scheduler
        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=scheduler.lr_warmup_init,
            max_lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            lr_warmup_steps=scheduler.lr_warmup_iters,
            lr_decay_steps=scheduler.lr_decay_iters,
            lr_decay_style=scheduler.lr_decay_style,
            start_wd=optimizer.weight_decay,
            end_wd=optimizer.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )


def _check_finite(metrics: dict[str, float], ddp: DistributedDataParallel) -> None:
    """Raise, on every rank alike, before the update: Megatron looks for such gradients only when it scales the loss."""
    gradients = all(torch.isfinite(parameter.main_grad).all() for parameter in ddp.parameters())
    sums = (value for name, value in metrics.items() if not name.endswith(tuple(EXTREMA)))  # of no token: infinite
    bad = torch.tensor(float(not gradients or not all(map(math.isfinite, sums))))
    dist.all_reduce(bad)
    if bad:
        raise FloatingPointError(f"a gradient or the loss is not finite, weights are as before the step: {metrics}")


def _join(rank: int, world_size: int, rendezvous: tuple[str, int] | None, listener: socket.socket | None) -> None:
    """Start gloo and Megatron's groups. One rank needs no socket; an engine in this process may share its group."""
    if not dist.is_initialized():
        store: dist.Store = dist.HashStore()
        if rendezvous is not None:
            host, port = rendezvous
            if ipaddress.ip_address(host).is_loopback:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            descriptor = listener.detach() if listener else None  # the store closes it
            store = dist.TCPStore(
                host, port, world_size=world_size, is_master=rank == 0, master_listen_fd=descriptor, use_libuv=False
            )
        dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
