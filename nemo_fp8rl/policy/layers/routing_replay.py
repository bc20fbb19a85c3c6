"""Routing replay: routers take the experts that the engine chose, where the batch names them.

A token whose two largest logits are nearly equal may go to another expert in the trainer than in the engine, and the
two sides then differ by a whole expert. Replay takes the engine's choice of experts, and the trainer's own weights for
them: the softmax of its logits at these experts, so gradients flow to the router as usual (R3, arXiv 2510.11370).
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from nemo_fp8rl.policy.weights.layout import Layout

TopK = Callable[..., tuple[Tensor, Tensor]]


class RoutingReplay:
    """The experts that the routers of a rank must choose for the present microbatch.

    recomputes:  True if layers run again in the backward, when the present microbatch may be another; each router then
                 takes its first choices again, in their order
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, recomputes: bool) -> None:
        self.layout, self.recomputes = layout, recomputes
        routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        assert len(routers) == len(layout.layers)
        self.routers = [_RouterReplay(self) for _ in routers]
        for router, replay in zip(routers, self.routers, strict=True):
            router.router_replay = replay  # Megatron's router calls it for the top k
        self.training = False

    def start_microbatch(self, routed_experts: Tensor | None, padded_length: int, sequence_parallel: bool) -> None:
        """Set the experts of the microbatch whose forward follows.

        routed_experts:     int [B, >= T, layers of the model, top k], the experts of each token, -1 if unknown. The
                            router chooses for a token with an unknown expert or with two equal ones (as in padding
                            with zeros); None lets the router choose for all tokens
        padded_length:      length of the sequences that the model gets
        sequence_parallel:  True if the tensor-parallel ranks share the tokens
        Raises:             ValueError for an expert that the model does not have
        """
        self.training = torch.is_grad_enabled()
        routes = [None] * len(self.routers) if routed_experts is None else self._routes(routed_experts, padded_length)
        local, tensor = slice(*self.layout.context.span(padded_length)), self.layout.tensor
        for router, route in zip(self.routers, routes, strict=True):
            part = None if route is None else route[local]
            if part is not None and sequence_parallel:
                part = part.chunk(tensor.size)[tensor.rank]
            router.experts = None if part is None else part.flatten(0, 1)

    def _routes(self, routed_experts: Tensor, length: int) -> list[Tensor]:
        """Return int64 [length, B, top k] for each of the rank's layers."""
        layers, top_k = self.layout.hf.num_hidden_layers, self.layout.hf.num_experts_per_tok
        if routed_experts.dim() != 4 or routed_experts.shape[2:] != (layers, top_k):
            raise ValueError(
                f"routed_experts must be [B, T, {layers} layers, {top_k} experts], got {list(routed_experts.shape)}"
            )
        routes, experts = routed_experts[:, :length].long(), self.layout.hf.num_experts
        if routes.numel() and (largest := int(routes.max())) >= experts:
            raise ValueError(f"routed_experts names expert {largest}, and the model has {experts}, 0 to {experts - 1}")
        known = (routes >= 0).all(-1) & (routes.sort(-1).values.diff(dim=-1) > 0).all(-1)
        routes = routes.masked_fill(~known[..., None], -1)
        missing = length - routes.size(1)
        routes = torch.nn.functional.pad(routes, (0, 0, 0, 0, 0, missing), value=-1).transpose(0, 1)
        return [routes[:, :, layer] for layer in self.layout.layers]


class _RouterReplay:
    """The replay of one router; it has the method of Megatron's `RouterReplay` that the router calls."""

    def __init__(self, replay: RoutingReplay) -> None:
        self.replay = replay
        self.experts: Tensor | None = None
        self._recompute_queue: deque[Tensor | None] = deque()

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return (scores, experts), [tokens, top k] each: the engine's experts, or the router's own if unknown."""
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        replayed = self._next_experts()
        if replayed is None:
            return values, experts
        experts = torch.where(replayed[:, :1] >= 0, replayed, experts)
        return scores.gather(1, experts), experts

    def _next_experts(self) -> Tensor | None:
        if not (self.replay.recomputes and self.replay.training):
            return self.experts
        if torch.is_grad_enabled():  # a recomputation in the backward
            return self._recompute_queue.popleft()
        self._recompute_queue.append(self.experts)
        return self.experts
