"""Routing replay: routers take the experts that the engine chose, where the batch says which.

A token whose two largest logits are nearly equal may go to another expert in the trainer than in the engine, and the
two then differ by a whole expert. Replay keeps the choice and lets the trainer weigh it: weights are the softmax of the
trainer's own logits at the chosen experts, so gradients flow to the router as ever (R3, arXiv 2510.11370).
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
    """What the routers of a rank are to choose for the microbatch at hand.

    recomputed: layers run again in the backward, by when the microbatch at hand may be another; each router then takes
    what it took first, in that order.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, recomputed: bool) -> None:
        self.layout, self.recomputed = layout, recomputed
        routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        assert len(routers) == len(layout.layers)
        self.routers = [_RouterReplay(self) for _ in routers]
        for router, replay in zip(routers, self.routers, strict=True):
            router.router_replay = replay  # Megatron's own place for it, which it asks for the top k
        self.training = False

    def begin(self, routed_experts: Tensor | None, padded_length: int, sequence_parallel: bool) -> None:
        """Routes of a microbatch whose forward follows.

        routed_experts: int [B, >= T, layers of the model, top k], the experts of each token, -1 where not known; None
        leaves every choice to the router. Experts that are not all known, or not all different (as in padding with
        zeros), leave it to the router, too. padded_length: of the sequences as the model gets them. Raises ValueError
        for experts that the model does not have.
        """
        self.training = torch.is_grad_enabled()
        routes = [None] * len(self.routers) if routed_experts is None else self._own(routed_experts, padded_length)
        own, tensor = slice(*self.layout.context.part(padded_length)), self.layout.tensor
        for router, route in zip(self.routers, routes, strict=True):
            part = None if route is None else route[own]
            if part is not None and sequence_parallel:
                part = part.chunk(tensor.size)[tensor.rank]
            router.wanted = None if part is None else part.flatten(0, 1)

    def _own(self, routed_experts: Tensor, length: int) -> list[Tensor]:
        """int64 [length, B, top k] of each of the rank's layers."""
        layers, chosen = self.layout.hf.num_hidden_layers, self.layout.hf.num_experts_per_tok
        if routed_experts.dim() != 4 or routed_experts.shape[2:] != (layers, chosen):
            raise ValueError(
                f"routed_experts must be [B, T, {layers} layers, {chosen} experts], got {list(routed_experts.shape)}"
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
    """The replay of one router, with the method that Megatron calls of its own `RouterReplay`."""

    def __init__(self, shared: RoutingReplay) -> None:
        self.shared = shared
        self.wanted: Tensor | None = None
        self._again: deque[Tensor | None] = deque()

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """(scores, experts) [tokens, top k] at the wanted experts; the router's own where none are known."""
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        wanted = self._next()
        if wanted is None:
            return values, experts
        experts = torch.where(wanted[:, :1] >= 0, wanted, experts)
        return scores.gather(1, experts), experts

    def _next(self) -> Tensor | None:
        if not (self.shared.recomputed and self.shared.training):
            return self.wanted
        if torch.is_grad_enabled():  # in the backward
            return self._again.popleft()
        self._again.append(self.wanted)
        return self.wanted
