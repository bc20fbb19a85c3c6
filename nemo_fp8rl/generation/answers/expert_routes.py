"""Records the experts that vLLM's routers chose, by request and token, for routing replay on the trainer.

vLLM returns experts itself (`enable_return_routed_experts`) where it has Triton (`vllm_compat.has_route_output`). On
a CPU this recorder replaces vLLM's own behind the same hook (`bind_routed_experts_capturer`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Forward:
    """One forward of the model.

    spans:   (request, position of its first token, its rows) of each request
    chosen:  int16 [tokens, top k] by layer
    """

    spans: list[tuple[str, int, slice]]
    chosen: dict[int, Tensor]


class RouteRecorder:
    """Records experts, forward by forward.

    runner:  vLLM's model runner, which knows the requests of a forward
    """

    def __init__(self, runner: Any, num_layers: int, experts_per_token: int) -> None:
        self.runner, self.num_layers, self.experts_per_token = runner, num_layers, experts_per_token
        self._forwards: list[_Forward] = []

    def capture(self, layer: int, chosen: Tensor) -> None:
        """Record the experts of one layer in the current forward.

        chosen:  integer [tokens, top k], one request after the other
        """
        if not self._forwards or layer in self._forwards[-1].chosen:
            self._forwards.append(_Forward(self._spans(), {}))
        self._forwards[-1].chosen[layer] = chosen.to(torch.int16, copy=True)

    def take(self) -> dict[str, Tensor]:
        """Return int16 [tokens, layers, top k] of each request since the last call, by the client's request id.

        -1 stands for tokens that were not computed: tokens of a prompt found in the prefix cache were computed for
        another request.
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
        return {request.rsplit("-", 1)[0]: route for request, route in routes.items()}  # vLLM appends a suffix

    def forget(self) -> dict[str, Tensor]:
        self._forwards.clear()
        return {}

    def _spans(self) -> list[tuple[str, int, slice]]:
        batch, ends = self.runner.input_batch, self.runner.query_start_loc.np
        return [
            (request, int(batch.num_computed_tokens_cpu[i]), slice(int(ends[i]), int(ends[i + 1])))
            for i, request in enumerate(batch.req_ids[: batch.num_reqs])
        ]
