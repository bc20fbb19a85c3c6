"""A batch through the model, microbatch by microbatch, to the log-probs of its tokens and back.

Megatron's schedule drives it, over one stage or several. Sequences lie in the model's tensors in one of two ways: one a
row, right-padded to the longest; or packed, one after the other without padding (`policy.sequence_packing`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from nemo_fp8rl.batch import TrainBatch, bins, flat_index, microbatches, num_rows, on_device, rows, split_further
from nemo_fp8rl.config.schema import PolicyConfig
from nemo_fp8rl.policy.layers.context_parallel import of_all_tokens
from nemo_fp8rl.policy.layers.kv_cache import TrainerKvCache
from nemo_fp8rl.policy.layers.logprobs import token_logprobs
from nemo_fp8rl.policy.layers.packed_sequences import PackedSequences
from nemo_fp8rl.policy.layers.routing_replay import RoutingReplay
from nemo_fp8rl.policy.layers.top_k_top_p import Restriction
from nemo_fp8rl.policy.model import PolicyModel

Finish = Callable[[Tensor, Tensor, TrainBatch], tuple[Tensor, Any]]
"""(next-token log-probs [B, T-1], row numbers, the rows) of a microbatch -> (value to go back from, what to keep)."""


@dataclass
class Pipeline:
    """The rank's stage. ddp: `model`, wrapped. multiple: tokens of a microbatch are padded to one of these. aligned:
    tensor-parallel ranks take the softmax of a token as one rank does, and so as the engine.
    """

    policy: PolicyConfig
    ddp: torch.nn.Module
    model: PolicyModel
    kv_cache: TrainerKvCache | None
    replay: RoutingReplay | None
    device: torch.device
    multiple: int
    aligned: bool

    def run(self, batch: TrainBatch, finish: Finish, *, training: bool, restricted: bool = True) -> list[Any]:
        """Forward, and backward in training, over all of the batch: what `finish` keeps, on the last stage.

        restricted: log-probs are over the tokens that the engine's top-k and top-p leave, if it has any; the unfiltered
        ones, which a KL term in the loss needs, then come along in the rows.
        """
        generation = self.policy.generation
        restriction = Restriction(generation.top_k, generation.top_p) if restricted else None
        which = self.microbatches(batch, training)
        dynamic = self.policy.dynamic_batching
        multiple = dynamic.sequence_length_round if dynamic.enabled else 1
        parts = ((index, on_device(rows(batch, index, multiple), self.device)) for index in which)

        def forward_step(parts: Iterator[tuple[Tensor, TrainBatch]], model: torch.nn.Module) -> tuple[Tensor, Any]:
            index, part = next(parts)
            lengths, tokens = batch["input_lengths"][index] - 1, None  # on the host
            if self.policy.sequence_packing.enabled:
                row, position = flat_index(lengths)
                tokens = row.to(self.device), position.to(self.device)

            def last(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
                logprobs = self._next_token_logprobs(hidden, part["input_ids"], tokens, restriction)
                if training and restriction and "reference_policy_logprobs" in part:
                    unfiltered = self._next_token_logprobs(hidden, part["input_ids"], tokens, None)
                    part["curr_logprobs_unfiltered"] = unfiltered
                value, kept = finish(logprobs, index, part)
                return value, torch.tensor(0), kept  # the number of tokens is the loss's own business

            return self._stage(model, part, lengths, tokens), last

        kept = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=parts,
            model=[self.ddp],
            num_microbatches=len(which),
            seq_length=1,  # of fixed shapes; ours vary
            micro_batch_size=1,
            forward_only=not training,
        )
        _forget_graphs(self.model)
        return kept

    def microbatches(self, batch: TrainBatch, training: bool) -> list[Tensor]:
        """Row numbers of each: a fixed number of rows, or as many as a budget of tokens holds.

        Ranks that share experts take each step of each microbatch together, so all ranks have as many.
        """
        policy, lengths = self.policy, batch["input_lengths"]
        packing, dynamic = policy.sequence_packing, policy.dynamic_batching
        if packing.enabled:
            own = bins(lengths, packing.train_mb_tokens if training else packing.logprob_mb_tokens)
        elif dynamic.enabled:
            tokens = dynamic.train_mb_tokens if training else dynamic.logprob_mb_tokens
            own = microbatches(lengths, tokens, dynamic.sequence_length_round)
        else:
            size = policy.train_micro_batch_size if training else policy.logprob_batch_size
            return list(torch.arange(num_rows(batch)).split(size))
        if self.model.layout.experts_span_replicas:
            most = torch.tensor(len(own))
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            own = split_further(own, int(most))
        return own

    def _stage(
        self, model: torch.nn.Module, part: TrainBatch, lengths: Tensor, tokens: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """What this stage makes of a microbatch: [B, T, H] on the last one, [T, B, H] before; packed, B is 1.

        lengths: of the rows as inputs, on the host. tokens: (row, position) of each input token when they are packed.
        """
        ids, routes = part["input_ids"], part.get("routed_experts")
        packed: dict[str, Any] = {}
        if tokens is None:
            inputs = F.pad(ids[:, :-1], (0, -(ids.size(1) - 1) % self.multiple))
            positions = torch.arange(inputs.size(1), device=ids.device).expand_as(inputs)
        else:
            extra = -len(tokens[0]) % self.multiple  # a sequence of its own
            inputs = F.pad(ids[tokens], (0, extra))[None]
            positions = F.pad(tokens[1], (0, extra))[None]
            packed["packed_seq_params"] = PackedSequences.of(
                F.pad(lengths, (0, 1), value=extra) if extra else lengths, self.device
            )
            routes = None if routes is None else routes[tokens][None]
            lengths = F.pad(lengths, (0, 1)) if extra else lengths
        if self.kv_cache is not None:
            self.kv_cache.next_rows(lengths.to(self.device))
        if self.replay is not None:
            self.replay.begin(routes, inputs.size(1), self.policy.megatron_cfg.sequence_parallel)
        own = slice(*self.model.layout.context.part(inputs.size(1)))
        return model(inputs[:, own], positions[:, own], None, **packed)

    def _next_token_logprobs(
        self, hidden: Tensor, ids: Tensor, tokens: tuple[Tensor, Tensor] | None, restriction: Restriction | None
    ) -> Tensor:
        """float32 [B, T-1], of ids[:, 1:] [B, T], at the temperature that the engine samples with.

        Padding is whatever the model says of it, or 0 where it was not computed.
        """
        policy, layout, head = self.policy, self.model.layout, self.model.head
        hidden = hidden.to(head.dtype)  # Megatron hands it out in float32
        targets = ids[:, 1:] if tokens is None else ids[tokens[0], tokens[1] + 1][None]
        context, length = layout.context, targets.size(1)
        targets = F.pad(targets, (0, hidden.size(1) * context.size - length))
        targets = targets[:, slice(*context.part(targets.size(1)))]
        logprobs = token_logprobs(
            hidden.flatten(0, 1),
            head,
            targets.flatten(),
            policy.generation.temperature,
            policy.logprob_chunk_size,
            layout.vocabulary.start,
            parallel_state.get_tensor_model_parallel_group(),
            restriction,
            whole=self.aligned,
        )
        logprobs = of_all_tokens(logprobs.view(targets.shape), parallel_state.get_context_parallel_group())[:, :length]
        if tokens is None:
            return logprobs
        return logprobs.new_zeros(ids[:, 1:].shape).index_put(tokens, logprobs[0])


def _forget_graphs(model: torch.nn.Module) -> None:
    """Megatron's dispatchers keep the weights of their last routes, whose graph holds, through hooks, the whole model:
    a ring that passes through C++, so Python's collector would never free the policy nor its process groups.
    """
    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        for name, value in vars(dispatcher).items() if dispatcher is not None else ():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, value.detach())
