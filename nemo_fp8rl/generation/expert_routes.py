"""The experts that vLLM's routers chose, by request and token: what routing replay on the trainer needs.

vLLM returns them itself (`enable_return_routed_experts`) where it has Triton (`compat.has_route_output`). On CPU this
recorder takes the place of vLLM's own behind the same hook (`bind_routed_experts_capturer`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Forward:
    """spans: (request, position of its first token, its rows) of each. chosen: int16 [tokens, top k] by layer."""

    spans: list[tuple[str, int, slice]]
    chosen: dict[int, Tensor]


class RouteRecorder:
    """`runner`: vLLM's model runner, which knows whose tokens a forward holds."""

    def __init__(self, runner: Any, num_layers: int, experts_per_token: int) -> None:
        self.runner, self.num_layers, self.experts_per_token = runner, num_layers, experts_per_token
        self._forwards: list[_Forward] = []

    def capture(self, layer: int, chosen: Tensor) -> None:
        """chosen: integer [tokens, top k] of one layer in the forward under way, requests one after the other."""
        if not self._forwards or layer in self._forwards[-1].chosen:
            self._forwards.append(_Forward(self._spans(), {}))
        self._forwards[-1].chosen[layer] = chosen.to(torch.int16, copy=True)

    def take(self) -> dict[str, Tensor]:
        """int16 [tokens, layers, top k] of each request since the last call; -1 where not computed here.

        Keys, request ids as the engine's clients know them. A prompt's tokens that were found in the prefix cache were
        computed for another request.
        """
        lengths: dict[str, int] = {}
        for forward in self._forwards:
            for request, first, rows in forward.spans:
                lengths[request] = max(lengths.get(request, 0), first + rows.stop - rows.start)
        shape = self.num_layers, self.experts_per_token
        routes = {request: torch.full((n, *shape), -1, dtype=torch.int16) for request, n in lengths.items()}
        for forward in self._forwards:
            for layer, chosen in forward.chosen.items():
                for request, first, rows in forward.spans:
                    routes[request][first : first + rows.stop - rows.start, layer] = chosen[rows]
        self._forwards.clear()
        return {request.rsplit("-", 1)[0]: route for request, route in routes.items()}  # vLLM adds a suffix of its own

    def forget(self) -> dict[str, Tensor]:
        self._forwards.clear()
        return {}

    def _spans(self) -> list[tuple[str, int, slice]]:
        batch, ends = self.runner.input_batch, self.runner.query_start_loc.np
        return [
            (request, int(batch.num_computed_tokens_cpu[i]), slice(int(ends[i]), int(ends[i + 1])))
            for i, request in enumerate(batch.req_ids[: batch.num_reqs])
        ]
