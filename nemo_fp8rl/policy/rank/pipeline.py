"""The forward and backward pass of a batch, microbatch by microbatch, to the log-probs of its tokens.

Megatron's schedule drives the pass over one pipeline stage or several. The model's tensors hold the sequences in one of
two ways: one sequence per row, right-padded to the longest; or packed, one after the other without padding
(`policy.sequence_packing`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from nemo_fp8rl.batch import (
    ScoredBatch,
    SequenceBatch,
    pack_by_tokens,
    split_by_tokens,
    split_further,
    token_coordinates,
)
from nemo_fp8rl.config.policy_schema import PolicyConfig
from nemo_fp8rl.ops.alignment import Alignment
from nemo_fp8rl.policy.layers.context_parallel import gather_tokens
from nemo_fp8rl.policy.layers.kv_cache import TrainerKvCache
from nemo_fp8rl.policy.layers.logprobs import Measurement, TokenFilter, choose_head, token_logprobs
from nemo_fp8rl.policy.layers.packed_sequences import PackedSequences
from nemo_fp8rl.policy.layers.routing_replay import RoutingReplay
from nemo_fp8rl.policy.model import PolicyModel


class TokenValues(NamedTuple):
    """Values of the next tokens of a microbatch, float32 [B, T-1] each.

    unfiltered:  the log-probs without top-k and top-p, or None
    sharpness:   see `policy.sharpness`; None where it is not measured
    """

    logprobs: Tensor
    unfiltered: Tensor | None = None
    sharpness: Tensor | None = None


FinishMicrobatch = Callable[[TokenValues, Tensor, Any], tuple[Tensor, Any]]
"""(values of the tokens, row numbers, rows) of a microbatch -> (value to differentiate, result to return)."""


@dataclass
class Pipeline:
    """The pipeline stage of this rank.

    ddp:             `model`, wrapped for data parallelism
    kv_window:       see `CoreAttention`
    token_multiple:  the tokens of a microbatch are padded to a multiple of this number
    alignment:       with any, tensor-parallel ranks compute the softmax of a token as a single rank, and so the engine
    """

    policy: PolicyConfig
    ddp: torch.nn.Module
    model: PolicyModel
    kv_cache: TrainerKvCache | None
    replay: RoutingReplay | None
    kv_window: int | None
    device: torch.device
    token_multiple: int
    alignment: Alignment

    def run(
        self,
        batch: SequenceBatch,
        finish: FinishMicrobatch,
        *,
        training: bool,
        filter_tokens: bool = True,
        epsilon: float | None = None,
    ) -> list[Any]:
        """Run the forward pass, in training also the backward pass, over the batch.

        Returns the results of `finish`, one per microbatch, on the last stage.
        filter_tokens:  take log-probs over the tokens that the engine's top-k and top-p select, if these are set;
                        `finish` then also gets the unfiltered log-probs where the rows have a reference policy, whose
                        KL needs them
        epsilon:        measure the sharpness of each token with it; None measures nothing
        Raises:         ValueError for a batch without the lengths of prompts, which a window needs
        """
        generation = self.policy.generation
        if self.kv_window is not None and batch.prompt_lengths is None:
            raise ValueError(
                f"prompt_lengths is None, and attention has a window of {self.kv_window} generated tokens "
                "(policy.generation.vllm_cfg.kv_window): give the batch the tokens of each row's prompt, int64 [B]"
            )
        token_filter = TokenFilter(generation.top_k, generation.top_p) if filter_tokens else None
        row_groups = self.microbatches(batch, training)
        dynamic = self.policy.dynamic_batching
        multiple = dynamic.sequence_length_round if dynamic.enabled else 1
        parts = ((index, batch.take_trimmed_rows(index, multiple).to(self.device)) for index in row_groups)

        def forward_step(parts: Iterator[tuple[Tensor, SequenceBatch]], model: torch.nn.Module) -> tuple[Tensor, Any]:
            index, part = next(parts)
            lengths, tokens = batch.input_lengths[index] - 1, None  # lengths stay on the host
            if self.policy.sequence_packing.enabled:
                row, position = token_coordinates(lengths)
                tokens = row.to(self.device), position.to(self.device)

            def finish_stage(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
                values = self._next_token_values(hidden, part.input_ids, tokens, token_filter, epsilon)
                has_reference = isinstance(part, ScoredBatch) and part.reference_policy_logprobs is not None
                if training and token_filter and has_reference:
                    unfiltered = self._next_token_values(hidden, part.input_ids, tokens, None, None).logprobs
                    values = values._replace(unfiltered=unfiltered)
                value, result = finish(values, index, part)
                return value, torch.tensor(0), result  # 0 tokens, because the loss itself divides by their number

            return self._run_stage(model, part, lengths, tokens), finish_stage

        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=parts,
            model=[self.ddp],
            num_microbatches=len(row_groups),
            seq_length=1,  # read only for fixed shapes; these shapes vary
            micro_batch_size=1,
            forward_only=not training,
        )
        _drop_dispatcher_graphs(self.model)
        return results

    def microbatches(self, batch: SequenceBatch, training: bool) -> list[Tensor]:
        """Return the row numbers of each microbatch: a fixed number of rows, or rows that fit a budget of tokens.

        Ranks that share experts run every microbatch together, so all ranks then get the same number of microbatches.
        """
        policy, lengths = self.policy, batch.input_lengths
        packing, dynamic = policy.sequence_packing, policy.dynamic_batching
        if packing.enabled:
            groups = pack_by_tokens(lengths, packing.train_mb_tokens if training else packing.logprob_mb_tokens)
        elif dynamic.enabled:
            tokens = dynamic.train_mb_tokens if training else dynamic.logprob_mb_tokens
            groups = split_by_tokens(lengths, tokens, dynamic.sequence_length_round)
        else:
            size = policy.train_micro_batch_size if training else policy.logprob_batch_size
            return list(torch.arange(batch.num_rows).split(size))
        if self.model.layout.experts_span_replicas:
            count = torch.tensor(len(groups))
            dist.all_reduce(count, op=dist.ReduceOp.MAX)
            groups = split_further(groups, int(count))
        return groups

    def _run_stage(
        self, model: torch.nn.Module, part: SequenceBatch, lengths: Tensor, tokens: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Return the stage's output for a microbatch: [B, T, H] on the last stage, else [T, B, H]; packed, B is 1.

        lengths:  int64 [B] on the host, the input tokens of each row
        tokens:   (row, position) of each input token if sequences are packed, else None
        """
        ids, routes = part.input_ids, part.routed_experts
        packed: dict[str, Any] = {}
        prompt_lengths = part.prompt_lengths
        if tokens is None:
            inputs = F.pad(ids[:, :-1], (0, -(ids.size(1) - 1) % self.token_multiple))
            positions = torch.arange(inputs.size(1), device=ids.device).expand_as(inputs)
        else:
            extra = -len(tokens[0]) % self.token_multiple  # this padding is one more sequence
            inputs = F.pad(ids[tokens], (0, extra))[None]
            positions = F.pad(tokens[1], (0, extra))[None]
            packed["packed_seq_params"] = PackedSequences.from_lengths(
                F.pad(lengths, (0, 1), value=extra) if extra else lengths, self.device
            )
            routes = None if routes is None else routes[tokens][None]
            lengths = F.pad(lengths, (0, 1)) if extra else lengths
            if prompt_lengths is not None and extra:
                prompt_lengths = F.pad(prompt_lengths, (0, 1), value=extra)
        if self.kv_cache is not None:
            self.kv_cache.set_lengths(lengths.to(self.device))
        if self.replay is not None:
            self.replay.start_microbatch(routes, inputs.size(1), self.policy.megatron_cfg.sequence_parallel)
        local = slice(*self.model.layout.context.span(inputs.size(1)))
        return model(inputs[:, local], positions[:, local], prompt_lengths, **packed)

    def _next_token_values(
        self,
        hidden: Tensor,
        ids: Tensor,
        tokens: tuple[Tensor, Tensor] | None,
        token_filter: TokenFilter | None,
        epsilon: float | None,
    ) -> TokenValues:
        """Return the log-probs of ids[:, 1:] at the engine's sampling temperature, with their sharpness or without.

        At padding the values are arbitrary, or 0 if sequences are packed.
        ids:  int64 [B, T]
        """
        policy, layout, head = self.policy, self.model.layout, self.model.head
        hidden = hidden.to(head.dtype)  # Megatron returns float32
        targets = ids[:, 1:] if tokens is None else ids[tokens[0], tokens[1] + 1][None]
        context, length = layout.context, targets.size(1)
        targets = F.pad(targets, (0, hidden.size(1) * context.size - length))
        targets = targets[:, slice(*context.span(targets.size(1)))]
        measurement = None
        if epsilon is not None:
            measurement = Measurement(epsilon, torch.empty(targets.numel(), device=hidden.device))
        logprobs = token_logprobs(
            hidden.flatten(0, 1),
            head,
            targets.flatten(),
            policy.generation.temperature,
            policy.logprob_chunk_size,
            layout.vocabulary.start,
            parallel_state.get_tensor_model_parallel_group(),
            token_filter,
            whole=self.alignment != "none",
            head=choose_head(self.alignment),
            measurement=measurement,
        )

        def place(values: Tensor) -> Tensor:
            """Return the values of this rank's tokens at their places in the rows, with those of the other ranks."""
            group = parallel_state.get_context_parallel_group()
            values = gather_tokens(values.view(targets.shape), group)[:, :length]
            if tokens is None:
                return values
            return values.new_zeros(ids[:, 1:].shape).index_put(tokens, values[0])

        return TokenValues(place(logprobs), sharpness=None if measurement is None else place(measurement.values))


def _drop_dispatcher_graphs(model: torch.nn.Module) -> None:
    """Detach the tensors that Megatron's token dispatchers keep after a pass.

    A dispatcher keeps the weights of its last routes, and hooks of their graph refer to the whole model. This cycle
    passes through C++, so Python's collector would never free the policy and its process groups.
    """
    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        for name, value in vars(dispatcher).items() if dispatcher is not None else ():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, value.detach())
