"""The experts that vLLM's routers chose, by request and token: what routing replay on the trainer needs.

vLLM returns them itself (`enable_return_routed_experts`) where its newer model runner works, which needs Triton. On CPU
this recorder takes the place of vLLM's own behind the same hook (`bind_routed_experts_capturer`).
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class RouteRecorder:
    """`runner`: vLLM's model runner, which knows whose tokens a forward holds."""

    def __init__(self, runner: Any, num_layers: int, experts_per_token: int) -> None:
        self.runner, self.num_layers, self.experts_per_token = runner, num_layers, experts_per_token
        self._parts: dict[str, list[tuple[int, int, Tensor]]] = defaultdict(list)

    def capture(self, layer: int, chosen: Tensor) -> None:
        """chosen: [tokens, experts a token] of one layer in the forward under way, requests one after the other."""
        batch = self.runner.input_batch
        ends = self.runner.query_start_loc.np
        for i, request in enumerate(batch.req_ids[: batch.num_reqs]):
            rows = chosen[ends[i] : ends[i + 1]].to(torch.int16, copy=True)
            self._parts[request].append((layer, int(batch.num_computed_tokens_cpu[i]), rows))

    def take(self) -> dict[str, Tensor]:
        """int16 [tokens, layers, experts a token] of each request since the last call; -1 where not computed here.

        Keys, request ids as the engine's clients know them. A prompt's tokens that were found in the prefix cache were
        computed for another request.
        """
        routes = {}
        for request, parts in self._parts.items():
            length = max(first + len(rows) for _, first, rows in parts)
            route = torch.full((length, self.num_layers, self.experts_per_token), -1, dtype=torch.int16)
            for layer, first, rows in parts:
                route[first : first + len(rows), layer] = rows
            routes[request.rsplit("-", 1)[0]] = route  # vLLM adds a suffix of its own
        self._parts.clear()
        return routes
